//! Computes a run's figures from its timeline.
//!
//! # Problem
//! The simulator and the lab's VMs report the same quantities by different means: counters that only rise, and clocks
//! that are exact or measured. One set of figures must follow from both.
//!
//! # Approach
//! A [`Timeline`] is a list of moments, about one per second, each with the totals so far. Every figure is the
//! difference of two moments: of the start and the end, of the last third, or of neighbours. Times are whole
//! picoseconds, so that no difference depends on the order of sums.
//!
//! # Properties
//! - The speeds of all intervals, weighted by their work or time, give the mean speed.
//! - A counter's value before the start does not matter.

use std::collections::BTreeMap;

use crate::names::{CAUSES, Role};
use crate::schema::{Metadata, Point, Speed, SystemResult, WorkloadResult};
use crate::unit::Unit;

/// Share of the hot set in fast memory from which it counts as found.
const FOUND: f64 = 0.9;

/// Picoseconds in a second.
const PS_PER_S: f64 = 1e12;

/// The measurements of one run, from start to end.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Timeline {
    /// The quantities measured of each workload.
    pub meters: Vec<Meter>,
    /// Sorted by time; the first is the start.
    pub moments: Vec<Moment>,
    /// When the hot set jumps.
    pub shift_ps: Option<u64>,
    /// Tolerance of a measured clock.
    pub slack_ps: u64,
}

/// The measured quantities of a workload.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Meter {
    /// Its name, if there are several. The first of several may have none: it is the total.
    pub name: String,
    /// The unit of its speed; `None` if nothing is counted.
    pub unit: Option<Unit>,
    /// Seconds until it ended, if it has an end and reached it.
    pub elapsed_s: Option<f64>,
}

/// The totals at one moment.
#[derive(Debug, Clone, PartialEq, Default)]
pub struct Moment {
    /// Time since the timed phase began.
    pub at_ps: u64,
    /// Work of each meter, in their order.
    pub work: Vec<Work>,
    /// Fast memory of each meter's workload, bytes, in their order; `None` if unknown.
    pub fast_bytes: Vec<Option<u64>>,
    /// Share of the hot set in fast memory, 0 to 1; `None` if the hot set is unknown.
    pub hot_in_fast: Option<f64>,
    /// CPU time so far by cause, see [`CAUSES`].
    pub cpu_ps: BTreeMap<String, u64>,
    /// Counters so far; a counter that is missing at the start began at 0.
    pub counters: BTreeMap<String, u64>,
    /// Pages that kswapd has scanned.
    pub kswapd_scanned: u64,
    /// Bytes moved to fast memory, if counted; `None` at the start means 0.
    pub promoted_bytes: Option<u64>,
    /// Bytes moved to slow memory, likewise.
    pub demoted_bytes: Option<u64>,
    /// The system's own memory now, if known.
    pub memory_overhead_bytes: Option<u64>,
    /// Time in which the host ran something other than the virtual CPUs that were not halted, averaged over these;
    /// `None` if unknown.
    pub lag_ps: Option<u64>,
}

/// A workload's work so far.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Work {
    /// Amount of work, as its unit counts it.
    pub done: f64,
    /// Time that it took; summed over threads if the unit is an operation's time.
    pub time_ps: u64,
}

impl Moment {
    fn fast_bytes(&self, meter: usize) -> Option<u64> {
        self.fast_bytes.get(meter).copied().flatten()
    }
}

impl Timeline {
    /// Computes the figures of the system `name`; `None` without an interval.
    ///
    /// Management is all CPU time of its causes; [`less_none`](crate::less_none) subtracts that of `none`.
    pub fn summarise(&self, name: &str) -> Option<SystemResult> {
        let (start, rest) = self.moments.split_first()?;
        let end = rest.last()?;
        let steady_ps = (end.at_ps / 3 * 2).saturating_add(self.slack_ps);
        let steady = self.moments.iter().rev().find(|m| m.at_ps <= steady_ps)?;
        let mut workloads: Vec<WorkloadResult> = self
            .meters
            .iter()
            .enumerate()
            .map(|(index, meter)| WorkloadResult {
                name: meter.name.clone(),
                elapsed_s: meter.elapsed_s,
                speed: meter.unit.as_ref().map(|unit| {
                    Speed::new(
                        unit.clone(),
                        self.speed(index, start, end),
                        self.speed(index, steady, end),
                    )
                }),
                verify_errors: None,
                series: self.series(|from, to| Point {
                    t_s: seconds(0, to.at_ps),
                    speed: self.speed(index, from, to),
                    fast_bytes: to.fast_bytes(index),
                    ..Point::default()
                }),
            })
            .collect();
        let ends = workloads.iter().map(|workload| workload.elapsed_s);
        let elapsed_s = ends.reduce(|a, b| Some(f64::max(a?, b?))).flatten();
        let is_of_all = |first: &WorkloadResult| workloads.len() == 1 || first.name.is_empty();
        let of_all = workloads.first().is_some_and(is_of_all);
        let only = of_all.then(|| workloads.remove(0));
        let shift_ps = self.shift_ps.unwrap_or(u64::MAX);
        Some(SystemResult {
            name: name.into(),
            metadata: Metadata {
                host_noise: noise(start, end),
                host_noise_steady: noise(steady, end),
                ..Metadata::default()
            },
            elapsed_s,
            hot_in_fast_final: end.hot_in_fast,
            t90_s: self.found(0, shift_ps),
            t90_after_shift_s: self.shift_ps.and_then(|from| self.found(from, u64::MAX)),
            mgmt_cpu_s: Some(managed_s(start, end)),
            mgmt_cpu_steady_s: Some(managed_s(steady, end)),
            kswapd_scanned: end.kswapd_scanned.saturating_sub(start.kswapd_scanned),
            bytes_promoted: since(start.promoted_bytes, end.promoted_bytes),
            bytes_demoted: since(start.demoted_bytes, end.demoted_bytes),
            moved_steady_bytes_per_s: moved_per_s(steady, end),
            memory_overhead_bytes: (self.moments.iter())
                .filter_map(|m| m.memory_overhead_bytes)
                .max(),
            cpu_s: (end.cpu_ps.iter())
                .map(|(cause, ps)| {
                    (
                        cause.clone(),
                        seconds(at(&start.cpu_ps, cause), *ps).max(0.0),
                    )
                })
                .collect(),
            counters: (end.counters.iter())
                .map(|(name, n)| (name.clone(), n.saturating_sub(at(&start.counters, name))))
                .collect(),
            series: self.series(|from, to| Point {
                t_s: seconds(0, to.at_ps),
                speed: only.as_ref().and_then(|_| self.speed(0, from, to)),
                hot_in_fast: to.hot_in_fast,
                fast_bytes: only.as_ref().and_then(|_| to.fast_bytes(0)),
            }),
            speed: only.and_then(|only| only.speed),
            workloads,
            ..SystemResult::default()
        })
    }

    /// Speed of a meter between two moments.
    fn speed(&self, meter: usize, from: &Moment, to: &Moment) -> Option<f64> {
        let work = |moment: &Moment| moment.work.get(meter).copied().unwrap_or_default();
        let (from, to) = (work(from), work(to));
        let ps = to.time_ps.saturating_sub(from.time_ps) as f64;
        self.meters[meter]
            .unit
            .as_ref()?
            .speed(to.done - from.done, ps)
    }

    /// A point for each interval.
    fn series(&self, point: impl Fn(&Moment, &Moment) -> Point) -> Vec<Point> {
        let pairs = self.moments.windows(2);
        pairs.map(|pair| point(&pair[0], &pair[1])).collect()
    }

    /// Seconds from a moment until the hot set was found, if before another moment.
    fn found(&self, from_ps: u64, before_ps: u64) -> Option<f64> {
        let mut within = self
            .moments
            .iter()
            .filter(|m| (from_ps..before_ps).contains(&m.at_ps));
        let found = within.find(|m| m.hot_in_fast.is_some_and(|share| share >= FOUND))?;
        Some(seconds(from_ps, found.at_ps))
    }
}

/// Seconds between two counts of picoseconds; negative if the second is smaller.
fn seconds(from_ps: u64, to_ps: u64) -> f64 {
    (i128::from(to_ps) - i128::from(from_ps)) as f64 / PS_PER_S
}

/// A counter by name; 0 if it is missing.
fn at(counts: &BTreeMap<String, u64>, name: &str) -> u64 {
    counts.get(name).copied().unwrap_or(0)
}

/// CPU seconds of all management causes.
fn managed_s(from: &Moment, to: &Moment) -> f64 {
    let managed = CAUSES.iter().filter(|(_, role)| *role == Role::Management);
    managed
        .filter(|(cause, _)| to.cpu_ps.contains_key(*cause))
        .map(|(cause, _)| seconds(at(&from.cpu_ps, cause), at(&to.cpu_ps, cause)))
        .sum()
}

fn since(from: Option<u64>, to: Option<u64>) -> Option<u64> {
    Some(to?.saturating_sub(from.unwrap_or(0)))
}

/// The host's share of the time between two moments.
fn noise(from: &Moment, to: &Moment) -> Option<f64> {
    let lag_ps = since(from.lag_ps, to.lag_ps)?;
    let length_ps = to.at_ps.saturating_sub(from.at_ps);
    // Two clocks are read one after the other, so the share may exceed 1.
    (length_ps > 0).then(|| (lag_ps as f64 / length_ps as f64).min(1.0))
}

fn moved_per_s(from: &Moment, to: &Moment) -> Option<f64> {
    let promoted = since(from.promoted_bytes, to.promoted_bytes)?;
    let demoted = since(from.demoted_bytes, to.demoted_bytes)?;
    let seconds = seconds(from.at_ps, to.at_ps);
    Some(if seconds > 0.0 {
        promoted.saturating_add(demoted) as f64 / seconds
    } else {
        0.0
    })
}

#[cfg(test)]
mod tests;
