//! What the policy makes of the tracker's samples, on a machine that is a formula: blocks are
//! accessed at known rates, and DAMON's looks find what chance lets them.

use std::num::NonZero;

use super::{Exposures, PASSES, Region};
use crate::chance::Chance;
use crate::engine::{Config, Direction, Engine, Gain, Input, NodeFacts, Ranges, Request};
use crate::{
    BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, MIB, PAGE_SIZE, PerTier, Pid, Placement, Tuning,
    VirtRange,
};

const PID: Pid = Pid(1);
const BASE: u64 = 1 << 40;
const BLOCKS: usize = 400;
const FAST: usize = 100;

/// Epochs between two passes: while the policy is at work, and while it is calm.
const BUSY_EPOCHS: u32 = 4;
const CALM_EPOCHS: u32 = 20;

/// Time to move a block of small pages, and a huge one, in the lab.
const MOVE_NS: [u64; 2] = [18_000_000, 4_800_000];

struct Machine {
    in_fast: Vec<bool>,
    is_huge: Vec<bool>,
    chance: Chance,
    moved: u64,
}

impl Machine {
    /// The first blocks lie in fast memory.
    fn new(seed: u64, is_huge: impl Fn(usize) -> bool) -> Self {
        Self {
            in_fast: (0..BLOCKS).map(|b| b < FAST).collect(),
            is_huge: (0..BLOCKS).map(is_huge).collect(),
            chance: Chance::new(seed),
            moved: 0,
        }
    }

    /// A pass over blocks that are accessed so often a second.
    fn look(&mut self, exposures: &mut Exposures, rung: usize, rates: &[f64]) {
        let pass = PASSES[rung];
        let mut regions = Vec::new();
        for (b, rate) in rates.iter().enumerate() {
            let entries = if self.is_huge[b] { 1.0 } else { 512.0 };
            let found = 1.0 - (-rate / entries * pass.interval.as_secs_f64()).exp();
            let page_bytes = if self.is_huge[b] { 2 * MIB } else { PAGE_SIZE };
            let accesses = (0..pass.looks)
                .filter(|_| self.chance.draw() < found)
                .count();
            let start = BASE + b as u64 * BLOCK_SIZE;
            let end = GuestVirtAddr(start + BLOCK_SIZE);
            regions.push(Region {
                pid: PID,
                range: VirtRange::new(GuestVirtAddr(start), end).unwrap(),
                accesses: accesses as u32,
                page_bytes: NonZero::new(page_bytes).filter(|_| accesses > 0),
            });
        }
        exposures.add(rung, pass.interval, pass.looks, &regions);
    }

    fn placement(&self, block: &Block) -> Placement {
        let bytes = |there: bool| ByteCount(if there { BLOCK_SIZE } else { 0 });
        let b = (block.0 - BASE / BLOCK_SIZE) as usize;
        Placement {
            fast: bytes(self.in_fast[b]),
            slow: bytes(!self.in_fast[b]),
        }
    }

    /// Lets the agent run for so many epochs beside a program that accesses block b `rates(epoch,
    /// b)` times a second.
    fn run(&mut self, epochs: u32, rates: impl Fn(u32, usize) -> f64) {
        let tuning = Tuning::default();
        let size = ByteCount(FAST as u64 * BLOCK_SIZE);
        let gain = Gain {
            loads_per_sample: None,
            latency_ns: PerTier {
                fast: 600,
                slow: 1800,
            },
            cpus: 1,
        };
        let config = Config::new(&tuning, size, gain);
        let mut engine = Engine::new(Ranges(tuning.classifier()), config);
        let mut exposures = Exposures::default();
        let end = GuestVirtAddr(BASE + BLOCKS as u64 * BLOCK_SIZE);
        let space = [VirtRange::new(GuestVirtAddr(BASE), end).unwrap()];
        let (mut epoch, mut next_pass, mut has_news) = (0, 1, false);
        engine.push(Input::Started(PID)).unwrap();
        engine
            .push(Input::Space {
                pid: PID,
                vmas: &space,
            })
            .unwrap();
        while epoch < epochs {
            match engine.request() {
                Request::Refresh => engine.push(Input::Refreshed).unwrap(),
                Request::Samples { most } => {
                    let mut samples = vec![];
                    exposures.samples(most, &mut samples);
                    for sample in samples {
                        engine.push(Input::Sample(sample)).unwrap();
                    }
                    let mut sightings = vec![];
                    if has_news {
                        exposures.sightings(most, &mut sightings);
                    }
                    for sighting in sightings {
                        engine.push(Input::Sighting(sighting)).unwrap();
                    }
                    let end = Input::SamplesEnd {
                        lost: 0,
                        rejected: 0,
                        is_repeat: !has_news,
                    };
                    engine.push(end).unwrap();
                }
                Request::LookUp { blocks, .. } => {
                    let places: Vec<_> = blocks.iter().map(|b| self.placement(b)).collect();
                    engine.push(Input::Located(&places)).unwrap();
                }
                Request::ReadNodes => {
                    let used = self.in_fast.iter().filter(|&&f| f).count();
                    let free = |blocks: usize| NodeFacts {
                        free: ByteCount(blocks as u64 * BLOCK_SIZE),
                        kept: ByteCount(0),
                    };
                    let (fast, slow) = (free(FAST + 4 - used), free(BLOCKS));
                    engine.push(Input::Nodes(PerTier { fast, slow })).unwrap();
                }
                Request::Move {
                    direction, blocks, ..
                } => {
                    let blocks: Vec<Block> = blocks.iter().map(|r| r.block).collect();
                    let mut took_ns = 0;
                    for block in &blocks {
                        let b = (block.0 - BASE / BLOCK_SIZE) as usize;
                        took_ns += MOVE_NS[usize::from(self.is_huge[b])];
                        self.in_fast[b] = direction == Direction::Promotion;
                        self.moved += BLOCK_SIZE;
                    }
                    let places: Vec<_> = blocks.iter().map(|b| self.placement(b)).collect();
                    let placements = &places;
                    engine
                        .push(Input::Moved {
                            placements,
                            took_ns,
                        })
                        .unwrap();
                }
                Request::Reclaim => engine.push(Input::Reclaimed).unwrap(),
                Request::Sleep { epochs: pause } => {
                    epoch += pause;
                    has_news = epoch >= next_pass;
                    if has_news {
                        let now: Vec<f64> = (0..BLOCKS).map(|b| rates(epoch, b)).collect();
                        for rung in 0..PASSES.len() {
                            self.look(&mut exposures, rung, &now);
                            if !exposures.is_saturated(rung) {
                                break;
                            }
                        }
                        next_pass = epoch
                            + match (exposures.is_urgent(), pause) {
                                (true, _) => 1,
                                (false, 1) => BUSY_EPOCHS,
                                _ => CALM_EPOCHS,
                            };
                    }
                    engine.push(Input::Epoch).unwrap();
                }
            }
        }
    }

    fn moved_mib(&self) -> u64 {
        self.moved / MIB
    }

    /// The share of accesses that fall in fast memory.
    fn hit_share(&self, rates: impl Fn(usize) -> f64) -> f64 {
        let sum = |fast_only: bool| -> f64 {
            let counts = |&b: &usize| self.in_fast[b] || !fast_only;
            (0..BLOCKS).filter(counts).map(&rates).sum()
        };
        sum(true) / sum(false)
    }
}

/// Whether a block lies in a huge page.
type Pages = fn(usize) -> bool;

/// Accesses a second of all memory, and which blocks lie in huge pages.
const MACHINES: [(f64, Pages); 6] = [
    (3e5, |b| b < FAST),
    (3e5, |_| false),
    (3e5, |_| true),
    (3e6, |b| b < FAST),
    (3e6, |_| false),
    (3e6, |_| true),
];

/// 90 % of the accesses to a hot set.
fn gups(total: f64, hot: std::ops::Range<usize>) -> impl Fn(usize) -> f64 {
    move |b| {
        let hot_part = if hot.contains(&b) {
            0.9 / hot.len() as f64
        } else {
            0.0
        };
        total * (hot_part + 0.1 / BLOCKS as f64)
    }
}

#[test]
fn a_hot_set_is_found_and_followed_and_then_nothing_moves() {
    for (seed, (total, pages)) in (1..).zip(MACHINES) {
        let (first, second) = (gups(total, 350..400), gups(total, 175..225));
        let mut machine = Machine::new(seed, pages);
        machine.run(140, |e, b| if e < 60 { first(b) } else { second(b) });
        let (hits, moved) = (machine.hit_share(second), machine.moved_mib());
        // The hot set is 100 MiB: there and back, twice.
        assert!(hits > 0.9, "machine {seed}: {hits}");
        assert!(moved < 600, "machine {seed}: {moved} MiB");
    }
}

#[test]
fn where_all_is_alike_next_to_nothing_moves() {
    for (seed, (total, pages)) in (1..).zip(MACHINES) {
        let mut machine = Machine::new(seed, pages);
        machine.run(120, |_, _| total / BLOCKS as f64);
        let moved = machine.moved_mib();
        assert!(moved < 40, "machine {seed}: {moved} MiB");
    }
}

#[test]
fn a_sweep_moves_next_to_nothing() {
    for (seed, (total, pages)) in (1..).zip(MACHINES) {
        let mut machine = Machine::new(seed, pages);
        machine.run(120, |e, b| {
            let at = e as usize * 40 % BLOCKS;
            let is_near = (at..at + 40).contains(&b);
            if is_near { total / 40.0 } else { 0.0 }
        });
        let moved = machine.moved_mib();
        // What looks make believe at most once.
        assert!(moved < 200, "machine {seed}: {moved} MiB");
    }
}

#[test]
fn a_hot_set_that_never_stays_moves_next_to_nothing() {
    const SEEDS: u64 = 5;
    for (number, (total, pages)) in (1..).zip(MACHINES) {
        let moved_mib = (1..=SEEDS).map(|seed| {
            let mut machine = Machine::new(number * SEEDS + seed, pages);
            machine.run(240, |e, b| {
                let at = e as usize / 4 * 50 % 350;
                gups(total, at..at + 50)(b)
            });
            machine.moved_mib()
        });
        // 60 times 100 MiB went there and back if all were followed. By chance one is, in one run of five.
        let moved_mib = moved_mib.sum::<u64>() / SEEDS;
        assert!(moved_mib < 50, "machine {number}: {moved_mib} MiB");
    }
}
