//! Measures the agent's own CPU time per epoch and its memory, for 64 GiB and 1 TiB of memory.
//!
//! An epoch is the engine's work from waking to sleeping, and the figures for its status. The time to look pages up, to
//! move them and to read /proc does not count. DAMON's passes are chosen in another thread; that time has a column of
//! its own.
//!
//! `cargo bench -p demeter-policy --bench epoch [PART OF A NAME]`

use std::time::Duration;

use demeter_policy::benefit::Observed;
use demeter_policy::damon::{CPU_PERCENT, Cost, Found, Look, Next, Observer, WAITS};
use demeter_policy::engine::{
    ByHeat, Config, Direction, Engine, Gain, Input, Misuse, NodeFacts, Request,
};
use demeter_policy::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, Observation, PAGE_SIZE, PerTier, Pid, Sample, Spread,
    TierBytes, Tuning, VirtRange,
};

const PID: Pid = Pid(1);
const FIRST: u64 = 1 << 19;
const CPUS: u32 = 16;
const EPOCH: Duration = Duration::from_millis(500);

/// Samples per epoch: those of sixteen busy CPUs.
const SAMPLES: u64 = 12_000;

/// Epochs of each half of a run. In the first all memory is looked up, and moved for the first time.
const EPOCHS: usize = 200;

/// A hot block, and any block, is accessed so often each second. The first tenth from the end is hot.
const ACCESSES: (f64, f64) = (7000.0, 80.0);

/// Blocks of fast memory that are free at first: what the engine keeps free.
const FREE_BLOCKS: u64 = 32;

/// CPU time of a look at a page, and of setting a region.
const LOOK: Duration = Duration::from_nanos(1200);
const SET: Duration = Duration::from_micros(13);

/// How memory is used and mapped.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Kind {
    /// All of it is used, in huge pages.
    Used,
    /// One block in fifty is used; the others are mapped and absent.
    Idle,
    /// All of it is used, in small pages: part of each block lies in the other tier.
    Small,
    /// All of it is used, and another block is mapped every two seconds.
    Growing,
}

/// Accesses as a tracker reports them.
#[derive(Debug, Clone, Copy, PartialEq)]
enum Tracker {
    Perf,
    Damon,
}

/// Where the blocks lie, and what has been drawn so far.
struct World {
    blocks: u64,
    kind: Kind,
    fast: Vec<bool>,
    /// Free blocks of fast memory.
    free: u64,
    drawn: u64,
}

impl World {
    /// A number below `n`.
    fn draw(&mut self, n: u64) -> u64 {
        self.drawn = self.drawn.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mixed = (self.drawn ^ self.drawn >> 31).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        (mixed >> 20) % n
    }

    fn is_there(&self, block: u64) -> bool {
        self.kind != Kind::Idle || block.is_multiple_of(50)
    }

    fn is_hot(&self, block: u64) -> bool {
        block >= self.blocks - self.blocks / 10
    }

    /// Nine of ten samples are in the hot tenth.
    fn sample(&mut self) -> Sample {
        let mut block = match self.draw(10) {
            0 => self.draw(self.blocks),
            _ => self.blocks - 1 - self.draw(self.blocks / 10),
        };
        if !self.is_there(block) {
            block -= block % 50;
        }
        Sample {
            pid: PID,
            addr: Block(FIRST + block).start(),
            weight: 1,
        }
    }

    fn place(&self, block: Block) -> Spread {
        let at = block.0 - FIRST;
        let (mut fast, mut slow) = match self.fast[at as usize] {
            true => (BLOCK_SIZE, 0),
            false => (0, BLOCK_SIZE),
        };
        match self.kind {
            Kind::Small if at.is_multiple_of(3) => (fast, slow) = (fast / 4 * 3, slow / 4 * 3),
            Kind::Small => (fast, slow) = (fast / 2 + slow / 4, slow / 2 + fast / 4),
            Kind::Idle if !self.is_there(at) => (fast, slow) = (0, 0),
            Kind::Used | Kind::Idle | Kind::Growing => {}
        }
        let (fast, slow) = (ByteCount(fast), ByteCount(slow));
        TierBytes { fast, slow }.into()
    }

    fn move_all(&mut self, blocks: &[Block], direction: Direction) {
        for block in blocks {
            self.fast[(block.0 - FIRST) as usize] = direction == Direction::Promotion;
        }
        let moved = blocks.len() as u64;
        self.free = match direction {
            Direction::Promotion => self.free.saturating_sub(moved),
            Direction::Demotion => self.free + moved,
        };
    }

    /// The result of a pass for one block.
    fn look(&mut self, look: &Look, block: Block) -> Found {
        let at = block.0 - FIRST;
        let page_bytes = match self.kind {
            Kind::Small => PAGE_SIZE,
            Kind::Used | Kind::Idle | Kind::Growing => BLOCK_SIZE,
        };
        let a_second = match (self.is_there(at), self.is_hot(at)) {
            (false, _) => 0.0,
            (true, true) => ACCESSES.0,
            (true, false) => ACCESSES.1,
        };
        let a_page = a_second * page_bytes as f64 / BLOCK_SIZE as f64;
        let chance = 1.0 - (-a_page * look.pass.interval.as_secs_f64()).exp();
        let is_found = |_: &u32| self.draw(1 << 20) < (chance * f64::from(1 << 20)) as u64;
        let accesses = (0..look.pass.looks).filter(is_found).count() as u32;
        Found {
            pid: PID,
            block,
            accesses,
            page_bytes: std::num::NonZero::new(page_bytes).filter(|_| accesses > 0),
        }
    }
}

/// A driver of the engine and, for DAMON, of the observer.
struct Driver {
    engine: Engine,
    world: World,
    observer: Option<Observer>,
    /// The observer's time.
    now: Duration,
    found: Vec<Observation>,
    space: [VirtRange; 1],
    refreshes: u64,
}

/// A mapping with this number of blocks.
fn space(blocks: u64) -> [VirtRange; 1] {
    let (start, end) = (Block(FIRST).start(), Block(FIRST + blocks).start());
    [VirtRange::new(start, end).expect("not empty")]
}

impl Driver {
    fn new(blocks: u64, tracker: Tracker, kind: Kind) -> Self {
        let (period, waits) = match tracker {
            Tracker::Perf => (Some(4093), 1.0),
            Tracker::Damon => (None, WAITS),
        };
        let gain = Gain {
            loads_per_sample: period,
            waits,
            latency_ns: ByLevel([80, 200, 0, 0]),
            cpus: CPUS,
        };
        let config = Config {
            collapses: true,
            ..Config::new(&Tuning::default(), ByteCount(blocks / 4 * BLOCK_SIZE))
        };
        let is_damon = tracker == Tracker::Damon;
        Self {
            engine: Engine::new(ByHeat::new(gain), config),
            world: World {
                blocks,
                kind,
                fast: (0..blocks).map(|b| b < blocks / 4).collect(),
                free: FREE_BLOCKS,
                drawn: 0,
            },
            observer: is_damon.then(|| Observer::new(CPU_PERCENT, CPUS, Duration::ZERO)),
            now: Duration::ZERO,
            found: vec![],
            space: space(blocks),
            refreshes: 0,
        }
    }

    /// Runs an epoch. Returns its CPU time, without answers.
    fn epoch(&mut self) -> Duration {
        let mut took = timed(|| self.engine.push(Input::Epoch)).1;
        while !matches!(self.engine.request(), Request::Sleep { .. }) {
            took += self.answer();
        }
        took + timed(|| self.report()).1
    }

    /// Makes the figures of the agent's status and metrics.
    fn report(&self) {
        let engine = &self.engine;
        let figures: f64 = engine.processes().map(|p| p.samples).sum();
        let loads_per_s = self.observer.is_none().then(|| engine.rate() * 4093.0);
        let observed = Observed {
            ranking: engine.ranking(),
            residency: engine.residency(),
            served: loads_per_s.map(|_| engine.served()),
            latency_ns: PerTier {
                fast: 80,
                slow: 200,
            },
            running_ms: 400,
            loads_per_s,
            overlaps: false,
        };
        // As often as the agent does.
        let benefit = engine.epoch().is_multiple_of(4).then(|| observed.benefit());
        let seen = (figures, engine.working_set(), engine.set_aside(), benefit);
        std::hint::black_box(seen);
    }

    /// Answers the engine's request. Returns the time that the engine took for the answer.
    fn answer(&mut self) -> Duration {
        let Self { engine, world, .. } = self;
        let (pushed, took) = match engine.request() {
            Request::Sleep { .. } => (Ok(()), Duration::ZERO),
            Request::Refresh => {
                let pid = PID;
                if engine.processes().next().is_none() {
                    engine.push(Input::Started(pid)).expect("it is new");
                }
                if world.kind == Kind::Growing {
                    // Some blocks are still missing in the end.
                    self.refreshes += 1;
                    let missing = (2 * EPOCHS as u64).saturating_sub(self.refreshes);
                    self.space = space(world.blocks - missing);
                }
                let vmas = &self.space;
                timed(|| {
                    engine.push(Input::Space { pid, vmas })?;
                    engine.push(Input::Refreshed)
                })
            }
            Request::Samples { wanted, .. } => {
                if let Some(observer) = &mut self.observer {
                    observer.want(wanted);
                }
                let samples: Vec<Sample> = match self.observer {
                    None => (0..SAMPLES).map(|_| world.sample()).collect(),
                    Some(_) => vec![],
                };
                let found = std::mem::take(&mut self.found);
                timed(|| give(engine, samples, found))
            }
            Request::LookUp { blocks, .. } => {
                let places: Vec<_> = blocks.iter().map(|b| world.place(*b)).collect();
                timed(|| engine.push(Input::Located(&places)))
            }
            Request::ReadNodes => {
                let mut facts = ByLevel::<NodeFacts>::default();
                facts.0[0].free = ByteCount(world.free * BLOCK_SIZE);
                facts.0[1].free = ByteCount(1 << 40);
                timed(|| engine.push(Input::Nodes(facts)))
            }
            Request::Move {
                direction, blocks, ..
            } => {
                let blocks: Vec<Block> = blocks.iter().map(|r| r.block).collect();
                world.move_all(&blocks, direction);
                let whole = |&block: &Block| {
                    let resident = world.place(block).resident();
                    let mut spread = Spread::default();
                    spread.bytes.0[usize::from(direction == Direction::Demotion)] = resident;
                    spread
                };
                let places: Vec<_> = blocks.iter().map(whole).collect();
                let took_ns = 700_000 * places.len() as u64;
                timed(|| {
                    engine.push(Input::Moved {
                        placements: &places,
                        took_ns,
                        cpu_ns: took_ns,
                    })
                })
            }
            Request::Collapse { blocks, .. } => {
                let took_ns = 300_000 * blocks.len() as u64;
                let cpu_ns = took_ns;
                timed(|| engine.push(Input::Collapsed { took_ns, cpu_ns }))
            }
            Request::Reclaim => timed(|| engine.push(Input::Reclaimed)),
        };
        pushed.expect("the answer fits");
        took
    }

    /// Runs DAMON's passes during an epoch. Returns the observer's CPU time.
    fn observe(&mut self, until: Duration) -> Duration {
        let Some(observer) = &mut self.observer else {
            return Duration::ZERO;
        };
        let prospect = self.engine.prospect();
        let ((), mut took) = timed(|| {
            observer.set_memory(PID, &self.space);
            observer.set_prospect(prospect);
        });
        while self.now < until {
            let (next, chose) = timed(|| observer.next(self.now));
            took += chose;
            let look = match next {
                Next::Look(look) => look,
                Next::Rest(due) => {
                    self.now = due;
                    continue;
                }
                Next::Idle => return took,
            };
            let blocks = look.blocks.len() as u32;
            let found: Vec<Found> = (look.blocks.iter())
                .map(|&(_, block)| self.world.look(&look, block))
                .collect();
            let cost = Cost {
                looking: LOOK * (look.pass.looks + 1) * blocks,
                setting: SET * blocks,
                set: blocks.into(),
            };
            let length = look.pass.length();
            let out = &mut self.found;
            took += timed(|| observer.found(&look, length, &cost, &found, out)).1;
            self.now += length + cost.setting;
        }
        took
    }
}

/// A result and its CPU time, so that other running programs do not count.
fn timed<T>(work: impl FnOnce() -> T) -> (T, Duration) {
    let now = || {
        let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
        Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
    };
    let start = now();
    let result = work();
    (result, now() - start)
}

/// The median, the mean and the longest of some times, milliseconds.
fn summary(times: &mut [Duration]) -> [f64; 3] {
    times.sort_unstable();
    let ms = |time: Duration| time.as_secs_f64() * 1e3;
    let sum: Duration = times.iter().sum();
    [
        ms(times[times.len() / 2]),
        ms(sum) / times.len() as f64,
        times.last().copied().map_or(0.0, ms),
    ]
}

fn run(name: &str, gib: u64, tracker: Tracker, kind: Kind) {
    let mut driver = Driver::new(gib << 9, tracker, kind);
    for half in ["first", "then"] {
        let (mut epochs, mut rounds) = (vec![], vec![]);
        for _ in 0..EPOCHS {
            rounds.push(driver.observe(driver.now.max(EPOCH * driver.engine.epoch()) + EPOCH));
            epochs.push(driver.epoch());
        }
        let [median, mean, longest] = summary(&mut epochs);
        let [_, observer, _] = summary(&mut rounds);
        println!("{name:<22} {half:<6} {median:>8.2} {mean:>8.2} {longest:>8.2} {observer:>9.2}");
    }
    let observer = driver.observer.as_ref().map_or(0, Observer::state_bytes);
    let bytes = (driver.engine.state_bytes() + observer) as f64 / driver.world.blocks as f64;
    println!("{name:<22} {bytes:.1} bytes a block");
}

fn main() {
    let wanted = std::env::args().skip(1).find(|arg| !arg.starts_with('-'));
    println!("CPU time, ms                    median     mean  longest  observer");
    for (gib, size) in [(64, "64 GiB"), (1024, "1 TiB")] {
        for (tracker, by) in [(Tracker::Perf, "perf"), (Tracker::Damon, "DAMON")] {
            let kinds = [
                (Kind::Used, ""),
                (Kind::Idle, " idle"),
                (Kind::Small, " small"),
                (Kind::Growing, " growing"),
            ];
            for (kind, like) in kinds {
                let name = format!("{size} {by}{like}");
                if wanted.as_ref().is_none_or(|wanted| name.contains(wanted)) {
                    run(&name, gib, tracker, kind);
                }
            }
        }
    }
}

/// Answers a request for samples.
fn give(engine: &mut Engine, samples: Vec<Sample>, found: Vec<Observation>) -> Result<(), Misuse> {
    let is_repeat = samples.is_empty() && found.is_empty();
    for sample in samples {
        engine.push(Input::Sample(sample))?;
    }
    for found in found {
        engine.push(Input::Looked(found))?;
    }
    engine.push(Input::SamplesEnd {
        lost: 0,
        rejected: 0,
        is_repeat,
    })
}
