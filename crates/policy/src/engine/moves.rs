//! Hands a plan's relocations out, batch by batch.
//!
//! # Approach
//! Promotions run while fast memory has room for them above the plan's level. Then a batch of demotions makes room, as far as
//! slower memory has any, and so on. So free fast memory keeps its level, and kswapd sleeps. Free memory is read before every
//! batch, for two reasons. Pages that a demotion frees may wait on a per-CPU list, where allocations of another size cannot
//! use them. And a promotion that finds no page does direct reclaim before it fails. A little may be missing
//! ([`MISSING_DIVISOR`]), since the kernel allocates and frees pages meanwhile, and a demotion without its promotion is wasted.
//!
//! # Properties
//! - Every planned relocation is handed out once or dropped; a plan ends.
//! - Promotions are handed out only while they fit above the level, except for the part of the last one that may be
//!   missing. Demotions beside them likewise fit into slower memory.

use std::collections::{BTreeSet, VecDeque};

use crate::tier::Direction;
use crate::{Block, ByLevel, ByteCount, Level, Pid, Plan, Relocation};

/// Maximum number of blocks of a batch that one thread moves: 16 MiB.
pub const BATCH_BLOCKS: usize = 8;

/// A promotion fits if at most this part of its bytes is missing.
const MISSING_DIVISOR: u64 = 8;

/// The rest of the plans, and the present batch.
#[derive(Debug, Clone, Default)]
pub(super) struct Moves {
    /// Queues by boundary, each below a tier.
    queues: ByLevel<Queue>,
    /// Blocks to collapse after all moves.
    collapses: VecDeque<Relocation>,
    /// Number of consecutive reclaims that made no room.
    reclaims: u32,
    /// The batch that was handed out last: relocations of one process over one boundary.
    pub(super) batch: Vec<Relocation>,
    /// The boundary of the batch: the one below this tier.
    pub(super) level: Level,
    /// The direction of the batch.
    pub(super) direction: Direction,
}

/// The rest of the plan for one boundary.
#[derive(Debug, Clone, Default)]
struct Queue {
    promotions: VecDeque<Relocation>,
    demotions: VecDeque<Relocation>,
    /// Free memory that promotions leave in the faster tier.
    kept: ByteCount,
}

/// The next step.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Next {
    /// Move the new batch.
    Batch,
    /// Reclaim first, to make room.
    Reclaim,
    /// All relocations were handed out or dropped.
    Done,
}

impl Moves {
    /// Adds a plan for the boundary below a tier, without blocks that are moving already.
    pub(super) fn add(&mut self, level: Level, plan: Plan) {
        let moving = self.queues.0.iter().flat_map(Queue::all);
        let all = moving.chain(&self.collapses);
        let queued: BTreeSet<(Pid, Block)> = all.map(|r| (r.pid, r.block)).collect();
        let is_new = |r: &Relocation| !queued.contains(&(r.pid, r.block));
        self.reclaims = 0;
        self.collapses
            .extend(plan.collapses.into_iter().filter(is_new));
        let queue = self.queues.get_mut(level);
        queue.kept = plan.level;
        queue
            .promotions
            .extend(plan.promotions.into_iter().filter(is_new));
        queue
            .demotions
            .extend(plan.demotions.into_iter().filter(is_new));
    }

    /// Whether no relocation remains.
    pub(super) fn is_done(&self) -> bool {
        self.collapses.is_empty() && !self.has_moves()
    }

    fn has_moves(&self) -> bool {
        let mut queues = self.queues.0.iter();
        queues.any(|queue| queue.all().next().is_some())
    }

    /// Whether free memory matters.
    pub(super) fn wants_room(&self) -> bool {
        self.queues.0.iter().any(|q| !q.promotions.is_empty())
    }

    /// Takes an unanswered batch back.
    pub(super) fn take_back(&mut self) {
        let queue = self.queues.get_mut(self.level);
        let queue = match self.direction {
            Direction::Promotion => &mut queue.promotions,
            Direction::Demotion => &mut queue.demotions,
        };
        while let Some(relocation) = self.batch.pop() {
            queue.push_front(relocation);
        }
    }

    /// Ends the batch after its result.
    pub(super) fn end_batch(&mut self) {
        self.batch.clear();
    }

    /// Drops all remaining relocations.
    pub(super) fn give_up(&mut self) {
        self.queues = ByLevel::default();
        self.collapses.clear();
    }

    /// Drops the remaining promotions over the last batch's boundary.
    pub(super) fn give_up_promotions(&mut self) {
        self.queues.get_mut(self.level).promotions.clear();
    }

    /// Drops a process's relocations.
    pub(super) fn forget(&mut self, pid: Pid) {
        for queue in &mut self.queues.0 {
            queue.promotions.retain(|r| r.pid != pid);
            queue.demotions.retain(|r| r.pid != pid);
        }
        self.collapses.retain(|r| r.pid != pid);
    }

    /// Drops a process's relocations of blocks that must not move any more.
    pub(super) fn keep(&mut self, pid: Pid, stays: impl Fn(Block) -> bool) {
        let stays = |r: &Relocation| r.pid != pid || stays(r.block);
        for queue in &mut self.queues.0 {
            queue.promotions.retain(stays);
            queue.demotions.retain(stays);
        }
        self.collapses.retain(stays);
    }

    /// Makes the next batch of collapses, if no moves remain. Returns whether there is one.
    pub(super) fn collapse(&mut self, blocks_max: usize) -> bool {
        self.batch.clear();
        if !self.has_moves() {
            take_batch(&mut self.collapses, &mut self.batch, blocks_max, |_| true);
        }
        !self.batch.is_empty()
    }

    /// Makes the next batch of at most `blocks_max` blocks. The fastest boundary comes first.
    ///
    /// If nothing fits, promotions wait for up to `reclaims_max` reclaims.
    pub(super) fn advance(
        &mut self,
        usable: &ByLevel<ByteCount>,
        blocks_max: usize,
        reclaims_max: u32,
    ) -> Next {
        self.batch.clear();
        for level in Level::ALL {
            let queue = self.queues.get_mut(level);
            let room = usable.get(level).0.saturating_sub(queue.kept.0);
            let slower = level.slower().map(|slower| usable.get(slower).0);
            let slower = slower.fold(0, u64::saturating_add);
            self.level = level;
            self.direction = Direction::Promotion;
            let batch = &mut self.batch;
            take_batch(&mut queue.promotions, batch, blocks_max, fits(room));
            if batch.is_empty() {
                self.direction = Direction::Demotion;
                take_batch(&mut queue.demotions, batch, blocks_max, fits(slower));
            }
            if !self.batch.is_empty() {
                self.reclaims = 0;
                return Next::Batch;
            }
        }
        self.reclaims += 1;
        if self.reclaims > reclaims_max {
            self.queues = ByLevel::default();
        }
        match self.wants_room() {
            false => Next::Done,
            true => Next::Reclaim,
        }
    }
}

impl Queue {
    fn all(&self) -> impl Iterator<Item = &Relocation> {
        self.promotions.iter().chain(&self.demotions)
    }
}

/// Whether relocations fit into this room, one after the other.
fn fits(mut room: u64) -> impl FnMut(&Relocation) -> bool {
    move |r| {
        let fits = r.bytes.0 - r.bytes.0 / MISSING_DIVISOR <= room;
        room = room.saturating_sub(if fits { r.bytes.0 } else { 0 });
        fits
    }
}

/// Takes a batch from the front: fitting relocations of one process.
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

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{BLOCK_SIZE, LEVELS};

    /// Free memory in the fastest tier only.
    fn first(usable: ByteCount) -> ByLevel<ByteCount> {
        ByLevel([usable, ByteCount(0), ByteCount(0), ByteCount(0)])
    }

    #[test]
    fn each_boundary_has_its_own_room_and_the_fastest_comes_first() {
        let relocation = |block| Relocation {
            pid: Pid(7),
            block: Block(block),
            bytes: ByteCount(BLOCK_SIZE),
        };
        let plan = |up: &[u64], down: &[u64]| Plan {
            promotions: up.iter().copied().map(relocation).collect(),
            demotions: down.iter().copied().map(relocation).collect(),
            ..Plan::default()
        };
        let mut moves = Moves::default();
        moves.add(Level::First, plan(&[1], &[2]));
        moves.add(Level::Second, plan(&[3], &[4]));
        let mut next = |first, second, third| {
            let usable = [first, second, third, 0].map(|blocks| ByteCount(blocks * BLOCK_SIZE));
            let is_batch = moves.advance(&ByLevel(usable), BATCH_BLOCKS, 0) == Next::Batch;
            is_batch.then(|| (moves.level, moves.direction, moves.batch[0].block.0))
        };
        use Direction::{Demotion, Promotion};
        assert_eq!(next(0, 1, 0), Some((Level::First, Demotion, 2)));
        assert_eq!(next(0, 1, 0), Some((Level::Second, Promotion, 3)));
        assert_eq!(next(1, 0, 0), Some((Level::First, Promotion, 1)));
        assert_eq!(next(0, 0, 1), Some((Level::Second, Demotion, 4)));
        assert_eq!(next(1, 1, 1), None);
    }

    #[test]
    fn nothing_is_handed_out_while_all_tiers_are_full() {
        let relocations = |blocks: std::ops::Range<u64>| -> Vec<Relocation> {
            let relocation = |block| Relocation {
                pid: Pid(7),
                block: Block(block),
                bytes: ByteCount(BLOCK_SIZE),
            };
            blocks.map(relocation).collect()
        };
        let mut moves = Moves::default();
        let plan = Plan {
            promotions: relocations(0..3),
            demotions: relocations(3..6),
            ..Plan::default()
        };
        moves.add(Level::First, plan);
        let blocks = |free: [u64; LEVELS]| ByLevel(free.map(|n| ByteCount(n * BLOCK_SIZE)));
        assert_eq!(
            moves.advance(&blocks([0, 2, 0, 0]), BATCH_BLOCKS, 0),
            Next::Batch
        );
        assert_eq!(
            (moves.direction, moves.batch.len()),
            (Direction::Demotion, 2)
        );
        assert_eq!(
            moves.advance(&blocks([0; LEVELS]), BATCH_BLOCKS, 0),
            Next::Done
        );
        assert!(moves.is_done());
    }

    fn promotions(bytes: impl IntoIterator<Item = u64>) -> Moves {
        let relocation = |(block, bytes)| Relocation {
            pid: Pid(7),
            block: Block(block),
            bytes: ByteCount(bytes),
        };
        let mut moves = Moves::default();
        let plan = Plan {
            promotions: (0..).zip(bytes).map(relocation).collect(),
            level: ByteCount(4 * BLOCK_SIZE),
            ..Plan::default()
        };
        moves.add(Level::First, plan);
        moves
    }

    #[test]
    fn a_little_may_be_missing_to_a_promotion() {
        let handed_out = |missing: u64| {
            let usable = ByteCount(5 * BLOCK_SIZE - missing);
            promotions([BLOCK_SIZE; 2]).advance(&first(usable), BATCH_BLOCKS, 0) == Next::Batch
        };
        assert!(handed_out(0) && handed_out(BLOCK_SIZE / 8));
        assert!(!handed_out(BLOCK_SIZE / 8 + 1));
    }

    proptest! {
        #[test]
        fn promotions_are_handed_out_as_far_as_there_is_room(
            bytes in prop::collection::vec(1..=BLOCK_SIZE, 1..20), room in 0..8 * BLOCK_SIZE,
        ) {
            let mut moves = promotions(bytes);
            let usable = ByteCount(4 * BLOCK_SIZE + room);
            moves.advance(&first(usable), BATCH_BLOCKS, 0);
            let handed_out: u64 = moves.batch.iter().map(|r| r.bytes.0).sum();
            let last = moves.batch.last().map_or(0, |r| r.bytes.0);
            prop_assert!(handed_out <= room + last / MISSING_DIVISOR);
            let left = moves.queues.get(Level::First).promotions.front();
            let next_fits = left.is_some_and(|r| handed_out + r.bytes.0 <= room);
            prop_assert!(!next_fits || moves.batch.len() == BATCH_BLOCKS);
        }
    }
}
