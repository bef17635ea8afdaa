//! Carries a plan out: moves blocks in bounded batches and verifies by node what became of them.
//!
//! # Approach
//! Promotions run while fast memory has room for them; then a batch of demotions makes room, and
//! so on, so that free fast memory keeps its level and kswapd is never woken. How much room there
//! is, is looked at before every batch: what a demotion frees may wait on a CPU's own list, out of
//! reach for pages of another size, and a promotion that finds no page goes through direct
//! reclaim before it fails.
//!
//! The kernel moves a huge page whole by the address of any part of it, while more than one
//! address of it in a call breaks the kernel's batching. So a batch first moves the first page
//! of each block; where the rest did not follow, the block consists of smaller pages, and their
//! addresses follow in a second call. For a process whose blocks turned out that way the first
//! call is left out, but for every sixteenth batch.
//!
//! Where the system wants huge pages anyway (`collapse`), the small pages of a block are made one
//! before they are promoted: that costs no more than moving them one by one, leaves fast memory
//! in one piece, takes the pages that demoted huge ones have freed, and gives hot memory the
//! TLB's full reach.
//!
//! # Properties
//! - Free fast memory never falls below what the caller wants to keep.
//! - What is reported as moved lies on the other node: it was looked up afterwards.
//! - Blocks that did not move are set aside; a process that ends takes nothing else with it.

use std::collections::BTreeMap;

use demeter_policy::{
    Block, ByteCount, GuestVirtAddr, NodeId, Pid, Placement, Plan, Relocation, ResidencyMap,
    VirtRange,
};

use crate::pages::{Errno, PAGES_PER_CALL_MAX, PageState, Pages, PagesError};
use crate::residency::{PAGES_PER_BLOCK, Prober, Tiers, pages_of};

/// Blocks in one batch: 16 MiB.
const BATCH_BLOCKS: usize = 8;

/// Every so many batches a process of small pages is asked again whether it has huge ones.
const ASK_AGAIN_BATCHES: u32 = 16;

/// What became of a plan.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Outcome {
    /// Bytes that the plan wanted to move and that were tried.
    pub tried: ByteCount,
    /// Bytes that lie in fast memory now and did not before.
    pub promoted: ByteCount,
    /// Bytes that lie in slow memory now and did not before.
    pub demoted: ByteCount,
    /// Bytes that did not move, by the reason that the kernel gave for the first of a block.
    pub failed: BTreeMap<Errno, u64>,
    /// The last error of a whole call, for the log.
    pub error: Option<String>,
}

/// The memory on which a plan is carried out.
pub struct Memory<'a> {
    /// Moves pages, and says where they are.
    pub pages: &'a mut dyn Pages,
    /// What each process maps, sorted.
    pub spaces: &'a BTreeMap<Pid, Vec<VirtRange>>,
    /// Learns what became of each block.
    pub residency: &'a mut ResidencyMap,
    /// Now.
    pub epoch: u32,
}

/// Where a move goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Direction {
    Promotion,
    Demotion,
}

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
            tiers,
            collapse,
            prober: Prober::new(tiers),
            small_batches: BTreeMap::new(),
            addresses: vec![],
            states: vec![],
        }
    }

    /// Carries `plan` out. `spare` tells how much fast memory promotions may take right now.
    ///
    /// Promotions that find no room, because demotions failed or what they freed is not to be
    /// had yet, are left for another epoch.
    pub fn execute(
        &mut self,
        plan: &Plan,
        memory: &mut Memory<'_>,
        mut spare: impl FnMut() -> ByteCount,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let (mut up, mut down) = (&plan.promotions[..], &plan.demotions[..]);
        loop {
            let mut room = if up.is_empty() { 0 } else { spare().0 };
            let fits = |r: &Relocation| {
                let ok = r.bytes.0 <= room;
                room -= if ok { r.bytes.0 } else { 0 };
                ok
            };
            let n = take_batch(up, fits);
            if n > 0 {
                let batch = take_front(&mut up, n);
                let before = outcome.promoted;
                match self.move_batch(Direction::Promotion, batch, memory, &mut outcome) {
                    Ok(()) if (outcome.promoted.0 - before.0) * 2 < total(batch) => {
                        // Fast memory does not have what it seemed to have: more of the same
                        // would only cost time.
                        up = &[];
                    }
                    // A process that has gone says nothing about the others.
                    _ => {}
                }
            } else if !down.is_empty() {
                let n = take_batch(down, |_| true);
                let batch = take_front(&mut down, n);
                // What failed is in the outcome, and the next look at the room sees it.
                let _ = self.move_batch(Direction::Demotion, batch, memory, &mut outcome);
            } else {
                return outcome;
            }
        }
    }

    /// Forgets processes for which `keep` does not hold.
    pub fn retain(&mut self, mut keep: impl FnMut(Pid) -> bool) {
        self.small_batches.retain(|&pid, _| keep(pid));
    }

    /// Moves a batch of one process's blocks, and adds what came of it to `outcome`.
    fn move_batch(
        &mut self,
        direction: Direction,
        batch: &[Relocation],
        memory: &mut Memory<'_>,
        outcome: &mut Outcome,
    ) -> Result<(), PagesError> {
        let pid = batch[0].pid;
        let space = memory.spaces.get(&pid).map_or(&[][..], |s| s);
        let blocks: Vec<Block> = batch.iter().map(|r| r.block).collect();
        outcome.tried.0 += total(batch);
        let result = self.migrate_blocks(memory.pages, direction, pid, space, &blocks);
        let (placements, reasons) = result.inspect_err(|error| {
            if !matches!(error, PagesError::Gone(_)) {
                outcome.error = Some(error.to_string());
            }
            for r in batch {
                memory.residency.failed(pid, r.block, memory.epoch);
                *outcome.failed.entry(error.errno()).or_default() += r.bytes.0;
            }
        })?;
        for ((r, placement), reason) in batch.iter().zip(placements).zip(reasons) {
            let (left, moved) = match direction {
                Direction::Promotion => (placement.slow, &mut outcome.promoted),
                Direction::Demotion => (placement.fast, &mut outcome.demoted),
            };
            moved.0 += r.bytes.0.saturating_sub(left.0);
            memory.residency.set(pid, r.block, placement);
            if left.0 == 0 {
                memory.residency.moved(pid, r.block);
            } else {
                memory.residency.failed(pid, r.block, memory.epoch);
                *outcome.failed.entry(reason).or_default() += left.0.min(r.bytes.0);
            }
        }
        Ok(())
    }

    /// Moves blocks and looks where they are now. Also says for each block why its first page
    /// would not move, in case it did not.
    fn migrate_blocks(
        &mut self,
        pages: &mut dyn Pages,
        direction: Direction,
        pid: Pid,
        space: &[VirtRange],
        blocks: &[Block],
    ) -> Result<(Vec<Placement>, Vec<Errno>), PagesError> {
        let to = self.node(direction);
        let mut reasons = vec![Errno(libc::EBUSY); blocks.len()];
        if self.collapse && direction == Direction::Promotion {
            pages.collapse(pid, blocks)?;
        }
        let mut rest: Vec<Block> = blocks.to_vec();
        let small_batches = self.small_batches.get(&pid).copied().unwrap_or(0);
        if small_batches.is_multiple_of(ASK_AGAIN_BATCHES) {
            self.addresses.clear();
            self.addresses.extend(blocks.iter().map(|b| b.start()));
            self.states.clear();
            pages.migrate(pid, &self.addresses, to, &mut self.states)?;
            for (reason, state) in reasons.iter_mut().zip(&self.states) {
                if let PageState::Failed(errno) = state {
                    *reason = *errno;
                }
            }
            let placements = self.prober.look(pages, pid, space, blocks)?;
            let left = |p: &Placement| match direction {
                Direction::Promotion => p.slow.0 > 0,
                Direction::Demotion => p.fast.0 > 0,
            };
            rest.clear();
            rest.extend(
                blocks
                    .iter()
                    .zip(&placements)
                    .filter(|(_, p)| left(p))
                    .map(|(b, _)| *b),
            );
            if rest.is_empty() {
                self.small_batches.remove(&pid);
                return Ok((placements, reasons));
            }
        }
        for part in rest.chunks(PAGES_PER_CALL_MAX / PAGES_PER_BLOCK as usize) {
            self.addresses.clear();
            self.addresses
                .extend(part.iter().copied().flat_map(pages_of));
            self.leave_out_those_there(pages, pid, to)?;
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

    /// Drops addresses whose page is absent or on `to`: each would break the kernel's batching.
    fn leave_out_those_there(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        to: NodeId,
    ) -> Result<(), PagesError> {
        self.states.clear();
        pages.locate(pid, &self.addresses, &mut self.states)?;
        let mut states = self.states.iter();
        self.addresses.retain(|_| match states.next() {
            Some(PageState::On(node)) => *node != to,
            _ => false,
        });
        Ok(())
    }

    fn node(&self, direction: Direction) -> NodeId {
        match direction {
            Direction::Promotion => self.tiers.fast,
            Direction::Demotion => self.tiers.slow,
        }
    }
}

fn total(batch: &[Relocation]) -> u64 {
    batch.iter().map(|r| r.bytes.0).sum()
}

/// How many relocations at the front make a batch: of one process, at most [`BATCH_BLOCKS`].
fn take_batch(relocations: &[Relocation], mut fits: impl FnMut(&Relocation) -> bool) -> usize {
    relocations
        .iter()
        .take(BATCH_BLOCKS)
        .take_while(|r| r.pid == relocations[0].pid && fits(r))
        .count()
}

fn take_front<'a>(list: &mut &'a [Relocation], n: usize) -> &'a [Relocation] {
    let (front, rest) = list.split_at(n);
    *list = rest;
    front
}

#[cfg(test)]
mod tests;
