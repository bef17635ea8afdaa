//! Figures by name, for tables, pictures and comparisons in scenarios.

use std::fmt;

use serde::{Deserialize, Serialize};

use crate::names::{CAUSES, COUNTERS, LOGGING_COUNTERS, is_counter, role};
use crate::schema::{SystemResult, WorkloadResult};
use crate::unit::Unit;

/// The name of a figure of a result.
///
/// One of:
/// - a name of a fixed list (`elapsed_s`, `mean_mops`, ...);
/// - a counter (`counters.flush_total`);
/// - the CPU seconds of one or several causes (`cpu_s.track`, `cpu_s.migrate+fault`);
/// - a VM's or tenant's share of all fast memory (`fast_share.NAME`).
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(try_from = "String")]
pub struct Figure(String);

/// No figure has this name.
#[derive(Debug, thiserror::Error)]
#[error("there is no figure {0}")]
pub struct UnknownFigure(String);

/// A figure of the fixed list.
struct Fixed {
    name: &'static str,
    words: &'static str,
    unit: &'static str,
    of: fn(&SystemResult) -> Option<f64>,
}

/// One row for each figure: name, words, unit, and its value.
macro_rules! figures {
    ($($name:literal, $words:literal, $unit:literal, $of:expr;)*) => {
        [$(Fixed { name: $name, words: $words, unit: $unit, of: $of }),*]
    };
}

const FIXED: &[Fixed] = &figures! {
    "elapsed_s", "time for the work", "s", |s| s.elapsed_s;
    "mean_speed", "speed", "", |s| s.mean();
    "steady_speed", "speed at the end", "", |s| s.steady();
    "mean_mops", "throughput", "Mops", |s| told_in(s, Unit::MOPS)?.mean();
    "steady_mops", "throughput at the end", "Mops", |s| told_in(s, Unit::MOPS)?.steady();
    "slowest_mops", "throughput of the slowest VM at the end", "Mops", slowest;
    "peak_mops", "peak throughput", "Mops", |s| peak(told_in(s, Unit::MOPS)?);
    "trough", "slowest interval over the fastest", "", trough;
    "mean_latency_ns", "latency", "ns", |s| told_in(s, Unit::NS)?.mean();
    "steady_latency_ns", "latency at the end", "ns", |s| told_in(s, Unit::NS)?.steady();
    "hot_in_fast_final", "hot set in fast memory", "", |s| s.hot_in_fast_final;
    "t90_s", "t90", "s", |s| s.t90_s;
    "t90_after_shift_s", "t90 after the shift", "s", |s| s.t90_after_shift_s;
    "mgmt_cpu_s", "management CPU", "s", |s| s.mgmt_cpu_s;
    "cores_managing", "cores managing", "", |s| s.cores_managing();
    "cores_managing_steady", "cores managing at the end", "", |s| s.cores_managing_steady();
    "walk_overhead", "walks over all else", "", walk_overhead;
    "bytes_promoted", "promoted", "bytes", |s| Some(s.bytes_promoted? as f64);
    "bytes_demoted", "demoted", "bytes", |s| Some(s.bytes_demoted? as f64);
    "bytes_moved", "moved", "bytes", |s| Some(s.bytes_moved()? as f64);
    "memory_overhead_bytes", "memory overhead", "bytes", |s| Some(s.memory_overhead_bytes? as f64);
    "tail.mean_ns", "mean of operations", "ns", |s| Some(s.tail?.mean_ns);
    "tail.p50_ns", "p50 of operations", "ns", |s| Some(s.tail?.p50_ns);
    "tail.p90_ns", "p90 of operations", "ns", |s| Some(s.tail?.p90_ns);
    "tail.p99_ns", "p99 of operations", "ns", |s| Some(s.tail?.p99_ns);
    "tail.p999_ns", "p99.9 of operations", "ns", |s| Some(s.tail?.p999_ns);
};

/// The system, if its speed has this unit.
fn told_in(system: &SystemResult, unit: Unit) -> Option<&SystemResult> {
    (system.speed.as_ref()?.unit == unit).then_some(system)
}

/// Time of page walks divided by the program's time without them.
fn walk_overhead(system: &SystemResult) -> Option<f64> {
    let walks_s = *system.counters.get("walk_ns")? as f64 / 1e9;
    let work = ["compute", "walk", "cache", "fast", "slow"].map(|cause| system.cpu_s.get(cause));
    let work_s = work.into_iter().sum::<Option<f64>>()?;
    (work_s > walks_s).then(|| walks_s / (work_s - walks_s))
}

/// A VM's share of the fast memory that all VMs own at the end, or a program's share among programs in cgroups.
fn fast_share(system: &SystemResult, vm: &str) -> Option<f64> {
    let owned = |w: &WorkloadResult| Some(w.series.last()?.fast_bytes? as f64);
    let of_all: f64 = system.workloads.iter().filter_map(owned).sum();
    let own = owned(system.workloads.iter().find(|w| w.name == vm)?)?;
    (of_all > 0.0).then_some(own / of_all)
}

/// The lowest final throughput of workloads that run side by side.
fn slowest(system: &SystemResult) -> Option<f64> {
    let speeds = system.workloads.iter().filter_map(|w| w.speed.as_ref());
    let speeds = speeds.filter(|speed| speed.unit == Unit::MOPS);
    speeds.filter_map(|speed| speed.steady).reduce(f64::min)
}

/// The highest speed of an interval.
fn peak(system: &SystemResult) -> Option<f64> {
    let speeds = system.series.iter().filter_map(|point| point.speed);
    speeds.reduce(f64::max)
}

/// The lowest speed of an interval as a share of the highest.
fn trough(system: &SystemResult) -> Option<f64> {
    let speeds = system.series.iter().filter_map(|point| point.speed);
    let least = speeds.reduce(f64::min)?;
    let most = peak(system)?;
    (most > 0.0).then(|| least / most)
}

impl Figure {
    /// The figure of a system; `None` if it was not measured.
    pub fn of(&self, system: &SystemResult) -> Option<f64> {
        match self.parts() {
            ("counters", counter) => system.counters.get(counter).map(|&n| n as f64),
            ("cpu_s", causes) => causes.split('+').map(|cause| system.cpu_s.get(cause)).sum(),
            ("fast_share", vm) => fast_share(system, vm),
            _ => (self.fixed()?.of)(system),
        }
    }

    /// Its name in words, without the unit for a ratio.
    pub fn words(&self, is_ratio: bool) -> String {
        let plain = |name: &str| name.replace('_', " ");
        let (words, unit) = match (self.fixed(), self.parts()) {
            (Some(fixed), _) => (fixed.words.to_owned(), fixed.unit),
            (_, ("fast_share", vm)) => (format!("fast memory of {vm}, of all"), ""),
            (_, ("cpu_s", causes)) => (format!("CPU to {}", plain(causes)), "s"),
            (_, (_, "flush_total")) => ("TLB flushes".to_owned(), ""),
            (_, (_, counter)) => match counter.strip_prefix("flush_") {
                Some(kind) => (format!("flushes {}", plain(kind)), ""),
                None => (plain(counter), ""),
            },
        };
        if is_ratio || unit.is_empty() {
            words
        } else {
            format!("{words}, {unit}")
        }
    }

    /// The parts before and after the first point.
    fn parts(&self) -> (&str, &str) {
        self.0.split_once('.').unwrap_or(("", &self.0))
    }

    fn fixed(&self) -> Option<&'static Fixed> {
        FIXED.iter().find(|fixed| fixed.name == self.0)
    }
}

impl TryFrom<String> for Figure {
    type Error = UnknownFigure;

    fn try_from(name: String) -> Result<Self, UnknownFigure> {
        let figure = Self(name);
        let refuse = |what: &str, names: Vec<&str>| {
            let names = names.join(", ");
            Err(UnknownFigure(format!("{figure}: {what} {names}")))
        };
        match figure.parts() {
            ("counters", counter) if is_counter(counter) => Ok(figure),
            ("counters", _) => refuse(
                "counters are",
                COUNTERS.iter().chain(&LOGGING_COUNTERS).copied().collect(),
            ),
            ("cpu_s", causes) if causes.split('+').all(|c| role(c).is_some()) => Ok(figure),
            ("cpu_s", _) => refuse("causes are", CAUSES.map(|(cause, _)| cause).to_vec()),
            ("fast_share", vm) if !vm.is_empty() => Ok(figure),
            _ if figure.fixed().is_some() => Ok(figure),
            _ => refuse(
                "figures are counters.NAME, cpu_s.CAUSE, fast_share.VM,",
                FIXED.iter().map(|fixed| fixed.name).collect(),
            ),
        }
    }
}

impl fmt::Display for Figure {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::{Point, Speed, Tail};

    fn figure(name: &str) -> Figure {
        Figure::try_from(name.to_owned()).unwrap()
    }

    #[test]
    fn figures_are_found_by_name() {
        let point = |t_s, speed| Point {
            t_s,
            speed: Some(speed),
            ..Point::default()
        };
        let vm = |(name, fast, steady): (&str, u64, f64)| WorkloadResult {
            name: name.into(),
            elapsed_s: None,
            speed: Some(Speed::new(Unit::MOPS, 1.0, steady)),
            verify_errors: None,
            series: vec![Point {
                fast_bytes: Some(fast),
                ..Point::default()
            }],
        };
        let system = SystemResult {
            speed: Some(Speed::new(Unit::MOPS, 2.5, None)),
            mgmt_cpu_s: Some(6.0),
            mgmt_cpu_steady_s: Some(1.0),
            bytes_promoted: Some(7),
            bytes_demoted: Some(9),
            tail: Some(Tail {
                p99_ns: 5.0,
                ..Tail::default()
            }),
            counters: [("flush_total".into(), 9)].into(),
            cpu_s: [("track".into(), 0.5), ("fault".into(), 1.0)].into(),
            series: vec![point(1.0, 3.0), point(2.0, 2.0)],
            workloads: [("a", 3, 1.0), ("b", 1, 2.0)].map(vm).into(),
            ..SystemResult::default()
        };
        for (name, value) in [
            ("counters.flush_total", Some(9.0)),
            ("counters.samples", None),
            ("cpu_s.track", Some(0.5)),
            ("cpu_s.track+fault", Some(1.5)),
            ("cpu_s.track+walk", None),
            ("tail.p99_ns", Some(5.0)),
            ("mean_mops", Some(2.5)),
            ("mean_speed", Some(2.5)),
            ("mean_latency_ns", None),
            ("peak_mops", Some(3.0)),
            ("trough", Some(2.0 / 3.0)),
            ("cores_managing", Some(3.0)),
            ("cores_managing_steady", Some(1.5)),
            ("bytes_promoted", Some(7.0)),
            ("bytes_moved", Some(16.0)),
            ("elapsed_s", None),
            ("slowest_mops", Some(1.0)),
            ("fast_share.a", Some(0.75)),
            ("fast_share.c", None),
        ] {
            assert_eq!(figure(name).of(&system), value, "{name}");
        }
        let fixed = SystemResult {
            elapsed_s: Some(12.0),
            ..system
        };
        assert_eq!(figure("cores_managing").of(&fixed), Some(0.5));
    }

    #[test]
    fn a_misspelt_name_is_refused_with_those_that_there_are() {
        for (name, known) in [
            ("mean_mop", "mean_mops"),
            ("tail.p98_ns", "tail.p99_ns"),
            ("counters.flush_totl", "flush_total"),
            ("cpu_s.track+bogus", "classify"),
            ("cpu_s.", "track"),
            ("", "elapsed_s"),
        ] {
            let said = Figure::try_from(name.to_owned()).unwrap_err().to_string();
            assert!(said.contains(name) && said.contains(known), "{said}");
        }
        figure("counters.pgpromote_success");
    }

    #[test]
    fn figures_have_words() {
        for (name, is_ratio, words) in [
            ("elapsed_s", false, "time for the work, s"),
            ("elapsed_s", true, "time for the work"),
            ("cpu_s.track", false, "CPU to track, s"),
            ("counters.flush_total", false, "TLB flushes"),
            ("counters.flush_host_invept", true, "flushes host invept"),
            ("counters.hint_faults", false, "hint faults"),
        ] {
            assert_eq!(figure(name).words(is_ratio), words);
        }
    }
}
