//! From what the world looked like in between to what the result file says. Pure.

use std::collections::BTreeMap;

use demeter_report::{Point, SystemResult};

use crate::machine::ledger::{Bill, Cause};
use crate::world::Snapshot;

/// Share of the hot set in fast memory at which a system has found it.
const FOUND: f64 = 0.9;

/// Picoseconds in a second.
const PS_PER_S: f64 = 1e12;

/// What a result needs beside the snapshots.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Asked {
    /// Whether the program's speed is told as the latency of its operations.
    pub(crate) as_latency: bool,
    /// When the hot set jumps, seconds into the timed phase.
    pub(crate) shift_at_s: Option<u64>,
    /// Seconds that the work took, if it was a fixed amount and is done.
    pub(crate) elapsed_s: Option<f64>,
}

/// What a system did, from its state at the start and at the end of every interval. Nothing
/// without an interval.
pub(crate) fn summarise(name: &str, snapshots: &[Snapshot], asked: Asked) -> Option<SystemResult> {
    let (start, rest) = snapshots.split_first()?;
    let end = rest.last()?;
    let steady_from = end.at_ps / 3 * 2;
    let steady_start = snapshots.iter().rev().find(|s| s.at_ps <= steady_from)?;
    let mut result = SystemResult {
        name: name.into(),
        elapsed_s: asked.elapsed_s,
        hot_in_fast_final: end.hot_in_fast,
        kswapd_scanned: end.scanned_by_reclaim - start.scanned_by_reclaim,
        bytes_promoted: Some(end.promoted_bytes - start.promoted_bytes),
        bytes_demoted: Some(end.demoted_bytes - start.demoted_bytes),
        mgmt_cpu_s: Some(managed_s(start, end)),
        mgmt_cpu_steady_s: Some(managed_s(steady_start, end)),
        moved_steady_bytes_per_s: Some(moved_per_s(steady_start, end)),
        cpu_s: by_cause(&end.bill.since(&start.bill)),
        counters: counters(start, end),
        ..SystemResult::default()
    };
    let (whole, steady) = (speed(start, end, asked), speed(steady_start, end, asked));
    if asked.as_latency {
        (result.mean_latency_ns, result.steady_latency_ns) = (whole, steady);
    } else {
        (result.mean_mops, result.steady_mops) = (whole, steady);
    }
    result.series = snapshots
        .windows(2)
        .map(|pair| {
            let speed = speed(&pair[0], &pair[1], asked);
            Point {
                t_s: pair[1].at_ps as f64 / PS_PER_S,
                mops: speed.filter(|_| !asked.as_latency),
                latency_ns: speed.filter(|_| asked.as_latency),
                hot_in_fast: pair[1].hot_in_fast,
                fast_bytes: None,
            }
        })
        .collect();
    let shift_ps = asked.shift_at_s.map_or(u64::MAX, |s| s * PS_PER_S as u64);
    let found = |from_ps: u64, to_ps: u64| {
        let within = |s: &&Snapshot| s.at_ps >= from_ps && s.at_ps <= to_ps;
        let found = snapshots
            .iter()
            .filter(within)
            .find(|s| s.hot_in_fast >= FOUND)?;
        Some((found.at_ps - from_ps) as f64 / PS_PER_S)
    };
    result.t90_s = found(0, shift_ps.saturating_sub(1));
    result.t90_after_shift_s = asked.shift_at_s.and_then(|_| found(shift_ps, u64::MAX));
    Some(result)
}

/// Million operations per second between two moments, or nanoseconds per operation of a thread.
fn speed(from: &Snapshot, to: &Snapshot, asked: Asked) -> Option<f64> {
    let ops = (to.ops - from.ops) as f64;
    if asked.as_latency {
        let thread_ns = (to.thread_time_ps - from.thread_time_ps) as f64 / 1e3;
        (ops > 0.0).then(|| thread_ns / ops)
    } else {
        let seconds = (to.at_ps - from.at_ps) as f64 / PS_PER_S;
        (seconds > 0.0).then(|| ops / seconds / 1e6)
    }
}

fn managed_s(from: &Snapshot, to: &Snapshot) -> f64 {
    let bill = to.bill.since(&from.bill);
    let managed = Cause::ALL.iter().filter(|c| c.is_management());
    managed.map(|&c| bill.of(c) as f64 / PS_PER_S).sum()
}

fn moved_per_s(from: &Snapshot, to: &Snapshot) -> f64 {
    let moved = |s: &Snapshot| s.promoted_bytes + s.demoted_bytes;
    let seconds = (to.at_ps - from.at_ps) as f64 / PS_PER_S;
    if seconds > 0.0 {
        (moved(to) - moved(from)) as f64 / seconds
    } else {
        0.0
    }
}

fn by_cause(bill: &Bill) -> BTreeMap<String, f64> {
    Cause::ALL
        .iter()
        .map(|&c| (c.to_string(), bill.of(c) as f64 / PS_PER_S))
        .collect()
}

fn counters(start: &Snapshot, end: &Snapshot) -> BTreeMap<String, u64> {
    // Of first touch, too: who publishes such counts takes a program's whole run.
    let flushes = end.flushes.by_name().into_iter();
    let mut counters: BTreeMap<String, u64> =
        flushes.map(|(name, count)| (name.into(), count)).collect();
    counters.insert("flush_total".into(), end.flushes.total());
    counters.insert("page_faults".into(), end.faults - start.faults);
    counters.insert("hint_faults".into(), end.hint_faults - start.hint_faults);
    counters.insert("samples".into(), end.samples - start.samples);
    counters.insert("operations".into(), end.ops - start.ops);
    counters
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Nine seconds; operations and share of the hot set at the end of each.
    fn snapshots(hot: [f64; 10]) -> Vec<Snapshot> {
        let at = |(i, hot_in_fast): (usize, f64)| {
            let mut bill = Bill::default();
            bill.charge(Cause::Migrate, i as u64 * 100_000_000_000);
            bill.charge(Cause::Walk, i as u64 * 900_000_000_000);
            Snapshot {
                at_ps: i as u64 * 1_000_000_000_000,
                ops: (i * i) as u64 * 1_000_000,
                thread_time_ps: i as u64 * 4_000_000_000_000,
                hot_in_fast,
                promoted_bytes: i as u64 * 10,
                bill,
                ..Snapshot::default()
            }
        };
        hot.into_iter().enumerate().map(at).collect()
    }

    const PLAIN: Asked = Asked {
        elapsed_s: None,
        as_latency: false,
        shift_at_s: None,
    };

    #[test]
    fn figures_of_the_whole_phase_and_of_its_last_third() {
        let hot = [0.0, 0.0, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.95];
        let result = summarise("x", &snapshots(hot), PLAIN).unwrap();
        assert_eq!(result.mean_mops, Some(9.0));
        assert_eq!(result.steady_mops, Some((81.0 - 36.0) / 3.0));
        assert_eq!(result.t90_s, Some(3.0));
        assert_eq!(result.moved_steady_bytes_per_s, Some(10.0));
        assert!((result.mgmt_cpu_s.unwrap() - 0.9).abs() < 1e-9);
        assert!((result.cpu_s["walk"] - 8.1).abs() < 1e-9);
        assert_eq!(result.series.len(), 9);
        assert_eq!(result.series[0].mops, Some(1.0));
    }

    #[test]
    fn a_jump_starts_a_clock_of_its_own() {
        let hot = [0.0, 0.95, 0.95, 0.95, 0.0, 0.0, 0.92, 0.95, 0.95, 0.95];
        let asked = Asked {
            shift_at_s: Some(4),
            ..PLAIN
        };
        let result = summarise("x", &snapshots(hot), asked).unwrap();
        assert_eq!(
            (result.t90_s, result.t90_after_shift_s),
            (Some(1.0), Some(2.0))
        );
        let late = [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.92, 0.95, 0.95, 0.95];
        let result = summarise("x", &snapshots(late), asked).unwrap();
        assert_eq!((result.t90_s, result.t90_after_shift_s), (None, Some(2.0)));
    }

    #[test]
    fn latency_counts_every_thread() {
        let asked = Asked {
            as_latency: true,
            ..PLAIN
        };
        let result = summarise("x", &snapshots([0.0; 10]), asked).unwrap();
        assert!((result.mean_latency_ns.unwrap() - 4e9 * 9.0 / 81e6).abs() < 1e-6);
        assert_eq!(result.mean_mops, None);
    }
}
