//! Benchmarks the access rate of workload generators on one core, which must exceed the machine model's.
//!
//! Run `cargo bench -p demeter-sim --bench workload`.

use std::hint::black_box;

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use demeter_policy::GuestVirtAddr;
use demeter_scenario::{App, Gups, Memlat, Silo, SiloMix, Workload as Kind};
use demeter_sim::workload::Workload;
use demeter_sim::{Batch, Program};

/// Size of a small VM of the paper.
const SIZE_MIB: u64 = 14 << 10;
const BATCHES: usize = 256;

fn kinds() -> Vec<(&'static str, Kind)> {
    let app = || App {
        size_mib: SIZE_MIB,
        cold_mib: 0,
        threads: 1,
    };
    let silo = |mix| {
        Kind::Silo(Silo {
            size_mib: SIZE_MIB,
            cold_mib: 0,
            threads: 1,
            mix,
            drift_s: None,
            theta: None,
        })
    };
    let gups = Gups {
        reverse: true,
        ..Gups::new(SIZE_MIB, 1 << 10, 0.9)
    };
    let memlat = Memlat {
        size_mib: SIZE_MIB,
        cold_mib: 0,
    };
    vec![
        ("gups", Kind::Gups(gups)),
        ("memlat", Kind::Memlat(memlat)),
        ("sequential", Kind::Sequential(app())),
        ("btree", Kind::Btree(app())),
        ("silo ycsb", silo(SiloMix::Ycsb)),
        ("silo tpcc", silo(SiloMix::Tpcc)),
        ("xsbench", Kind::Xsbench(app())),
        ("bwaves", Kind::Bwaves(app())),
        ("graph500", Kind::Graph500(app())),
        ("pagerank", Kind::Pagerank(app())),
        ("liblinear", Kind::Liblinear(app())),
    ]
}

fn bench(criterion: &mut Criterion) {
    let mut group = criterion.benchmark_group("workload");
    group.sample_size(10);
    for (name, kind) in kinds() {
        let Ok(mut program) = Workload::new(&kind, 1, 0) else {
            unreachable!("only a trace can fail");
        };
        let bases: Vec<_> = (1..=program.regions().len() as u64)
            .map(|region| GuestVirtAddr(region << 40))
            .collect();
        program.place(&bases);
        let mut batch = Batch::default();
        let mut accesses = 0;
        for _ in 0..BATCHES {
            batch.clear();
            program.next(0, 0, &mut batch);
            accesses += batch.accesses().len();
        }
        group.throughput(Throughput::Elements(accesses as u64));
        group.bench_function(name, |bencher| {
            bencher.iter(|| {
                for _ in 0..BATCHES {
                    batch.clear();
                    program.next(0, 0, &mut batch);
                    black_box(batch.accesses());
                }
            });
        });
    }
    group.finish();
}

criterion_group!(benches, bench);
criterion_main!(benches);
