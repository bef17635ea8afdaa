//! Reclaim of a guest's fast node.

use demeter_policy::{GuestVirtAddr, Tier};

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::reclaim::{Reclaimable, Seen};

/// The fast node's frames, and the actor that scans them.
struct FastNode<'a, 'b> {
    guest: &'a mut Guest,
    actor: &'a mut Actor<'b>,
}

impl Guest {
    /// Whether free fast memory is below the watermark of promotions.
    pub(crate) fn is_short(&self) -> bool {
        self.nodes[0].is_short()
    }

    /// Whether reclaim has not reached its target.
    pub(crate) fn wants_more(&self) -> bool {
        self.nodes[0].wants_more()
    }

    /// Demotes pages until the target is reached, no candidate is left, or it is `until_ps`. Returns true if no work is
    /// left.
    pub(crate) fn reclaim(&mut self, actor: &mut Actor<'_>, until_ps: u64) -> bool {
        let mut lists = std::mem::take(&mut self.lists);
        let mut node = FastNode { guest: self, actor };
        let is_done = lists.turn(&mut node, until_ps);
        self.lists = lists;
        is_done
    }
}

impl FastNode<'_, '_> {
    fn frame(&self, place: u32) -> u32 {
        self.guest.nodes[0].frames().start + place
    }

    /// Clears a page's accessed bit; returns the old bit and the number of real pages. As on x86, the bit is cleared
    /// without a flush.
    fn look(&mut self, place: u32) -> (bool, u64) {
        let Some(used) = self.guest.frames.used(self.frame(place)) else {
            return (false, 0);
        };
        let real = if used.huge { 0 } else { self.actor.k };
        self.actor.look_in_reclaim(1 << real);
        let gva = GuestVirtAddr(u64::from(used.page) << self.guest.page_bits);
        let entry = self.guest.tables.find_mut(gva);
        let accessed = entry.is_some_and(|(entry, _)| entry.take_accessed());
        (accessed, 1 << real)
    }
}

impl Reclaimable for FastNode<'_, '_> {
    fn places(&self) -> u32 {
        self.guest.nodes[0].frames().len() as u32
    }

    fn fast_bytes(&self) -> u64 {
        u64::from(self.places()) << self.guest.page_bits
    }

    fn page_at(&mut self, place: u32) -> Option<u32> {
        let used = self.guest.frames.used(self.frame(place))?;
        Some(if used.huge {
            1 << (21 - self.guest.page_bits)
        } else {
            1
        })
    }

    fn deactivate(&mut self, place: u32) {
        self.look(place);
    }

    fn take_accessed(&mut self, place: u32) -> bool {
        let (accessed, pages) = self.look(place);
        self.guest.counts.scanned_by_reclaim += pages;
        accessed
    }

    fn walk_accessed(&mut self, place: u32) -> bool {
        let Some(used) = self.guest.frames.used(self.frame(place)) else {
            return false;
        };
        let real = if used.huge { 0 } else { self.actor.k };
        let scan_ps = self.actor.costs.scan_entry_ps;
        self.actor.charge(Cause::Track, scan_ps << real);
        let gva = GuestVirtAddr(u64::from(used.page) << self.guest.page_bits);
        let entry = self.guest.tables.find_mut(gva);
        entry.is_some_and(|(entry, _)| entry.take_accessed())
    }

    fn demote(&mut self, place: u32) -> bool {
        let frame = self.frame(place);
        let Some(used) = self.guest.frames.used(frame) else {
            return true;
        };
        *self.guest.frames.seen(frame) = Seen::default();
        let gva = GuestVirtAddr(u64::from(used.page) << self.guest.page_bits);
        self.guest
            .migrate_one_of_many(gva, Tier::Slow, true, self.actor)
    }

    fn has_enough(&self) -> bool {
        !self.guest.wants_more()
    }

    fn now_ps(&self) -> u64 {
        self.actor.now_ps()
    }
}
