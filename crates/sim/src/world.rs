//! All VMs on one host, and simulated time.

use crate::cpu_scheduler::CpuScheduler;
use crate::digest::Digest;
use crate::error::SimError;
use crate::latency::Latencies;
use crate::machine::ledger::Cause;
use crate::program::Program;
use crate::vm::plug::Plug;
use crate::vm::{Host, Vm};

/// Interval over which a tier's used bandwidth is averaged. It grows with the scale up to a limit, as accesses become
/// rarer.
const WINDOW_PS: u64 = 1_000_000_000;
const WINDOW_SCALE_MAX: u32 = 6;

/// The simulated host with all its VMs.
pub(crate) struct World<P> {
    pub(crate) host: Host,
    pub(crate) vms: Vec<Vm<P>>,
    scheduler: CpuScheduler,
    pub(crate) k: u32,
    window_end_ps: u64,
    /// Start of the timed phase.
    start_ps: u64,
}

impl<P: Program> World<P> {
    pub(crate) fn new(host: Host, vms: Vec<Vm<P>>, k: u32) -> Self {
        let scheduler = CpuScheduler::new(host.machine.cores.len(), &vms);
        Self {
            host,
            vms,
            scheduler,
            k,
            window_end_ps: window_ps(k),
            start_ps: 0,
        }
    }

    /// Populates all memory and starts the timed phase. If population is `timed`, only starts the phase.
    pub(crate) fn start(&mut self, timed_fill: bool) -> Result<(), SimError> {
        if !timed_fill {
            for vm in &mut self.vms {
                vm.populate(&mut self.host)?;
            }
        }
        self.start_ps = self.vms.iter().map(Vm::latest_ps).max().unwrap_or(0);
        self.window_end_ps = self.start_ps + window_ps(self.k);
        self.host.machine.memory.rest();
        for vm in &mut self.vms {
            vm.start(self.start_ps, timed_fill);
        }
        self.scheduler.start(self.start_ps, &mut self.vms);
        Ok(())
    }

    /// Runs until every virtual CPU is done or has reached this time of the timed phase.
    pub(crate) fn run_until(&mut self, end_ps: u64) -> Result<(), SimError> {
        let end_ps = self.start_ps + end_ps;
        loop {
            let next = self
                .scheduler
                .next(&mut self.vms, &mut self.host.machine.cores);
            let Some((clock_ps, (vm, on))) = next.filter(|(clock_ps, _)| *clock_ps < end_ps) else {
                return Ok(());
            };
            if clock_ps >= self.window_end_ps {
                self.end_windows(clock_ps);
            }
            self.vms[vm].step(on, &mut self.host)?;
        }
    }

    /// Brings memory of a node online or takes it offline, if that is due in this second of the timed phase.
    pub(crate) fn plug(&mut self, plug: &Plug, second: u64) -> Result<(), SimError> {
        let mut vms = self.vms.iter_mut();
        vms.try_for_each(|vm| vm.plug(plug, second, &mut self.host))
    }

    /// Ends all windows that are over at `now_ps`. Their traffic is spread evenly over them.
    fn end_windows(&mut self, now_ps: u64) {
        let window_ps = window_ps(self.k);
        let more = (now_ps - self.window_end_ps) / window_ps + 1;
        let memory = &mut self.host.machine.memory;
        memory.end_window(more * window_ps, self.k);
        self.window_end_ps += more * window_ps;
    }

    /// Time at which each program completed, in the timed phase; none while any still runs.
    pub(crate) fn elapsed_ps(&self) -> Option<Vec<u64>> {
        self.vms.iter().map(Vm::elapsed_ps).collect()
    }

    /// Operation latencies of all programs that mark their operations.
    pub(crate) fn latencies(&self) -> Latencies {
        let mut all = Latencies::default();
        self.vms.iter().for_each(|vm| all.add_all(&vm.latencies));
        all
    }

    /// Completed share of the work, 0 to 1; 0 if the work is not fixed.
    pub(crate) fn worked(&self) -> f64 {
        let share: u64 = self.vms.iter().filter_map(|vm| vm.share).sum();
        let ops: u64 = self.vms.iter().map(|vm| vm.ops).sum();
        if share == 0 {
            0.0
        } else {
            (ops as f64 / share as f64).min(1.0)
        }
    }

    /// Advances virtual CPUs without a thread to `at_ps` after the start of the timed phase.
    pub(crate) fn wait_until(&mut self, at_ps: u64) {
        self.scheduler
            .wait_until(self.start_ps + at_ps, &mut self.vms);
        self.vms.iter_mut().for_each(|vm| vm.idle_until(at_ps));
    }

    /// Adds every virtual CPU's bill, all migrations and all flushes to a hash.
    pub(crate) fn digest(&self, digest: &mut Digest) {
        for vm in &self.vms {
            for vcpu in &vm.hardware.vcpus {
                Cause::ALL.iter().for_each(|&c| digest.add(vcpu.bill.of(c)));
            }
            vm.moved_bytes().iter().for_each(|&bytes| digest.add(bytes));
            vm.hardware
                .flushes
                .by_name()
                .iter()
                .for_each(|&(_, n)| digest.add(n));
            digest.add(vm.ops);
        }
    }

    /// Whether every virtual CPU's bill adds up to its clock.
    pub(crate) fn is_conserved(&self) -> bool {
        let mut vcpus = self.vms.iter().flat_map(|vm| &vm.hardware.vcpus);
        vcpus.all(|v| v.bill.total() == v.clock_ps)
    }
}

fn window_ps(k: u32) -> u64 {
    WINDOW_PS << k.min(WINDOW_SCALE_MAX)
}
