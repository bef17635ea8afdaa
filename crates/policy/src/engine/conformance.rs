//! What every driver of an [`Engine`] has to do, as a suite that each of them runs over its own
//! simulated kernel.
//!
//! Since all drivers have the same engine, they can differ in what they tell it, in which order,
//! and when. So a [`Script`] says what happens to a machine, a [`Rig`] is a driver on such a
//! machine, and the driver [`conforms`] if its engine asks for the same, word for word, as that of
//! the plainest driver there can be, on a machine that is a map. The drivers thus conform to each
//! other, too.

use std::collections::{BTreeMap, BTreeSet};

use super::{ByHeat, Config, Direction, Engine, Gain, Input, NodeFacts, Request, Stage, Strategy};
use crate::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, PerTier, Pid, Sample, Spread, Tuning,
    VirtRange,
};

/// The one process on a script's machine.
pub const PID: Pid = Pid(1);

/// A machine on which every sample pays for all moves.
pub const WORTH_MUCH: Gain = Gain {
    loads_per_sample: Some(1 << 10),
    waits: 1.0,
    latency_ns: ByLevel([100, 1 << 20, 0, 0]),
    cpus: 1 << 20,
};

/// A machine of four CPUs on which samples cost what they do on hardware.
pub const HARDWARE: Gain = Gain {
    loads_per_sample: Some(4093),
    waits: 1.0,
    latency_ns: ByLevel([80, 200, 0, 0]),
    cpus: 4,
};

/// What happens to a machine.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Script {
    /// Blocks that the process has in fast memory at first: its first ones.
    pub fast: u64,
    /// Blocks that it has in slow memory at first: those that follow.
    pub slow: u64,
    /// Free blocks of fast memory.
    pub fast_free: u64,
    /// Free blocks of slow memory.
    pub slow_free: u64,
    /// Blocks that will not move, counted from the process's first.
    pub stuck: BTreeSet<u64>,
    /// The most that moves in one direction in an epoch, MiB.
    pub batch_mib: u64,
    /// What happens before each epoch.
    pub epochs: Vec<EpochScript>,
}

/// What happens before one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct EpochScript {
    /// Blocks that are mapped behind the last one, in slow memory; as many as are free there at
    /// the most.
    pub grown: u64,
    /// Blocks of which an access is sampled, in this order.
    pub samples: Vec<u64>,
}

impl Script {
    /// A script that follows from a number.
    pub fn new(seed: u64) -> Self {
        let mut state = seed;
        let mut below = |n: u64| {
            // Knuth's MMIX generator; the high half of a product spreads best.
            state = state
                .wrapping_mul(6364136223846793005)
                .wrapping_add(1442695040888963407);
            ((u128::from(state) * u128::from(n)) >> 64) as u64
        };
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
                // Now and then beyond what is mapped.
                0 => below(mapped + 2),
                _ => (hot + below(hot_len)) % mapped,
            };
            let samples = (0..samples).map(|_| sample(below)).collect();
            mapped += grown;
            EpochScript { grown, samples }
        };
        let mut epochs: Vec<_> = (0..epochs).map(|_| epoch(&mut below)).collect();
        // When an agent looks first is its driver's affair.
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

    /// What the agent is set to on this machine.
    pub fn tuning(&self) -> Tuning {
        let tuning = Tuning::default();
        Tuning {
            rate_limit_mib_s: self.batch_mib * 1000 / tuning.epoch_ms,
            ..tuning
        }
    }

    /// What the engine is set to. How long moves take differs from machine to machine, and must
    /// decide nothing here.
    pub fn config(&self) -> Config {
        Config::new(&self.tuning(), self.fast_size())
    }

    /// Size of fast memory.
    pub fn fast_size(&self) -> ByteCount {
        ByteCount((self.fast + self.fast_free) * BLOCK_SIZE)
    }
}

/// A driver on a machine.
pub trait Rig {
    /// A machine as the script says before its epochs, and an agent that has not begun.
    fn new(script: &Script) -> Self;

    /// The process's first address, a multiple of a block.
    fn base(&self) -> GuestVirtAddr;

    /// Lets this happen, and then the agent run until it sleeps. Returns what its engine asked
    /// for, each as `{:?}` of the [`Request`], the last one a sleep.
    fn epoch(&mut self, epoch: &EpochScript) -> Vec<String>;
}

/// Whether a driver tells its engine what it should, when it should.
///
/// # Errors
/// The first epoch in which its engine asked for something else.
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

/// A kernel that is a map.
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
    /// A machine as the script says.
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

    /// Maps blocks behind the last one, as far as slow memory has room.
    pub fn grow(&mut self, blocks: u64) {
        for _ in 0..blocks.min(self.free.slow) {
            let block = Block(Block::of(self.base).0 + self.mapped);
            self.in_fast.insert(block, false);
            self.mapped += 1;
            self.free.slow -= 1;
        }
    }

    /// What the process maps.
    pub fn space(&self) -> Option<VirtRange> {
        let end = GuestVirtAddr(self.base.0 + self.mapped * BLOCK_SIZE);
        VirtRange::new(self.base, end)
    }

    /// Where a block lies.
    pub fn locate(&self, block: Block) -> Spread {
        let bytes = |in_fast: bool| {
            let here = self.in_fast.get(&block) == Some(&in_fast);
            ByteCount(if here { BLOCK_SIZE } else { 0 })
        };
        Spread(ByLevel([
            bytes(true),
            bytes(false),
            ByteCount(0),
            ByteCount(0),
        ]))
    }

    /// Moves a block, if it will and there is room.
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

    /// How full the tiers are.
    pub fn nodes(&self) -> ByLevel<NodeFacts> {
        let facts = |tier| NodeFacts {
            free: ByteCount(self.free.get(tier) * BLOCK_SIZE),
            kept: ByteCount(0),
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
    /// Time that moving a block takes, nanoseconds.
    pub block_ns: u64,
    is_known: bool,
}

impl Plain {
    /// Before the first epoch.
    pub fn new(script: &Script, base: GuestVirtAddr) -> Self {
        Self::with(ByHeat::new(WORTH_MUCH), script, base)
    }
}

impl<S: Strategy> Plain<S> {
    /// The same with another strategy.
    pub fn with(strategy: S, script: &Script, base: GuestVirtAddr) -> Self {
        let config = script.config();
        Self {
            kernel: MapKernel::new(script, base),
            engine: Engine::new(strategy, config),
            block_ns: 0,
            is_known: false,
        }
    }

    /// Does what the engine asks for; see [`Rig::epoch`].
    ///
    /// # Panics
    /// When the engine takes an answer for a misuse.
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
    /// Likewise.
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
                })
            }
            Request::Reclaim => engine.push(Input::Reclaimed),
            Request::Sleep { .. } => engine.push(Input::Epoch),
        };
        pushed.expect("the answer fits");
    }
}

/// A script in which a hot set of `hot` blocks lies behind `fast` idle ones for so many epochs.
pub fn hot_set(fast: u64, slow: u64, hot: std::ops::Range<u64>, epochs: usize) -> Script {
    let len = hot.end - hot.start;
    let sample = |i: u64| match i % 10 {
        0 => i * 7919 % (fast + slow),
        // Nine of ten, each block in turn.
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
