//! Tiering by hint faults in the guest's kernel: Linux's own, and TPP.
//!
//! A scanner marks pages of the slow node; a page that faults and is judged hot is promoted at
//! once, if fast memory has room; if not, reclaim is woken to make some.

use demeter_policy::MIB;

use super::reclaimer::Reclaimer;
use super::{Classify, Memory};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::memory::TierId;

/// Bytes of address space that one scan marks pages in (`scan_size_mb`).
pub(crate) const SCAN_BYTES: u64 = 256 * MIB;

/// How many times as many bytes a scan may pass over to find them.
const SCAN_REACH: u64 = 8;

/// A process of one scan's size is scanned so often at first (`scan_period_min_ms`); a larger one
/// more often, down to the least period.
const SCAN_PERIOD_PS: u64 = 1_000_000_000_000;
const SCAN_PERIOD_LEAST_PS: u64 = SCAN_PERIOD_PS / 10;
/// The time until the first scan (`scan_delay_ms`).
const SCAN_DELAY_PS: u64 = 1_000_000_000_000;

/// The longest period for memory of one scan's size (`scan_period_max_ms`).
const SCAN_PERIOD_MAX_PS: u64 = 60 * SCAN_PERIOD_PS;

/// A thread that scanned runs so many times as long before it scans again (`task_numa_work`).
const SCAN_SHARE: u64 = 32;

/// Scans that a pass over so much memory takes.
fn scans_per_pass(bytes: u64) -> u64 {
    bytes.div_ceil(SCAN_BYTES).max(1)
}

/// Time between two scans of so much memory, at first (`task_scan_min`).
pub(crate) fn scan_period_ps(bytes: u64) -> u64 {
    (SCAN_PERIOD_PS / scans_per_pass(bytes)).max(SCAN_PERIOD_LEAST_PS)
}

/// A fault that comes within this time shows a hot page (`hot_threshold_ms`).
const HOT_MS: u32 = 1000;

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct Hints {
    classify: Classify,
    reclaimer: Reclaimer,
    /// Threads that take turns in scanning.
    threads: u64,
    period_ps: u64,
    /// What the period may grow to (`task_scan_max`).
    period_max_ps: u64,
    passes: u32,
}

impl Hints {
    /// Nothing seen yet.
    pub(crate) fn new(classify: Classify, memory: Memory) -> Self {
        let period_ps = scan_period_ps(memory.bytes);
        let max_ps = SCAN_PERIOD_MAX_PS / scans_per_pass(memory.bytes);
        Self {
            classify,
            threads: memory.threads.max(1),
            reclaimer: Reclaimer::default(),
            period_ps,
            period_max_ps: max_ps.max(period_ps),
            passes: 0,
        }
    }

    /// Begins; tells when the first scan is due.
    pub(crate) fn start(&self, now_ps: u64) -> u64 {
        now_ps + SCAN_DELAY_PS
    }

    /// The scanner's turn; tells when the next one is due.
    ///
    /// Where Linux tiers it counts no faults on slow memory, takes the process for idle after
    /// every pass, and doubles the period (`update_task_scan_period`).
    pub(crate) fn scan(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) -> u64 {
        let began_ps = actor.now_ps();
        guest.hint_scan(SCAN_BYTES, SCAN_BYTES * SCAN_REACH, actor);
        if guest.hint_passes() > self.passes {
            self.passes = guest.hint_passes();
            if self.classify == Classify::SoonFault {
                self.period_ps = (2 * self.period_ps).min(self.period_max_ps);
            }
        }
        let took_ps = actor.now_ps() - began_ps;
        began_ps + self.period_ps.max(took_ps * SCAN_SHARE / self.threads)
    }

    /// A marked page was accessed.
    pub(crate) fn fault(&mut self, gva: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        let Some(hint) = guest.hint_fault(gva, actor) else {
            return;
        };
        let hot = match self.classify {
            Classify::SecondFault => {
                guest.activate(gva);
                hint.active
            }
            _ => hint.since_ms < HOT_MS,
        };
        if !hot {
            return;
        }
        if guest.is_short() {
            self.reclaimer.wake();
        } else {
            // While it was marked nobody could have its translation.
            guest.migrate(gva, TierId::Fast, false, actor);
        }
    }

    /// A moment at which reclaim may run, if it was woken.
    pub(crate) fn tick(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        let work = |actor: &mut Actor<'_>, until_ps| guest.reclaim(actor, until_ps);
        self.reclaimer.turn(actor, work);
    }
}
