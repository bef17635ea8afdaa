//! Snapshots of the world for the timeline of a run.

use demeter_outcome::{HISTORY_PREFIX, Meter, Moment, Timeline, Unit, Work, WorkloadResult};

use crate::machine::core::Walks;
use crate::machine::cost::PS_PER_NS;
use crate::machine::flush::FlushCounts;
use crate::machine::ledger::{Bill, Cause};
use crate::program::Program;
use crate::vm::Vm;
use crate::world::World;

impl<P: Program> World<P> {
    /// The state of all VMs `at_ps` after the start of the timed phase. Virtual CPUs without a thread must have
    /// advanced to that time. The time of operations is that of all threads; finished programs count until their end.
    /// The first `work` entry covers all VMs, the others one VM each, or one process each of the only VM.
    pub(crate) fn moment(&mut self, at_ps: u64, unit: &Unit) -> Moment {
        self.wait_until(at_ps);
        let flushes = self.vms.iter().fold(FlushCounts::default(), |mut sum, vm| {
            sum.add(&vm.hardware.flushes);
            sum
        });
        let sum = |of: fn(&Vm<P>) -> u64| self.vms.iter().map(of).sum::<u64>();
        let ops = sum(|vm| vm.ops);
        let cores = &self.host.machine.cores;
        let walks =
            |of: fn(&Walks) -> u64| cores.iter().map(|c| of(&c.walks)).sum::<u64>() << self.k;
        let counters = [
            ("flush_total", flushes.total()),
            ("page_faults", sum(|vm| vm.guest.counts.faults)),
            ("hint_faults", sum(|vm| vm.guest.counts.hint_faults)),
            ("samples", sum(Vm::samples)),
            ("operations", ops),
            ("tlb_misses", walks(|w| w.walks)),
            ("walk_references", walks(|w| w.references)),
            ("walk_ns", walks(|w| w.ps) / PS_PER_NS),
            ("segment_hits", walks(|w| w.by_segment)),
            ("working_set_bytes", sum(working_set)),
        ];
        let counters = counters.into_iter().chain(flushes.by_name());
        let counters = counters.map(|(name, n)| (name.to_owned(), n));
        let ones = self.pages_by_ones().into_iter().zip(1..);
        let ones = ones.map(|(pages, ones)| (format!("{HISTORY_PREFIX}{ones:02}"), pages));
        let bill = self.bill();
        let causes = Cause::ALL.iter();
        let thread_time_ps = self.vms.iter().map(|vm| vm.thread_time_ps(at_ps)).sum();
        let time_ps = |thread_time_ps| match unit.is_time() {
            true => thread_time_ps,
            false => at_ps,
        };
        let all = Work {
            done: ops as f64,
            time_ps: time_ps(thread_time_ps),
        };
        let work_of = |vm: &Vm<P>, ops: u64| Work {
            done: ops as f64,
            time_ps: time_ps(vm.thread_time_ps(at_ps)),
        };
        let parts: Vec<Work> = match &self.vms[..] {
            [vm] => {
                let processes = vm.ops_by_process.iter();
                processes.map(|&ops| work_of(vm, ops)).collect()
            }
            vms => vms.iter().map(|vm| work_of(vm, vm.ops)).collect(),
        };
        let work = std::iter::once(all).chain(parts).collect();
        let [promoted_bytes, demoted_bytes] =
            [0, 1].map(|way| Some(self.vms.iter().map(|vm| vm.moved_bytes()[way]).sum()));
        Moment {
            at_ps,
            work,
            fast_bytes: vec![],
            cpu_ps: causes
                .map(|&cause| (cause.to_string(), bill.of(cause)))
                .collect(),
            counters: counters.chain(ones).collect(),
            kswapd_scanned: sum(|vm| vm.guest.counts.scanned_by_reclaim),
            promoted_bytes,
            demoted_bytes,
            memory_overhead_bytes: Some(sum(|vm| vm.manager.memory_overhead(&vm.guest).0)),
            hot_in_fast: self.hot_in_fast(at_ps),
            lag_ps: None,
        }
    }

    /// Real pages of all VMs by the number of ones in their histories, from one on. Empty if no system keeps histories.
    fn pages_by_ones(&self) -> Vec<u64> {
        let mut sum = vec![];
        for pages in self.vms.iter().map(|vm| vm.manager.pages_by_ones()) {
            sum.resize(pages.len().max(sum.len()), 0);
            for (sum, pages) in sum.iter_mut().zip(pages) {
                *sum += pages << self.k;
            }
        }
        sum
    }

    /// Time of all virtual CPUs by cause.
    pub(crate) fn bill(&self) -> Bill {
        let mut sum = Bill::default();
        for vcpu in self.vms.iter().flat_map(|vm| &vm.hardware.vcpus) {
            sum.add_scaled(&vcpu.bill, 0);
        }
        sum
    }

    /// Mean over the VMs whose programs declare a hot set.
    pub(crate) fn hot_in_fast(&mut self, at_ps: u64) -> Option<f64> {
        let host = &self.host;
        let shares = self.vms.iter_mut();
        let shares = shares.filter_map(|vm| vm.hot_in_fast(host, at_ps / 1000));
        let shares: Vec<f64> = shares.collect();
        // Divide once, at the end: a sum of rounded ninths may exceed one.
        (!shares.is_empty()).then(|| shares.iter().sum::<f64>() / shares.len() as f64)
    }
}

/// The manager's estimate of a VM's working set, bytes.
fn working_set<P>(vm: &Vm<P>) -> u64 {
    vm.manager.working_set().map_or(0, |bytes| bytes.0)
}

/// Results of each of these VMs or processes, in order; empty for fewer than two names. `fast_bytes`: fast memory that each VM
/// owned, from the second moment on.
pub(crate) fn of_each_vm(
    names: Vec<String>,
    moments: &[Moment],
    fast_bytes: &[Vec<u64>],
    unit: &Unit,
) -> Vec<WorkloadResult> {
    let meter = |name| Meter {
        name,
        unit: Some(unit.clone()),
        ..Meter::default()
    };
    let of_vms = |moment: &Moment| Moment {
        at_ps: moment.at_ps,
        work: moment.work.iter().skip(1).copied().collect(),
        ..Moment::default()
    };
    let timeline = Timeline {
        meters: names.into_iter().map(meter).collect(),
        moments: moments.iter().map(of_vms).collect(),
        ..Timeline::default()
    };
    let all = timeline.summarise("");
    let mut workloads = all.map_or_else(Vec::new, |all| all.workloads);
    for (vm, workload) in workloads.iter_mut().enumerate() {
        for (point, owned) in workload.series.iter_mut().zip(fast_bytes) {
            point.fast_bytes = owned.get(vm).copied();
        }
    }
    workloads
}

/// The timeline of a run, from its state at the start and after every interval. `elapsed_s` is the duration of a fixed
/// amount of work that is complete.
pub(crate) fn timeline(
    mut moments: Vec<Moment>,
    unit: Unit,
    elapsed_s: Option<f64>,
    shift_at_s: Option<u64>,
) -> Timeline {
    if let Some(start) = moments.first_mut() {
        // Flushes during first touch count as well, since published counts cover a program's whole run.
        start.counters.retain(|name, _| !name.starts_with("flush_"));
    }
    Timeline {
        meters: vec![Meter {
            unit: Some(unit),
            elapsed_s,
            ..Meter::default()
        }],
        moments,
        shift_ps: shift_at_s.map(|s| s * 1_000_000_000_000),
        slack_ps: 0,
    }
}
