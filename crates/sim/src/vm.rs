//! A virtual machine: virtual CPUs, a guest kernel, the program, and the memory manager.
//!
//! # Approach
//! A virtual CPU runs a slice of its thread's accesses on its core, and their cost advances its clock. Between slices
//! it handles the events that are due: timer ticks, context switches, and the manager's turns. The caller always
//! advances the core with the lowest clock. All clocks therefore stay close together, and they alone determine the
//! order of events.
//!
//! # Properties
//! - Each virtual CPU's bill adds up to its clock.

mod events;
#[cfg(test)]
mod isolation;
pub(crate) mod plug;
mod slice;
mod stats;

use demeter_policy::benefit::Benefit;

use self::events::{Due, SWITCH_PS, WORKER_PS};
use self::slice::Thread;
use crate::guest::Guest;
use crate::hypervisor::{Backing, Hypervisor};
use crate::latency::{Interruptions, Latencies, Operation};
use crate::machine::actor::{Actor, Vcpu};
use crate::machine::core::Core;
use crate::machine::cost::{CostModel, TICK_PERIOD_PS};
use crate::machine::flush::FlushCounts;
use crate::machine::ledger::Cause;
use crate::machine::memory::Memory;
use crate::machine::sampler::Sampling;
use crate::machine::walk::Space;
use crate::program::Program;
use crate::system::{Context, Manager, NEVER_PS};

/// A VM's virtual hardware and its counters.
pub(crate) struct Hardware {
    pub(crate) vcpus: Vec<Vcpu>,
    /// The host core of each virtual CPU. The first ones are on distinct cores, as far as there are cores.
    pub(crate) placed: Vec<usize>,
    pub(crate) flushes: FlushCounts,
    pub(crate) space: Space,
    pub(crate) costs: CostModel,
    /// A base page and an access stand for `2^k` real ones.
    pub(crate) k: u32,
}

impl Hardware {
    /// The actor on one virtual CPU, while the first `busy` virtual CPUs run the program.
    fn actor<'a>(&'a mut self, on: usize, busy: usize, machine: &'a mut Machine) -> Actor<'a> {
        let cores = self.placed.len().min(machine.cores.len());
        Actor {
            vcpus: &mut self.vcpus,
            cores: &mut machine.cores,
            placed: &self.placed[..cores],
            on,
            busy,
            memory: &mut machine.memory,
            costs: &self.costs,
            space: self.space,
            flushes: &mut self.flushes,
            k: self.k,
            copiers: 1,
        }
    }
}

/// The host's cores and memory.
pub(crate) struct Machine {
    pub(crate) cores: Vec<Core>,
    pub(crate) memory: Memory,
}

/// Resources shared by all VMs.
pub(crate) struct Host {
    pub(crate) machine: Machine,
    pub(crate) hypervisor: Hypervisor,
}

/// A virtual machine.
pub(crate) struct Vm<P> {
    pub(crate) hardware: Hardware,
    pub(crate) guest: Guest,
    pub(crate) backing: Backing,
    pub(crate) manager: Box<dyn Manager>,
    pub(crate) program: P,
    /// Operations completed by the program.
    pub(crate) ops: u64,
    /// Operations completed by each process.
    pub(crate) ops_by_process: Vec<u64>,
    /// Number of operations to run; none for an endless run.
    pub(crate) share: Option<u64>,
    /// Time at which the last operation completed.
    finished_ps: Option<u64>,
    /// Latencies of its operations.
    pub(crate) latencies: Latencies,
    /// None while the thread runs a slice.
    threads: Vec<Option<Box<Thread>>>,
    /// The thread that each virtual CPU runs.
    running: Vec<usize>,
    due: Vec<Due>,
    manager_due_ps: u64,
    worker_due_ps: u64,
    khugepaged_due_ps: u64,
    /// The sampling units' settings.
    sampling: Option<Sampling>,
    /// Start of the timed phase.
    start_ps: u64,
    /// Number of virtual CPUs with a thread to run, from the first; 0 once the program is done. One thread populates
    /// memory for all.
    busy: usize,
    /// Whether the program still populates its memory in the timed phase.
    filling: bool,
}

impl<P: Program> Vm<P> {
    /// Its agent's estimate of the benefit of fast memory, if it has one.
    pub(crate) fn benefit(&self) -> Option<Benefit> {
        let per_s = |vcpu: &Vcpu| match vcpu.clock_ps {
            0 => 0,
            clock_ps => (u128::from(vcpu.worked_ps()) * 1000 / u128::from(clock_ps)) as u32,
        };
        let running_ms = self.hardware.vcpus.iter().map(per_s).sum();
        self.manager.benefit(&self.guest, running_ms)
    }

    /// A VM with mapped but untouched program memory.
    pub(crate) fn new(
        hardware: Hardware,
        mut guest: Guest,
        backing: Backing,
        manager: Box<dyn Manager>,
        mut program: P,
    ) -> Self {
        let bases = guest.map(&program.regions());
        program.place(&bases);
        let vcpus = hardware.vcpus.len();
        let of_threads = (0..program.threads()).map(|thread| program.process_of(thread));
        let processes = 1 + of_threads.max().unwrap_or(0) as usize;
        let due = Due {
            tick_ps: TICK_PERIOD_PS,
            switch_ps: SWITCH_PS,
        };
        Self {
            threads: (0..program.threads())
                .map(|_| Some(Box::default()))
                .collect(),
            running: (0..vcpus).collect(),
            busy: 1,
            filling: false,
            due: vec![due; vcpus],
            hardware,
            guest,
            backing,
            manager,
            ops_by_process: vec![0; processes],
            program,
            ops: 0,
            share: None,
            finished_ps: None,
            latencies: Latencies::default(),
            manager_due_ps: NEVER_PS,
            worker_due_ps: NEVER_PS,
            khugepaged_due_ps: NEVER_PS,
            sampling: None,
            start_ps: 0,
        }
    }

    /// The manager, and the context in which it acts on a virtual CPU.
    pub(crate) fn manager_on<'a>(
        &'a mut self,
        on: usize,
        host: &'a mut Host,
    ) -> (&'a mut dyn Manager, Context<'a>) {
        let ctx = Context {
            guest: &mut self.guest,
            hypervisor: &mut host.hypervisor,
            backing: &mut self.backing,
            actor: self.hardware.actor(on, self.busy, &mut host.machine),
        };
        (self.manager.as_mut(), ctx)
    }

    /// Whether a virtual CPU has a thread to run.
    pub(crate) fn is_busy(&self, vcpu: usize) -> bool {
        vcpu < self.busy
    }

    /// The clock of the virtual CPU that is furthest ahead.
    pub(crate) fn latest_ps(&self) -> u64 {
        self.hardware
            .vcpus
            .iter()
            .map(|v| v.clock_ps)
            .max()
            .unwrap_or(0)
    }

    /// Advances every idle virtual CPU to `at_ps` after the start of the timed phase, unless it is later already.
    pub(crate) fn idle_until(&mut self, at_ps: u64) {
        let busy = self.busy;
        wait_until(&mut self.hardware.vcpus[busy..], self.start_ps + at_ps);
    }

    /// Starts the timed phase: all clocks equal `start_ps`, and the manager starts. `filling`: whether memory is still
    /// to be populated.
    pub(crate) fn start(&mut self, start_ps: u64, filling: bool) {
        wait_until(&mut self.hardware.vcpus, start_ps);
        self.start_ps = start_ps;
        self.filling = filling;
        if !filling {
            self.busy = self.program.threads().min(self.hardware.vcpus.len());
        }
        for thread in self.threads.iter_mut().flatten() {
            thread.operation = Operation::new(start_ps, Interruptions::default());
        }
        for vcpu in &mut self.hardware.vcpus {
            vcpu.interruptions = Interruptions::default();
        }
        self.begin_events(start_ps);
        self.manager_due_ps = self.manager.start(&self.guest, start_ps, filling);
        if self.manager.has_worker() {
            self.worker_due_ps = start_ps + WORKER_PS;
        }
        self.khugepaged_due_ps = start_ps;
        self.sample();
    }

    /// Schedules ticks and context switches, staggered over the virtual CPUs.
    fn begin_events(&mut self, now_ps: u64) {
        let busy = self.busy.max(1) as u64;
        for (i, due) in self.due.iter_mut().enumerate() {
            let part = |ps: u64| now_ps + ps * (i as u64 + 1) / busy;
            *due = Due {
                tick_ps: part(TICK_PERIOD_PS),
                switch_ps: part(SWITCH_PS),
            };
        }
    }

    /// Sets the sampling units up as the manager requests.
    fn sample(&mut self) {
        self.sampling = self.manager.sampling(self.hardware.k);
        let busy = self.busy.max(1) as u64;
        for (i, vcpu) in self.hardware.vcpus.iter_mut().enumerate() {
            match self.sampling {
                Some(sampling) => {
                    let phase = sampling.period * i as u64 / busy;
                    vcpu.sampler.start(sampling, phase);
                }
                None => vcpu.sampler.stop(),
            }
        }
    }
}

/// Advances virtual CPUs to `ps`, unless they are later already.
fn wait_until(vcpus: &mut [Vcpu], ps: u64) {
    for vcpu in vcpus {
        let wait = ps.saturating_sub(vcpu.clock_ps);
        vcpu.charge(Cause::Idle, wait);
    }
}
