//! Chooses known blocks to look up again.
//!
//! # Problem
//! The kernel and other programs move memory, too. A hot block that left fast memory unnoticed would never be promoted.
//! Looking up every block in every epoch would cost too much.
//!
//! # Approach
//! A few blocks per epoch, in turn, of the important ones. These are the hottest blocks that fit into fast memory. If
//! one is found in another tier than expected, others have probably moved, too: the next epoch looks up more, in
//! proportion to the findings. (Cold memory has a slower turn, see [`super::process::Process::recheck`].)
//!
//! # Properties
//! - Every hot block has its turn, while the ranking is unchanged.
//! - Hot memory that others demoted returns, half of it or all, in a few epochs.
//! - Without findings, an epoch looks up at most [`RECHECKS`] hot blocks.

use serde::{Deserialize, Serialize};

use crate::{BLOCK_SIZE, Block, ByteCount, Pid, RankedRange, Spread};

/// Number of blocks looked up again per epoch: hot ones of all processes, and as many of each process by address.
pub(super) const RECHECKS: usize = 8;

/// Maximum number of hot ones.
const RECHECKS_MAX: usize = 1024;

/// The state of the turns, with the last turn's findings.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
pub(super) struct Rechecks {
    /// Position in the ranking, in blocks, of the next turn.
    pub(super) next: u32,
    /// Blocks found in another tier than expected since the last turn.
    pub(super) strays: u32,
}

impl Rechecks {
    /// The hot blocks of this turn. `size`, that of all tiers except the slowest, limits the hot blocks.
    pub(super) fn take_turn(
        &mut self,
        ranking: &[RankedRange],
        size: ByteCount,
    ) -> Vec<(Pid, Block)> {
        let strays = std::mem::take(&mut self.strays) as usize;
        let n = RECHECKS.saturating_mul(strays + 1).min(RECHECKS_MAX);
        let mut left = size.0 / BLOCK_SIZE;
        let mut skip = u64::from(self.next);
        let mut turn = Vec::with_capacity(n);
        for hot in ranking.iter().take_while(|r| r.count > 0.0) {
            let blocks = Block::numbers_of(&hot.range);
            let len = (blocks.end - blocks.start).min(left);
            let skipped = skip.min(len);
            let here = (blocks.start + skipped..blocks.start + len).map(|b| (hot.pid, Block(b)));
            turn.extend(here.take(n - turn.len()));
            left -= len;
            skip -= skipped;
            if turn.len() == n || left == 0 {
                break;
            }
        }
        self.next = match turn.len() == n {
            true => self.next.saturating_add(n as u32),
            false => 0,
        };
        turn
    }

    /// Notes that a block was expected at `before` and found at `now`.
    pub(super) fn found(&mut self, before: Spread, now: Spread) {
        let is_resident = before.resident().0 > 0 && now.resident().0 > 0;
        self.strays += u32::from(is_resident && before.main() != now.main());
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;
    use crate::{TierBytes, VirtRange};

    const IN_FAST: TierBytes = TierBytes {
        fast: ByteCount(BLOCK_SIZE),
        slow: ByteCount(0),
    };
    const IN_SLOW: TierBytes = TierBytes {
        fast: ByteCount(0),
        slow: ByteCount(BLOCK_SIZE),
    };

    fn ranked(first: u64, blocks: u64, count: f64) -> RankedRange {
        let (start, end) = (Block(first).start(), Block(first + blocks).start());
        RankedRange {
            pid: Pid(1),
            range: VirtRange::new(start, end).unwrap(),
            count,
            born_epoch: 0,
        }
    }

    proptest! {
        #[test]
        fn every_hot_block_has_its_turn(
            lens in prop::collection::vec(1u64..40, 1..12),
            fast_blocks in 0u64..300,
            strays in prop::collection::vec(0u32..4, 1..6),
        ) {
            let mut first = 0;
            let mut ranking: Vec<RankedRange> = lens
                .iter()
                .map(|&len| {
                    first += len + 3;
                    ranked(first - len, len, 1.0)
                })
                .collect();
            ranking.push(ranked(first + 100, 50, 0.0));
            let all = ranking.iter().filter(|r| r.count > 0.0);
            let hot: BTreeSet<Block> = all
                .flat_map(|r| Block::all_of(&r.range))
                .take(fast_blocks as usize)
                .collect();
            let mut rechecks = Rechecks::default();
            let mut seen = BTreeSet::new();
            let turns = hot.len() / RECHECKS + 1;
            for &found in strays.iter().cycle().take(turns) {
                rechecks.strays = found;
                let turn = rechecks.take_turn(&ranking, ByteCount(fast_blocks * BLOCK_SIZE));
                prop_assert!(turn.len() <= RECHECKS * (found as usize + 1));
                seen.extend(turn.iter().map(|&(_, b)| b));
            }
            prop_assert_eq!(seen, hot);
        }
    }

    #[test]
    fn only_another_tier_is_a_stray() {
        let mut rechecks = Rechecks::default();
        let absent = TierBytes::default();
        for (before, now) in [(IN_FAST, IN_FAST), (IN_SLOW, absent), (absent, IN_SLOW)] {
            rechecks.found(before.into(), now.into());
        }
        assert_eq!(rechecks.strays, 0);
        rechecks.found(IN_FAST.into(), IN_SLOW.into());
        rechecks.found(IN_SLOW.into(), IN_FAST.into());
        assert_eq!(rechecks.strays, 2);
    }
}
