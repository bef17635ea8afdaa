//! A process that an engine manages.

use super::strategy::Classify;
use crate::{Block, GuestVirtAddr, Pid, ResidencyMap, TierBytes, VirtRange};

/// A process's memory and heat.
#[derive(Debug, Clone)]
pub(super) struct Process<C> {
    pub(super) classifier: C,
    /// Movable memory: sorted, disjoint.
    pub(super) space: Vec<VirtRange>,
    /// Whether every block was looked up at least once.
    pub(super) all_known: bool,
    /// First block of the next recheck.
    pub(super) next_recheck: Block,
}

impl<C: Classify> Process<C> {
    pub(super) fn new(classifier: C) -> Self {
        Self {
            classifier,
            space: vec![],
            all_known: false,
            next_recheck: Block(0),
        }
    }

    /// Whether `addr` is in movable memory.
    #[inline]
    pub(super) fn maps(&self, addr: GuestVirtAddr) -> bool {
        let next = self.space.partition_point(|r| r.end() <= addr);
        self.space.get(next).is_some_and(|r| r.contains(addr))
    }

    /// Whether a block overlaps movable memory.
    pub(super) fn touches(&self, block: Block) -> bool {
        let next = self
            .space
            .partition_point(|r| Block::numbers_of(r).end <= block.0);
        self.space
            .get(next)
            .is_some_and(|r| Block::numbers_of(r).contains(&block.0))
    }

    /// Whether no access is known.
    pub(super) fn is_cold(&self) -> bool {
        self.classifier.is_cold()
    }

    /// Adds the next `n` blocks in turn to `blocks`, to look them up again.
    pub(super) fn recheck(&mut self, n: usize, blocks: &mut Vec<Block>) {
        let before = blocks.len();
        let rest = self.space.iter().flat_map(|r| {
            let first = Block::of(r.start()).max(self.next_recheck);
            let end = Block::of(GuestVirtAddr(r.end().0 - 1)).0 + 1;
            (first.0..end).map(Block)
        });
        blocks.extend(rest.take(n));
        self.next_recheck = match blocks.last() {
            Some(last) if blocks.len() == before + n => Block(last.0 + 1),
            _ => Block(0),
        };
    }

    /// Known placement of its memory.
    pub(super) fn placement(&self, pid: Pid, residency: &ResidencyMap) -> TierBytes {
        let whole = self.space.first().zip(self.space.last());
        let whole = whole.and_then(|(first, last)| VirtRange::new(first.start(), last.end()));
        let placement = whole.map(|range| residency.placement(pid, &range));
        placement.unwrap_or_default()
    }
}

/// Figures of a process.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ProcessFigures {
    /// Its pid.
    pub pid: Pid,
    /// Number of its ranges in the ranking.
    pub ranges: usize,
    /// Decayed samples in them.
    pub samples: f64,
    /// Known placement of its memory.
    pub placement: TierBytes,
}
