//! Tests of engines with more than two tiers, on a machine that is a map.

use proptest::prelude::*;

use super::conformance::{PID, Plain, Script, WORTH_MUCH};
use super::{ByHeat, Config, Direction, Engine, Gain, Input, NodeFacts, Request, Stage};
use crate::{BLOCK_SIZE, Block, ByLevel, ByteCount, Level, Sample, Spread, Tuning, VirtRange};

const FIRST: u64 = 512;

/// Latencies of three tiers, between which every move pays.
const GAIN: Gain = Gain {
    latency_ns: ByLevel([100, 1 << 19, 1 << 20, 0]),
    ..WORTH_MUCH
};

/// A machine of three tiers with one process.
struct Machine {
    engine: Engine,
    lies: Vec<Level>,
    free: ByLevel<u64>,
    moved: u64,
}

impl Machine {
    /// Number of blocks in each tier, by address, and of free ones.
    fn new(blocks: [usize; 3], free: [u64; 3]) -> Self {
        let sizes = [0, 1, 2].map(|at| blocks[at] as u64 + free[at]);
        let [first, second, third] = sizes.map(|blocks| ByteCount(blocks * BLOCK_SIZE));
        let config = Config {
            sizes: ByLevel([first, second, third, ByteCount(0)]),
            slowest: Level::Third,
            ..Config::new(&Tuning::default(), first)
        };
        let tiers = [Level::First, Level::Second, Level::Third];
        let lies = tiers.into_iter().zip(blocks);
        Self {
            engine: Engine::new(ByHeat::new(GAIN), config),
            lies: lies.flat_map(|(tier, n)| vec![tier; n]).collect(),
            free: ByLevel([free[0], free[1], free[2], 0]),
            moved: 0,
        }
    }

    fn locate(&self, block: Block) -> Spread {
        let lies = self.lies[(block.0 - FIRST) as usize];
        let bytes = |level| ByteCount(if level == lies { BLOCK_SIZE } else { 0 });
        ByLevel::from_fn(bytes).into()
    }

    /// Moves a block over the boundary below `level`: up, or down to the nearest tier with free memory, if any.
    fn migrate(&mut self, block: Block, level: Level, direction: Direction) {
        let from = self.lies[(block.0 - FIRST) as usize];
        let to = match direction {
            Direction::Promotion => (from > level).then_some(level),
            Direction::Demotion => level.slower().find(|&to| *self.free.get(to) > 0),
        };
        let Some(to) = to.filter(|&to| *self.free.get(to) > 0) else {
            return;
        };
        *self.free.get_mut(from) += 1;
        *self.free.get_mut(to) -= 1;
        self.lies[(block.0 - FIRST) as usize] = to;
        self.moved += 1;
    }

    /// Runs an epoch in which each block is accessed `heat` times.
    fn epoch(&mut self, heat: impl Fn(usize) -> u32) {
        if self.engine.stage() == Stage::Asleep {
            self.engine.push(Input::Epoch).unwrap();
        }
        loop {
            match self.engine.request() {
                Request::Sleep { .. } if self.engine.epoch() == 0 => {
                    self.engine.push(Input::Epoch).unwrap();
                }
                Request::Sleep { .. } => return,
                Request::Refresh => {
                    if self.engine.processes().next().is_none() {
                        self.engine.push(Input::Started(PID)).unwrap();
                        let end = Block(FIRST + self.lies.len() as u64).start();
                        let vmas = &[VirtRange::new(Block(FIRST).start(), end).unwrap()];
                        self.engine.push(Input::Space { pid: PID, vmas }).unwrap();
                    }
                    self.engine.push(Input::Refreshed).unwrap();
                }
                Request::Samples { .. } => {
                    for block in 0..self.lies.len() {
                        let sample = Sample {
                            pid: PID,
                            addr: Block(FIRST + block as u64).start(),
                            weight: heat(block),
                        };
                        if sample.weight > 0 {
                            self.engine.push(Input::Sample(sample)).unwrap();
                        }
                    }
                    let end = Input::SamplesEnd {
                        lost: 0,
                        rejected: 0,
                        is_repeat: false,
                    };
                    self.engine.push(end).unwrap();
                }
                Request::LookUp { blocks, .. } => {
                    let lies: Vec<_> = blocks.iter().map(|&b| self.locate(b)).collect();
                    self.engine.push(Input::Located(&lies)).unwrap();
                }
                Request::ReadNodes => {
                    let facts = |level| NodeFacts {
                        free: ByteCount(self.free.get(level) * BLOCK_SIZE),
                        kept: ByteCount(0),
                        latency_ns: None,
                    };
                    let facts = ByLevel::from_fn(facts);
                    self.engine.push(Input::Nodes(facts)).unwrap();
                }
                Request::Move {
                    level,
                    direction,
                    blocks,
                    ..
                } => {
                    let blocks: Vec<Block> = blocks.iter().map(|r| r.block).collect();
                    for &block in &blocks {
                        self.migrate(block, level, direction);
                    }
                    let placements: Vec<_> = blocks.iter().map(|&b| self.locate(b)).collect();
                    let moved = Input::Moved {
                        placements: &placements,
                        took_ns: 1000,
                        cpu_ns: 1000,
                    };
                    self.engine.push(moved).unwrap();
                }
                Request::Collapse { .. } => {
                    let (took_ns, cpu_ns) = (1000, 1000);
                    self.engine
                        .push(Input::Collapsed { took_ns, cpu_ns })
                        .unwrap();
                }
                Request::Reclaim => self.engine.push(Input::Reclaimed).unwrap(),
            }
        }
    }

    fn count(&self, blocks: std::ops::Range<usize>, level: Level) -> usize {
        self.lies[blocks]
            .iter()
            .filter(|&&lies| lies == level)
            .count()
    }
}

#[test]
fn hot_memory_in_the_middle_is_promoted_where_the_first_tier_has_room() {
    let mut m = Machine::new([10, 60, 60], [50, 20, 100]);
    for _ in 0..40 {
        m.epoch(|block| if (20..50).contains(&block) { 20 } else { 0 });
    }
    assert_eq!(m.count(20..50, Level::First), 30);
    assert_eq!(
        m.engine.figures().demoted,
        ByteCount(0),
        "nothing had to leave"
    );
}

#[test]
fn what_does_not_fit_into_the_first_tier_goes_to_the_second() {
    // Blocks 0..40 are idle, 40..80 warm, 80..120 hot. The first two tiers have room for 40 each, and a reserve.
    let mut m = Machine::new([40, 40, 40], [4, 4, 100]);
    let heat = |block: usize| [0, 4, 40][block / 40];
    for _ in 0..200 {
        m.epoch(heat);
    }
    let told = [0, 1, 2].map(|heat| {
        let blocks = heat * 40..(heat + 1) * 40;
        [Level::First, Level::Second, Level::Third].map(|level| m.count(blocks.clone(), level))
    });
    assert!(told[2][0] >= 38, "hot: {told:?}");
    assert!(told[1][0] + told[1][1] >= 38, "warm: {told:?}");
    assert!(told[0][2] >= 36, "idle: {told:?}");
    let moved = m.moved;
    for _ in 0..50 {
        m.epoch(heat);
    }
    assert!(m.moved - moved <= 4, "{} still move", m.moved - moved);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]
    #[test]
    fn a_tier_without_memory_changes_nothing(seed: u64) {
        let script = Script::new(seed);
        let base = Block(FIRST).start();
        let mut two = Plain::new(&script, base);
        let mut three = Plain::new(&script, base);
        let config = Config {
            slowest: Level::Third,
            ..script.config()
        };
        three.engine = Engine::new(ByHeat::new(WORTH_MUCH), config);
        for epoch in &script.epochs {
            prop_assert_eq!(two.epoch(epoch), three.epoch(epoch));
        }
    }

    #[test]
    fn three_tiers_come_to_rest(
        blocks in prop::array::uniform3(1usize..30), free in prop::array::uniform3(0u64..12), hot in 1usize..40,
    ) {
        // If slow memory is full, moves fail and are retried at growing intervals.
        let free = [free[0], free[1], free[2] + 4];
        let mut m = Machine::new(blocks, free);
        let all = m.lies.len();
        let heat = |block: usize| if block >= all.saturating_sub(hot) { 30 } else { 0 };
        for _ in 0..120 {
            m.epoch(heat);
        }
        let moved = m.moved;
        for _ in 0..30 {
            m.epoch(heat);
        }
        prop_assert!(m.moved - moved <= 2, "{} of {moved}", m.moved - moved);
    }
}
