//! Finds out where blocks lie, asking as little as will do.
//!
//! Asking for every page of every block would cost more than classifying them. Nearly all blocks
//! lie wholly in one tier, so a few pages of a block speak for it; only when they disagree, or
//! when the block is not mapped whole, is every page asked for.
//!
//! Pages may alternate between nodes with any period, so the pages that are asked for must not have one.
//! Periods of 2, 3 and 4 pages show at once, because the probes fall on every residue of these. Longer ones
//! show sooner or later, because each look shifts the probes.

use demeter_policy::{
    BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, NodeId, PAGE_SIZE, Pid, Placement, VirtRange,
};

use crate::pages::{PAGES_PER_CALL_MAX, PageState, Pages, PagesError};

/// Base pages in a block.
pub const PAGES_PER_BLOCK: u64 = BLOCK_SIZE / PAGE_SIZE;

/// Pages that speak for a block.
const PROBES: u64 = 4;

/// Offsets from the first page of each quarter of a block. With the quarters' first pages they are on every
/// residue of 2, 3 and 4, and stay so when all are shifted alike.
const PROBE_OFFSETS: [u64; PROBES as usize] = [0, 3, 2, 1];

/// Pages by which all probes of a look can be shifted and stay in their quarters.
const SHIFTS: u64 = PAGES_PER_BLOCK / PROBES - (PROBES - 1);

/// Added to the shift from one look to the next: has no divisor in common with [`SHIFTS`], so that all have their turn.
const SHIFT_STEP: u64 = 47;

/// The pages of a block that speak for it in a look.
fn probes(look: u64) -> [u64; PROBES as usize] {
    let shift = look % SHIFTS * SHIFT_STEP % SHIFTS;
    std::array::from_fn(|i| i as u64 * (PAGES_PER_BLOCK / PROBES) + PROBE_OFFSETS[i] + shift)
}

/// Which node is which tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Tiers {
    /// The fast node.
    pub fast: NodeId,
    /// The slow node.
    pub slow: NodeId,
}

/// Looks up where blocks lie.
#[derive(Debug)]
pub struct Prober {
    tiers: Tiers,
    /// Looks so far.
    looks: u64,
    addresses: Vec<GuestVirtAddr>,
    states: Vec<PageState>,
}

impl Prober {
    /// A prober for these tiers. Memory on any other node counts as not resident: it is not
    /// ours to move.
    pub fn new(tiers: Tiers) -> Self {
        Self {
            tiers,
            looks: 0,
            addresses: vec![],
            states: vec![],
        }
    }

    /// Where each of `blocks` lies, in order. `space` is what the process maps, sorted.
    pub fn look(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        space: &[VirtRange],
        blocks: &[Block],
    ) -> Result<Vec<Placement>, PagesError> {
        let mut placements = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(PAGES_PER_CALL_MAX / PROBES as usize) {
            self.addresses.clear();
            self.states.clear();
            for block in part {
                let start = block.start().0;
                let probes = probes(self.looks).map(|page| GuestVirtAddr(start + page * PAGE_SIZE));
                self.addresses.extend(probes);
                self.looks += 1;
            }
            pages.locate(pid, &self.addresses, &mut self.states)?;
            for (i, &block) in part.iter().enumerate() {
                let first = i * PROBES as usize;
                let probed = &self.states[first..first + PROBES as usize];
                let agreed = probed.iter().all(|s| s == &probed[0]) && covers(space, block);
                placements.push(agreed.then(|| self.placement(probed, PAGES_PER_BLOCK / PROBES)));
            }
        }
        blocks
            .iter()
            .zip(placements)
            .map(|(&block, known)| known.map_or_else(|| self.look_closely(pages, pid, block), Ok))
            .collect()
    }

    /// Where a block lies, by every one of its pages.
    pub fn look_closely(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        block: Block,
    ) -> Result<Placement, PagesError> {
        self.addresses.clear();
        self.addresses.extend(pages_of(block));
        self.states.clear();
        pages.locate(pid, &self.addresses, &mut self.states)?;
        Ok(self.placement(&self.states, 1))
    }

    /// Sums states, each of which stands for `weight` pages.
    fn placement(&self, states: &[PageState], weight: u64) -> Placement {
        let on = |node| states.iter().filter(|s| **s == PageState::On(node)).count() as u64;
        Placement {
            fast: ByteCount(on(self.tiers.fast) * weight * PAGE_SIZE),
            slow: ByteCount(on(self.tiers.slow) * weight * PAGE_SIZE),
        }
    }
}

/// The addresses of a block's base pages.
pub fn pages_of(block: Block) -> impl Iterator<Item = GuestVirtAddr> {
    (0..PAGES_PER_BLOCK).map(move |i| GuestVirtAddr(block.start().0 + i * PAGE_SIZE))
}

/// Whether one of the sorted ranges holds the whole block.
fn covers(space: &[VirtRange], block: Block) -> bool {
    let next = space.partition_point(|r| r.end().0 < block.start().0 + BLOCK_SIZE);
    space.get(next).is_some_and(|r| r.start() <= block.start())
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::pages::simulated::SimulatedPages;

    const TIERS: Tiers = Tiers {
        fast: NodeId(0),
        slow: NodeId(1),
    };
    const PID: Pid = Pid(3);

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)).unwrap()
    }

    #[test]
    fn whole_mixed_partial_and_empty_blocks() {
        let mut pages = SimulatedPages::new(0, 0);
        pages.map_block(PID, 1, true, NodeId(0));
        pages.map_block(PID, 2, false, NodeId(1));
        // Block 3: the first 100 pages fast, the rest slow.
        for i in 0..PAGES_PER_BLOCK {
            let node = NodeId(u32::from(i >= 100));
            pages.map(PID, 3 * BLOCK_SIZE + i * PAGE_SIZE, PAGE_SIZE, node);
        }
        // Block 4: only its second page is mapped; no probe hits it.
        pages.map(PID, 4 * BLOCK_SIZE + PAGE_SIZE, PAGE_SIZE, NodeId(0));
        let space = [
            range(BLOCK_SIZE, 4 * BLOCK_SIZE),
            range(4 * BLOCK_SIZE + PAGE_SIZE, 4 * BLOCK_SIZE + 2 * PAGE_SIZE),
            range(5 * BLOCK_SIZE, 6 * BLOCK_SIZE),
        ];
        let blocks: Vec<_> = (1..6).map(Block).collect();
        let got = Prober::new(TIERS)
            .look(&mut pages, PID, &space, &blocks)
            .unwrap();
        let want = [(512, 0), (0, 512), (100, 412), (1, 0), (0, 0)].map(|(fast, slow)| Placement {
            fast: ByteCount(fast * PAGE_SIZE),
            slow: ByteCount(slow * PAGE_SIZE),
        });
        assert_eq!(got, want);
    }

    #[test]
    fn periods_up_to_four_show_in_each_look_and_longer_ones_in_time() {
        for period in 2..=PAGES_PER_BLOCK / 8 {
            for phase in 0..period {
                let hit = |look: u64| probes(look).iter().any(|page| page % period == phase);
                assert!(probes(0).iter().all(|&page| page < PAGES_PER_BLOCK));
                match period {
                    2..=4 => assert!((0..SHIFTS).all(hit), "{period}, {phase}"),
                    _ => assert!((0..SHIFTS).any(hit), "{period}, {phase}"),
                }
            }
        }
    }

    proptest! {
        #![proptest_config(ProptestConfig::with_cases(16))]
        #[test]
        fn interleaved_pages_are_counted(period in 2u64..5, phase in 0u64..4, before in 0u64..200) {
            let mut pages = SimulatedPages::new(0, 0);
            for i in 0..PAGES_PER_BLOCK {
                let node = NodeId(u32::from(i % period == phase % period));
                pages.map(PID, BLOCK_SIZE + i * PAGE_SIZE, PAGE_SIZE, node);
            }
            let mut prober = Prober { looks: before, ..Prober::new(TIERS) };
            let space = [range(BLOCK_SIZE, 2 * BLOCK_SIZE)];
            let got = prober.look(&mut pages, PID, &space, &[Block(1)]).unwrap();
            let slow = (0..PAGES_PER_BLOCK).filter(|i| i % period == phase % period).count();
            prop_assert_eq!(got[0].slow.0, slow as u64 * PAGE_SIZE);
            prop_assert_eq!(got[0].resident().0, BLOCK_SIZE);
        }
    }

    #[test]
    fn more_blocks_than_fit_one_call() {
        let mut pages = SimulatedPages::new(0, 0);
        let n = PAGES_PER_CALL_MAX as u64;
        for b in 0..n {
            pages.map_block(PID, b, true, NodeId((b % 2) as u32));
        }
        let space = [range(0, n * BLOCK_SIZE)];
        let blocks: Vec<_> = (0..n).map(Block).collect();
        let got = Prober::new(TIERS)
            .look(&mut pages, PID, &space, &blocks)
            .unwrap();
        for (b, p) in got.iter().enumerate() {
            assert_eq!(p.fast.0, if b % 2 == 0 { BLOCK_SIZE } else { 0 });
        }
    }
}
