//! The virtual CPUs of a VM and the cores that run them.

use demeter_scenario::Scenario;

use super::{WorldSetup, vms_of};
use crate::machine::actor::Vcpu;
use crate::machine::core::Core;
use crate::machine::flush::FlushCounts;
use crate::machine::walk::Space;
use crate::program::Program;
use crate::vm::Hardware;

impl WorldSetup {
    /// The socket of a thread. The processes of a program run on the sockets in turn.
    fn socket_of<P: Program>(&self, program: &P, thread: usize) -> usize {
        program.process_of(thread) as usize % self.orders.len()
    }

    /// The socket of each virtual CPU. Threads stay on theirs, so these are on the sockets of their threads; the others
    /// fill the sockets up.
    pub(super) fn sockets_of_vcpus<P: Program>(&self, program: &P) -> Vec<usize> {
        let (vcpus, sockets) = (self.vcpus as usize, self.orders.len());
        let busy = vcpus.min(program.threads());
        let mut of = Vec::with_capacity(vcpus);
        of.extend((0..busy).map(|thread| self.socket_of(program, thread)));
        while of.len() < vcpus {
            let count = |socket: &usize| of.iter().filter(|&other| other == socket).count();
            let emptiest = (0..sockets).min_by_key(count);
            of.push(emptiest.unwrap_or(0));
        }
        of
    }

    /// Whether each socket has a virtual CPU for each of its threads.
    pub(super) fn has_cpus_for<P: Program>(&self, program: &P) -> bool {
        let (vcpus, sockets) = (self.vcpus as usize, self.orders.len());
        let of = self.sockets_of_vcpus(program);
        let count = |socket| of.iter().filter(|&&other| other == socket).count();
        let mut threads = 0..program.threads();
        threads.all(|thread| of[thread % vcpus] == self.socket_of(program, thread))
            && (0..sockets).all(|socket| count(socket) * sockets == vcpus)
    }

    /// A core, with as many misses in flight as the programs on it have.
    pub(super) fn core(&self, core: u32) -> Core {
        let in_flight = self.workload(core / self.vcpus).in_flight();
        Core::new(&self.cpu, self.page_bits()).overlapping(in_flight)
    }

    pub(super) fn hardware(&self, vm: u32, sockets: &[usize]) -> Hardware {
        let vcpus = self.vcpus as usize;
        let vcpu = |&socket: &usize| Vcpu::new(socket, self.k);
        Hardware {
            vcpus: sockets.iter().map(vcpu).collect(),
            placed: (0..vcpus)
                .map(|vcpu| (vm as usize * vcpus + vcpu) % self.cores)
                .collect(),
            flushes: FlushCounts::default(),
            space: Space(vm % Space::COUNT),
            costs: self.cpu.costs,
            k: self.k,
        }
    }
}

/// Number of host cores, at most one for each virtual CPU.
pub(super) fn cores_of(scenario: &Scenario) -> u32 {
    let vcpus = scenario.machine.vcpus * vms_of(scenario);
    scenario.sim.cores.map_or(vcpus, |cores| cores.min(vcpus))
}
