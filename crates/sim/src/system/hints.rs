//! Tiering by hint faults in the guest's kernel: Linux's own, and TPP.
//!
//! A scanner marks pages of the slow node; a page that faults and is judged hot is promoted at
//! once, if fast memory has room; if not, reclaim is woken to make some.

use demeter_policy::MIB;

use super::Classify;
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::memory::TierId;

/// Bytes that one scan marks (`scan_size_mb`).
const SCAN_BYTES: u64 = 256 * MIB;

/// Time between two scans: `scan_period_min_ms`, which a process whose pages lie in the slow node
/// stays at.
pub(crate) const SCAN_PERIOD_PS: u64 = 1_000_000_000_000;

/// A fault that comes within this time shows a hot page (`hot_threshold_ms`).
const HOT_MS: u32 = 1000;

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct Hints {
    classify: Classify,
    /// Reclaim was woken.
    short: bool,
}

impl Hints {
    pub(crate) fn new(classify: Classify) -> Self {
        Self {
            classify,
            short: false,
        }
    }

    /// The scanner's turn.
    pub(crate) fn scan(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        guest.hint_scan(SCAN_BYTES, actor);
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
            self.short = true;
        } else {
            guest.migrate(gva, TierId::Fast, true, actor);
        }
    }

    /// A moment at which reclaim may run, if it was woken.
    pub(crate) fn tick(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if std::mem::take(&mut self.short) {
            guest.reclaim(actor);
        }
    }
}
