//! Benchmarks the model's access rate on one core.
//!
//! Run `cargo bench -p demeter-sim`; large footprints need some hundred MiB.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use demeter_sim::{Model, Testbed};

use self::accesses::ACCESSES;

mod accesses;

fn bench(criterion: &mut Criterion) {
    for case in accesses::cases() {
        let mut testbed = Testbed::new(case.size);
        let mut group = criterion.benchmark_group(case.name);
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
                    let before = accesses::cpu_time();
                    for _ in 0..times {
                        for batch in case.accesses.chunks(demeter_sim::BATCH) {
                            black_box(testbed.run(model, black_box(batch)));
                        }
                    }
                    accesses::cpu_time() - before
                });
            });
        }
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
