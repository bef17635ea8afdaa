//! Faults: each first touch takes a page of the nearest node that has room.

use demeter_policy::{BLOCK_SIZE, Block, GuestVirtAddr, Tier, VirtRange};

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::NodeIndex;
use crate::machine::radix::PageSize;

/// Error: no free frame for a fault.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the guest's memory is full at {0}")]
pub(crate) struct OutOfMemory(pub(super) GuestVirtAddr);

impl Guest {
    /// Handles a fault at an unmapped address.
    pub(crate) fn fault(
        &mut self,
        gva: GuestVirtAddr,
        actor: &mut Actor<'_>,
    ) -> Result<(), OutOfMemory> {
        self.counts.faults += 1;
        self.mappings.grow_to(gva);
        let promised = self.promised_to(gva);
        let (size, frame) = self
            .interleaved(gva)
            .or_else(|| self.first_touched(gva, promised))
            .ok_or(OutOfMemory(gva))?;
        let start = self.page_start(gva, size);
        self.tables.map(start, size, frame);
        let page = (start.0 >> self.page_bits) as u32;
        self.frames.take(frame, page, size == PageSize::Huge);
        if let Some(NodeIndex(node)) = promised {
            let frames = (self.bytes(size) >> self.page_bits) as u32;
            let promised = &mut self.promised_frames[node];
            *promised = promised.saturating_sub(frames);
        }
        let real = if size == PageSize::Base { actor.k } else { 0 };
        actor.charge(Cause::Fault, actor.costs.fault_ps << real);
        let before = self.first_touches;
        self.first_touches += 1 << real;
        let passed = |every: u64| self.first_touches / every - before / every;
        actor.flushes.guest_local_one += passed(actor.costs.touches_per_flush);
        actor.shoot_down_for_others(passed(actor.costs.touches_per_shootdown));
        let node = self.node_of(frame);
        actor.clear(Cause::Fault, node, self.bytes(size));
        Ok(())
    }

    /// A huge page where the guest takes one, else a base page: of the nearest node while that has any.
    fn first_touched(
        &mut self,
        gva: GuestVirtAddr,
        promised: Option<NodeIndex>,
    ) -> Option<(PageSize, u32)> {
        let socket = self.socket_of(self.pid_of(gva));
        let order = self.orders[socket].iter().copied();
        let order: Vec<NodeIndex> = promised.into_iter().chain(order).collect();
        self.huge_for(gva, &order, promised)
            .map(|f| (PageSize::Huge, f))
            .or_else(|| self.base_for(&order, promised).map(|f| (PageSize::Base, f)))
    }

    /// Allocates a block for a huge page around `gva`, if the policy allows. As in Linux, a fault that finds no huge
    /// page in the first node falls back to small pages, unless huge pages are enabled everywhere.
    fn huge_for(
        &mut self,
        gva: GuestVirtAddr,
        order: &[NodeIndex],
        promised: Option<NodeIndex>,
    ) -> Option<u32> {
        let frames = (BLOCK_SIZE >> self.page_bits) as u32;
        if !self.takes_huge(gva) {
            return None;
        }
        let (&first, others) = order.split_first()?;
        let near = self
            .has(first, frames, promised)
            .then(|| self.take(first, PageSize::Huge));
        near.flatten().or_else(|| {
            let may_take = self.huge_in_slow;
            let mut others = others.iter().filter(|&&node| may_take && node != first);
            others.find_map(|&node| self.nodes[node.0].take_block())
        })
    }

    /// Whether a fault takes a huge page, if there is one.
    pub(super) fn takes_huge(&self, gva: GuestVirtAddr) -> bool {
        let start = Block::of(gva).start();
        let whole = VirtRange::new(start, GuestVirtAddr(start.0 + BLOCK_SIZE));
        whole.is_some_and(|whole| self.huge_pages && self.mappings.holds(&whole))
            && self.tables.is_empty_block(gva)
    }

    fn base_for(&mut self, order: &[NodeIndex], promised: Option<NodeIndex>) -> Option<u32> {
        let near = order.iter().find_map(|&node| {
            self.has(node, 1, promised)
                .then(|| self.take(node, PageSize::Base))?
        });
        // The watermarks of allocations are no limit for them.
        near.or_else(|| {
            let mut order = order.iter();
            order.find_map(|&node| self.take(node, PageSize::Base))
        })
    }

    /// Whether a node has this number of frames above its watermark and the frames reserved for others. The slowest tier
    /// has neither.
    pub(super) fn has(&self, node: NodeIndex, frames: u32, promised: Option<NodeIndex>) -> bool {
        let kept = match promised == Some(node) {
            true => 0,
            false => self.promised_frames[node.0],
        };
        self.is_slowest(node) || self.nodes[node.0].usable() >= frames + kept
    }

    fn is_slowest(&self, node: NodeIndex) -> bool {
        self.levels
            .iter()
            .all(|&level| level <= self.level_of(node))
    }

    /// Allocates a page of a node.
    pub(super) fn take(&mut self, node: NodeIndex, size: PageSize) -> Option<u32> {
        match size {
            PageSize::Base if node == NodeIndex::from(Tier::Slow) => self.slow_page(),
            PageSize::Base => self.nodes[node.0].take_page(),
            _ => self.nodes[node.0].take_block(),
        }
    }
}
