//! The balloon of the fast node: blocks that the guest gives back to its host.
//!
//! # Approach
//! A block that is free is taken at once. Where none is free, a hand goes round over the node's
//! blocks: pages that were accessed since it last passed stay, all others are demoted, as reclaim
//! would do for the driver's allocation. A driver that takes blocks by their address has the pages of the next
//! one demoted, accessed or not.
//!
//! # Properties
//! - A page stays mapped, in one place; what the balloon holds is neither free nor mapped.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestPhysAddr, GuestVirtAddr};

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::memory::TierId;

impl Guest {
    /// Fast memory that the balloon does not hold.
    pub(crate) fn owned_fast(&self) -> ByteCount {
        ByteCount(u64::from(self.nodes[0].managed()) << self.page_bits)
    }

    /// Fast memory that is in use.
    pub(crate) fn used_fast(&self) -> ByteCount {
        let used = self.nodes[0].managed() - self.nodes[0].free();
        ByteCount(u64::from(used) << self.page_bits)
    }

    /// Gives blocks to the balloon that are free until `owned` is left, before anything is touched.
    pub(crate) fn begin_with(&mut self, owned: ByteCount) {
        while self.owned_fast() > owned && self.nodes[0].hold_block().is_some() {}
    }

    /// Gives a block to the balloon; tells where it lies. Nothing when its pages have nowhere to go.
    /// `spares_hot`: whether what was accessed of late stays.
    pub(crate) fn inflate(
        &mut self,
        spares_hot: bool,
        actor: &mut Actor<'_>,
    ) -> Option<GuestPhysAddr> {
        let per_block = self.frames_per_block();
        // The second round finds all bits cleared.
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

    /// Takes a block back from the balloon; true when it held one.
    pub(crate) fn deflate(&mut self) -> bool {
        self.nodes[0].release_block()
    }

    fn frames_per_block(&self) -> u32 {
        (BLOCK_SIZE >> self.page_bits) as u32
    }

    /// Demotes the pages of the block under the hand, unless some of them was accessed and what is hot is spared.
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
                self.migrate_one_of_many(at, TierId::Slow, true, actor);
            }
        }
    }
}
