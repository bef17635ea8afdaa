//! A plan on its way: relocations that are carried out batch by batch, while the program runs in
//! between.
//!
//! # Approach
//! As in the live agent: promotions run while fast memory has room for them above its level; then
//! a batch of demotions makes room, and so on. The sequential way knows promotions only: it
//! wakes reclaim for room and waits, as kernels do.
//!
//! # Properties
//! - Every planned relocation is tried once or given up; a plan comes to its end.
//! - A balanced plan leaves the level of free fast memory alone.

use std::collections::{BTreeSet, VecDeque};

use demeter_policy::{Block, ByteCount, Plan, Relocation};

use super::Design;
use crate::guest::Guest;
use crate::machine::memory::TierId;

/// Blocks in one batch of moves, as in the live agent.
const BATCH_BLOCKS: usize = 8;

/// Turns in a row without room after which a sequential plan is given up: reclaim finds nothing.
const WAITS_MAX: u32 = 64;

/// What is left of a plan.
#[derive(Debug, Default)]
pub(super) struct Moves {
    up: VecDeque<Relocation>,
    down: VecDeque<Relocation>,
    /// Fast memory that promotions leave free.
    level: ByteCount,
    waits: u32,
}

/// What is to be done next.
#[derive(Debug, PartialEq, Eq)]
pub(super) enum Next {
    /// These blocks go to this tier.
    Batch(TierId, Vec<Relocation>),
    /// Reclaim has to make room first.
    WakeReclaim,
    /// The plan is done.
    Nothing,
}

impl Moves {
    /// Adds a plan as a design takes it; what is on its way already is left out.
    pub(super) fn add(&mut self, plan: Plan, level: ByteCount, design: Design) {
        let queued: BTreeSet<Block> = self.up.iter().chain(&self.down).map(|r| r.block).collect();
        let is_new = |r: &Relocation| !queued.contains(&r.block);
        self.up.extend(plan.promotions.into_iter().filter(is_new));
        if design != Design::Sequential {
            self.down.extend(plan.demotions.into_iter().filter(is_new));
        }
        self.level = level;
        self.waits = 0;
    }

    /// Whether nothing is left.
    pub(super) fn is_done(&self) -> bool {
        self.up.is_empty() && self.down.is_empty()
    }

    /// Promotions find less than they were told: the rest of them is left for another epoch.
    pub(super) fn give_up_promotions(&mut self) {
        self.up.clear();
    }

    /// The next batch.
    pub(super) fn next(&mut self, design: Design, guest: &Guest) -> Next {
        let mut room = match design {
            Design::Sequential => guest.promotable(),
            _ => ByteCount(guest.usable(TierId::Fast).0.saturating_sub(self.level.0)),
        };
        let fits = |r: &&Relocation| {
            let fits = r.bytes <= room;
            room.0 -= if fits { r.bytes.0 } else { 0 };
            fits
        };
        let n = self.up.iter().take(BATCH_BLOCKS).take_while(fits).count();
        if n > 0 {
            self.waits = 0;
            return Next::Batch(TierId::Fast, self.up.drain(..n).collect());
        }
        if !self.down.is_empty() {
            let n = self.down.len().min(BATCH_BLOCKS);
            return Next::Batch(TierId::Slow, self.down.drain(..n).collect());
        }
        self.waits += 1;
        if design != Design::Sequential || self.waits > WAITS_MAX {
            self.up.clear();
        }
        if self.up.is_empty() {
            Next::Nothing
        } else {
            Next::WakeReclaim
        }
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::{BLOCK_SIZE, MIB};
    use proptest::prelude::*;

    use super::*;
    use crate::guest::{GuestConfig, Watermarks};
    use crate::reclaim::Lists;
    use crate::system::heat::PID;

    /// A guest whose fast node is free.
    fn guest(fast_mib: u64) -> Guest {
        Guest::new(&GuestConfig {
            levels: 4,
            page_bits: 12,
            nodes: [ByteCount(fast_mib * MIB), ByteCount(64 * MIB)],
            huge_pages: true,
            watermarks: Watermarks::LINUX,
            lists: Lists::default(),
        })
    }

    fn relocations(blocks: std::ops::Range<u64>) -> Vec<Relocation> {
        let relocation = |b| Relocation {
            pid: PID,
            block: Block(b),
            bytes: ByteCount(BLOCK_SIZE),
        };
        blocks.map(relocation).collect()
    }

    proptest! {
        #[test]
        fn every_relocation_is_handed_out_once_and_the_plan_ends(
            up in 0u64..40,
            down in 0u64..40,
            fast_mib in 0u64..64,
            level_mib in 0u64..64,
            sequential: bool,
        ) {
            let guest = guest(fast_mib);
            let design = if sequential { Design::Sequential } else { Design::Product };
            let plan = Plan { promotions: relocations(0..up), demotions: relocations(100..100 + down), ..Plan::default() };
            let mut moves = Moves::default();
            moves.add(plan.clone(), ByteCount(level_mib * MIB), design);
            moves.add(plan, ByteCount(level_mib * MIB), design);
            let mut seen = BTreeSet::new();
            let mut turns = 0;
            while !moves.is_done() {
                turns += 1;
                prop_assert!(turns < 200);
                let Next::Batch(to, batch) = moves.next(design, &guest) else {
                    continue;
                };
                prop_assert!(!batch.is_empty() && batch.len() <= BATCH_BLOCKS);
                let bytes = batch.len() as u64 * BLOCK_SIZE;
                if to == TierId::Fast && !sequential {
                    prop_assert!(bytes + level_mib * MIB <= guest.usable(TierId::Fast).0);
                }
                for relocation in batch {
                    prop_assert!(seen.insert(relocation.block));
                    prop_assert_eq!(to == TierId::Fast, relocation.block.0 < 100);
                }
            }
            let demoted = seen.iter().filter(|b| b.0 >= 100).count() as u64;
            prop_assert_eq!(demoted, if sequential { 0 } else { down });
        }
    }
}
