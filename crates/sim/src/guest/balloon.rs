//! The balloon of the fast node: blocks returned to the host.
//!
//! # Approach
//! A free block is taken at once. If none is free, a clock hand sweeps over the node's blocks. Pages accessed since its
//! last pass stay; all others are demoted, as reclaim does for the driver's allocation. A driver that takes blocks in
//! address order demotes all pages of the next block, accessed or not.
//!
//! # Properties
//! - Every page stays mapped exactly once; balloon memory is neither free nor mapped.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestPhysAddr, GuestVirtAddr, Level, Tier};

use super::Guest;
use crate::machine::actor::Actor;

impl Guest {
    /// Memory of the fastest tier outside the balloon.
    pub(crate) fn owned_fast(&self) -> ByteCount {
        let nodes = self.nodes.iter().zip(&self.levels);
        let fast = nodes.filter(|(_, level)| **level == Level::First);
        let frames: u64 = fast.map(|(node, _)| u64::from(node.managed())).sum();
        ByteCount(frames << self.page_bits)
    }

    /// Fast memory in use.
    pub(crate) fn used_fast(&self) -> ByteCount {
        let used = self.nodes[0].managed() - self.nodes[0].free();
        ByteCount(u64::from(used) << self.page_bits)
    }

    /// Inflates the balloon with free blocks until `owned` is left, before the program starts.
    pub(crate) fn begin_with(&mut self, owned: ByteCount) {
        while self.owned_fast() > owned && self.nodes[0].hold_block().is_some() {}
    }

    /// Adds a block to the balloon and returns its address. Returns none if its pages cannot be demoted. With
    /// `spares_hot`, recently accessed pages stay.
    pub(crate) fn inflate(
        &mut self,
        spares_hot: bool,
        actor: &mut Actor<'_>,
    ) -> Option<GuestPhysAddr> {
        let per_block = self.frames_per_block();
        // The first round clears all accessed bits, so two rounds suffice.
        let rounds = 2 * self.nodes[0].frames().len() as u32 / per_block;
        for _ in 0..=rounds {
            if self.nodes[0].usable() >= per_block
                && let Some(first) = self.nodes[0].hold_block()
            {
                return Some(self.gpa(first));
            }
            self.empty_next_block(spares_hot, actor);
        }
        None
    }

    /// Removes a block from the balloon; returns false if the balloon is empty.
    pub(crate) fn deflate(&mut self) -> bool {
        self.nodes[0].release_block()
    }

    fn frames_per_block(&self) -> u32 {
        (BLOCK_SIZE >> self.page_bits) as u32
    }

    /// Demotes the pages of the block under the hand. With `spares_hot`, a block with an accessed page is skipped.
    fn empty_next_block(&mut self, spares_hot: bool, actor: &mut Actor<'_>) {
        let (frames, per_block) = (self.nodes[0].frames(), self.frames_per_block());
        let first = frames.start + self.balloon_hand;
        self.balloon_hand = (self.balloon_hand + per_block) % frames.len() as u32;
        let pages: Vec<GuestVirtAddr> = (first..first + per_block)
            .filter_map(|frame| self.frames.used(frame))
            .map(|used| GuestVirtAddr(u64::from(used.page) << self.page_bits))
            .collect();
        let mut accessed = false;
        for &at in pages.iter().filter(|_| spares_hot) {
            actor.look_in_reclaim(1);
            let entry = self.tables.find_mut(at);
            accessed |= entry.is_some_and(|(entry, _)| entry.take_accessed());
        }
        if !accessed {
            for at in pages {
                self.migrate_one_of_many(at, Tier::Slow, true, actor);
            }
        }
    }
}
