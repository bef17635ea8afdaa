//! What the classifier costs: per sample, and per epoch with many ranges.

use std::hint::black_box;
use std::time::{Duration, Instant};

use criterion::{Criterion, Throughput, criterion_group, criterion_main};
use demeter_policy::{Classifier, ClassifierConfig, GuestVirtAddr, MIB, VirtRange};

const SAMPLES_PER_EPOCH: u64 = 3000;

fn space(len: u64) -> VirtRange {
    let start = 1 << 40;
    VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + len)).expect("not empty")
}

/// Deterministic addresses: 90 % in 64 hot spots of 2 MiB, the rest anywhere.
fn addresses(space: VirtRange, n: u64, mut state: u64) -> Vec<GuestVirtAddr> {
    let mut below = |n: u64| {
        state = state
            .wrapping_mul(6364136223846793005)
            .wrapping_add(1442695040888963407);
        ((u128::from(state) * u128::from(n)) >> 64) as u64
    };
    let spots = space.len().0 / 64;
    (0..n)
        .map(|_| {
            let offset = match below(10) {
                0 => below(space.len().0),
                _ => below(64) * spots + below(2 * MIB),
            };
            GuestVirtAddr(space.start().0 + offset)
        })
        .collect()
}

/// A classifier that holds as many ranges as it may.
fn full(space: VirtRange) -> Classifier {
    let mut c = Classifier::new(ClassifierConfig::default());
    c.set_space(&[space]);
    let granules = space.len().0 / (2 * MIB);
    for _ in 0..6 {
        for i in 0..256 {
            for _ in 0..64 {
                c.add(
                    GuestVirtAddr(space.start().0 + i * granules / 256 * 2 * MIB),
                    1,
                );
            }
        }
        c.end_epoch();
    }
    assert!(c.ranges().len() >= 500, "{} ranges", c.ranges().len());
    c
}

fn bench(criterion: &mut Criterion) {
    for (name, len) in [
        ("16 GiB", 16 << 30),
        ("1 TiB", 1 << 40),
        ("64 TiB", 1u64 << 46),
    ] {
        let space = space(len);
        let addresses = addresses(space, SAMPLES_PER_EPOCH, 1);
        let mut group = criterion.benchmark_group(format!("classifier over {name}"));

        let mut classifier = full(space);
        group.throughput(Throughput::Elements(SAMPLES_PER_EPOCH));
        group.bench_function("add, folds included", |b| {
            b.iter_custom(|epochs| {
                let mut spent = Duration::ZERO;
                for _ in 0..epochs {
                    let start = Instant::now();
                    addresses
                        .iter()
                        .for_each(|a| classifier.add(black_box(*a), 1));
                    spent += start.elapsed();
                    classifier.end_epoch();
                }
                spent
            });
        });

        let mut classifier = full(space);
        group.throughput(Throughput::Elements(1));
        group.bench_function("end_epoch with 512 ranges", |b| {
            b.iter_custom(|epochs| {
                let mut spent = Duration::ZERO;
                for _ in 0..epochs {
                    addresses.iter().for_each(|a| classifier.add(*a, 1));
                    let start = Instant::now();
                    classifier.end_epoch();
                    spent += start.elapsed();
                }
                spent
            });
        });
        println!("state: {} KiB", classifier.state_bytes() / 1024);
    }
}

criterion_group!(benches, bench);
criterion_main!(benches);
