//! Reclaim by demotion, as kswapd does it.
//!
//! # Problem
//! Pages of the fast node that nobody uses have to go to the slow one, until enough is free. What
//! is known of a page is one bit, whether it was accessed since the bit was last cleared.
//!
//! # Approach
//! Linux keeps a list of active pages and a shorter one of inactive pages. At the end of the
//! active list a page's bit is cleared and it becomes inactive, accessed or not; at the end of the
//! inactive list it is active again if it was accessed in between, else it is demoted. The model
//! is a clock with two hands over the node's frames: what lies between them is inactive.
//!
//! # Properties
//! - A page that was accessed after it became inactive stays.
//! - A run ends: when enough is free, after two rounds, at its time, or when nothing can move.

use std::ops::Range;

use demeter_policy::MIB;

use super::frames::Used;
use super::{Guest, HIGH_MILLI, PROMO_MILLI};
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;

/// Rounds over the node in one run.
const ROUNDS: u32 = 2;

impl Guest {
    /// Whether promotions find less free fast memory than they leave free.
    pub(crate) fn is_short(&self) -> bool {
        self.nodes[0].free() < self.share_of(TierId::Fast, HIGH_MILLI)
    }

    /// Whether reclaim still has to free memory for promotions.
    fn wants_more(&self) -> bool {
        self.nodes[0].free() < self.share_of(TierId::Fast, PROMO_MILLI)
    }

    /// Demotes until enough is free, two rounds over the node are done, or it is `until_ps`;
    /// true when there is no more to do.
    pub(crate) fn reclaim(&mut self, actor: &mut Actor<'_>, until_ps: u64) -> bool {
        let frames = self.nodes[0].frames();
        let count = frames.len() as u32;
        let wanted = count / (1 + active_per_inactive(u64::from(count) << self.page_bits));
        let mut left = count * ROUNDS;
        while self.wants_more() && left > 0 {
            if actor.now_ps() >= until_ps {
                return false;
            }
            if self.inactive < wanted {
                let frame = around(self.hand, self.inactive, &frames);
                let (used, step) = self.page_at(frame);
                self.inactive += step;
                if let Some(used) = used {
                    self.take_accessed(used, actor);
                }
                continue;
            }
            let frame = self.hand;
            let (used, step) = self.page_at(frame);
            self.hand = around(frame, step, &frames);
            self.inactive = self.inactive.saturating_sub(step);
            left = left.saturating_sub(step);
            let Some(used) = used else {
                continue;
            };
            let real = if used.huge { 0 } else { self.page_bits - 12 };
            self.counts.scanned_by_reclaim += 1 << real;
            if self.take_accessed(used, actor) {
                continue;
            }
            self.frames.set_active(frame, false);
            let gva = u64::from(used.page) << self.page_bits;
            if !self.migrate_one_of_many(gva, TierId::Slow, true, actor) {
                // No room below either.
                return true;
            }
        }
        true
    }

    /// The page that begins at a frame, if any, and how many frames it has.
    fn page_at(&self, frame: u32) -> (Option<Used>, u32) {
        let used = self.frames.used(frame);
        let huge = used.is_some_and(|used| used.huge);
        (used, if huge { 1 << (21 - self.page_bits) } else { 1 })
    }

    /// Looks whether a page was accessed. As on x86, the bit is cleared without a flush.
    fn take_accessed(&mut self, used: Used, actor: &mut Actor<'_>) -> bool {
        let real = if used.huge { 0 } else { self.page_bits - 12 };
        actor.charge(Cause::Track, actor.costs.reclaim_page_ps << real);
        let entry = self.tables.find_mut(u64::from(used.page) << self.page_bits);
        entry.is_some_and(|(entry, _)| entry.take_accessed())
    }
}

/// How many times as long the active list may be as the inactive one on a node of so many bytes
/// (mm/vmscan.c, `inactive_is_low`).
fn active_per_inactive(bytes: u64) -> u32 {
    let gib = bytes / (1024 * MIB);
    ((10 * gib).isqrt() as u32).max(1)
}

/// The frame that lies `step` after another, around the node's end.
fn around(frame: u32, step: u32, frames: &Range<u32>) -> u32 {
    let after = frame + step;
    if after >= frames.end {
        frames.start + (after - frames.end)
    } else {
        after
    }
}
