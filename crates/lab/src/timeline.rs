//! From what a VM reported to the timeline of its run.

use demeter_outcome::{Meter, Moment, OTHER_SYSTEM, SystemResult, Timeline, Unit, Work};

use crate::error::VmFault;
use crate::link::{Report, Totals};
use crate::workload::Rate;

/// More intervals than any workload reports, which has one a second.
const INTERVALS_MAX: usize = 10_000;

/// An interval's end is measured: half a tenth of a second does not count as late.
const SLACK_PS: u64 = 50_000_000_000;

/// What one VM has reported so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VmTimeline {
    timeline: Timeline,
    is_done: bool,
    verify_errors: Option<u64>,
}

impl VmTimeline {
    /// Takes the next report. Reports that nothing is computed from are passed over.
    pub fn add(&mut self, report: Report) -> Result<(), VmFault> {
        let moments = &mut self.timeline.moments;
        match report {
            Report::Start {
                hot_in_fast,
                totals,
            } => {
                *moments = vec![moment(0, Work::default(), hot_in_fast, totals)];
                self.timeline.slack_ps = SLACK_PS;
            }
            Report::Interval(interval) => {
                if moments.len() > INTERVALS_MAX {
                    return Err(VmFault::Nonsense(format!("over {INTERVALS_MAX} intervals")));
                }
                let Some(last) = moments.last() else {
                    return Err(VmFault::Nonsense("an interval before the start".into()));
                };
                let (at_ps, unit) = (picoseconds(interval.t_s), interval.rate.unit());
                let length_ps = at_ps.saturating_sub(last.at_ps);
                let done = last.work[0].done + unit.done(interval.rate.value(), length_ps as f64);
                let work = Work {
                    done,
                    time_ps: at_ps,
                };
                moments.push(moment(at_ps, work, interval.hot_in_fast, interval.totals));
            }
            Report::Shift { t_s } => self.timeline.shift_ps = Some(picoseconds(t_s)),
            Report::Done { t_s, rate, totals } => {
                let (at_ps, unit) = (picoseconds(t_s), rate.unit());
                let work = Work {
                    done: unit.done(rate.value(), at_ps as f64),
                    time_ps: at_ps,
                };
                // It is the end of the last interval, and counted to the last operation.
                if let [_, .., last] = &mut moments[..] {
                    *last = moment(at_ps, work, last.hot_in_fast, totals);
                }
                self.timeline.meters = vec![Meter {
                    unit: Some(unit),
                    ..Meter::default()
                }];
                self.is_done = true;
            }
            Report::Verified { errors, .. } => self.verify_errors = Some(errors),
            Report::Booted { .. }
            | Report::Sized { .. }
            | Report::AgentLog { .. }
            | Report::AgentRecording { .. }
            | Report::Failed { .. }
            | Report::Finished => {}
        }
        Ok(())
    }

    /// What the system called `name` did; nothing when a report that a result is made of is missing.
    pub fn summarise(&self, name: &str) -> Option<SystemResult> {
        let result = self.timeline.summarise(name).filter(|_| self.is_done)?;
        Some(SystemResult {
            verify_errors: self.verify_errors,
            ..result
        })
    }
}

/// The VM's state, as it has counted since its boot.
fn moment(at_ps: u64, work: Work, hot_in_fast: Option<f64>, totals: Totals) -> Moment {
    let causes = totals.cpu_s.iter();
    let system = causes.filter(|(cause, _)| !cause.ends_with("_user"));
    let other_s = totals.system_s - system.map(|(_, s)| s).sum::<f64>();
    let other = (OTHER_SYSTEM.to_owned(), other_s);
    Moment {
        at_ps,
        work: vec![work],
        hot_in_fast,
        cpu_ps: (totals.cpu_s.into_iter().chain([other]))
            .map(|(cause, s)| (cause, picoseconds(s)))
            .collect(),
        kswapd_scanned: *totals.vmstat.get("pgscan_kswapd").unwrap_or(&0),
        counters: totals.vmstat,
        promoted_bytes: totals.promoted_bytes,
        demoted_bytes: totals.demoted_bytes,
    }
}

/// What is no time is none.
fn picoseconds(s: f64) -> u64 {
    (s * 1e12).round() as u64
}

impl Rate {
    fn unit(self) -> Unit {
        match self {
            Self::Mops(_) => Unit::MOPS,
            Self::LatencyNs(_) => Unit::NS,
        }
    }

    fn value(self) -> f64 {
        match self {
            Self::Mops(value) | Self::LatencyNs(value) => value,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::link::Interval;

    fn totals(system_s: f64, agent_user_s: f64, pages: u64, promoted: Option<u64>) -> Totals {
        Totals {
            system_s,
            cpu_s: [
                ("agent_user".into(), agent_user_s),
                ("kswapd".into(), system_s / 2.0),
            ]
            .into(),
            vmstat: [("pgscan_kswapd".into(), pages)].into(),
            promoted_bytes: promoted,
            demoted_bytes: promoted,
        }
    }

    fn interval(t_s: f64, mops: f64, totals: Totals) -> Report {
        Report::Interval(Interval {
            t_s,
            rate: Rate::Mops(mops),
            hot_in_fast: Some(t_s / 10.0),
            totals,
        })
    }

    /// Nine seconds with these speeds, and a hundredth of a second after them.
    fn timeline(speeds: [f64; 9]) -> VmTimeline {
        let mut timeline = VmTimeline::default();
        let start = Report::Start {
            hot_in_fast: Some(0.0),
            totals: totals(5.0, 0.0, 7, None),
        };
        timeline.add(start).unwrap();
        let at = |t: f64| totals(5.0 + t * 0.05, t * 0.1, 7 + t as u64, Some(t as u64 * 10));
        for (t, mops) in (1..).map(f64::from).zip(speeds) {
            timeline.add(interval(t + 0.01, mops, at(t))).unwrap();
        }
        let done = Report::Done {
            t_s: 9.02,
            rate: Rate::Mops(speeds.iter().sum::<f64>() / 9.02),
            totals: at(9.0),
        };
        timeline.add(done).unwrap();
        timeline
    }

    #[test]
    fn a_vm_becomes_a_result() {
        let mut timeline = timeline([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 6.0]);
        let errors = 3;
        timeline.add(Report::Verified { words: 9, errors }).unwrap();
        let result = timeline.summarise("demeter").unwrap();
        let near = |value: Option<f64>, expected: f64| {
            let value = value.unwrap();
            assert!((value / expected - 1.0).abs() < 0.01, "{value} {expected}");
        };
        near(result.mean(), 21.0 / 9.0);
        near(result.steady(), 4.0);
        assert_eq!(result.speed.as_ref().unwrap().unit, Unit::MOPS);
        // All of the VM's system time, whatever it was for, and the agent's user time.
        near(result.mgmt_cpu_s, 0.45 + 0.9);
        near(result.mgmt_cpu_steady_s, 0.15 + 0.3);
        assert!((result.cpu_s["kswapd"] - 0.225).abs() < 1e-9);
        assert!((result.cpu_s["other_system"] - 0.225).abs() < 1e-9);
        assert_eq!(
            (result.kswapd_scanned, result.counters["pgscan_kswapd"]),
            (9, 9)
        );
        assert_eq!(
            (result.bytes_promoted, result.verify_errors),
            (Some(90), Some(3))
        );
        near(result.moved_steady_bytes_per_s, 20.0);
        assert_eq!((result.series.len(), result.series[8].t_s), (9, 9.02));
        near(result.hot_in_fast_final, 0.9);
    }

    #[test]
    fn a_jump_is_told() {
        let mut timeline = timeline([1.0; 9]);
        timeline.add(Report::Shift { t_s: 4.0 }).unwrap();
        let result = timeline.summarise("demeter").unwrap();
        assert_eq!((result.t90_s, result.t90_after_shift_s), (None, Some(5.02)));
    }

    #[test]
    fn a_vm_that_says_too_little_or_too_much_is_refused() {
        assert!(VmTimeline::default().summarise("none").is_none());
        let mut endless = timeline([1.0; 9]);
        let again = || interval(1.0, 1.0, Totals::default());
        let refused = (0..=INTERVALS_MAX).find(|_| endless.add(again()).is_err());
        assert_eq!(refused, Some(INTERVALS_MAX - 9));
        assert!(VmTimeline::default().add(again()).is_err());
        // An end without a start, and a start without an end.
        let mut torn = VmTimeline::default();
        let (t_s, rate, totals) = (1.0, Rate::Mops(1.0), Totals::default());
        torn.add(Report::Done { t_s, rate, totals }).unwrap();
        assert!(torn.summarise("none").is_none());
    }

    #[test]
    fn every_cause_is_one_that_results_know() {
        let followed = ["observer", "workload", "agent"];
        let known = |cause: String| demeter_outcome::role(&cause).is_some();
        assert!(
            followed
                .iter()
                .all(|f| known(format!("{f}_user")) && known(format!("{f}_system")))
        );
    }
}
