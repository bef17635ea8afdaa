//! Measures the engine's CPU time per epoch (samples, heat, ranking and plan), for memory of 16 GiB to 1 TiB.

use std::time::Duration;

use criterion::{BenchmarkId, Criterion, criterion_group, criterion_main};
use demeter_policy::engine::{ByHeat, Config, Direction, Engine, Gain, Input, NodeFacts, Request};
use demeter_policy::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, Pid, Sample, TierBytes, Tuning, VirtRange,
};

const PID: Pid = Pid(1);
const FIRST: u64 = 1 << 19;

/// Samples per epoch: those of sixteen busy CPUs.
const SAMPLES: u64 = 12_000;

/// A driver with a number of blocks, the first quarter of them in fast memory.
#[derive(Clone)]
struct Driver {
    engine: Engine,
    blocks: u64,
    fast: Vec<bool>,
    drawn: u64,
}

impl Driver {
    fn new(blocks: u64) -> Self {
        let gain = Gain {
            loads_per_sample: Some(4093),
            waits: 1.0,
            latency_ns: ByLevel([80, 200, 0, 0]),
            cpus: 16,
        };
        let config = Config::new(&Tuning::default(), ByteCount(blocks / 4 * BLOCK_SIZE));
        let mut driver = Self {
            engine: Engine::new(ByHeat::new(gain), config),
            blocks,
            fast: (0..blocks).map(|b| b < blocks / 4).collect(),
            drawn: 0,
        };
        // Until the place of every block is known.
        for _ in 0..200 {
            driver.epoch();
        }
        driver
    }

    /// Nine of ten samples are in the last tenth.
    fn sample(&mut self) -> Sample {
        self.drawn += 1;
        let spread = self.drawn.wrapping_mul(0x9e37_79b9_7f4a_7c15) >> 24;
        let block = match self.drawn % 10 {
            0 => spread % self.blocks,
            _ => self.blocks - 1 - spread % (self.blocks / 10),
        };
        Sample {
            pid: PID,
            addr: GuestVirtAddr((FIRST + block) * BLOCK_SIZE),
            weight: 1,
        }
    }

    fn place(&self, block: Block) -> TierBytes {
        let fast = self.fast[(block.0 - FIRST) as usize];
        let bytes = |there: bool| ByteCount(if there { BLOCK_SIZE } else { 0 });
        TierBytes {
            fast: bytes(fast),
            slow: bytes(!fast),
        }
    }

    /// Answers requests until the engine sleeps, and starts the next epoch.
    fn epoch(&mut self) {
        while !matches!(self.engine.request(), Request::Sleep { .. }) {
            self.answer();
        }
        self.engine.push(Input::Epoch).expect("it sleeps");
    }

    fn answer(&mut self) {
        let engine = &mut self.engine;
        let pushed = match engine.request() {
            Request::Sleep { .. } => engine.push(Input::Epoch),
            Request::Refresh => {
                if engine.processes().next().is_none() {
                    engine.push(Input::Started(PID)).expect("it is new");
                    let (start, end) = (Block(FIRST).start(), Block(FIRST + self.blocks).start());
                    let vmas = &[VirtRange::new(start, end).expect("not empty")];
                    let space = Input::Space { pid: PID, vmas };
                    engine.push(space).expect("it is known");
                }
                engine.push(Input::Refreshed)
            }
            Request::Samples { .. } => {
                for _ in 0..SAMPLES {
                    let sample = Input::Sample(self.sample());
                    self.engine.push(sample).expect("samples are wanted");
                }
                self.engine.push(Input::SamplesEnd {
                    lost: 0,
                    rejected: 0,
                    is_repeat: false,
                })
            }
            Request::LookUp { blocks, .. } => {
                let blocks = blocks.to_vec();
                let places: Vec<_> = blocks.iter().map(|b| self.place(*b).into()).collect();
                self.engine.push(Input::Located(&places))
            }
            Request::ReadNodes => {
                let mut facts = ByLevel::<NodeFacts>::default();
                facts.0[1].free = ByteCount(1 << 40);
                engine.push(Input::Nodes(facts))
            }
            Request::Move {
                direction, blocks, ..
            } => {
                let blocks: Vec<Block> = blocks.iter().map(|r| r.block).collect();
                for block in &blocks {
                    self.fast[(block.0 - FIRST) as usize] = direction == Direction::Promotion;
                }
                let places: Vec<_> = blocks.iter().map(|b| self.place(*b).into()).collect();
                self.engine.push(Input::Moved {
                    placements: &places,
                    took_ns: 700_000 * places.len() as u64,
                    cpu_ns: 700_000 * places.len() as u64,
                })
            }
            Request::Reclaim => engine.push(Input::Reclaimed),
        };
        pushed.expect("the answer fits");
    }
}

/// CPU time, so that other running programs do not count.
fn cpu_time() -> Duration {
    let now = rustix::time::clock_gettime(rustix::time::ClockId::ThreadCPUTime);
    Duration::new(now.tv_sec as u64, now.tv_nsec as u32)
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("epoch");
    group.sample_size(20);
    for gib in [16, 256, 1024] {
        let driver = Driver::new(gib << 9);
        let bytes = driver.engine.state_bytes() as u64 / driver.blocks;
        println!("{gib} GiB: {bytes} bytes a block");
        group.bench_function(BenchmarkId::from_parameter(format!("{gib} GiB")), |b| {
            b.iter_custom(|epochs| {
                let mut driver = driver.clone();
                let start = cpu_time();
                (0..epochs).for_each(|_| driver.epoch());
                cpu_time() - start
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
