//! Looks up which tiers blocks lie in, with few look-ups.
//!
//! Looking up every page of every block would cost more than classifying the blocks. Almost all blocks lie wholly in
//! one tier, so that a few pages represent a block. Every page is looked up only if these disagree, or if the block is
//! not fully mapped.
//!
//! Pages may alternate between nodes with any period, so the probes must not have one. Periods of 2, 3 and 4 pages show
//! at once, because the probes have every residue of these. Longer periods show sooner or later, because each look-up
//! shifts the probes.

use std::collections::BTreeMap;

use demeter_policy::{
    BLOCK_SIZE, Block, GuestVirtAddr, NodeId, PAGE_SIZE, Pid, Socket, Spread, VirtRange,
};

use crate::nodes::Tiers;
use crate::pages::{PAGES_PER_CALL_MAX, PageState, Pages, PagesError};

/// Base pages in a block.
pub const PAGES_PER_BLOCK: u64 = BLOCK_SIZE / PAGE_SIZE;

/// Number of pages that represent a block.
const PROBES: u64 = 4;

/// Offsets of the probes from the first page of each quarter of a block. The resulting pages have every residue of 2, 3
/// and 4, even when all are shifted equally.
const PROBE_OFFSETS: [u64; PROBES as usize] = [0, 3, 2, 1];

/// Number of shifts that keep all probes in their quarters.
const SHIFTS: u64 = PAGES_PER_BLOCK / PROBES - (PROBES - 1);

/// Change of the shift from one look-up to the next. It is coprime to [`SHIFTS`], so that every shift occurs.
const SHIFT_STEP: u64 = 47;

/// The probes of a block in a look-up.
fn probes(look: u64) -> [u64; PROBES as usize] {
    let shift = look % SHIFTS * SHIFT_STEP % SHIFTS;
    std::array::from_fn(|i| i as u64 * (PAGES_PER_BLOCK / PROBES) + PROBE_OFFSETS[i] + shift)
}

/// Looks up blocks.
#[derive(Debug)]
pub struct Prober {
    tiers: Tiers,
    /// The socket of each node; the first for all others.
    sockets: BTreeMap<NodeId, Socket>,
    /// Number of look-ups so far.
    looks: u64,
    addresses: Vec<GuestVirtAddr>,
    states: Vec<PageState>,
}

impl Prober {
    /// Creates a prober for these tiers. Memory on other nodes counts as not resident, since it is not managed.
    pub fn new(tiers: Tiers) -> Self {
        Self {
            tiers,
            sockets: BTreeMap::new(),
            looks: 0,
            addresses: vec![],
            states: vec![],
        }
    }

    /// Has it tell nodes of several sockets apart.
    pub fn with_sockets(self, sockets: BTreeMap<NodeId, Socket>) -> Self {
        Self { sockets, ..self }
    }

    /// Looks up each of `blocks`, in order. `space` are the process's sorted mappings.
    pub fn look(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        space: &[VirtRange],
        blocks: &[Block],
    ) -> Result<Vec<Spread>, PagesError> {
        let mut spreads = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(PAGES_PER_CALL_MAX / PROBES as usize) {
            self.probe(pages, pid, part)?;
            for (&block, probed) in part.iter().zip(self.states.chunks(PROBES as usize)) {
                let agreed = probed.iter().all(|s| s == &probed[0]) && covers(space, block);
                let weight = PAGES_PER_BLOCK / PROBES;
                spreads.push(agreed.then(|| self.spread(probed, weight)));
            }
        }
        blocks
            .iter()
            .zip(spreads)
            .map(|(&block, known)| known.map_or_else(|| self.look_closely(pages, pid, block), Ok))
            .collect()
    }

    /// Looks up a block by all of its pages.
    pub fn look_closely(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        block: Block,
    ) -> Result<Spread, PagesError> {
        self.addresses.clear();
        self.addresses.extend(pages_of(block));
        self.states.clear();
        pages.locate(pid, &self.addresses, &mut self.states)?;
        Ok(self.spread(&self.states, 1))
    }

    /// The node of most probes of each block, among nodes that are `wanted`.
    pub fn main_nodes(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        blocks: &[Block],
        wanted: impl Fn(NodeId) -> bool,
    ) -> Result<Vec<Option<NodeId>>, PagesError> {
        let mut found = Vec::with_capacity(blocks.len());
        for part in blocks.chunks(PAGES_PER_CALL_MAX / PROBES as usize) {
            self.probe(pages, pid, part)?;
            for probed in self.states.chunks(PROBES as usize) {
                let nodes = probed.iter().filter_map(|state| match state {
                    PageState::On(node) if wanted(*node) => Some(*node),
                    _ => None,
                });
                let count = |of: &NodeId| nodes.clone().filter(|node| node == of).count();
                found.push(
                    nodes
                        .clone()
                        .max_by_key(|node| (count(node), std::cmp::Reverse(*node))),
                );
            }
        }
        Ok(found)
    }

    /// Looks up the probes of each block.
    fn probe(
        &mut self,
        pages: &mut dyn Pages,
        pid: Pid,
        blocks: &[Block],
    ) -> Result<(), PagesError> {
        self.addresses.clear();
        self.states.clear();
        for block in blocks {
            let start = block.start().0;
            let probes = probes(self.looks).map(|page| GuestVirtAddr(start + page * PAGE_SIZE));
            self.addresses.extend(probes);
            self.looks += 1;
        }
        pages.locate(pid, &self.addresses, &mut self.states)
    }

    /// Sums states, each of which represents `weight` pages.
    pub(crate) fn spread(&self, states: &[PageState], weight: u64) -> Spread {
        let mut spread = Spread::default();
        let mut pages_by_socket = [0u16; Socket::MAX as usize];
        let mut most = 0;
        for state in states {
            if let PageState::On(node) = state
                && let Some(level) = self.tiers.of(*node)
            {
                spread.bytes.get_mut(level).0 += weight * PAGE_SIZE;
                let socket = self.sockets.get(node).copied().unwrap_or_default();
                let pages = &mut pages_by_socket[usize::from(socket.number())];
                *pages += 1;
                if *pages > most {
                    (most, spread.socket) = (*pages, socket);
                }
            }
        }
        spread
    }
}

/// The addresses of a block's base pages.
pub fn pages_of(block: Block) -> impl Iterator<Item = GuestVirtAddr> {
    (0..PAGES_PER_BLOCK).map(move |i| GuestVirtAddr(block.start().0 + i * PAGE_SIZE))
}

/// Whether one of the sorted ranges contains the whole block.
fn covers(space: &[VirtRange], block: Block) -> bool {
    let next = space.partition_point(|r| r.end().0 < block.start().0 + BLOCK_SIZE);
    space.get(next).is_some_and(|r| r.start() <= block.start())
}

#[cfg(test)]
mod tests {
    use demeter_policy::{ByteCount, Level, TierBytes};
    use proptest::prelude::*;

    use super::*;
    use crate::pages::simulated::SimulatedPages;

    fn prober() -> Prober {
        Prober::new("0/1".parse().unwrap())
    }

    const PID: Pid = Pid(3);

    fn range(start: u64, end: u64) -> VirtRange {
        VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(end)).unwrap()
    }

    #[test]
    fn whole_mixed_partial_and_empty_blocks() {
        let mut pages = SimulatedPages::new(0, 0);
        pages.map_block(PID, 1, true, NodeId(0));
        pages.map_block(PID, 2, false, NodeId(1));
        // Block 3: the first 100 pages are fast, the rest slow.
        for i in 0..PAGES_PER_BLOCK {
            let node = NodeId(u32::from(i >= 100));
            pages.map(PID, 3 * BLOCK_SIZE + i * PAGE_SIZE, PAGE_SIZE, node);
        }
        // Block 4: only its second page is mapped, and no probe hits it.
        pages.map(PID, 4 * BLOCK_SIZE + PAGE_SIZE, PAGE_SIZE, NodeId(0));
        let space = [
            range(BLOCK_SIZE, 4 * BLOCK_SIZE),
            range(4 * BLOCK_SIZE + PAGE_SIZE, 4 * BLOCK_SIZE + 2 * PAGE_SIZE),
            range(5 * BLOCK_SIZE, 6 * BLOCK_SIZE),
        ];
        let blocks: Vec<_> = (1..6).map(Block).collect();
        let got = prober().look(&mut pages, PID, &space, &blocks).unwrap();
        let want = [(512, 0), (0, 512), (100, 412), (1, 0), (0, 0)].map(|(fast, slow)| TierBytes {
            fast: ByteCount(fast * PAGE_SIZE),
            slow: ByteCount(slow * PAGE_SIZE),
        });
        assert_eq!(got, want.map(Spread::from));
    }

    #[test]
    fn interleaved_pages_are_noticed() {
        let mut pages = SimulatedPages::new(0, 0);
        for page in 0..PAGES_PER_BLOCK {
            pages.map(PID, page * PAGE_SIZE, PAGE_SIZE, NodeId((page % 2) as u32));
        }
        let space = [range(0, BLOCK_SIZE)];
        let got = prober().look(&mut pages, PID, &space, &[Block(0)]).unwrap();
        assert_eq!(
            (got[0].at(Level::First).fast, got[0].at(Level::First).slow),
            (ByteCount(1 << 20), ByteCount(1 << 20))
        );
    }

    #[test]
    fn nodes_of_a_tier_count_together_and_others_not_at_all() {
        let mut pages = SimulatedPages::new(0, 0);
        for page in 0..PAGES_PER_BLOCK {
            pages.map(
                PID,
                page * PAGE_SIZE,
                PAGE_SIZE,
                NodeId((page / 100) as u32),
            );
        }
        let space = [range(0, BLOCK_SIZE)];
        let mut prober = Prober::new("0,1/2,3".parse().unwrap());
        let got = prober.look(&mut pages, PID, &space, &[Block(0)]).unwrap();
        // 112 pages lie on nodes 4 and 5.
        assert_eq!(got[0].at(Level::First).fast, ByteCount(200 * PAGE_SIZE));
        assert_eq!(got[0].at(Level::First).slow, ByteCount(200 * PAGE_SIZE));
        let slow = |node: NodeId| node >= NodeId(2);
        let main = prober
            .main_nodes(&mut pages, PID, &[Block(0)], slow)
            .unwrap();
        assert_eq!(main, [Some(NodeId(3))]);
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
            let mut prober = Prober { looks: before, ..prober() };
            let space = [range(BLOCK_SIZE, 2 * BLOCK_SIZE)];
            let got = prober.look(&mut pages, PID, &space, &[Block(1)]).unwrap();
            let slow = (0..PAGES_PER_BLOCK).filter(|i| i % period == phase % period).count();
            prop_assert_eq!(got[0].at(Level::First).slow.0, slow as u64 * PAGE_SIZE);
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
        let got = prober().look(&mut pages, PID, &space, &blocks).unwrap();
        for (b, p) in got.iter().enumerate() {
            assert_eq!(p.bytes.0[0].0, if b % 2 == 0 { BLOCK_SIZE } else { 0 });
        }
    }
}
