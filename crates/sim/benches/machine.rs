//! How many accesses a second the model runs, on one core.
//!
//! `cargo bench -p demeter-sim`; large footprints need some hundred MiB.

use std::hint::black_box;
use std::time::Duration;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use demeter_policy::{ByteCount, GuestVirtAddr, MIB};
use demeter_sim::{Access, Model, Testbed};

/// Accesses that are generated beforehand and run again and again.
const ACCESSES: usize = 1 << 21;

/// Time that this thread has had a CPU for: what else runs on this computer does not count.
fn cpu_time() -> Duration {
    let stat = std::fs::read_to_string("/proc/thread-self/schedstat").unwrap_or_default();
    let nanoseconds = stat.split(' ').next().and_then(|ns| ns.parse().ok());
    Duration::from_nanos(nanoseconds.expect("Linux counts the time of threads"))
}

struct Rng(u64);

impl Rng {
    fn below(&mut self, n: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        ((u128::from(self.0) * u128::from(n)) >> 64) as u64
    }
}

/// Random 8-byte updates: a load and a store each. `hot`: seven of eight go to the first 1/128.
fn updates(bytes: u64, hot: bool) -> Vec<Access> {
    let mut rng = Rng(88172645463325252);
    let mut accesses = Vec::with_capacity(ACCESSES);
    while accesses.len() < ACCESSES {
        let within = if hot && rng.below(8) < 7 {
            bytes / 128
        } else {
            bytes
        };
        let gva = GuestVirtAddr(Testbed::BASE.0 + rng.below(within / 8) * 8);
        accesses.extend([Access::load(gva), Access::store(gva)]);
    }
    accesses
}

fn sequential(bytes: u64) -> Vec<Access> {
    (0..ACCESSES as u64)
        .map(|i| Access::load(GuestVirtAddr(Testbed::BASE.0 + i * 8 % bytes)))
        .collect()
}

fn bench(criterion: &mut Criterion) {
    let cases = [
        ("gups 256 MiB", 256 * MIB, updates(256 * MIB, false)),
        ("gups 16 GiB", 16 << 30, updates(16 << 30, false)),
        ("hot and cold", 256 * MIB, updates(256 * MIB, true)),
        ("sequential", 256 * MIB, sequential(256 * MIB)),
    ];
    for (name, bytes, accesses) in cases {
        let mut testbed = Testbed::new(ByteCount(bytes));
        let mut group = criterion.benchmark_group(name);
        group.sample_size(10);
        group.throughput(Throughput::Elements(ACCESSES as u64));
        for model in [
            Model::Native,
            Model::NativeCaches,
            Model::Nested,
            Model::Full,
        ] {
            group.bench_function(format!("{model:?}"), |b| {
                b.iter_custom(|times| {
                    let before = cpu_time();
                    for _ in 0..times {
                        for batch in accesses.chunks(demeter_sim::BATCH) {
                            black_box(testbed.run(model, black_box(batch)));
                        }
                    }
                    cpu_time() - before
                });
            });
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
