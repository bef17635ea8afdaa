//! Address space scanning of the kernel: position and period (`task_numa_work`, `update_task_scan_period` in
//! kernel/sched/fair.c).

use std::ops::{Range, RangeInclusive};

use demeter_policy::MIB;

use super::Managed;
use crate::machine::cost::PS_PER_MS;
use crate::machine::radix::Address;

/// Default bytes of address space marked per scan (`scan_size_mb`).
const SCAN_BYTES: u64 = 256 * MIB;

/// Maximum bytes scanned in the time for which a process of one scan's size is scanned once (`MAX_SCAN_WINDOW`).
const SCANNED_MAX_BYTES: u64 = 2560 * MIB;

/// Limit on the bytes that a scan may pass over, as a multiple of the bytes to mark.
const SCAN_REACH: u64 = 8;

/// Initial scan period of a process of one scan's size (`scan_period_min_ms`). A larger process is scanned more often,
/// down to the minimum period.
const PERIOD_PS: u64 = 1_000_000_000_000;

/// Maximum period for memory of one scan's size (`scan_period_max_ms`).
const PERIOD_MAX_PS: u64 = 60 * PERIOD_PS;

/// Delay from a process's start to the first scan (`scan_delay_ms`).
const DELAY_PS: u64 = 1_000_000_000_000;

/// A thread that scanned runs this many times as long before it scans again.
const RUN_PER_SCAN: u64 = 32;

/// Number of steps by which a period shrinks, and the share of private faults, in such steps, that prevents it
/// (`NUMA_PERIOD_SLOTS`, `NUMA_PERIOD_THRESHOLD`).
const PERIOD_SLOTS: u64 = 10;
const PRIVATE_SLOTS: u64 = 7;

/// Scan settings of an administrator.
#[derive(Debug, Clone, Copy)]
pub(super) struct Scanning {
    /// `scan_size_mb`, in bytes.
    pub(super) bytes: u64,
    /// `scan_period_min_ms` and `scan_period_max_ms`, in picoseconds.
    pub(super) period_ps: u64,
    pub(super) period_max_ps: u64,
}

impl Default for Scanning {
    fn default() -> Self {
        Self {
            bytes: SCAN_BYTES,
            period_ps: PERIOD_PS,
            period_max_ps: PERIOD_MAX_PS,
        }
    }
}

impl Scanning {
    /// The administrator's settings, or defaults.
    pub(super) fn of(managed: &Managed) -> Self {
        let default = Self::default();
        let mib = managed.knob(|s| s.scan_size_mib);
        let ps =
            |ms: Option<u32>, default_ps| ms.map_or(default_ps, |ms| u64::from(ms) * PS_PER_MS);
        Self {
            bytes: mib.map_or(default.bytes, |mib| u64::from(mib) * MIB),
            period_ps: ps(managed.knob(|s| s.scan_period_min_ms), default.period_ps),
            period_max_ps: ps(
                managed.knob(|s| s.scan_period_max_ms),
                default.period_max_ps,
            ),
        }
    }
}

/// The schedule of scans.
#[derive(Debug)]
pub(super) struct Pace {
    /// Threads that scan in turn.
    threads: u64,
    period_ps: u64,
    /// Bounds of the period (`task_scan_min`, `task_scan_max`).
    bounds_ps: RangeInclusive<u64>,
    /// Whether faults on pages that stay in slow memory count.
    counts_all: bool,
    /// Whether any page was promoted since the last pass ended.
    promoted: bool,
}

impl Pace {
    /// The schedule for a process with this much memory. With `counts_all` the kernel counts all faults. Linux, when it
    /// tiers, counts only faults of promoted pages.
    pub(super) fn new(bytes: u64, threads: u64, counts_all: bool) -> Self {
        Self::with(Scanning::default(), bytes, threads, counts_all)
    }

    /// The schedule with an administrator's settings.
    pub(super) fn with(scanning: Scanning, bytes: u64, threads: u64, counts_all: bool) -> Self {
        let scans_per_pass = bytes.div_ceil(scanning.bytes).max(1);
        let threads = threads.max(1);
        let scans_max = (SCANNED_MAX_BYTES / scanning.bytes).max(1);
        let least_ps = (scanning.period_ps / scans_per_pass).max(PERIOD_PS / scans_max);
        // Threads that share all memory form one group. Its period may grow with the share of faults that are not
        // private to a thread.
        let shared = (threads - 1).max(1);
        let most_ps = (shared * scanning.period_max_ps / scans_per_pass).max(least_ps);
        Self {
            threads,
            period_ps: least_ps,
            bounds_ps: least_ps..=most_ps,
            counts_all,
            promoted: false,
        }
    }

    /// Time of the first scan of a process that is `new`, or has run for a while.
    pub(super) fn start(&self, now_ps: u64, new: bool) -> u64 {
        now_ps + if new { DELAY_PS } else { 0 }
    }

    /// Time of the next scan, after one that began at `began_ps`.
    pub(super) fn after(&self, began_ps: u64, now_ps: u64) -> u64 {
        let run_ps = (now_ps - began_ps) * RUN_PER_SCAN / self.threads;
        began_ps + self.period_ps.max(run_ps)
    }

    /// Records the success of an attempted promotion.
    pub(super) fn promoted(&mut self, was: bool) {
        self.promoted |= was;
    }

    /// Ends a pass over all memory and adapts the period. It doubles if pages were promoted, since Linux counts these
    /// as neither local nor shared. Some of many promotions also fail, for example while a page is on no list, and one
    /// failure suffices for a kernel that counts all. Otherwise the period stays or, if faults were counted, shrinks.
    /// It shrinks more if fewer faults come from a thread that faulted on the same page before.
    pub(super) fn pass_ended(&mut self) {
        let period_ps = if std::mem::take(&mut self.promoted) {
            2 * self.period_ps
        } else if self.counts_all {
            let private = PERIOD_SLOTS / self.threads;
            let shrunk = PRIVATE_SLOTS.saturating_sub(private);
            self.period_ps - self.period_ps / PERIOD_SLOTS * shrunk
        } else {
            self.period_ps
        };
        self.period_ps = period_ps.clamp(*self.bounds_ps.start(), *self.bounds_ps.end());
    }
}

/// Position of a scanner in the current pass.
#[derive(Debug)]
pub(super) struct Cursor<A>(A);

impl<A: Address> Default for Cursor<A> {
    fn default() -> Self {
        Self(A::of(0))
    }
}

impl<A: Address> Cursor<A> {
    /// Runs one scan over the sorted `areas`. It passes ranges to `mark` until enough is marked, too much was passed
    /// over, or the pass has ended; it returns true at the end of a pass. `mark` returns whether it marked anything in
    /// a range.
    ///
    /// As in Linux, a range has the size of the bytes left to mark. It counts in full if one of its pages was marked.
    pub(super) fn scan(&mut self, areas: &[Range<A>], mark: impl FnMut(Range<A>) -> bool) -> bool {
        self.scan_bytes(SCAN_BYTES, areas, mark)
    }

    /// Runs one scan with this many bytes to mark.
    pub(super) fn scan_bytes(
        &mut self,
        mut bytes: u64,
        areas: &[Range<A>],
        mut mark: impl FnMut(Range<A>) -> bool,
    ) -> bool {
        let mut reach = bytes * SCAN_REACH;
        while bytes > 0 && reach > 0 {
            let at = self.0.number();
            let Some(area) = areas.iter().find(|a| a.end.number() > at) else {
                *self = Self::default();
                return true;
            };
            let start = at.max(area.start.number());
            let most = start.saturating_add(bytes.min(reach));
            let end = area.end.number().min(most);
            if mark(A::of(start)..A::of(end)) {
                bytes -= end - start;
            }
            self.0 = A::of(end);
            reach -= end - start;
        }
        false
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::GuestVirtAddr;
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn the_period_follows_size_and_use() {
        let small = Pace::new(SCAN_BYTES, 1, true);
        assert_eq!(small.after(5, 6), 5 + PERIOD_PS);
        let mut large = Pace::new(56 * SCAN_BYTES, 4, false);
        assert_eq!(large.after(0, 0), PERIOD_PS / 10);
        // After a scan of 50 ms, 32 times as long passes, spread over four threads.
        assert_eq!(large.after(0, 50_000_000_000), 400_000_000_000);
        for _ in 0..10 {
            large.promoted(true);
            large.pass_ended();
        }
        large.pass_ended();
        assert_eq!(large.after(0, 0), 3 * PERIOD_MAX_PS / 56);
        large.counts_all = true;
        (0..20).for_each(|_| large.pass_ended());
        assert_eq!(large.after(0, 0), PERIOD_PS / 10);
    }

    proptest! {
        /// A pass covers every address exactly once, for any marks.
        #[test]
        fn a_pass_covers_everything_once(
            sizes in prop::collection::vec((0u64..700, 1u64..700), 1..6),
            marks in prop::collection::vec(any::<bool>(), 1..50),
        ) {
            let mut at = 0;
            let areas: Vec<Range<GuestVirtAddr>> = sizes
                .into_iter()
                .map(|(gap, size)| {
                    let start = at + gap * MIB;
                    at = start + size * MIB;
                    GuestVirtAddr(start)..GuestVirtAddr(at)
                })
                .collect();
            let bytes = |range: &Range<GuestVirtAddr>| range.end.0 - range.start.0;
            let mut cursor = Cursor::default();
            let mut marks = marks.iter().cycle();
            for _ in 0..2 {
                let mut seen: Vec<Range<GuestVirtAddr>> = vec![];
                while !cursor.scan(&areas, |stretch| {
                    seen.push(stretch);
                    *marks.next().unwrap()
                }) {}
                let covered: u64 = seen.iter().map(bytes).sum();
                prop_assert_eq!(covered, areas.iter().map(bytes).sum::<u64>());
                prop_assert!(seen.windows(2).all(|w| w[0].end <= w[1].start));
            }
        }
    }
}
