//! Hint faults: the kernel makes pages of the slow node fault to detect accesses.

use std::ops::Range;

use demeter_policy::{GuestVirtAddr, Tier};

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;
use crate::reclaim::Seen;

/// A hint fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Hint {
    /// The page's node.
    pub(crate) node: Tier,
    /// Time since the page was marked, ms.
    pub(crate) since_ms: u32,
    /// Whether it was on the active list.
    pub(crate) active: bool,
    /// Number of real pages that it stands for.
    pub(crate) pages: u64,
}

impl Guest {
    /// Marks pages in a range to fault: the slow node's, or from `Tier::Fast` on those of both nodes. Returns whether
    /// any was marked. The caller must flush translations.
    pub(crate) fn make_fault(
        &mut self,
        range: Range<GuestVirtAddr>,
        from: Tier,
        actor: &mut Actor<'_>,
    ) -> bool {
        let now_ms = (actor.now_ps() / PS_PER_MS) as u32;
        let first = self.nodes[from as usize].frames().start;
        let (mut seen, mut marked, mut marked_huge) = (0u64, 0u64, 0u64);
        let frames = &mut self.frames;
        self.tables.for_each(range, |_, entry, size| {
            seen += 1;
            if entry.index() >= first && !entry.is_hint() {
                entry.set_hint(true);
                *frames.word(entry.index()) = now_ms;
                match size {
                    PageSize::Base => marked += 1,
                    _ => marked_huge += 1,
                }
            }
        });
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
        actor.charge_page(Cause::Track, marked * actor.costs.mark_page_ps);
        actor.charge(Cause::Track, marked_huge * actor.costs.mark_page_ps);
        marked + marked_huge > 0
    }

    /// Marks the page that holds `gva` as accessed.
    pub(crate) fn mark_accessed(&mut self, gva: GuestVirtAddr) {
        if let Some((entry, _)) = self.tables.find(gva) {
            self.frames.seen(entry.index()).mark_accessed();
        }
    }

    /// Whether the page that begins at this frame is on the active list; none if no page begins there.
    pub(crate) fn is_active(&self, frame: u32) -> Option<bool> {
        Some(self.frames.used(frame)?.seen.is_active())
    }

    /// Clears the accessed bits of a range. An accessed page becomes referenced or active, any other inactive. Reports
    /// the address, size, node and active state of each page. As on x86, bits are cleared without a flush.
    pub(crate) fn take_accessed(
        &mut self,
        range: Range<GuestVirtAddr>,
        mut tell: impl FnMut(GuestVirtAddr, PageSize, Tier, bool),
    ) {
        let middle = self.nodes[1].frames().start;
        let frames = &mut self.frames;
        self.tables.for_each(range, |at, entry, size| {
            let seen = frames.seen(entry.index());
            if entry.take_accessed() {
                seen.mark_accessed();
            } else {
                *seen = Seen::default();
            }
            let tier = match entry.index() >= middle {
                true => Tier::Slow,
                false => Tier::Fast,
            };
            tell(at, size, tier, seen.is_active());
        });
    }

    /// Handles a hint fault: unmarks the page and returns the kernel's evidence.
    pub(crate) fn hint_fault(&mut self, gva: GuestVirtAddr, actor: &mut Actor<'_>) -> Option<Hint> {
        let (entry, size) = self.tables.find_mut(gva)?;
        entry.set_hint(false);
        let frame = entry.index();
        let real = if size == PageSize::Base { actor.k } else { 0 };
        self.counts.hint_faults += 1 << real;
        actor.charge(Cause::Hint, actor.costs.fault_ps << real);
        let used = self.frames.used(frame)?;
        let then_ms = *self.frames.word(frame);
        Some(Hint {
            node: self.tier_of(frame),
            since_ms: ((actor.now_ps() / PS_PER_MS) as u32).saturating_sub(then_ms),
            active: used.seen.is_active(),
            pages: 1 << real,
        })
    }
}
