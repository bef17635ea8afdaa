//! A plan on its way: relocations that are handed out batch by batch.
//!
//! # Approach
//! Promotions run while fast memory has room for them above the plan's level; then a batch of
//! demotions makes room, and so on, so that free fast memory keeps its level and the kernel's
//! reclaim sleeps. How much room there is, is asked for before every batch: what a demotion frees
//! may wait on a CPU's own list, out of reach for pages of another size, and a promotion that
//! finds no page goes through direct reclaim before it fails.
//!
//! # Properties
//! - Every planned relocation is handed out once or given up; a plan comes to its end.
//! - Promotions are handed out only as far as there is room above the level.

use std::collections::{BTreeSet, VecDeque};

use super::protocol::Direction;
use crate::{Block, ByteCount, Pid, Plan, Relocation};

/// The most blocks in one batch of moves: 16 MiB.
pub const BATCH_BLOCKS: usize = 8;

/// The most of them as long as nobody knows what a move costs.
pub(super) const FIRST_BATCH_BLOCKS: usize = 2;

/// What is left of a plan, or of several.
#[derive(Debug, Clone, Default)]
pub(super) struct Moves {
    promotions: VecDeque<Relocation>,
    demotions: VecDeque<Relocation>,
    /// Free fast memory that promotions leave.
    level: ByteCount,
    /// Reclaims in a row that made no room.
    reclaims: u32,
    /// The batch that was handed out last: relocations of one process.
    pub(super) batch: Vec<Relocation>,
    /// Where that batch goes.
    pub(super) direction: Direction,
}

/// What comes next.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// The new batch.
    Batch,
    /// Reclaim has to make room first.
    Reclaim,
    /// Nothing: all was handed out or given up.
    Done,
}

impl Moves {
    /// Adds a plan; blocks that are on their way already are left out.
    pub(super) fn add(&mut self, plan: Plan) {
        let all = self.promotions.iter().chain(&self.demotions);
        let queued: BTreeSet<(Pid, Block)> = all.map(|r| (r.pid, r.block)).collect();
        let is_new = |r: &Relocation| !queued.contains(&(r.pid, r.block));
        self.level = plan.level;
        self.reclaims = 0;
        self.promotions
            .extend(plan.promotions.into_iter().filter(is_new));
        self.demotions
            .extend(plan.demotions.into_iter().filter(is_new));
    }

    /// Whether nothing is left to hand out.
    pub(super) fn is_done(&self) -> bool {
        self.promotions.is_empty() && self.demotions.is_empty()
    }

    /// Whether it matters how much room there is.
    pub(super) fn wants_room(&self) -> bool {
        !self.promotions.is_empty()
    }

    /// Takes the batch back that was handed out last, if nobody has said what became of it.
    pub(super) fn take_back(&mut self) {
        let queue = match self.direction {
            Direction::Promotion => &mut self.promotions,
            Direction::Demotion => &mut self.demotions,
        };
        while let Some(relocation) = self.batch.pop() {
            queue.push_front(relocation);
        }
    }

    /// What became of the batch is known.
    pub(super) fn end_batch(&mut self) {
        self.batch.clear();
    }

    /// All that is left is given up.
    pub(super) fn give_up(&mut self) {
        self.promotions.clear();
        self.demotions.clear();
    }

    /// The rest of the promotions is left for another epoch.
    pub(super) fn give_up_promotions(&mut self) {
        self.promotions.clear();
    }

    /// Drops what is left of a process.
    pub(super) fn forget(&mut self, pid: Pid) {
        self.promotions.retain(|r| r.pid != pid);
        self.demotions.retain(|r| r.pid != pid);
    }

    /// Makes the next batch, of `blocks_max` blocks at the most, now that so much fast memory is usable. Where neither a
    /// promotion fits nor a demotion is left, promotions wait for up to `reclaims_max` reclaims.
    pub(super) fn advance(
        &mut self,
        usable: ByteCount,
        blocks_max: usize,
        reclaims_max: u32,
    ) -> Next {
        self.batch.clear();
        let mut room = usable.0.saturating_sub(self.level.0);
        let fits = |r: &Relocation| {
            let fits = r.bytes.0 <= room;
            room -= if fits { r.bytes.0 } else { 0 };
            fits
        };
        take_batch(&mut self.promotions, &mut self.batch, blocks_max, fits);
        self.direction = Direction::Promotion;
        if self.batch.is_empty() {
            take_batch(&mut self.demotions, &mut self.batch, blocks_max, |_| true);
            self.direction = Direction::Demotion;
        }
        if !self.batch.is_empty() {
            self.reclaims = 0;
            return Next::Batch;
        }
        self.reclaims += 1;
        if self.reclaims > reclaims_max {
            self.give_up_promotions();
        }
        match self.promotions.is_empty() {
            true => Next::Done,
            false => Next::Reclaim,
        }
    }
}

/// Takes what makes a batch from the front: relocations of one process that fit.
fn take_batch(
    from: &mut VecDeque<Relocation>,
    batch: &mut Vec<Relocation>,
    blocks_max: usize,
    mut fits: impl FnMut(&Relocation) -> bool,
) {
    while batch.len() < blocks_max
        && let Some(next) = from.front()
        && batch.first().is_none_or(|first| first.pid == next.pid)
        && fits(next)
    {
        batch.extend(from.pop_front());
    }
}
