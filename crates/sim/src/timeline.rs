//! From what the world looked like in between to the timeline of a run.

use demeter_outcome::{Meter, Moment, Timeline, Unit, Work};

use crate::machine::ledger::Cause;
use crate::world::Snapshot;

impl Snapshot {
    /// As a moment of a program whose speed is told in `unit`.
    fn moment(&self, unit: &Unit) -> Moment {
        let flushes = self.flushes;
        let counters = [
            ("flush_total", flushes.total()),
            ("page_faults", self.faults),
            ("hint_faults", self.hint_faults),
            ("samples", self.samples),
            ("operations", self.ops),
        ];
        let counters = counters.into_iter().chain(flushes.by_name());
        Moment {
            at_ps: self.at_ps,
            work: vec![Work {
                done: self.ops as f64,
                time_ps: match unit.is_time() {
                    true => self.thread_time_ps,
                    false => self.at_ps,
                },
            }],
            hot_in_fast: self.hot_in_fast,
            cpu_ps: Cause::ALL
                .iter()
                .map(|&cause| (cause.to_string(), self.bill.of(cause)))
                .collect(),
            counters: counters.map(|(name, n)| (name.into(), n)).collect(),
            kswapd_scanned: self.scanned_by_reclaim,
            promoted_bytes: Some(self.promoted_bytes),
            demoted_bytes: Some(self.demoted_bytes),
        }
    }
}

/// The timeline of a run: its state at the start and at the end of every interval. `elapsed_s` is
/// how long the work took, if it was a fixed amount and is done.
pub(crate) fn timeline(
    snapshots: &[Snapshot],
    unit: Unit,
    elapsed_s: Option<f64>,
    shift_at_s: Option<u64>,
) -> Timeline {
    let mut moments: Vec<Moment> = snapshots.iter().map(|s| s.moment(&unit)).collect();
    if let Some(start) = moments.first_mut() {
        // Those of first touch count, too: who publishes such counts takes a program's whole run.
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

#[cfg(test)]
mod tests {
    use demeter_outcome::{COUNTERS, role};

    use super::*;
    use crate::machine::flush::FlushCounts;
    use crate::machine::ledger::Bill;

    fn snapshot(second: u64) -> Snapshot {
        let mut bill = Bill::default();
        bill.charge(Cause::Track, second * 250_000_000_000);
        Snapshot {
            at_ps: second * 1_000_000_000_000,
            ops: second * 500,
            thread_time_ps: second * 4_000_000_000_000,
            samples: 7 + second,
            bill,
            flushes: FlushCounts {
                host_vcpu: 10 + second,
                ..FlushCounts::default()
            },
            ..Snapshot::default()
        }
    }

    #[test]
    fn latency_counts_every_thread_and_throughput_the_clock() {
        let mean = |unit| {
            let timeline = timeline(&[0, 1, 2].map(snapshot), unit, None, None);
            timeline.summarise("x").unwrap().mean()
        };
        assert_eq!(mean(Unit::MOPS), Some(0.0005));
        assert_eq!(mean(Unit::NS), Some(4e9 / 500.0));
    }

    #[test]
    fn first_touch_counts_among_flushes_only() {
        let timeline = timeline(&[0, 2].map(snapshot), Unit::MOPS, None, Some(5));
        let result = timeline.summarise("x").unwrap();
        assert_eq!(result.counters["flush_host_vcpu"], 12);
        assert_eq!(
            (result.counters["flush_total"], result.counters["samples"]),
            (12, 2)
        );
        assert_eq!(result.mgmt_cpu_s, Some(0.5));
    }

    #[test]
    fn every_name_is_one_that_results_know() {
        let moment = snapshot(1).moment(&Unit::MOPS);
        assert!(
            moment
                .counters
                .keys()
                .eq(&std::collections::BTreeSet::from(COUNTERS))
        );
        assert!(
            Cause::ALL
                .iter()
                .all(|cause| role(&cause.to_string()).is_some())
        );
    }
}
