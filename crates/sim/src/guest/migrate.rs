//! Page migration between nodes.

use std::cmp::Ordering;
use std::ops::Range;

use demeter_policy::engine::Direction;
use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Level, Tier};

use super::{Guest, node_of};
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::NodeIndex;
use crate::machine::radix::PageSize;

impl Guest {
    /// Migrates the page that holds `gva` to a node in a call of its own; returns whether it moved. `flush`: whether a
    /// TLB may hold its translation.
    pub(crate) fn migrate(
        &mut self,
        gva: GuestVirtAddr,
        to: impl Into<NodeIndex>,
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
        to: impl Into<NodeIndex>,
        flush: bool,
        actor: &mut Actor<'_>,
    ) -> bool {
        let Some((entry, size)) = self.tables.find(gva) else {
            return false;
        };
        let (old, from, to) = (entry.index(), self.node_of(entry.index()), to.into());
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
        let new = self.take(to, size);
        let Some(new) = new.or_else(|| self.compacted(to, size, actor)) else {
            return false;
        };
        let start = self.page_start(gva, size);
        if let Some((entry, _)) = self.tables.find_mut(start) {
            entry.set_index(new);
        }
        self.frames.transfer(old, new);
        self.written.push((new, size));
        let node = &mut self.nodes[from.0];
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
        self.count_move(from, to, bytes);
        true
    }

    /// A block of a node whose free memory is in pieces: the kernel compacts the node for the target of a huge page. On
    /// machines of a fast and a slow node, which first touch fills with whole blocks, it does not.
    fn compacted(&mut self, node: NodeIndex, size: PageSize, actor: &mut Actor<'_>) -> Option<u32> {
        if size == PageSize::Base || self.nodes.len() <= 2 {
            return None;
        }
        let (first, free) = self.nodes[node.0].take_emptiest()?;
        let block = first..first + (BLOCK_SIZE >> self.page_bits) as u32;
        for old in block.filter(|frame| !free.contains(frame)) {
            // As many frames are free elsewhere as this block has in use.
            let (used, new) = (self.frames.used(old)?, self.nodes[node.0].take_page()?);
            let gva = GuestVirtAddr(u64::from(used.page) << self.page_bits);
            if let Some((entry, _)) = self.tables.find_mut(gva) {
                entry.set_index(new);
            }
            self.frames.transfer(old, new);
            self.written.push((new, PageSize::Base));
            actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps);
            actor.copy(Cause::Migrate, node, node, 1 << self.page_bits);
            actor.flush_page(gva);
        }
        Some(first)
    }

    /// Migrates all pages of a block to a node, as far as memory is free; returns the bytes moved. Translations are
    /// flushed once for all pages.
    pub(crate) fn migrate_block(
        &mut self,
        block: Block,
        to: impl Into<NodeIndex>,
        actor: &mut Actor<'_>,
    ) -> u64 {
        let pages = self.pages_of(block);
        self.migrate_pages(&pages, to, actor)
    }

    /// Migrates the pages at these addresses to a node, as far as memory is free; returns the bytes moved. Translations
    /// of base pages are flushed once for all.
    pub(crate) fn migrate_pages(
        &mut self,
        pages: &[GuestVirtAddr],
        to: impl Into<NodeIndex>,
        actor: &mut Actor<'_>,
    ) -> u64 {
        let to = to.into();
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

    /// Migrates pages one by one, with one flush for each.
    pub(crate) fn migrate_singly(
        &mut self,
        pages: &[GuestVirtAddr],
        to: impl Into<NodeIndex>,
        actor: &mut Actor<'_>,
    ) {
        let to = to.into();
        for &at in pages {
            self.migrate_one_of_many(at, to, true, actor);
        }
    }

    /// The pages of a block that a move over the boundary below a tier concerns. A promotion concerns those in slower
    /// tiers, a demotion those in this tier.
    pub(crate) fn pages_across(
        &mut self,
        block: Block,
        level: Level,
        direction: Direction,
    ) -> Vec<GuestVirtAddr> {
        let mut pages = vec![];
        let (nodes, levels) = (&self.nodes, &self.levels);
        self.tables.for_each(whole(block), |at, entry, _| {
            let of_page = levels[node_of(nodes, entry.index()).0];
            let moves = match direction {
                Direction::Promotion => of_page > level,
                Direction::Demotion => of_page == level,
            };
            pages.extend(moves.then_some(at));
        });
        pages
    }

    /// The node of a tier that holds most of a block, if any does.
    pub(crate) fn main_node(&mut self, block: Block, level: Level) -> Option<NodeIndex> {
        let mut frames = vec![];
        self.tables.for_each(whole(block), |_, entry, _| {
            frames.push(entry.index());
        });
        frames.retain(|&frame| self.level_of(self.node_of(frame)) == level);
        (!frames.is_empty()).then(|| self.node_of_most(&frames))
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

    /// The node that holds most of these frames; if equal, that of the slower tier.
    pub(super) fn node_of_most(&self, frames: &[u32]) -> NodeIndex {
        let mut counts = vec![0; self.nodes.len()];
        for &frame in frames {
            counts[self.node_of(frame).0] += 1;
        }
        let most = self
            .all_nodes()
            .max_by_key(|&node| (counts[node.0], self.level_of(node)));
        most.unwrap_or(Tier::Slow.into())
    }

    /// Replaces a block's small pages (frames `old`) by a huge page on a node. Returns false if the node has no free
    /// huge page. Unmapped pages are zeroed.
    pub(super) fn make_huge(
        &mut self,
        block: Block,
        old: &[u32],
        to: NodeIndex,
        cause: Cause,
        actor: &mut Actor<'_>,
    ) -> bool {
        let start = block.start();
        let Some(new) = self.nodes[to.0].take_block() else {
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
            self.nodes[from.0].give_page(frame);
            actor.charge_page(cause, actor.costs.collapse_page_ps);
            actor.copy(cause, from, to, page_bytes);
            self.count_move(from, to, page_bytes);
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

    /// Counts bytes that have moved to a faster or a slower tier.
    pub(super) fn count_move(
        &mut self,
        from: impl Into<NodeIndex>,
        to: impl Into<NodeIndex>,
        bytes: u64,
    ) {
        let [from, to] = [from.into(), to.into()].map(|node| self.level_of(node));
        match to.cmp(&from) {
            Ordering::Less => self.counts.promoted_bytes += bytes,
            Ordering::Greater => self.counts.demoted_bytes += bytes,
            Ordering::Equal => {}
        }
    }
}

/// All addresses of a block.
pub(super) fn whole(block: Block) -> Range<GuestVirtAddr> {
    block.start()..GuestVirtAddr(block.start().0 + BLOCK_SIZE)
}
