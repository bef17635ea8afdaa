//! Reclaim by demotion, as kswapd does it: pages of the fast node that were not accessed since the
//! last look go to the slow one, until enough is free.

use super::{Guest, HIGH_MILLI, PROMO_MILLI};
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;

/// Rounds over the node in one run: the first may only clear accessed bits.
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

    /// Demotes until enough is free, or two rounds over the node are done.
    pub(crate) fn reclaim(&mut self, actor: &mut Actor<'_>) {
        let frames = self.nodes[0].frames();
        if frames.is_empty() {
            return;
        }
        let mut left = frames.len() as u32 * ROUNDS;
        while self.wants_more() && left > 0 {
            let frame = self.hand;
            let Some(used) = self.frames.used(frame) else {
                self.hand = next(frame, 1, &frames);
                left -= 1;
                continue;
            };
            let step = if used.huge {
                1 << (21 - self.page_bits)
            } else {
                1
            };
            self.hand = next(frame, step, &frames);
            left = left.saturating_sub(step);
            let gva = u64::from(used.page) << self.page_bits;
            let real = if used.huge { 0 } else { self.page_bits - 12 };
            self.counts.scanned_by_reclaim += 1 << real;
            actor.charge(Cause::Track, actor.costs.reclaim_page_ps << real);
            let accessed = self
                .tables
                .find_mut(gva)
                .is_some_and(|(entry, _)| entry.take_accessed());
            if used.active {
                // Whether it was accessed is not asked on the active list.
                self.frames.set_active(frame, false);
            } else if accessed {
                // As on x86, the bit is cleared without a flush.
                self.frames.set_active(frame, true);
            } else if !self.migrate_one_of_many(gva, TierId::Slow, true, actor) {
                // No room below either.
                return;
            }
        }
    }
}

fn next(frame: u32, step: u32, frames: &std::ops::Range<u32>) -> u32 {
    let after = frame + step;
    if after >= frames.end {
        frames.start
    } else {
        after
    }
}
