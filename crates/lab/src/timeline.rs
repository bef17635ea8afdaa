//! Converts a VM's reports to the timeline of its run.

use demeter_outcome::{Estimate, Meter, Moment, OTHER_SYSTEM, SystemResult, Timeline, Unit, Work};
use demeter_workload::Rate;

use crate::error::VmFault;
use crate::link::{ProgramFigure, Totals, VmMessage};

/// Maximum number of intervals; no workload reports as many, with one per second.
const INTERVALS_MAX: usize = 10_000;

/// Tolerance of an interval's measured end: 0.05 s.
const SLACK_PS: u64 = 50_000_000_000;

/// The reports of one VM so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct VmTimeline {
    vcpus: u32,
    timeline: Timeline,
    is_done: bool,
    verify_errors: Option<u64>,
    estimate: Option<Estimate>,
}

impl VmTimeline {
    /// An empty timeline of a VM with this many CPUs.
    pub fn new(vcpus: u32) -> Self {
        Self {
            vcpus,
            ..Self::default()
        }
    }

    /// Adds the next report. Ignores reports without figures.
    pub fn add(&mut self, report: VmMessage) -> Result<(), VmFault> {
        let vcpus = f64::from(self.vcpus.max(1));
        let moment = |at_ps, work, hot_in_fast, mut totals: Totals| {
            totals.lag_s /= vcpus;
            moment(at_ps, work, hot_in_fast, totals)
        };
        let moments = &mut self.timeline.moments;
        match report {
            VmMessage::Start {
                hot_in_fast,
                totals,
            } => {
                *moments = vec![moment(0, vec![], hot_in_fast, totals)];
                self.timeline.slack_ps = SLACK_PS;
            }
            VmMessage::Interval(interval) => {
                if moments.len() > INTERVALS_MAX {
                    return Err(VmFault::Nonsense(format!("over {INTERVALS_MAX} intervals")));
                }
                let Some(last) = moments.last() else {
                    return Err(VmFault::Nonsense("an interval before the start".into()));
                };
                let at_ps = picoseconds(interval.t_s);
                let length_ps = at_ps.saturating_sub(last.at_ps);
                let readings = readings(interval.rate, interval.programs);
                let work = readings.iter().enumerate().map(|(i, reading)| {
                    let before = last.work.get(i).copied().unwrap_or_default();
                    reading.work(before, length_ps)
                });
                let work = work.collect();
                let moment = moment(at_ps, work, interval.hot_in_fast, interval.totals);
                moments.push(Moment {
                    fast_bytes: readings.iter().map(|r| r.fast_bytes).collect(),
                    ..moment
                });
            }
            VmMessage::Shift { t_s } => self.timeline.shift_ps = Some(picoseconds(t_s)),
            VmMessage::Done {
                t_s,
                rate,
                programs,
                totals,
                estimate,
            } => {
                self.estimate = estimate;
                let at_ps = picoseconds(t_s);
                let readings = readings(rate, programs);
                // It marks the end of the last interval, and its count includes the last operation.
                if let [.., before, last] = &mut moments[..] {
                    let mut work = std::mem::take(&mut last.work);
                    for (i, (work, reading)) in work.iter_mut().zip(&readings).enumerate() {
                        if reading.value.is_some() {
                            let all = reading.work(Work::default(), at_ps);
                            // Rates are rounded, but work never decreases, even if a program was idle.
                            let least = before.work.get(i).map_or(0.0, |work| work.done);
                            let done = all.done.max(least);
                            *work = Work { done, ..all };
                        }
                    }
                    *last = Moment {
                        fast_bytes: readings.iter().map(|r| r.fast_bytes).collect(),
                        ..moment(at_ps, work, last.hot_in_fast, totals)
                    };
                }
                self.timeline.meters = readings.into_iter().map(Reading::meter).collect();
                self.is_done = true;
            }
            VmMessage::Verified { errors, .. } => self.verify_errors = Some(errors),
            VmMessage::Booted { .. }
            | VmMessage::Sized { .. }
            | VmMessage::Filled
            | VmMessage::Program(_)
            | VmMessage::Uses { .. }
            | VmMessage::AgentLog { .. }
            | VmMessage::AgentRecording { .. }
            | VmMessage::Failed { .. }
            | VmMessage::Finished => {}
        }
        Ok(())
    }

    /// Results of the system called `name`; none if a required report is missing.
    pub fn summarise(&self, name: &str) -> Option<SystemResult> {
        let result = self.timeline.summarise(name).filter(|_| self.is_done)?;
        Some(SystemResult {
            verify_errors: self.verify_errors,
            estimate: self.estimate.clone(),
            ..result
        })
    }
}

/// The VM's state, from counters since boot.
fn moment(at_ps: u64, work: Vec<Work>, hot_in_fast: Option<f64>, totals: Totals) -> Moment {
    let causes = totals.cpu_s.iter();
    let system = causes.filter(|(cause, _)| !cause.ends_with("_user"));
    let other_s = totals.system_s - system.map(|(_, s)| s).sum::<f64>();
    let other = (OTHER_SYSTEM.to_owned(), other_s);
    Moment {
        at_ps,
        work,
        fast_bytes: vec![],
        hot_in_fast,
        cpu_ps: (totals.cpu_s.into_iter().chain([other]))
            .map(|(cause, s)| (cause, picoseconds(s)))
            .collect(),
        kswapd_scanned: *totals.vmstat.get("pgscan_kswapd").unwrap_or(&0),
        counters: totals.vmstat,
        promoted_bytes: totals.promoted_bytes,
        demoted_bytes: totals.demoted_bytes,
        memory_overhead_bytes: None,
        lag_ps: Some(picoseconds(totals.lag_s)),
    }
}

/// Converts seconds to picoseconds; an invalid time becomes zero.
fn picoseconds(s: f64) -> u64 {
    (s * 1e12).round() as u64
}

/// Measured work of one workload, in an interval or in total.
struct Reading {
    name: String,
    unit: Unit,
    value: Option<f64>,
    /// Whether it is the duration of all the work, not a speed.
    is_elapsed: bool,
    fast_bytes: Option<u64>,
}

/// For our own programs, their joint unnamed figure; for other programs, one figure each.
fn readings(rate: Option<Rate>, programs: Vec<ProgramFigure>) -> Vec<Reading> {
    let own = rate.map(|rate| Reading {
        name: String::new(),
        unit: rate.unit(),
        value: Some(rate.value()),
        is_elapsed: false,
        fast_bytes: None,
    });
    let programs = programs.into_iter().map(|program| Reading {
        name: program.name,
        unit: Unit::new(program.unit),
        value: program.value,
        is_elapsed: program.is_elapsed,
        fast_bytes: program.fast_bytes,
    });
    own.into_iter().chain(programs).collect()
}

impl Reading {
    /// Total work after `length_ps` more. Time without data does not count.
    fn work(&self, before: Work, length_ps: u64) -> Work {
        self.value.map_or(before, |value| Work {
            done: before.done + self.unit.done(value, length_ps as f64),
            time_ps: before.time_ps + length_ps,
        })
    }

    fn meter(self) -> Meter {
        Meter {
            name: self.name,
            elapsed_s: self.value.filter(|_| self.is_elapsed),
            unit: (!self.is_elapsed).then_some(self.unit),
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
            lag_s: system_s,
        }
    }

    fn interval(t_s: f64, mops: f64, totals: Totals) -> VmMessage {
        VmMessage::Interval(Interval {
            t_s,
            rate: Some(Rate::Mops(mops)),
            programs: vec![],
            hot_in_fast: Some(t_s / 10.0),
            totals,
        })
    }

    /// Nine seconds with these speeds, and a hundredth of a second after them.
    fn timeline(speeds: [f64; 9]) -> VmTimeline {
        let mut timeline = VmTimeline::new(2);
        let start = VmMessage::Start {
            hot_in_fast: Some(0.0),
            totals: totals(5.0, 0.0, 7, None),
        };
        timeline.add(start).unwrap();
        let at = |t: f64| totals(5.0 + t * 0.05, t * 0.1, 7 + t as u64, Some(t as u64 * 10));
        for (t, mops) in (1..).map(f64::from).zip(speeds) {
            timeline.add(interval(t + 0.01, mops, at(t))).unwrap();
        }
        let done = VmMessage::Done {
            t_s: 9.02,
            rate: Some(Rate::Mops(speeds.iter().sum::<f64>() / 9.02)),
            programs: vec![],
            totals: at(9.0),
            estimate: Some(Estimate::default()),
        };
        timeline.add(done).unwrap();
        timeline
    }

    #[test]
    fn a_vm_becomes_a_result() {
        let mut timeline = timeline([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 6.0]);
        let errors = 3;
        timeline
            .add(VmMessage::Verified { words: 9, errors })
            .unwrap();
        let result = timeline.summarise("demeter").unwrap();
        assert_eq!(result.estimate, Some(Estimate::default()));
        let near = |value: Option<f64>, expected: f64| {
            let value = value.unwrap();
            assert!((value / expected - 1.0).abs() < 0.01, "{value} {expected}");
        };
        near(result.mean(), 21.0 / 9.0);
        near(result.steady(), 4.0);
        assert_eq!(result.speed.as_ref().unwrap().unit, Unit::MOPS);
        // The VM's total system time, for any purpose, and the agent's user time.
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
        // Summed over two CPUs: 0.05 s a second.
        near(result.metadata.host_noise, 0.025);
        near(result.metadata.host_noise_steady, 0.025);
    }

    /// The earlier intervals are reported slightly too long.
    #[test]
    fn who_is_idle_at_the_end_undoes_nothing() {
        let result = timeline([3.0, 3.0, 3.0, 3.0, 3.0, 3.0, 0.0, 0.0, 0.0]).summarise("none");
        assert_eq!(result.unwrap().steady(), Some(0.0));
    }

    #[test]
    fn a_jump_is_told() {
        let mut timeline = timeline([1.0; 9]);
        timeline.add(VmMessage::Shift { t_s: 4.0 }).unwrap();
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
        let done = VmMessage::Done {
            t_s,
            rate: Some(rate),
            programs: vec![],
            totals,
            estimate: None,
        };
        torn.add(done).unwrap();
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

    #[test]
    fn programs_side_by_side_have_a_figure_each() {
        let figures = |requests, seconds| {
            let figure = |name: &str, unit: &str, value| ProgramFigure {
                name: name.into(),
                unit: unit.into(),
                value,
                is_elapsed: name == "gcc",
                fast_bytes: (name == "redis").then_some(7),
            };
            vec![
                figure("redis", "requests/s", requests),
                figure("gcc", "s", seconds),
                // Seconds per query, which is a speed.
                figure("sqlite", "s", Some(0.5)),
            ]
        };
        let mut timeline = VmTimeline::default();
        let start = VmMessage::Start {
            hot_in_fast: None,
            totals: totals(0.0, 0.0, 0, None),
        };
        timeline.add(start).unwrap();
        for (t_s, requests) in [(1.0, None), (2.0, Some(30.0)), (3.0, Some(60.0))] {
            let interval = Interval {
                t_s,
                rate: None,
                programs: figures(requests, None),
                hot_in_fast: None,
                totals: totals(t_s, 0.0, 0, None),
            };
            timeline.add(VmMessage::Interval(interval)).unwrap();
        }
        let done = VmMessage::Done {
            t_s: 3.0,
            rate: None,
            programs: figures(Some(45.0), Some(2.5)),
            totals: totals(3.0, 0.0, 0, None),
            estimate: None,
        };
        timeline.add(done).unwrap();
        let result = timeline.summarise("none").unwrap();
        let [redis, gcc, sqlite] = &result.workloads[..] else {
            panic!("{result:?}");
        };
        assert_eq!((redis.name.as_str(), gcc.name.as_str()), ("redis", "gcc"));
        let speed = redis.speed.as_ref().unwrap();
        assert_eq!((speed.unit.name(), speed.mean), ("requests/s", Some(45.0)));
        assert_eq!(redis.series.last().unwrap().fast_bytes, Some(7));
        assert_eq!((&gcc.speed, gcc.elapsed_s), (&None, Some(2.5)));
        assert_eq!(gcc.series.last().unwrap().fast_bytes, None);
        let speed = sqlite.speed.as_ref().unwrap();
        assert_eq!((speed.unit.name(), speed.mean), ("s", Some(0.5)));
        assert_eq!(sqlite.elapsed_s, None);
        assert_eq!(result.hot_in_fast_final, None);
    }
}
