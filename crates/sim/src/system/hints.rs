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

/// Bytes that one scan marks (`scan_size_mb`).
pub(crate) const SCAN_BYTES: u64 = 256 * MIB;

/// How many times as many bytes a scan may pass over to find them.
const SCAN_REACH: u64 = 8;

/// A process of one scan's size is scanned so often at first (`scan_period_min_ms`); a larger one
/// more often, down to the least period.
const SCAN_PERIOD_PS: u64 = 1_000_000_000_000;
const SCAN_PERIOD_LEAST_PS: u64 = SCAN_PERIOD_PS / 10;
/// At most (`scan_period_max_ms`).
const SCAN_PERIOD_MAX_PS: u64 = 60 * SCAN_PERIOD_PS;

/// Time between two scans of so much memory, at first (`task_scan_min`).
pub(crate) fn scan_period_ps(bytes: u64) -> u64 {
    let scans = (bytes / SCAN_BYTES).max(1);
    (SCAN_PERIOD_PS / scans).max(SCAN_PERIOD_LEAST_PS)
}

/// A fault that comes within this time shows a hot page (`hot_threshold_ms`).
const HOT_MS: u32 = 1000;

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct Hints {
    classify: Classify,
    /// Whether threads share the memory: the kernel then goes on scanning as fast.
    shared: bool,
    reclaimer: Reclaimer,
    period_ps: u64,
    passes: u32,
}

impl Hints {
    /// Nothing seen yet.
    pub(crate) fn new(classify: Classify, memory: Memory) -> Self {
        Self {
            classify,
            shared: memory.shared,
            reclaimer: Reclaimer::default(),
            period_ps: scan_period_ps(memory.bytes),
            passes: 0,
        }
    }

    /// The scanner's turn. After every pass over private memory
    /// Linux's scanner slows down by three tenths (`update_task_scan_period`).
    pub(crate) fn scan(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        guest.hint_scan(SCAN_BYTES, SCAN_BYTES * SCAN_REACH, actor);
        let slows = self.classify == Classify::SoonFault && !self.shared;
        if guest.hint_passes() > self.passes {
            self.passes = guest.hint_passes();
            if slows {
                self.period_ps = (self.period_ps / 10 * 13).min(SCAN_PERIOD_MAX_PS);
            }
        }
    }

    /// Time between two scans now.
    pub(crate) fn period_ps(&self) -> u64 {
        self.period_ps
    }

    /// A marked page was accessed.
    pub(crate) fn fault(&mut self, gva: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        let Some(hint) = guest.hint_fault(gva, actor) else {
            return;
        };
        let hot = match self.classify {
            Classify::SecondFault => hint.active,
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
        self.reclaimer.turn(true, actor, work);
    }
}
