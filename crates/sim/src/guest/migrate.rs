//! Page migration between nodes.

use std::ops::Range;

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Tier};

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

impl Guest {
    /// Migrates the page that holds `gva` to a node in a call of its own; returns whether it moved. `flush`: whether a
    /// TLB may hold its translation.
    pub(crate) fn migrate(
        &mut self,
        gva: GuestVirtAddr,
        to: Tier,
        flush: bool,
        actor: &mut Actor<'_>,
    ) -> bool {
        let moved = self.migrate_one_of_many(gva, to, flush, actor);
        if moved {
            let single = self
                .tables
                .find(gva)
                .is_some_and(|(_, s)| s == PageSize::Base);
            let real = if single { actor.k } else { 0 };
            actor.charge(Cause::Migrate, actor.costs.migrate_call_ps << real);
        }
        moved
    }

    /// Migrates the page that holds `gva` to a node as part of a larger call; returns whether it moved. With `flush`,
    /// it is invalidated at once. Without, the caller flushes all pages together.
    pub(super) fn migrate_one_of_many(
        &mut self,
        gva: GuestVirtAddr,
        to: Tier,
        flush: bool,
        actor: &mut Actor<'_>,
    ) -> bool {
        let Some((entry, size)) = self.tables.find(gva) else {
            return false;
        };
        let (old, from) = (entry.index(), self.node_of(entry.index()));
        if from == to {
            return false;
        }
        #[cfg(test)]
        if self.pinned.contains(&Block::of(gva)) {
            return false;
        }
        if self.return_to_shadow(gva, old, flush, actor) {
            return true;
        }
        let taken = match (size, to) {
            (PageSize::Base, Tier::Slow) => self.slow_page(),
            (PageSize::Base, Tier::Fast) => self.nodes[0].take_page(),
            _ => self.nodes[to as usize].take_block(),
        };
        let Some(new) = taken else {
            return false;
        };
        let start = self.page_start(gva, size);
        if let Some((entry, _)) = self.tables.find_mut(start) {
            entry.set_index(new);
        }
        self.frames.transfer(old, new);
        self.written.push((new, size));
        let node = &mut self.nodes[from as usize];
        match size {
            PageSize::Base => node.give_page(old),
            _ => node.give_block(old),
        }
        let bytes = self.bytes(size);
        match size {
            PageSize::Base => actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps),
            _ => actor.charge(Cause::Migrate, actor.costs.migrate_huge_ps),
        }
        actor.copy(Cause::Migrate, from, to, bytes);
        match size {
            _ if !flush => {}
            PageSize::Base => actor.flush_page(start),
            _ => actor.flush_huge(start),
        }
        self.count_move(to, bytes);
        true
    }

    /// Migrates all pages of a block to a node, as far as memory is free; returns the bytes moved. Translations are
    /// flushed once for all pages.
    pub(crate) fn migrate_block(&mut self, block: Block, to: Tier, actor: &mut Actor<'_>) -> u64 {
        let pages = self.pages_of(block);
        self.migrate_pages(&pages, to, actor)
    }

    /// Migrates the pages at these addresses to a node, as far as memory is free; returns the bytes moved. Translations
    /// of base pages are flushed once for all.
    pub(crate) fn migrate_pages(
        &mut self,
        pages: &[GuestVirtAddr],
        to: Tier,
        actor: &mut Actor<'_>,
    ) -> u64 {
        let (mut moved, mut bytes) = (vec![], 0);
        for &at in pages {
            let Some((_, size)) = self.tables.find(at) else {
                continue;
            };
            let is_base = size == PageSize::Base;
            if self.migrate_one_of_many(at, to, !is_base, actor) {
                moved.extend(is_base.then_some(at));
                bytes += self.bytes(size);
            }
        }
        if bytes > 0 {
            actor.charge(Cause::Migrate, actor.costs.migrate_call_ps);
        }
        actor.flush_batch(&moved);
        bytes
    }

    /// Migrates pages within the slow node, to pay the cost of a migration without its effect.
    pub(crate) fn migrate_in_vain(&mut self, pages: &[GuestVirtAddr], actor: &mut Actor<'_>) {
        let mut moved = vec![];
        for &at in pages {
            let Some((_, size)) = self.tables.find(at) else {
                continue;
            };
            match size {
                PageSize::Base => {
                    actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps);
                    moved.push(at);
                }
                _ => {
                    actor.charge(Cause::Migrate, actor.costs.migrate_huge_ps);
                    actor.flush_huge(at);
                }
            }
            actor.copy(Cause::Migrate, Tier::Slow, Tier::Slow, self.bytes(size));
        }
        actor.flush_batch(&moved);
    }

    /// Migrates a block page by page, with one flush for each page.
    pub(crate) fn migrate_block_singly(
        &mut self,
        block: Block,
        to: Tier,
        actor: &mut Actor<'_>,
    ) -> u64 {
        let before = self.counts;
        let pages = self.pages_of(block);
        for at in pages {
            self.migrate_one_of_many(at, to, true, actor);
        }
        self.counts.promoted_bytes + self.counts.demoted_bytes
            - before.promoted_bytes
            - before.demoted_bytes
    }

    /// Collapses a block's small pages into a huge page on the node that holds most of them; returns whether it did.
    /// All of its pages must be mapped.
    pub(crate) fn collapse(&mut self, block: Block, actor: &mut Actor<'_>) -> bool {
        let mut old = vec![];
        self.tables.for_each(whole(block), |_, entry, size| {
            if size == PageSize::Base {
                old.push(entry.index());
            }
        });
        let to = self.node_of_most(&old);
        old.len() as u64 == BLOCK_SIZE >> self.page_bits
            && self.make_huge(block, &old, to, Cause::Migrate, actor)
    }

    /// The node that holds most of these frames.
    pub(super) fn node_of_most(&self, frames: &[u32]) -> Tier {
        let in_slow = frames.iter().filter(|&&f| self.node_of(f) == Tier::Slow);
        match in_slow.count() * 2 >= frames.len() {
            true => Tier::Slow,
            false => Tier::Fast,
        }
    }

    /// Replaces a block's small pages (frames `old`) by a huge page on a node. Returns false if the node has no free
    /// huge page. Unmapped pages are zeroed.
    pub(super) fn make_huge(
        &mut self,
        block: Block,
        old: &[u32],
        to: Tier,
        cause: Cause,
        actor: &mut Actor<'_>,
    ) -> bool {
        let start = block.start();
        let Some(new) = self.nodes[to as usize].take_block() else {
            return false;
        };
        self.tables.map(start, PageSize::Huge, new);
        let page = (start.0 >> self.page_bits) as u32;
        self.frames.take(new, page, true);
        self.written.push((new, PageSize::Huge));
        let page_bytes = 1u64 << self.page_bits;
        for &frame in old {
            let from = self.node_of(frame);
            self.frames.free(frame);
            self.nodes[from as usize].give_page(frame);
            actor.charge_page(cause, actor.costs.collapse_page_ps);
            actor.copy(cause, from, to, page_bytes);
            if from != to {
                self.count_move(to, page_bytes);
            }
        }
        let missing = BLOCK_SIZE - ((old.len() as u64) << self.page_bits);
        if missing > 0 {
            actor.clear(cause, to, missing);
        }
        actor.flush_all();
        true
    }

    /// Addresses of a block's pages.
    fn pages_of(&mut self, block: Block) -> Vec<GuestVirtAddr> {
        let mut pages = vec![];
        self.tables
            .for_each(whole(block), |at, _, _| pages.push(at));
        pages
    }

    pub(super) fn count_move(&mut self, to: Tier, bytes: u64) {
        match to {
            Tier::Fast => self.counts.promoted_bytes += bytes,
            Tier::Slow => self.counts.demoted_bytes += bytes,
        }
    }
}

/// All addresses of a block.
pub(super) fn whole(block: Block) -> Range<GuestVirtAddr> {
    block.start()..GuestVirtAddr(block.start().0 + BLOCK_SIZE)
}
