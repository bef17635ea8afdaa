//! Conformance suite of all drivers of an [`Engine`], each with its own simulated kernel.
//!
//! All drivers have the same engine, so they can differ only in its inputs, their order and their time. A [`Script`]
//! describes events on a machine, and a [`Rig`] is a driver on such a machine. The driver [`conforms`] if its engine
//! makes exactly the requests that it makes with the plainest driver, whose machine is a map. So all drivers conform to
//! each other.

use std::collections::{BTreeMap, BTreeSet};

use super::{ByHeat, Config, Direction, Engine, Gain, Input, NodeFacts, Request, Stage, Strategy};
use crate::chance::Chance;
use crate::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, PerTier, Pid, Sample, Spread, TierBytes,
    Tuning, VirtRange,
};

/// The only process of a script.
pub const PID: Pid = Pid(1);

/// A machine on which every sample pays for any move.
pub const WORTH_MUCH: Gain = Gain {
    loads_per_sample: Some(1 << 10),
    waits: 1.0,
    latency_ns: ByLevel([100, 1 << 20, 0, 0]),
    cpus: 1 << 20,
};

/// A machine of four CPUs with the costs of hardware.
pub const HARDWARE: Gain = Gain {
    loads_per_sample: Some(4093),
    waits: 1.0,
    latency_ns: ByLevel([80, 200, 0, 0]),
    cpus: 4,
};

/// The events on a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// Number of the process's blocks in fast memory at first: its first ones.
    pub fast: u64,
    /// Number of its blocks in slow memory at first: the following ones.
    pub slow: u64,
    /// Free blocks of fast memory.
    pub fast_free: u64,
    /// Free blocks of slow memory.
    pub slow_free: u64,
    /// Unmovable blocks, counted from the process's first.
    pub stuck: BTreeSet<u64>,
    /// Limit of moves in one direction per epoch, MiB.
    pub batch_mib: u64,
    /// Events before each epoch.
    pub epochs: Vec<EpochScript>,
}

/// Events before one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EpochScript {
    /// Blocks that are mapped behind the last one, in slow memory, if there are enough free blocks.
    pub grown: u64,
    /// Blocks with a sampled access, in this order.
    pub samples: Vec<u64>,
}

impl Script {
    /// A pseudorandom script from a seed.
    pub fn new(seed: u64) -> Self {
        let mut chance = Chance::new(seed);
        let mut below = |n: u64| chance.below(n);
        let (fast, slow) = (1 + below(60), 1 + below(120));
        let mut mapped = fast + slow;
        let stuck = (0..below(6)).map(|_| below(mapped)).collect();
        let (mut hot, hot_len) = (below(mapped), 1 + below(40));
        let epochs = 2 + below(40);
        let mut epoch = |below: &mut dyn FnMut(u64) -> u64| {
            if below(8) == 0 {
                hot = below(mapped);
            }
            let grown = if below(12) == 0 { below(20) } else { 0 };
            let samples = match below(6) {
                0 => 0,
                _ => below(800),
            };
            let sample = |below: &mut dyn FnMut(u64) -> u64| match below(10) {
                // Sometimes beyond the mapped blocks.
                0 => below(mapped + 2),
                _ => (hot + below(hot_len)) % mapped,
            };
            let samples = (0..samples).map(|_| sample(below)).collect();
            mapped += grown;
            EpochScript { grown, samples }
        };
        let mut epochs: Vec<_> = (0..epochs).map(|_| epoch(&mut below)).collect();
        // Drivers may differ in when an agent looks first.
        epochs[0].grown = 0;
        Self {
            fast,
            slow,
            fast_free: below(12),
            slow_free: below(200),
            stuck,
            batch_mib: 2 + below(200),
            epochs,
        }
    }

    /// The agent's tuning on this machine.
    pub fn tuning(&self) -> Tuning {
        let tuning = Tuning::default();
        Tuning {
            rate_limit_mib_s: self.batch_mib * 1000 / tuning.epoch_ms,
            ..tuning
        }
    }

    /// The engine's settings. The duration of moves differs between machines, and must not change decisions here.
    pub fn config(&self) -> Config {
        Config {
            collapses: true,
            ..Config::new(&self.tuning(), self.fast_size())
        }
    }

    /// Size of fast memory.
    pub fn fast_size(&self) -> ByteCount {
        ByteCount((self.fast + self.fast_free) * BLOCK_SIZE)
    }
}

/// A driver on a machine.
pub trait Rig {
    /// Creates the script's machine, and an agent that has not started.
    fn new(script: &Script) -> Self;

    /// The process's first address, a multiple of the block size.
    fn base(&self) -> GuestVirtAddr;

    /// Applies these events, and runs the agent until it sleeps. Returns its engine's requests, each as `{:?}` of the
    /// [`Request`]; the last one is a sleep.
    fn epoch(&mut self, epoch: &EpochScript) -> Vec<String>;
}

/// Checks that a driver gives its engine the right inputs at the right time.
///
/// # Errors
/// The first epoch with different requests.
pub fn conforms<R: Rig>(script: &Script) -> Result<(), String> {
    let mut rig = R::new(script);
    let mut plain = Plain::new(script, rig.base());
    for (n, epoch) in script.epochs.iter().enumerate() {
        let (got, want) = (rig.epoch(epoch), plain.epoch(epoch));
        if got != want {
            let at = got.iter().zip(&want).take_while(|(g, w)| g == w).count();
            let none = String::from("nothing");
            let (got, want) = (got.get(at).unwrap_or(&none), want.get(at).unwrap_or(&none));
            return Err(format!(
                "epoch {}, request {at}: {got} instead of {want}",
                n + 1
            ));
        }
    }
    Ok(())
}

/// A simulated kernel that is a map.
#[derive(Debug, Clone)]
pub struct MapKernel {
    base: GuestVirtAddr,
    mapped: u64,
    in_fast: BTreeMap<Block, bool>,
    stuck: BTreeSet<Block>,
    /// Free blocks.
    pub free: PerTier<u64>,
}

impl MapKernel {
    /// The machine of a script.
    pub fn new(script: &Script, base: GuestVirtAddr) -> Self {
        let first = Block::of(base).0;
        let mapped = script.fast + script.slow;
        let place = |b: u64| (Block(first + b), b < script.fast);
        Self {
            base,
            mapped,
            in_fast: (0..mapped).map(place).collect(),
            stuck: script.stuck.iter().map(|b| Block(first + b)).collect(),
            free: PerTier {
                fast: script.fast_free,
                slow: script.slow_free,
            },
        }
    }

    /// Maps blocks behind the last one, as far as there is free slow memory.
    pub fn grow(&mut self, blocks: u64) {
        for _ in 0..blocks.min(self.free.slow) {
            let block = Block(Block::of(self.base).0 + self.mapped);
            self.in_fast.insert(block, false);
            self.mapped += 1;
            self.free.slow -= 1;
        }
    }

    /// The process's mapping.
    pub fn space(&self) -> Option<VirtRange> {
        let end = GuestVirtAddr(self.base.0 + self.mapped * BLOCK_SIZE);
        VirtRange::new(self.base, end)
    }

    /// The place of a block.
    pub fn locate(&self, block: Block) -> Spread {
        let bytes = |in_fast: bool| {
            let here = self.in_fast.get(&block) == Some(&in_fast);
            ByteCount(if here { BLOCK_SIZE } else { 0 })
        };
        TierBytes {
            fast: bytes(true),
            slow: bytes(false),
        }
        .into()
    }

    /// Moves a block, if it is movable and there is free memory.
    pub fn migrate(&mut self, block: Block, direction: Direction) {
        let to_fast = direction == Direction::Promotion;
        let Some(in_fast) = self.in_fast.get_mut(&block) else {
            return;
        };
        let (from, to) = match to_fast {
            true => (&mut self.free.slow, &mut self.free.fast),
            false => (&mut self.free.fast, &mut self.free.slow),
        };
        if *in_fast != to_fast && *to > 0 && !self.stuck.contains(&block) {
            *in_fast = to_fast;
            *from += 1;
            *to -= 1;
        }
    }

    /// Free memory of the tiers.
    pub fn nodes(&self) -> ByLevel<NodeFacts> {
        let facts = |tier| NodeFacts {
            free: ByteCount(self.free.get(tier) * BLOCK_SIZE),
            kept: ByteCount(0),
            latency_ns: None,
        };
        PerTier::from_fn(facts).into()
    }
}

/// The plainest driver.
#[derive(Debug, Clone)]
pub struct Plain<S: Strategy = ByHeat> {
    /// Its machine.
    pub kernel: MapKernel,
    /// Its engine.
    pub engine: Engine<S>,
    /// Time to move a block, nanoseconds.
    pub block_ns: u64,
    is_known: bool,
}

impl Plain {
    /// Creates the driver before its first epoch.
    pub fn new(script: &Script, base: GuestVirtAddr) -> Self {
        Self::with(ByHeat::new(WORTH_MUCH), script, base)
    }
}

impl<S: Strategy> Plain<S> {
    /// Creates a driver with another strategy.
    pub fn with(strategy: S, script: &Script, base: GuestVirtAddr) -> Self {
        let config = script.config();
        Self {
            kernel: MapKernel::new(script, base),
            engine: Engine::new(strategy, config),
            block_ns: 0,
            is_known: false,
        }
    }

    /// Answers the engine's requests in one epoch; see [`Rig::epoch`].
    ///
    /// # Panics
    /// The engine reports an answer as misuse.
    pub fn epoch(&mut self, epoch: &EpochScript) -> Vec<String> {
        self.kernel.grow(epoch.grown);
        let mut asked = vec![];
        if self.engine.stage() == Stage::Asleep {
            self.engine.push(Input::Epoch).expect("it sleeps");
        }
        loop {
            asked.push(format!("{:?}", self.engine.request()));
            if self.engine.stage() == Stage::Asleep && self.engine.epoch() > 0 {
                return asked;
            }
            self.answer(epoch);
        }
    }

    /// Answers one request.
    ///
    /// # Panics
    /// The engine reports the answer as misuse.
    pub fn answer(&mut self, epoch: &EpochScript) {
        let engine = &mut self.engine;
        let pushed = match engine.request() {
            Request::Refresh => {
                if !std::mem::replace(&mut self.is_known, true) {
                    engine.push(Input::Started(PID)).expect("it is new");
                }
                let vmas = Vec::from_iter(self.kernel.space());
                engine
                    .push(Input::Space {
                        pid: PID,
                        vmas: &vmas,
                    })
                    .expect("it is known");
                engine.push(Input::Refreshed)
            }
            Request::Samples { most, .. } => {
                for b in epoch.samples.iter().take(most) {
                    let sample = Sample {
                        pid: PID,
                        addr: GuestVirtAddr(self.kernel.base.0 + b * BLOCK_SIZE),
                        weight: 1,
                    };
                    engine
                        .push(Input::Sample(sample))
                        .expect("samples are wanted");
                }
                let lost = epoch.samples.len().saturating_sub(most) as u64;
                let end = Input::SamplesEnd {
                    lost,
                    rejected: 0,
                    is_repeat: false,
                };
                engine.push(end)
            }
            Request::LookUp { blocks, .. } => {
                let places: Vec<_> = blocks.iter().map(|&b| self.kernel.locate(b)).collect();
                engine.push(Input::Located(&places))
            }
            Request::ReadNodes => engine.push(Input::Nodes(self.kernel.nodes())),
            Request::Move {
                direction, blocks, ..
            } => {
                for r in blocks {
                    self.kernel.migrate(r.block, direction);
                }
                let place = |r: &crate::Relocation| self.kernel.locate(r.block);
                let places: Vec<_> = blocks.iter().map(place).collect();
                engine.push(Input::Moved {
                    placements: &places,
                    took_ns: self.block_ns * places.len() as u64,
                    cpu_ns: self.block_ns * places.len() as u64,
                })
            }
            // Its blocks are huge pages already.
            Request::Collapse { blocks, .. } => engine.push(Input::Collapsed {
                took_ns: self.block_ns * blocks.len() as u64,
                cpu_ns: self.block_ns * blocks.len() as u64,
            }),
            Request::Reclaim => engine.push(Input::Reclaimed),
            Request::Sleep { .. } => engine.push(Input::Epoch),
        };
        pushed.expect("the answer fits");
    }
}

/// A script with a hot set of `hot` blocks behind `fast` idle ones, for `epochs` epochs.
pub fn hot_set(fast: u64, slow: u64, hot: std::ops::Range<u64>, epochs: usize) -> Script {
    let len = hot.end - hot.start;
    let sample = |i: u64| match i % 10 {
        0 => i * 7919 % (fast + slow),
        // Nine of ten samples, each hot block in turn.
        _ => hot.start + (i - i / 10) % len,
    };
    let epoch = EpochScript {
        grown: 0,
        samples: (0..300).map(sample).collect(),
    };
    Script {
        fast,
        slow,
        fast_free: 4,
        slow_free: 100,
        stuck: BTreeSet::new(),
        batch_mib: 256,
        epochs: vec![epoch; epochs],
    }
}
