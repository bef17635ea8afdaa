//! Carries a plan out: moves blocks in bounded batches and verifies by node what became of them.
//!
//! # Approach
//! Promotions run while fast memory has room for them; then a batch of demotions makes room, and
//! so on, so that free fast memory keeps its level and kswapd is never woken.
//!
//! The kernel moves a huge page whole by the address of any part of it, while more than one
//! address of it in a call breaks the kernel's batching. So a batch first moves the first page
//! of each block; where the rest did not follow, the block consists of smaller pages, and their
//! addresses follow in a second call. For a process whose blocks turned out that way the first
//! call is left out, but for every sixteenth batch.
//!
//! # Properties
//! - Free fast memory never falls below what it was at the start, or below what the plan's
//!   filling leaves free.
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
    prober: Prober,
    /// Batches in a row in which a process's blocks were small pages.
    small_batches: BTreeMap<Pid, u32>,
    addresses: Vec<GuestVirtAddr>,
    states: Vec<PageState>,
}

impl Mover {
    /// A mover between these tiers.
    pub fn new(tiers: Tiers) -> Self {
        Self {
            tiers,
            prober: Prober::new(tiers),
            small_batches: BTreeMap::new(),
            addresses: vec![],
            states: vec![],
        }
    }

    /// Carries `plan` out. `spare` is the free fast memory that the plan may fill; `spaces` says
    /// what each process maps; `residency` learns what became of each block.
    pub fn execute(
        &mut self,
        pages: &mut dyn Pages,
        plan: &Plan,
        spare: ByteCount,
        spaces: &BTreeMap<Pid, Vec<VirtRange>>,
        residency: &mut ResidencyMap,
        epoch: u32,
    ) -> Outcome {
        let mut outcome = Outcome::default();
        let (mut up, mut down) = (&plan.promotions[..], &plan.demotions[..]);
        let mut spare = spare.0;
        loop {
            let mut room = spare;
            let fits = |r: &Relocation| {
                let ok = r.bytes.0 <= room;
                room -= if ok { r.bytes.0 } else { 0 };
                ok
            };
            let n = take_batch(up, fits);
            let (direction, batch) = if n > 0 {
                (Direction::Promotion, take_front(&mut up, n))
            } else if !down.is_empty() {
                let n = take_batch(down, |_| true);
                (Direction::Demotion, take_front(&mut down, n))
            } else {
                // What is left of the promotions has no room: a demotion failed.
                break;
            };
            let moved = self.move_batch(
                pages,
                direction,
                batch,
                spaces,
                residency,
                epoch,
                &mut outcome,
            );
            match direction {
                Direction::Promotion => {
                    outcome.promoted.0 += moved;
                    spare = spare.saturating_sub(moved);
                }
                Direction::Demotion => {
                    outcome.demoted.0 += moved;
                    spare += moved;
                }
            }
        }
        outcome
    }

    /// Forgets processes for which `keep` does not hold.
    pub fn retain(&mut self, mut keep: impl FnMut(Pid) -> bool) {
        self.small_batches.retain(|&pid, _| keep(pid));
    }

    /// Moves a batch of one process's blocks; returns the bytes that really changed their tier.
    #[allow(clippy::too_many_arguments, reason = "private; the parts of one batch")]
    fn move_batch(
        &mut self,
        pages: &mut dyn Pages,
        direction: Direction,
        batch: &[Relocation],
        spaces: &BTreeMap<Pid, Vec<VirtRange>>,
        residency: &mut ResidencyMap,
        epoch: u32,
        outcome: &mut Outcome,
    ) -> u64 {
        let pid = batch[0].pid;
        let space = spaces.get(&pid).map_or(&[][..], |s| s);
        let blocks: Vec<Block> = batch.iter().map(|r| r.block).collect();
        outcome.tried.0 += batch.iter().map(|r| r.bytes.0).sum::<u64>();
        let result = self.migrate_blocks(pages, direction, pid, space, &blocks);
        let (placements, reasons) = match result {
            Ok(done) => done,
            Err(error) => {
                if !matches!(error, PagesError::Gone(_)) {
                    outcome.error = Some(error.to_string());
                }
                for r in batch {
                    residency.failed(pid, r.block, epoch);
                    *outcome.failed.entry(Errno(libc::ESRCH)).or_default() += r.bytes.0;
                }
                return 0;
            }
        };
        let mut moved = 0;
        for ((r, placement), reason) in batch.iter().zip(placements).zip(reasons) {
            let left = match direction {
                Direction::Promotion => placement.slow,
                Direction::Demotion => placement.fast,
            };
            moved += r.bytes.0.saturating_sub(left.0);
            residency.set(pid, r.block, placement);
            if left.0 == 0 {
                residency.moved(pid, r.block);
            } else {
                residency.failed(pid, r.block, epoch);
                *outcome.failed.entry(reason).or_default() += left.0.min(r.bytes.0);
            }
        }
        moved
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
