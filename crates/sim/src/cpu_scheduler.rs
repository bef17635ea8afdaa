//! The host's CPU scheduler, which assigns cores to virtual CPUs.
//!
//! # Problem
//! Virtual CPUs share cores, and their clocks must stay together without a global clock.
//!
//! # Approach
//! A core's time is the clock of the virtual CPU that runs on it. The core with the lowest time goes on, so that all
//! stay together. After a time slice, the next runnable virtual CPU of the core's run queue takes the core. Its waiting
//! time is charged as stolen. While it waits, it may be interrupted or receive the manager's work; it does that work
//! when it next runs.
//!
//! # Properties
//! - The work of a core's virtual CPUs, without idle and wait time, fits into the elapsed time.
//! - Equal virtual CPUs on a core get equal parts of its time.

use crate::machine::actor::Vcpu;
use crate::machine::core::Core;
use crate::machine::ledger::Cause;
use crate::program::Program;
use crate::vm::Vm;

/// Time slice of a virtual CPU while others wait (Linux's slice on a large host).
const SLICE_PS: u64 = 3_000_000_000;

/// A virtual CPU: VM index and CPU index.
type VcpuIndex = (usize, usize);

/// The scheduler of all host cores.
#[derive(Debug)]
pub(crate) struct CpuScheduler {
    by_core: Vec<RunQueue>,
}

/// The virtual CPUs of one core.
#[derive(Debug, Clone, Default)]
struct RunQueue {
    /// Virtual CPUs in round-robin order.
    ring: Vec<VcpuIndex>,
    /// The virtual CPU that runs or ran last.
    last: usize,
    /// Whether it runs.
    running: bool,
    /// End of its slice.
    until_ps: u64,
    /// Time since when the core is idle.
    free_ps: u64,
}

impl CpuScheduler {
    /// Assigns each virtual CPU to the core that its VM names. None runs yet.
    pub(crate) fn new<P>(cores: usize, vms: &[Vm<P>]) -> Self {
        let mut by_core = vec![RunQueue::default(); cores];
        for (i, vm) in vms.iter().enumerate() {
            for (vcpu, &core) in vm.hardware.placed.iter().enumerate() {
                by_core[core].ring.push((i, vcpu));
            }
        }
        Self { by_core }
    }

    /// Starts with all cores free at `now_ps`.
    pub(crate) fn start<P>(&mut self, now_ps: u64, vms: &mut [Vm<P>]) {
        for queue in &mut self.by_core {
            queue.free_ps = now_ps;
            queue.last = queue.ring.len().saturating_sub(1);
            for &place in &queue.ring {
                at(vms, place).end_turn();
            }
        }
    }

    /// The virtual CPU that runs next, with its clock; `None` if none is runnable.
    pub(crate) fn next<P: Program>(
        &mut self,
        vms: &mut [Vm<P>],
        cores: &mut [Core],
    ) -> Option<(u64, VcpuIndex)> {
        loop {
            let queues = self.by_core.iter_mut().enumerate();
            let times = queues.filter_map(|(core, queue)| Some((queue.time(vms)?, core)));
            let (now_ps, core) = times.min()?;
            let queue = &mut self.by_core[core];
            if queue.running && (now_ps < queue.until_ps || queue.ring.len() == 1) {
                return Some((now_ps, queue.ring[queue.last]));
            }
            queue.pass_on(vms, &mut cores[core]);
        }
    }

    /// Charges virtual CPUs that wait for a core with the time until `ps`.
    pub(crate) fn wait_until<P: Program>(&self, ps: u64, vms: &mut [Vm<P>]) {
        for queue in &self.by_core {
            for (i, &place) in queue.ring.iter().enumerate() {
                if queue.wants(place, vms) && !(queue.running && i == queue.last) {
                    at(vms, place).begin_turn(ps);
                }
            }
        }
    }
}

impl RunQueue {
    /// The core's time, or the start of its next runnable virtual CPU; `None` if none is runnable.
    fn time<P: Program>(&mut self, vms: &mut [Vm<P>]) -> Option<u64> {
        if self.running {
            let place @ (vm, vcpu) = self.ring[self.last];
            if vms[vm].is_busy(vcpu) {
                return Some(at(vms, place).clock_ps);
            }
            self.stop(vms);
        }
        let next = self.ring[self.next(vms)?];
        let vcpu = at(vms, next);
        Some(self.free_ps.max(vcpu.clock_ps - vcpu.undone_ps()))
    }

    /// The next runnable virtual CPU in round-robin order; the current one comes last.
    fn next<P: Program>(&self, vms: &mut [Vm<P>]) -> Option<usize> {
        let count = self.ring.len();
        let mut others = (1..=count).map(|n| (self.last + n) % count);
        others.find(|&i| self.wants(self.ring[i], vms))
    }

    /// Whether a virtual CPU has a thread to run, or work that it received while waiting. A virtual CPU alone on its
    /// core never waits.
    fn wants<P: Program>(&self, place: VcpuIndex, vms: &mut [Vm<P>]) -> bool {
        let (vm, vcpu) = place;
        vms[vm].is_busy(vcpu) || self.ring.len() > 1 && at(vms, place).undone_ps() > 0
    }

    /// Gives the core to the next virtual CPU.
    fn pass_on<P: Program>(&mut self, vms: &mut [Vm<P>], core: &mut Core) {
        let Some(next) = self.next(vms) else {
            return;
        };
        if self.running && next == self.last {
            self.until_ps = at(vms, self.ring[next]).clock_ps + SLICE_PS;
            return;
        }
        if self.running {
            self.stop(vms);
        }
        self.last = next;
        self.running = true;
        let place @ (vm, index) = self.ring[next];
        let (costs, space) = (vms[vm].hardware.costs, vms[vm].hardware.space);
        let vcpu = at(vms, place);
        vcpu.begin_turn(self.free_ps);
        if self.ring.len() > 1 {
            vcpu.charge(Cause::Kernel, costs.exit_ps + costs.switch_ps);
            core.switch(space);
        }
        self.until_ps = vcpu.clock_ps + SLICE_PS;
        if !vms[vm].is_busy(index) {
            // The received work is done.
            self.stop(vms);
        }
    }

    fn stop<P>(&mut self, vms: &mut [Vm<P>]) {
        let vcpu = at(vms, self.ring[self.last]);
        vcpu.end_turn();
        self.free_ps = vcpu.clock_ps;
        self.running = false;
    }
}

fn at<P>(vms: &mut [Vm<P>], (vm, vcpu): VcpuIndex) -> &mut Vcpu {
    &mut vms[vm].hardware.vcpus[vcpu]
}
