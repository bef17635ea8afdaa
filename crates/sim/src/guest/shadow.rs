//! Shadow pages: the old frame of a promoted page, kept as a clean copy (Nomad, section 3.2).
//!
//! # Problem
//! A page that is promoted and demoted is copied twice, even if it did not change.
//!
//! # Approach
//! A page is copied while it is mapped. Its dirty bit is cleared before the copy and tested after it. If the page was
//! written to, the copy is discarded. If not, the page is mapped write-protected at its new frame, and the old frame
//! becomes its shadow. The first store faults and frees the shadow. Demoting a page with a shadow just maps the shadow.
//! If the slow node runs out of frames, shadows are freed.
//!
//! # Properties
//! - A frame is free, mapped once, or a shadow.
//! - A page with a shadow was not written to since its promotion.

use demeter_policy::{GuestVirtAddr, Tier};

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Shadows freed for one missing frame of the slow node.
const FREED_AT_ONCE: usize = 10;

impl Guest {
    /// Starts to copy a base page of the slow node that stays mapped: clears its dirty bit and flushes its translation.
    /// Returns the time to copy one real page, or none if it cannot be copied.
    pub(crate) fn begin_copy(&mut self, gva: GuestVirtAddr, actor: &mut Actor<'_>) -> Option<u64> {
        let (entry, size) = self.tables.find_mut(gva)?;
        if size != PageSize::Base || entry.index() < self.nodes[1].frames().start {
            return None;
        }
        entry.take_dirty();
        actor.flush_page(self.page_start(gva, PageSize::Base));
        let before_ps = actor.now_ps();
        let bytes = self.bytes(PageSize::Base);
        actor.copy(Cause::Migrate, Tier::Slow, Tier::Fast, bytes);
        Some((actor.now_ps() - before_ps) >> actor.k)
    }

    /// Whether the page that holds `gva` was written to.
    pub(crate) fn is_dirty(&self, gva: GuestVirtAddr) -> bool {
        let found = self.tables.find(gva);
        found.is_some_and(|(entry, _)| entry.is_dirty())
    }

    /// Completes [`Self::begin_copy`]: maps the page at its copy and keeps the old frame as its shadow. Returns false
    /// if fast memory is full.
    pub(crate) fn commit_copy(&mut self, gva: GuestVirtAddr, actor: &mut Actor<'_>) -> bool {
        let Some((entry, PageSize::Base)) = self.tables.find(gva) else {
            return false;
        };
        let old = entry.index();
        if self.tier_of(old) == Tier::Fast {
            return false;
        }
        let Some(new) = self.nodes[0].take_page() else {
            return false;
        };
        if let Some((entry, _)) = self.tables.find_mut(gva) {
            entry.set_index(new);
            entry.set_protected(true);
        }
        self.frames.transfer(old, new);
        self.shadows.insert(new, old);
        self.written.push((new, PageSize::Base));
        actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps);
        actor.flush_page(self.page_start(gva, PageSize::Base));
        self.count_move(Tier::Slow, Tier::Fast, self.bytes(PageSize::Base));
        true
    }

    /// Abandons the copy of a page that was written to meanwhile. The page was unmapped briefly anyway.
    pub(crate) fn abort_copy(&self, gva: GuestVirtAddr, actor: &mut Actor<'_>) {
        actor.flush_page(self.page_start(gva, PageSize::Base));
    }

    /// Handles a fault on a write-protected page: frees its shadow. Returns false if the page is not write-protected.
    pub(crate) fn write_fault(&mut self, gva: GuestVirtAddr, actor: &mut Actor<'_>) -> bool {
        let Some((entry, _)) = self.tables.find_mut(gva) else {
            return false;
        };
        if !entry.is_protected() {
            return false;
        }
        entry.set_protected(false);
        let frame = entry.index();
        actor.charge_page(Cause::Hint, actor.costs.fault_ps);
        if let Some(shadow) = self.shadows.remove(&frame) {
            self.nodes[1].give_page(shadow);
        }
        true
    }

    /// Demotes a page to its shadow; returns false if it has none.
    pub(super) fn return_to_shadow(
        &mut self,
        gva: GuestVirtAddr,
        frame: u32,
        flush: bool,
        actor: &mut Actor<'_>,
    ) -> bool {
        let Some(shadow) = self.shadows.remove(&frame) else {
            return false;
        };
        if let Some((entry, _)) = self.tables.find_mut(gva) {
            entry.set_index(shadow);
            entry.set_protected(false);
        }
        self.frames.transfer(frame, shadow);
        self.nodes[0].give_page(frame);
        actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps);
        if flush {
            actor.flush_page(self.page_start(gva, PageSize::Base));
        }
        self.count_move(Tier::Fast, Tier::Slow, self.bytes(PageSize::Base));
        true
    }

    /// Bytes of all shadows and of their index.
    pub(crate) fn shadow_bytes(&self) -> u64 {
        let entries = self.shadows.len() as u64;
        entries * self.bytes(PageSize::Base)
            + ((entries * size_of::<(u32, u32)>() as u64) << self.k())
    }

    /// Allocates a frame of the slow node; frees shadows if the node is full.
    pub(super) fn slow_page(&mut self) -> Option<u32> {
        if let Some(frame) = self.nodes[1].take_page() {
            return Some(frame);
        }
        for _ in 0..FREED_AT_ONCE {
            let Some((frame, shadow)) = self.shadows.pop_first() else {
                break;
            };
            let page = self.frames.used(frame).map(|used| used.page);
            let gva = page.map(|page| GuestVirtAddr(u64::from(page) << self.page_bits));
            if let Some((entry, _)) = gva.and_then(|gva| self.tables.find_mut(gva)) {
                entry.set_protected(false);
            }
            self.nodes[1].give_page(shadow);
        }
        self.nodes[1].take_page()
    }
}
