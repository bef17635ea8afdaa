//! Moves a batch of blocks, and verifies by node what became of them.
//!
//! # Approach
//! The kernel moves a huge page whole by the address of any part of it, while more than one
//! address of it in a call breaks the kernel's batching. So a batch first moves the first page
//! of each block; where the rest did not follow, the block consists of smaller pages, and their
//! addresses follow in a second call. For a process whose blocks turned out that way the first
//! call is left out, but for every sixteenth batch.
//!
//! Where the system wants huge pages anyway (`collapse`), the small pages of a block are made one
//! before they are promoted: that costs no more than moving them one by one, leaves fast memory
//! in one piece, takes the pages that demoted huge ones have freed, and gives hot memory the
//! TLB's full reach. The kernel fills a block's holes with zeros then, so a block is made huge only where it has
//! hardly any.
//!
//! A tier may have several nodes. Pages stay that lie on any node of the tier that their block goes to. Such a block is not
//! made a huge page, which would drag them along.
//!
//! # Properties
//! - Pages that are reported as moved lie in the other tier: they were looked up afterwards.
//! - Only what was asked for moves.

use std::collections::BTreeMap;

use demeter_policy::engine::Direction;
use demeter_policy::{Block, GuestVirtAddr, Level, NodeId, Pid, Spread, VirtRange};

use crate::nodes::Tiers;
use crate::pages::{Errno, PAGES_PER_CALL_MAX, PageState, Pages, PagesError};
use crate::prober::{PAGES_PER_BLOCK, Prober, pages_of};

/// Every so many batches a process of small pages is asked again whether it has huge ones.
const ASK_AGAIN_BATCHES: u32 = 16;

/// The most pages that a block may lack and still be made one huge page: a sixteenth.
const HOLES_MAX: usize = PAGES_PER_BLOCK as usize / 16;

/// Blocks whose pages fit one call.
const BLOCKS_PER_CALL: usize = PAGES_PER_CALL_MAX / PAGES_PER_BLOCK as usize;

/// Moves blocks.
#[derive(Debug)]
pub struct Mover {
    tiers: Tiers,
    collapse: bool,
    prober: Prober,
    /// Batches in a row in which a process's blocks were small pages.
    small_batches: BTreeMap<Pid, u32>,
    addresses: Vec<GuestVirtAddr>,
    states: Vec<PageState>,
}

impl Mover {
    /// A mover between these tiers, which promotes small pages as huge ones if `collapse`.
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

    /// Whether small pages are made huge ones from now on.
    pub fn set_collapse(&mut self, collapse: bool) {
        self.collapse = collapse;
    }

    /// Forgets a process.
    pub fn forget(&mut self, pid: Pid) {
        self.small_batches.remove(&pid);
    }

    /// Moves blocks of a process that maps `space` (sorted) over the boundary below a tier to a node, and looks where they are
    /// now. Also says for each block why its first page would not move, in case it did not.
    ///
    /// # Errors
    /// When a whole call failed; some blocks may have moved all the same.
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
            let full = self.full(pages, pid, to, blocks)?;
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
        for part in rest.chunks(BLOCKS_PER_CALL) {
            self.addresses.clear();
            self.addresses
                .extend(part.iter().copied().flat_map(pages_of));
            self.keep_those_to_leave(pages, pid, (level, direction))?;
            self.states.clear();
            pages.migrate(pid, &self.addresses, to, &mut self.states)?;
        }
        if rest.len() * 2 > blocks.len() {
            self.small_batches
                .insert(pid, small_batches.saturating_add(1));
        }
        let mut placements = self.prober.look(pages, pid, space, blocks)?;
        for (block, placement) in blocks.iter().zip(&mut placements) {
            // Of small pages a single one may have stayed behind.
            if rest.contains(block) {
                *placement = self.prober.look_closely(pages, pid, *block)?;
            }
        }
        Ok((placements, reasons))
    }

    /// The blocks that have hardly any holes, and no page on another node of the tier that `to` is in.
    fn full(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        to: NodeId,
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
            let holes = |states: &[PageState]| {
                let is_there = |state: &PageState| matches!(state, PageState::On(_));
                states.iter().filter(|state| !is_there(state)).count()
            };
            let tier = self.tiers.of(to);
            let is_beside = |state: &PageState| match state {
                PageState::On(node) => *node != to && self.tiers.of(*node) == tier,
                _ => false,
            };
            let is_full = part
                .iter()
                .zip(by_block)
                .filter(|(_, states)| holes(states) <= HOLES_MAX && !states.iter().any(is_beside));
            full.extend(is_full.map(|(block, _)| *block));
        }
        Ok(full)
    }

    /// Keeps the addresses of pages that are in a tier they shall leave. Other pages would break the kernel's batching, or be
    /// dragged from a node where they lie well.
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
        self.addresses.retain(|_| match states.next() {
            Some(PageState::On(node)) => leaves(tiers, way, *node),
            _ => false,
        });
        Ok(())
    }
}

/// Whether memory on this node is to move.
fn leaves(tiers: &Tiers, (level, direction): (Level, Direction), node: NodeId) -> bool {
    match direction {
        Direction::Promotion => tiers.of(node) > Some(level),
        Direction::Demotion => tiers.of(node) == Some(level),
    }
}

#[cfg(test)]
mod tests;
