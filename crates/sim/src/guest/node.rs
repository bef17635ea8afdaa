//! The page allocator of one NUMA node, and its watermarks.
//!
//! # Approach
//! Free memory consists of whole blocks of 2 MiB and of single base pages. A block is split if no page is free. Pages
//! are merged if no block is free.
//!
//! # Properties
//! - No frame is allocated twice; none lies outside the node.
//! - Free and allocated frames add up to the node.

use std::collections::BTreeMap;
use std::ops::Range;

use demeter_policy::{BLOCK_SIZE, ByteCount};

use crate::machine::memory::NodeIndex;
use crate::machine::radix::{Address, HUGE_BITS, PageSize, Radix};

/// Watermarks: parts of a node to keep free, in 1/1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Watermarks {
    /// Kept free by allocations (`low`).
    low_milli: u32,
    /// Kept free by promotions, which wake reclaim below it (`high`).
    high_milli: u32,
    /// Target of reclaim.
    wanted_milli: u32,
}

impl Watermarks {
    /// Watermarks of a node without demotion.
    pub(crate) const NONE: Self = Self {
        low_milli: 0,
        high_milli: 0,
        wanted_milli: 0,
    };
    /// Linux's watermarks (`wanted_milli` is its promotion watermark).
    pub(crate) const LINUX: Self = Self {
        low_milli: 20,
        high_milli: 30,
        wanted_milli: 40,
    };
    /// TPP's watermarks, which demote early. Demeter's authors published runs with `demote_scale_factor` at a tenth.
    pub(crate) const TPP: Self = Self {
        wanted_milli: 100,
        ..Self::LINUX
    };

    /// The watermarks with `vm.watermark_scale_factor` set, in ten-thousandths. A factor below the minimum distance of
    /// two watermarks has no effect.
    pub(crate) fn scaled(self, factor: Option<u32>) -> Self {
        let Some(factor) = factor else {
            return self;
        };
        let gap = self.high_milli - self.low_milli;
        let more = (factor / 10).saturating_sub(gap);
        Self {
            low_milli: self.low_milli + more,
            high_milli: self.high_milli + 2 * more,
            wanted_milli: self.wanted_milli + 3 * more,
        }
    }

    /// Size of a node that leaves `usable` to programs.
    pub(crate) fn around(self, usable: ByteCount) -> ByteCount {
        ByteCount(usable.0 * 1000 / (1000 - u64::from(self.low_milli)))
    }
}

/// The page allocator of a node.
#[derive(Debug, Clone)]
pub(crate) struct Node {
    frames: Range<u32>,
    watermarks: Watermarks,
    per_block: u32,
    /// First frames of free blocks, lowest last.
    blocks: Vec<u32>,
    /// Free frames outside free blocks.
    pages: Vec<u32>,
    /// Whether pages were freed since the last merge.
    loose: bool,
    /// First frames of blocks in the balloon.
    held: Vec<u32>,
}

impl Node {
    /// A node of these free frames; both ends are multiples of `per_block`, the frames of a block.
    pub(crate) fn new(frames: Range<u32>, per_block: u32, watermarks: Watermarks) -> Self {
        debug_assert!(
            [frames.start, frames.end]
                .iter()
                .all(|f| f.is_multiple_of(per_block))
        );
        Self {
            blocks: frames.clone().step_by(per_block as usize).rev().collect(),
            frames,
            watermarks,
            per_block,
            pages: vec![],
            loose: false,
            held: vec![],
        }
    }

    /// Its frames.
    pub(crate) fn frames(&self) -> Range<u32> {
        self.frames.clone()
    }

    /// Number of frames outside the balloon.
    pub(crate) fn managed(&self) -> u32 {
        self.frames.len() as u32 - self.held.len() as u32 * self.per_block
    }

    /// Number of free frames.
    pub(crate) fn free(&self) -> u32 {
        self.blocks.len() as u32 * self.per_block + self.pages.len() as u32
    }

    /// Number of free frames above the watermark of allocations.
    pub(crate) fn usable(&self) -> u32 {
        self.free()
            .saturating_sub(self.part(self.watermarks.low_milli))
    }

    /// Number of free frames above the watermark that no allocation of a program goes below (`min`). In Linux `low` is a
    /// quarter above it.
    pub(crate) fn allocatable(&self) -> u32 {
        let min = self.part(self.watermarks.low_milli * 4 / 5);
        self.free().saturating_sub(min)
    }

    /// Number of free frames above the watermark of promotions.
    pub(crate) fn promotable(&self) -> u32 {
        self.free()
            .saturating_sub(self.part(self.watermarks.high_milli))
    }

    /// Whether free memory is below the watermark of promotions.
    pub(crate) fn is_short(&self) -> bool {
        self.free() < self.part(self.watermarks.high_milli)
    }

    /// Whether reclaim has not reached its target.
    pub(crate) fn wants_more(&self) -> bool {
        self.free() < self.part(self.watermarks.wanted_milli)
    }

    fn part(&self, milli: u32) -> u32 {
        (u64::from(self.managed()) * u64::from(milli) / 1000) as u32
    }

    /// Allocates a frame.
    pub(crate) fn take_page(&mut self) -> Option<u32> {
        if self.pages.is_empty() {
            let block = self.blocks.pop()?;
            self.pages.extend((block..block + self.per_block).rev());
        }
        self.pages.pop()
    }

    /// Allocates a block; returns its first frame.
    pub(crate) fn take_block(&mut self) -> Option<u32> {
        if self.blocks.is_empty() && self.loose && self.pages.len() >= self.per_block as usize {
            self.compact();
        }
        self.blocks.pop()
    }

    /// Moves a free block to the balloon; returns its first frame.
    pub(crate) fn hold_block(&mut self) -> Option<u32> {
        let first = self.take_block()?;
        self.held.push(first);
        Some(first)
    }

    /// Returns a block from the balloon; false if the balloon is empty.
    pub(crate) fn release_block(&mut self) -> bool {
        let first = self.held.pop();
        first.into_iter().for_each(|first| self.give_block(first));
        first.is_some()
    }

    /// Allocates the free frames of the block that has most of them, if the node has a block's worth of free frames but no
    /// whole block. Returns the block's first frame and these frames.
    pub(crate) fn take_emptiest(&mut self) -> Option<(u32, Vec<u32>)> {
        if !self.blocks.is_empty() || self.free() < self.per_block {
            return None;
        }
        let mut counts = BTreeMap::new();
        for frame in &self.pages {
            *counts.entry(frame / self.per_block).or_insert(0u32) += 1;
        }
        let (block, _) = counts.into_iter().max_by_key(|&(_, count)| count)?;
        let pages = std::mem::take(&mut self.pages).into_iter();
        let (free, others) = pages.partition(|frame| frame / self.per_block == block);
        self.pages = others;
        Some((block * self.per_block, free))
    }

    /// Frees a frame.
    pub(crate) fn give_page(&mut self, frame: u32) {
        debug_assert!(self.frames.contains(&frame));
        self.pages.push(frame);
        self.loose = true;
    }

    /// Frees a block.
    pub(crate) fn give_block(&mut self, first: u32) {
        debug_assert!(self.frames.contains(&first) && first.is_multiple_of(self.per_block));
        self.blocks.push(first);
    }

    /// Merges free pages into whole free blocks.
    fn compact(&mut self) {
        self.loose = false;
        self.pages.sort_unstable_by(|a, b| b.cmp(a));
        let n = self.per_block as usize;
        let mut kept = Vec::with_capacity(self.pages.len());
        let mut rest = &self.pages[..];
        while let Some(&frame) = rest.first() {
            // Sorted in descending order, so a whole block ends with its first frame.
            let whole = rest.len() >= n
                && (frame + 1).is_multiple_of(self.per_block)
                && rest[n - 1] == frame + 1 - self.per_block;
            if whole {
                self.blocks.push(rest[n - 1]);
                rest = &rest[n..];
            } else {
                kept.push(frame);
                rest = &rest[1..];
            }
        }
        self.pages = kept;
    }
}

/// The node of a frame: the last of those that begin at or below it.
pub(crate) fn node_of(nodes: &[Node], frame: u32) -> NodeIndex {
    let later = nodes.iter().skip(1);
    NodeIndex(later.filter(|node| frame >= node.frames.start).count())
}

/// The first frame of each node but the first. Frames below all nodes belong to the first one with memory, so the nodes up
/// to that begin at frame 0.
pub(crate) fn node_starts(nodes: &[Node]) -> Vec<u32> {
    let mut has_memory = false;
    let start = |pair: &[Node]| {
        has_memory |= !pair[0].frames.is_empty();
        if has_memory { pair[1].frames.start } else { 0 }
    };
    nodes.windows(2).map(start).collect()
}

/// Maps a range to contiguous memory, with pages of this size. The last page is used only as far as the range needs it.
/// With `piece`, another user takes one block after each piece of that many bytes. Returns the first frame, or none if
/// the nodes are in use or too small.
pub(crate) fn reserve<A: Address>(
    tree: &mut Radix<A>,
    nodes: &mut [Node],
    range: std::ops::Range<A>,
    size: PageSize,
    piece: Option<u64>,
) -> Option<u32> {
    let page_bits = tree.page_bits();
    let range = range.start.number()..range.end.number();
    let mut first = None;
    let mut others = 0;
    for (i, at) in range.clone().step_by(BLOCK_SIZE as usize).enumerate() {
        let block = nodes.iter_mut().find_map(Node::take_block)?;
        let expected =
            *first.get_or_insert(block) + ((i as u32 + others) << (HUGE_BITS - page_bits));
        if block != expected {
            return None;
        }
        if piece.is_some_and(|bytes| (at + BLOCK_SIZE - range.start).is_multiple_of(bytes)) {
            nodes.iter_mut().find_map(Node::take_block)?;
            others += 1;
        }
        match size {
            PageSize::Base => {
                for page in 0..1u32 << (HUGE_BITS - page_bits) {
                    let at = at + (u64::from(page) << page_bits);
                    tree.map(A::of(at), size, block + page);
                }
            }
            PageSize::Huge => tree.map(A::of(at), size, block),
            PageSize::Giant => {
                if at.is_multiple_of(1 << (HUGE_BITS + 9)) {
                    tree.map(A::of(at), size, block);
                }
            }
        }
    }
    first
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn frames_are_handed_out_once_and_none_is_lost(
            steps in prop::collection::vec((0u32..4, any::<prop::sample::Index>()), 1..400),
        ) {
            let mut node = Node::new(64..64 + 8 * 16, 8, Watermarks::NONE);
            let (mut pages, mut blocks): (Vec<u32>, Vec<u32>) = (vec![], vec![]);
            for (what, which) in steps {
                match what {
                    0 => pages.extend(node.take_page()),
                    1 => blocks.extend(node.take_block()),
                    2 if !pages.is_empty() => node.give_page(pages.swap_remove(which.index(pages.len()))),
                    3 if !blocks.is_empty() => node.give_block(blocks.swap_remove(which.index(blocks.len()))),
                    _ => {}
                }
                let all: BTreeSet<u32> = blocks.iter().flat_map(|&b| b..b + 8).chain(pages.iter().copied()).collect();
                prop_assert_eq!(all.len(), pages.len() + 8 * blocks.len());
                prop_assert_eq!(all.len() as u32 + node.free(), 128);
                prop_assert!(all.iter().all(|f| node.frames().contains(f)));
            }
            // Freed pages merge into whole blocks.
            pages.drain(..).for_each(|p| node.give_page(p));
            blocks.drain(..).for_each(|b| node.give_block(b));
            while let Some(block) = node.take_block() {
                blocks.push(block);
            }
            prop_assert_eq!(blocks.len(), 16);
        }
    }
}
