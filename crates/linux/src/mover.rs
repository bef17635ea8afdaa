//! Moves a batch of blocks, and verifies the result by node.
//!
//! # Approach
//! The kernel moves a huge page as a whole by the address of any part of it. More than one of its addresses in a call
//! breaks the kernel's batching. Hence a batch first moves the first page of each block. If the rest did not follow,
//! the block consists of smaller pages, and a second call moves these. For a process with small pages the first call is
//! skipped, except in every sixteenth batch.
//!
//! If the system wants huge pages (`collapse`), the small pages of a block become one huge page before promotion. This
//! costs no more than moving them one by one. It leaves fast memory unfragmented, uses the pages that demoted huge
//! pages have freed, and gives hot memory the TLB's full reach. The kernel fills a block's holes with zeros, so only
//! blocks with almost no holes are collapsed.
//!
//! A tier may have several nodes. Pages stay if they lie on any node of their block's target tier. Such a block is not
//! collapsed, because that would move these pages, too.
//!
//! # Properties
//! - Pages that are reported as moved lie in the other tier: the kernel has named their node afterwards.
//! - Only the requested pages move.

use std::collections::BTreeMap;

use demeter_policy::engine::Direction;
use demeter_policy::{
    Block, COLLAPSE_HOLES_MAX, GuestVirtAddr, Level, NodeId, PAGE_SIZE, Pid, Socket, Spread,
    VirtRange,
};

use crate::nodes::Tiers;
use crate::pages::{Errno, PAGES_PER_CALL_MAX, PageState, Pages, PagesError};
use crate::prober::{PAGES_PER_BLOCK, Prober, pages_of};

/// Batches after which a process of small pages is tried for huge pages again.
const ASK_AGAIN_BATCHES: u32 = 16;

/// The most missing pages of a block that may be collapsed.
const HOLES_MAX: usize = (COLLAPSE_HOLES_MAX / PAGE_SIZE) as usize;

/// Number of blocks whose pages fit one call.
const BLOCKS_PER_CALL: usize = PAGES_PER_CALL_MAX / PAGES_PER_BLOCK as usize;

/// A mover of blocks between tiers.
#[derive(Debug)]
pub struct Mover {
    tiers: Tiers,
    collapse: bool,
    prober: Prober,
    /// Number of consecutive batches in which a process's blocks were small pages.
    small_batches: BTreeMap<Pid, u32>,
    addresses: Vec<GuestVirtAddr>,
    states: Vec<PageState>,
}

impl Mover {
    /// Creates a mover between these tiers. With `collapse` it promotes small pages as huge ones.
    pub fn new(tiers: Tiers, collapse: bool) -> Self {
        Self {
            prober: Prober::new(tiers.clone()),
            tiers,
            collapse,
            small_batches: BTreeMap::new(),
            addresses: vec![],
            states: vec![],
        }
    }

    /// Has it tell nodes of several sockets apart.
    pub fn with_sockets(self, sockets: BTreeMap<NodeId, Socket>) -> Self {
        let prober = self.prober.with_sockets(sockets);
        Self { prober, ..self }
    }

    /// Sets whether small pages are collapsed from now on.
    pub fn set_collapse(&mut self, collapse: bool) {
        self.collapse = collapse;
    }

    /// Forgets a process.
    pub fn forget(&mut self, pid: Pid) {
        self.small_batches.remove(&pid);
    }

    /// Moves blocks across the boundary below a tier, and looks up where they lie afterwards.
    ///
    /// `space` are the process's sorted mappings. The result has an error for each block whose first page did not move.
    ///
    /// # Errors
    /// A whole call failed; some blocks may still have moved.
    pub fn migrate(
        &mut self,
        pages: &mut dyn Pages,
        (level, direction): (Level, Direction),
        to: NodeId,
        pid: Pid,
        space: &[VirtRange],
        blocks: &[Block],
    ) -> Result<(Vec<Spread>, Vec<Errno>), PagesError> {
        let mut reasons = vec![Errno(libc::EBUSY); blocks.len()];
        if self.collapse && direction == Direction::Promotion {
            let full = self.full(pages, pid, Some(to), blocks)?;
            pages.collapse(pid, &full)?;
        }
        let mut rest: Vec<Block> = blocks.to_vec();
        let small_batches = self.small_batches.get(&pid).copied().unwrap_or(0);
        if small_batches.is_multiple_of(ASK_AGAIN_BATCHES) {
            self.addresses.clear();
            self.addresses.extend(blocks.iter().map(|b| b.start()));
            self.keep_those_to_leave(pages, pid, (level, direction))?;
            self.states.clear();
            pages.migrate(pid, &self.addresses, to, &mut self.states)?;
            for (address, state) in self.addresses.iter().zip(&self.states) {
                let at = blocks.iter().position(|block| block.start() == *address);
                if let (Some(at), PageState::Failed(errno)) = (at, state) {
                    reasons[at] = *errno;
                }
            }
            let placements = self.prober.look(pages, pid, space, blocks)?;
            rest.clear();
            rest.extend(
                blocks
                    .iter()
                    .zip(&placements)
                    .filter(|(_, spread)| direction.left(&spread.at(level)).0 > 0)
                    .map(|(b, _)| *b),
            );
            if rest.is_empty() {
                self.small_batches.remove(&pid);
                return Ok((placements, reasons));
            }
        }
        let mut spreads = BTreeMap::new();
        for part in rest.chunks(BLOCKS_PER_CALL) {
            let moved = self.migrate_pages(pages, (level, direction), to, pid, part)?;
            spreads.extend(part.iter().copied().zip(moved));
        }
        if rest.len() * 2 > blocks.len() {
            self.small_batches
                .insert(pid, small_batches.saturating_add(1));
        }
        let mut whole = blocks.to_vec();
        whole.retain(|block| !spreads.contains_key(block));
        let placements = self.prober.look(pages, pid, space, &whole)?;
        spreads.extend(whole.into_iter().zip(placements));
        Ok((blocks.iter().map(|block| spreads[block]).collect(), reasons))
    }

    /// Moves all pages of these blocks one by one. The kernel reports each page's node, except where one did not move:
    /// there the block is looked up again.
    fn migrate_pages(
        &mut self,
        pages: &mut dyn Pages,
        way: (Level, Direction),
        to: NodeId,
        pid: Pid,
        blocks: &[Block],
    ) -> Result<Vec<Spread>, PagesError> {
        self.addresses.clear();
        self.addresses
            .extend(blocks.iter().copied().flat_map(pages_of));
        self.keep_those_to_leave(pages, pid, way)?;
        let mut after = std::mem::take(&mut self.states);
        pages.migrate(pid, &self.addresses, to, &mut self.states)?;
        let tiers = &self.tiers;
        let left = |state: &&mut PageState| is_to_leave(tiers, way, state);
        for (state, moved) in after.iter_mut().filter(left).zip(&self.states) {
            *state = *moved;
        }
        let by_block = after.chunks(PAGES_PER_BLOCK as usize);
        let stayed = |state: &PageState| is_to_leave(tiers, way, state);
        let spreads = blocks.iter().zip(by_block).map(|(&block, states)| {
            let is_failed = |state: &PageState| matches!(state, PageState::Failed(_));
            match states.iter().any(|state| is_failed(state) || stayed(state)) {
                true => self.prober.look_closely(pages, pid, block),
                false => Ok(self.prober.spread(states, 1)),
            }
        });
        spreads.collect()
    }

    /// Lets the small pages of these blocks become huge ones where they lie. Blocks with holes, or on several nodes, stay.
    ///
    /// # Errors
    /// A whole call failed; some blocks may have collapsed.
    pub fn collapse(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        blocks: &[Block],
    ) -> Result<(), PagesError> {
        let full = self.full(pages, pid, None, blocks)?;
        pages.collapse(pid, &full)
    }

    /// Blocks that have almost no holes. Before a move to node `to` they have no page on another node of its tier, otherwise
    /// all pages are on one node.
    fn full(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        to: Option<NodeId>,
        blocks: &[Block],
    ) -> Result<Vec<Block>, PagesError> {
        let mut full = vec![];
        for part in blocks.chunks(BLOCKS_PER_CALL) {
            self.addresses.clear();
            self.addresses
                .extend(part.iter().copied().flat_map(pages_of));
            self.states.clear();
            pages.locate(pid, &self.addresses, &mut self.states)?;
            let by_block = self.states.chunks(PAGES_PER_BLOCK as usize);
            let node_of = |state: &PageState| match state {
                PageState::On(node) => Some(*node),
                _ => None,
            };
            let is_full = part.iter().zip(by_block).filter(|(_, states)| {
                let mut nodes = states.iter().filter_map(node_of);
                let holes = states.len() - nodes.clone().count();
                let stays = match to {
                    Some(to) => {
                        let tier = self.tiers.of(to);
                        !nodes.any(|node| node != to && self.tiers.of(node) == tier)
                    }
                    None => {
                        let first = nodes.next();
                        nodes.all(|node| Some(node) == first)
                    }
                };
                holes <= HOLES_MAX && stays
            });
            full.extend(is_full.map(|(block, _)| *block));
        }
        Ok(full)
    }

    /// Keeps addresses of pages that must leave their tier. Other pages would break the kernel's batching, or leave a
    /// node where they may stay. `states` has the states of all pages afterwards.
    fn keep_those_to_leave(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        way: (Level, Direction),
    ) -> Result<(), PagesError> {
        self.states.clear();
        pages.locate(pid, &self.addresses, &mut self.states)?;
        let mut states = self.states.iter();
        let tiers = &self.tiers;
        let mut leaves = || states.next().is_some_and(|s| is_to_leave(tiers, way, s));
        self.addresses.retain(|_| leaves());
        Ok(())
    }
}

/// Whether a page must move.
fn is_to_leave(tiers: &Tiers, way: (Level, Direction), state: &PageState) -> bool {
    matches!(state, PageState::On(node) if leaves(tiers, way, *node))
}

/// Whether memory on this node must move.
fn leaves(tiers: &Tiers, (level, direction): (Level, Direction), node: NodeId) -> bool {
    match direction {
        Direction::Promotion => tiers.of(node) > Some(level),
        Direction::Demotion => tiers.of(node) == Some(level),
    }
}

#[cfg(test)]
mod tests;
