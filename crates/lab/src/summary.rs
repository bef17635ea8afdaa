//! From what a VM reported to what the result file says. Pure.

use std::collections::BTreeMap;

use demeter_report::{Point, SystemResult};

use crate::error::VmFault;
use crate::link::{Interval, ProgramFigure, Report, Totals};
use crate::workload::Rate;

/// Share of the hot set in fast memory at which a system has found it.
const FOUND: f64 = 0.9;

/// Where the steady part begins, as a share of the timed phase.
const STEADY_FROM: f64 = 2.0 / 3.0;

/// More intervals than any workload reports, which has one a second.
const INTERVALS_MAX: usize = 10_000;

/// What one VM has reported so far.
#[derive(Debug, Clone, Default, PartialEq)]
pub struct Trace {
    start: Option<(Option<f64>, Totals)>,
    intervals: Vec<Interval>,
    shift_at_s: Option<f64>,
    done: Option<(f64, Option<Speed>, Totals)>,
    verify_errors: Option<u64>,
}

impl Trace {
    /// Takes the next report. Reports that nothing is computed from are passed over.
    pub fn add(&mut self, report: Report) -> Result<(), VmFault> {
        match report {
            Report::Start {
                hot_in_fast,
                totals,
            } => self.start = Some((hot_in_fast, totals)),
            Report::Interval(interval) => {
                if self.intervals.len() >= INTERVALS_MAX {
                    return Err(VmFault::Nonsense(format!("over {INTERVALS_MAX} intervals")));
                }
                self.intervals.push(interval);
            }
            Report::Shift { t_s } => self.shift_at_s = Some(t_s),
            Report::Done {
                t_s,
                rate,
                programs,
                totals,
            } => self.done = Some((t_s, Speed::of(rate, &programs), totals)),
            Report::Verified { errors, .. } => self.verify_errors = Some(errors),
            Report::Booted { .. }
            | Report::Sized { .. }
            | Report::Program(_)
            | Report::AgentLog { .. }
            | Report::Failed { .. }
            | Report::Finished => {}
        }
        Ok(())
    }

    /// Whether the reports that a result is made of are all there.
    pub fn is_complete(&self) -> bool {
        self.start.is_some() && self.done.is_some() && !self.intervals.is_empty()
    }

    /// What the system called `name` did. `baseline` is the trace of `none` in the same run.
    ///
    /// Nothing when the trace [is not complete](Self::is_complete).
    pub fn summarise(&self, name: &str, baseline: Option<&Self>) -> Option<SystemResult> {
        let (hot_at_start, start) = self.start.as_ref()?;
        let (t_s, speed, end) = self.done.as_ref()?;
        let last = self.intervals.last()?;
        let from_s = t_s * STEADY_FROM;
        let steady_start = self.totals_at(from_s, start);
        let steady_s = (t_s - self.end_before(from_s)).max(f64::MIN_POSITIVE);
        let mgmt_cpu_s = |part: fn(&Self) -> Option<f64>| Some(part(self)? - part(baseline?)?);
        let mut result = SystemResult {
            name: name.into(),
            hot_in_fast_final: last.hot_in_fast.unwrap_or(0.0),
            t90_s: self.found_first(hot_at_start.unwrap_or(0.0)),
            t90_after_shift_s: self.found_after_shift(),
            mgmt_cpu_s: mgmt_cpu_s(Self::managed_s).map(|s| s + agent_user_s(start, end)),
            mgmt_cpu_steady_s: mgmt_cpu_s(Self::managed_steady_s)
                .map(|s| s + agent_user_s(steady_start, end)),
            kswapd_scanned: counted(start, end, "pgscan_kswapd"),
            bytes_promoted: moved(start, end, |totals| totals.promoted_bytes),
            bytes_demoted: moved(start, end, |totals| totals.demoted_bytes),
            moved_steady_bytes_per_s: moved(steady_start, end, |totals| {
                Some(totals.promoted_bytes? + totals.demoted_bytes?)
            })
            .map(|bytes| bytes as f64 / steady_s),
            verify_errors: self.verify_errors,
            cpu_s: cpu_by_cause(start, end),
            counters: differences(start, end),
            series: self.intervals.iter().map(point).collect(),
            ..SystemResult::default()
        };
        let steady = self.steady_mean(from_s);
        match speed {
            None => {}
            Some(Speed::Mops(mean)) => {
                (result.mean_mops, result.steady_mops) = (*mean, steady);
            }
            Some(Speed::LatencyNs(mean)) => {
                (result.mean_latency_ns, result.steady_latency_ns) = (*mean, steady);
            }
            Some(Speed::ElapsedS(s)) => result.elapsed_s = *s,
        }
        Some(result)
    }

    /// System time of the whole VM in the timed phase, CPU seconds.
    fn managed_s(&self) -> Option<f64> {
        let (_, start) = self.start.as_ref()?;
        let (_, _, end) = self.done.as_ref()?;
        Some(end.system_s - start.system_s)
    }

    /// The same in the last third.
    fn managed_steady_s(&self) -> Option<f64> {
        let (_, start) = self.start.as_ref()?;
        let (t_s, _, end) = self.done.as_ref()?;
        Some(end.system_s - self.totals_at(t_s * STEADY_FROM, start).system_s)
    }

    /// Intervals that begin before `t_s`.
    fn before(&self, t_s: f64) -> &[Interval] {
        // An interval's end is measured: half a hundredth of a second does not count as late.
        let count = self
            .intervals
            .iter()
            .take_while(|i| i.t_s <= t_s + 0.05)
            .count();
        &self.intervals[..count]
    }

    fn totals_at<'a>(&'a self, t_s: f64, start: &'a Totals) -> &'a Totals {
        self.before(t_s)
            .last()
            .map_or(start, |interval| &interval.totals)
    }

    fn end_before(&self, t_s: f64) -> f64 {
        self.before(t_s).last().map_or(0.0, |interval| interval.t_s)
    }

    /// Mean over the intervals after `from_s`, weighted by their length. For latencies that is
    /// the mean over time, not over loads.
    fn steady_mean(&self, from_s: f64) -> Option<f64> {
        let skipped = self.before(from_s).len();
        let mut last_s = self.end_before(from_s);
        let (mut sum, mut length_s) = (0.0, 0.0);
        for interval in &self.intervals[skipped..] {
            if let Some(speed) = speed(interval) {
                sum += speed * (interval.t_s - last_s);
                length_s += interval.t_s - last_s;
            }
            last_s = interval.t_s;
        }
        (length_s > 0.0).then(|| sum / length_s)
    }

    fn found_first(&self, hot_at_start: f64) -> Option<f64> {
        if hot_at_start >= FOUND {
            return Some(0.0);
        }
        let end_s = self.shift_at_s.unwrap_or(f64::INFINITY);
        let mut first = self.intervals.iter().take_while(|i| i.t_s <= end_s);
        first.find(|i| i.hot_in_fast >= Some(FOUND)).map(|i| i.t_s)
    }

    fn found_after_shift(&self) -> Option<f64> {
        let shift_at_s = self.shift_at_s?;
        let mut after = self.intervals.iter().filter(|i| i.t_s > shift_at_s);
        after
            .find(|i| i.hot_in_fast >= Some(FOUND))
            .map(|i| i.t_s - shift_at_s)
    }
}

/// What a workload's speed is told in. Of several programs the first one's counts.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Speed {
    Mops(Option<f64>),
    LatencyNs(Option<f64>),
    ElapsedS(Option<f64>),
}

impl Speed {
    fn of(rate: Option<Rate>, programs: &[ProgramFigure]) -> Option<Self> {
        match rate {
            Some(Rate::Mops(mops)) => return Some(Self::Mops(Some(mops))),
            Some(Rate::RequestsPerS(requests)) => return Some(Self::Mops(Some(requests / 1e6))),
            Some(Rate::LatencyNs(ns)) => return Some(Self::LatencyNs(Some(ns))),
            None => {}
        }
        let ProgramFigure { unit, value, .. } = programs.first()?;
        Some(match unit.as_str() {
            "s" => Self::ElapsedS(*value),
            "ns" => Self::LatencyNs(*value),
            "Mops" => Self::Mops(*value),
            _ => Self::Mops(value.map(|value| value / 1e6)),
        })
    }
}

fn speed(interval: &Interval) -> Option<f64> {
    match Speed::of(interval.rate, &interval.programs)? {
        Speed::Mops(value) | Speed::LatencyNs(value) => value,
        Speed::ElapsedS(_) => None,
    }
}

fn point(interval: &Interval) -> Point {
    let (mops, latency_ns) = match Speed::of(interval.rate, &interval.programs) {
        Some(Speed::Mops(mops)) => (mops, None),
        Some(Speed::LatencyNs(ns)) => (None, ns),
        Some(Speed::ElapsedS(_)) | None => (None, None),
    };
    Point {
        t_s: interval.t_s,
        mops,
        latency_ns,
        hot_in_fast: interval.hot_in_fast.unwrap_or(0.0),
        fast_bytes: None,
    }
}

fn agent_user_s(start: &Totals, end: &Totals) -> f64 {
    let user = |totals: &Totals| totals.cpu_s.get("agent_user").copied().unwrap_or(0.0);
    user(end) - user(start)
}

/// Counters start at 0 when a system does, so that no figure at the start means none.
fn moved(start: &Totals, end: &Totals, bytes: impl Fn(&Totals) -> Option<u64>) -> Option<u64> {
    Some(bytes(end)?.saturating_sub(bytes(start).unwrap_or(0)))
}

fn counted(start: &Totals, end: &Totals, name: &str) -> u64 {
    let count = |totals: &Totals| totals.vmstat.get(name).copied().unwrap_or(0);
    count(end).saturating_sub(count(start))
}

fn differences(start: &Totals, end: &Totals) -> BTreeMap<String, u64> {
    end.vmstat
        .keys()
        .map(|name| (name.clone(), counted(start, end, name)))
        .collect()
}

/// CPU seconds by cause; system time that no cause took is `other_system`.
fn cpu_by_cause(start: &Totals, end: &Totals) -> BTreeMap<String, f64> {
    let mut causes: BTreeMap<String, f64> = end
        .cpu_s
        .iter()
        .map(|(cause, s)| (cause.clone(), s - start.cpu_s.get(cause).unwrap_or(&0.0)))
        .collect();
    let known: f64 = causes
        .iter()
        .filter(|(cause, _)| !cause.ends_with("_user"))
        .map(|(_, s)| s)
        .sum();
    // The kernel splits a process's time by estimate, so that the sum can exceed the whole.
    let other = (end.system_s - start.system_s - known).max(0.0);
    causes.insert("other_system".into(), other);
    causes
}

#[cfg(test)]
mod tests {
    use super::*;

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

    /// Nine seconds; speed and share of the hot set as given for each.
    fn trace(speeds: [f64; 9], hot: [f64; 9], system_per_s: f64) -> Trace {
        let mut trace = Trace::default();
        let start = Totals {
            promoted_bytes: None,
            demoted_bytes: None,
            ..totals(5.0, 0.0, 7, None)
        };
        trace
            .add(Report::Start {
                hot_in_fast: Some(0.0),
                totals: start,
            })
            .unwrap();
        for (i, (mops, hot_in_fast)) in speeds.into_iter().zip(hot).enumerate() {
            let t = (i + 1) as f64;
            let totals = totals(
                5.0 + t * system_per_s,
                t * 0.1,
                7 + i as u64,
                Some(t as u64 * 10),
            );
            let interval = Interval {
                t_s: t,
                rate: Some(Rate::Mops(mops)),
                programs: vec![],
                hot_in_fast: Some(hot_in_fast),
                totals,
            };
            trace.add(Report::Interval(interval)).unwrap();
        }
        let end = trace.intervals[8].totals.clone();
        trace
            .add(Report::Done {
                t_s: 9.0,
                rate: Some(Rate::Mops(2.0)),
                programs: vec![],
                totals: end,
            })
            .unwrap();
        trace
    }

    const RISING: [f64; 9] = [0.0, 0.5, 0.9, 0.95, 0.95, 0.95, 0.95, 0.95, 0.97];

    #[test]
    fn figures_of_the_whole_phase_and_of_its_last_third() {
        let none = trace([1.0; 9], [0.0; 9], 0.01);
        let demeter = trace([1.0, 1.0, 1.0, 2.0, 2.0, 2.0, 3.0, 3.0, 6.0], RISING, 0.05);
        let result = demeter.summarise("demeter", Some(&none)).unwrap();
        assert_eq!(result.name, "demeter");
        assert_eq!(result.mean_mops, Some(2.0));
        assert_eq!(result.steady_mops, Some(4.0));
        assert_eq!(result.mean_latency_ns, None);
        assert_eq!(result.hot_in_fast_final, 0.97);
        assert_eq!(result.t90_s, Some(3.0));
        assert!((result.mgmt_cpu_s.unwrap() - (0.45 - 0.09 + 0.9)).abs() < 1e-9);
        assert!((result.mgmt_cpu_steady_s.unwrap() - (0.15 - 0.03 + 0.3)).abs() < 1e-9);
        assert_eq!(result.kswapd_scanned, 8);
        assert_eq!(result.bytes_promoted, Some(90));
        assert!((result.moved_steady_bytes_per_s.unwrap() - 20.0).abs() < 1e-9);
        assert_eq!(result.verify_errors, None);
        assert_eq!(result.series.len(), 9);
        assert!((result.cpu_s["kswapd"] - 0.225).abs() < 1e-9);
        assert!((result.cpu_s["other_system"] - 0.225).abs() < 1e-9);
    }

    #[test]
    fn without_none_there_is_no_figure_for_management() {
        let result = trace([1.0; 9], RISING, 0.0)
            .summarise("demeter", None)
            .unwrap();
        assert_eq!((result.mgmt_cpu_s, result.mgmt_cpu_steady_s), (None, None));
    }

    #[test]
    fn a_hot_set_that_is_there_at_the_start_took_no_time() {
        let mut oracle = trace([1.0; 9], [1.0; 9], 0.0);
        oracle.start.as_mut().unwrap().0 = Some(1.0);
        assert_eq!(oracle.summarise("oracle", None).unwrap().t90_s, Some(0.0));
    }

    #[test]
    fn a_jump_starts_a_clock_of_its_own() {
        let hot = [0.0, 0.0, 0.95, 0.95, 0.0, 0.5, 0.92, 0.95, 0.95];
        let mut shifted = trace([1.0; 9], hot, 0.0);
        shifted.add(Report::Shift { t_s: 4.0 }).unwrap();
        let result = shifted.summarise("demeter", None).unwrap();
        assert_eq!(
            (result.t90_s, result.t90_after_shift_s),
            (Some(3.0), Some(3.0))
        );
        // Found only after the jump is never found before it.
        let hot = [0.0, 0.0, 0.0, 0.0, 0.0, 0.5, 0.92, 0.95, 0.95];
        let mut late = trace([1.0; 9], hot, 0.0);
        late.add(Report::Shift { t_s: 4.0 }).unwrap();
        let result = late.summarise("demeter", None).unwrap();
        assert_eq!((result.t90_s, result.t90_after_shift_s), (None, Some(3.0)));
    }

    #[test]
    fn a_vm_that_says_too_little_or_too_much_is_refused() {
        assert!(Trace::default().summarise("none", None).is_none());
        let mut endless = trace([1.0; 9], RISING, 0.0);
        let again = Report::Interval(endless.intervals[0].clone());
        let refused = (0..=INTERVALS_MAX).find(|_| endless.add(again.clone()).is_err());
        assert_eq!(refused, Some(INTERVALS_MAX - 9));
    }
}
