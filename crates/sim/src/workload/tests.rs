//! Tests of all workloads, and the share of hot traffic in each.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestVirtAddr, MIB, PAGE_SIZE, VirtRange};
use demeter_scenario::{
    App, Gups, Memlat, Mix, Part, Pattern, Phase, Several, Silo, SiloMix, Workload as Kind,
};
use proptest::prelude::*;

use super::Workload;
use crate::{Batch, Program};

const GIB: u64 = 1 << 30;

fn app(size_mib: u64, threads: u32) -> App {
    App {
        size_mib,
        cold_mib: 0,
        threads,
    }
}

fn silo(size_mib: u64, threads: u32, mix: SiloMix) -> Kind {
    Kind::Silo(Silo {
        size_mib,
        cold_mib: 0,
        threads,
        mix,
        drift_s: (mix == SiloMix::Ycsb).then_some(1),
        theta: None,
    })
}

fn gups(size_mib: u64, hot_mib: u64, hot_weight: f64, threads: u32) -> Kind {
    Kind::Gups(Gups {
        size_mib,
        hot_mib,
        hot_weight,
        reverse: true,
        threads,
        shift_at_s: Some(1),
        phases: vec![],
        in_flight: 1,
        scattered: false,
        compute_ns: 0,
        copies: 1,
        bind: vec![],
        interleave: vec![],
        cpuset: vec![],
        shared_by: 1,
        reserve_mib: 0,
    })
}

/// A gups with scattered hot blocks.
fn scattered(size_mib: u64, hot_mib: u64, threads: u32) -> Kind {
    match gups(size_mib / 2 * 2, hot_mib / 2 * 2, 0.9, threads) {
        Kind::Gups(gups) => Kind::Gups(Gups {
            scattered: true,
            ..gups
        }),
        other => other,
    }
}

/// Two processes: one like `mix`, the other with growing memory.
fn several(size_mib: u64, threads: u32) -> Kind {
    let Kind::Mix(first) = mix(size_mib / 2, threads, None) else {
        unreachable!("a mix is one");
    };
    let mut second = first.clone();
    second.parts[1] = Part {
        hot_mib: 0,
        hot_weight: 0.0,
        moves_s: None,
        start_mib: Some(1),
        grows_s: Some(20),
        ..second.parts[1].clone()
    };
    second.compute_ns = 500;
    Kind::Several(Several {
        processes: vec![first, second],
    })
}

/// A sweep and a moving hot set, at once or in turn.
fn mix(size_mib: u64, threads: u32, turns_s: Option<u64>) -> Kind {
    let part = |pattern, hot_mib| Part {
        size_mib: size_mib / 2,
        share: 1.0,
        pattern,
        stores: 0.3,
        hot_mib,
        hot_weight: if hot_mib > 0 { 0.9 } else { 0.0 },
        moves_s: (hot_mib > 0).then_some(1),
        start_mib: None,
        grows_s: None,
    };
    Kind::Mix(Mix {
        cold_mib: 0,
        threads,
        turns_s,
        compute_ns: 0,
        parts: vec![
            part(Pattern::Sweep, 0),
            part(Pattern::Random, size_mib / 10),
        ],
    })
}

/// All computed workloads.
fn kinds(size_mib: u64, threads: u32) -> Vec<Kind> {
    let memlat = Memlat {
        size_mib: size_mib - size_mib / 3,
        cold_mib: size_mib / 3,
    };
    vec![
        gups(size_mib, size_mib / 8, 0.9, threads),
        Kind::Memlat(memlat),
        Kind::Sequential(app(size_mib, threads)),
        Kind::Btree(app(size_mib, threads)),
        silo(size_mib, threads, SiloMix::Ycsb),
        silo(size_mib, threads, SiloMix::Tpcc),
        Kind::Xsbench(app(size_mib, threads)),
        Kind::Bwaves(app(size_mib, threads)),
        Kind::Graph500(app(size_mib, threads)),
        Kind::Pagerank(app(size_mib, threads)),
        Kind::Liblinear(app(size_mib, threads)),
        mix(size_mib, threads, None),
        mix(size_mib, threads, Some(2)),
        scattered(size_mib, size_mib / 8, threads),
        several(size_mib, threads),
    ]
}

/// The program with its regions placed a page apart, and their ranges.
fn placed(kind: &Kind, seed: u64) -> (Workload, Vec<VirtRange>) {
    let mut program = Workload::new(kind, seed, 0).unwrap();
    let mut base = 1 << 40;
    let mut ranges = Vec::new();
    for region in program.regions() {
        let end = base + region.bytes.0;
        ranges.push(VirtRange::new(GuestVirtAddr(base), GuestVirtAddr(end)).unwrap());
        base = end.next_multiple_of(PAGE_SIZE) + PAGE_SIZE;
    }
    let bases: Vec<_> = ranges.iter().map(VirtRange::start).collect();
    program.place(&bases);
    (program, ranges)
}

fn next(program: &mut Workload, thread: usize, now_ns: u64) -> Batch {
    let mut batch = Batch::default();
    program.next(thread, now_ns, &mut batch);
    batch
}

/// The share of accesses in batches of thread 0 that go to `ranges`.
fn share(program: &mut Workload, batches: u32, ranges: &[VirtRange]) -> f64 {
    let (mut hits, mut all) = (0, 0);
    for _ in 0..batches {
        let batch = next(program, 0, 0);
        let inside = |gva| ranges.iter().any(|range| range.contains(gva));
        hits += batch.accesses().iter().filter(|a| inside(a.gva())).count();
        all += batch.accesses().len();
    }
    hits as f64 / all as f64
}

#[test]
fn a_hot_set_in_phases_keeps_its_end_and_gets_its_share() {
    let phases = [(10, 60), (20, 5)].map(|(at_s, hot_mib)| Phase { at_s, hot_mib });
    for reverse in [false, true] {
        let kind = Kind::Gups(Gups {
            size_mib: 100,
            hot_mib: 20,
            hot_weight: 0.9,
            reverse,
            threads: 1,
            shift_at_s: None,
            phases: phases.to_vec(),
            in_flight: 1,
            scattered: false,
            compute_ns: 0,
            copies: 1,
            bind: vec![],
            interleave: vec![],
            cpuset: vec![],
            shared_by: 1,
            reserve_mib: 0,
        });
        let (mut program, ranges) = placed(&kind, 3);
        for (second, hot_mib) in [(0, 20), (9, 20), (10, 60), (19, 60), (20, 5), (99, 5)] {
            let now_ns = second * 1_000_000_000;
            let hot = program.hot(now_ns);
            let lengths: Vec<u64> = hot.iter().map(|range| range.len().0).collect();
            assert_eq!(lengths, [hot_mib * MIB], "at {second} s");
            match reverse {
                false => assert_eq!(hot[0].start(), ranges[0].start()),
                true => assert_eq!(hot[0].end(), ranges[0].end()),
            }
            let batch = next(&mut program, 0, now_ns);
            let all = batch.accesses().len() as f64;
            let hits = batch.accesses().iter().filter(|a| hot[0].contains(a.gva()));
            let share = hits.count() as f64 / all;
            assert!((0.85..0.95).contains(&share), "{share} at {second} s");
        }
    }
}

#[test]
fn a_scattered_hot_set_is_made_of_single_blocks_and_gets_its_share() {
    let kind = scattered(1024, 128, 1);
    let hot_at = |now_ns, seed| placed(&kind, seed).0.hot(now_ns);
    let hot = hot_at(0, 3);
    let whole = |range: &&VirtRange| range.len().0 == BLOCK_SIZE;
    assert_eq!(hot.iter().filter(whole).count(), 64);
    // Few hot blocks are adjacent, and another seed selects others.
    let beside = hot.windows(2).filter(|w| w[0].end() == w[1].start());
    assert!(beside.count() < 16);
    assert_ne!(hot, hot_at(0, 4));
    // The hot set jumps as a whole.
    let jumped = hot_at(1_000_000_000, 3);
    assert!(jumped.len() == 64 && jumped.iter().all(|range| !hot.contains(range)));
    let (mut program, _) = placed(&kind, 3);
    let share = share(&mut program, 20, &hot);
    assert!((0.88..0.92).contains(&share), "{share}");
}

#[test]
fn each_process_uses_its_own_memory_as_far_as_it_is_there() {
    let kind = several(64, 2);
    let (mut program, ranges) = placed(&kind, 5);
    let regions = program.regions();
    let processes: Vec<u32> = regions.iter().map(|region| region.process).collect();
    assert_eq!(processes, [0, 0, 1, 1]);
    assert_eq!(program.threads(), 4);
    assert_eq!(regions[3].start, ByteCount(MIB));
    for (thread, second, of, until) in [
        (0, 0, 0..2, None),
        (3, 0, 2..4, Some(1)),
        (3, 10, 2..4, Some(9)),
    ] {
        let batch = next(&mut program, thread, second * 1_000_000_000);
        for access in batch.accesses() {
            let region = ranges.iter().position(|range| range.contains(access.gva()));
            let region = region.unwrap();
            assert!(of.contains(&region), "thread {thread} in region {region}");
            let offset = access.gva().0 - ranges[region].start().0;
            let is_there = until.is_none_or(|mib| offset < mib * MIB);
            assert!(region != 3 || is_there, "{offset} at {second} s");
        }
    }
    assert!(program.compute_ps(3) > program.compute_ps(0));
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn accesses_stay_inside_the_regions(size_mib in 16u64..200, threads in 1u32..5, seed: u64) {
        for kind in kinds(size_mib, threads) {
            let (mut program, ranges) = placed(&kind, seed);
            let bytes: u64 = program.regions().iter().map(|region| region.bytes.0).sum();
            prop_assert!(bytes <= size_mib * MIB, "{}: {} bytes", kind.kind(), bytes);
            prop_assert!(bytes > size_mib * MIB / 5 * 4, "{}: {} bytes", kind.kind(), bytes);
            for round in 0..40 {
                let thread = round % program.threads();
                let batch = next(&mut program, thread, round as u64 * 100_000_000);
                prop_assert!(!batch.accesses().is_empty());
                for access in batch.accesses() {
                    let inside = ranges.iter().any(|range| range.contains(access.gva()));
                    prop_assert!(inside, "{}: {}", kind.kind(), access.gva());
                }
            }
        }
    }

    #[test]
    fn what_is_hot_lies_inside_in_order(size_mib in 16u64..200, threads in 1u32..5, seed: u64) {
        for kind in kinds(size_mib, threads) {
            let (mut program, ranges) = placed(&kind, seed);
            for round in 0..20 {
                let hot = program.hot(round * 200_000_000);
                prop_assert!(hot.windows(2).all(|pair| pair[0].end() <= pair[1].start()));
                for range in &hot {
                    let inside = ranges.iter().any(|r| r.intersection(range) == Some(*range));
                    prop_assert!(inside, "{}: {}", kind.kind(), range);
                }
                next(&mut program, 0, round * 200_000_000);
            }
        }
    }

    #[test]
    fn a_seed_is_a_stream_and_threads_do_not_disturb_each_other(
        size_mib in 16u64..100, seed: u64, order in proptest::collection::vec(0usize..3, 1..30),
    ) {
        for kind in kinds(size_mib, 3) {
            let (mut mixed, _) = placed(&kind, seed);
            let (mut alone, _) = placed(&kind, seed);
            let thread = mixed.threads() - 1;
            for other in &order {
                let other = other % mixed.threads();
                if other != thread {
                    next(&mut mixed, other, 0);
                }
                let (a, b) = (next(&mut mixed, thread, 0), next(&mut alone, thread, 0));
                prop_assert_eq!(a.accesses(), b.accesses(), "{}", kind.kind());
                prop_assert_eq!(a.ops, b.ops);
            }
        }
    }

    #[test]
    fn every_page_is_touched_once_in_order(size_mib in 16u64..64, cold_mib in 0u64..8) {
        let kind = Kind::Xsbench(App { cold_mib, ..app(size_mib, 1) });
        let (mut program, ranges) = placed(&kind, 1);
        let mut batch = Batch::default();
        let mut touched = Vec::new();
        while program.populate(demeter_policy::PAGE_SIZE, &mut batch) {
            prop_assert!(batch.accesses().iter().all(|access| access.is_store()));
            touched.extend(batch.accesses().iter().map(|access| access.gva().0));
            batch.clear();
        }
        let pages = |r: &VirtRange| (r.start().0..r.end().0).step_by(PAGE_SIZE as usize);
        let expected: Vec<u64> = ranges.iter().flat_map(pages).collect();
        prop_assert_eq!(touched, expected);
        prop_assert_eq!(program.regions().len(), 3 + usize::from(cold_mib > 0));
    }

    #[test]
    fn gups_sends_its_weight_to_the_hot_set(
        size_mib in 16u64..1 << 18, hot_percent in 1u64..50, hot_weight in 0.0..=1.0f64, seed: u64,
    ) {
        let hot_mib = (size_mib * hot_percent / 100).max(1);
        let (mut program, _) = placed(&gups(size_mib, hot_mib, hot_weight, 1), seed);
        let hot = program.hot(0);
        prop_assert_eq!(hot[0].len().0, hot_mib * MIB);
        // 51,200 updates: five standard deviations are at most 0.011.
        let share = share(&mut program, 100, &hot);
        prop_assert!((share - hot_weight).abs() < 0.012, "{}", share);
        prop_assert!(program.hot(1_000_000_000)[0].intersection(&hot[0]).is_none() || hot_percent > 33);
    }
}

#[test]
fn gups_loads_and_stores_the_same_word_and_jumps_with_its_hot_set() {
    let (mut program, ranges) = placed(&gups(1024, 64, 1.0, 1), 3);
    assert_eq!(program.hot(0)[0].end(), ranges[0].end());
    for now_ns in [0, 999_999_999, 1_000_000_000] {
        let hot = program.hot(now_ns)[0];
        let batch = next(&mut program, 0, now_ns);
        assert_eq!(batch.ops as usize * 2, batch.accesses().len());
        for pair in batch.accesses().chunks(2) {
            assert!(!pair[0].is_store() && pair[1].is_store());
            assert_eq!(pair[0].gva(), pair[1].gva());
            assert!(hot.contains(pair[0].gva()));
        }
    }
    let middle = program.hot(1_000_000_000)[0].start().0 - ranges[0].start().0;
    assert_eq!(middle, 480 * MIB);
}

#[test]
fn memlat_follows_one_cycle_through_all_lines() {
    let kind = Kind::Memlat(Memlat {
        size_mib: 3,
        cold_mib: 5,
    });
    let (mut program, ranges) = placed(&kind, 9);
    let lines = 3 * MIB / 64;
    let mut seen = vec![0u32; lines as usize];
    let mut hops = 0;
    while hops < lines {
        for access in next(&mut program, 0, 0).accesses() {
            let line = (access.gva().0 - ranges[1].start().0) / 64;
            if hops < lines {
                seen[line as usize] += 1;
            }
            hops += 1;
        }
    }
    assert!(seen.iter().all(|&n| n == 1));
}

#[test]
fn sequential_takes_every_word_in_order_and_begins_again() {
    let (mut program, ranges) = placed(&Kind::Sequential(app(16, 2)), 1);
    for half in 0..2 {
        let start = ranges[0].start().0 + half * 8 * MIB;
        let mut expected = (start..start + 8 * MIB).step_by(8).cycle();
        for _ in 0..1500 {
            for access in next(&mut program, half as usize, 0).accesses() {
                assert_eq!(Some(access.gva().0), expected.next());
            }
        }
    }
}

/// Each application's hot part is small, but gets a large share of the traffic.
#[test]
fn hot_parts_are_hot() {
    let size_mib = 1024;
    for (kind, part_max, share_min) in [
        (Kind::Btree(app(size_mib, 1)), 0.08, 0.7),
        (Kind::Xsbench(app(size_mib, 1)), 0.04, 0.66),
        (Kind::Graph500(app(size_mib, 1)), 0.12, 0.5),
        (Kind::Pagerank(app(size_mib, 1)), 0.04, 0.45),
        (Kind::Liblinear(app(size_mib, 1)), 0.05, 0.7),
        (silo(size_mib, 1, SiloMix::Tpcc), 0.08, 0.5),
    ] {
        let (mut program, _) = placed(&kind, 5);
        // Skips the start, when a ring has no newest part yet.
        for _ in 0..50 {
            next(&mut program, 0, 0);
        }
        let hot = program.hot(0);
        let bytes: u64 = hot.iter().map(|range| range.len().0).sum();
        let part = bytes as f64 / (size_mib * MIB) as f64;
        let share = share(&mut program, 200, &hot);
        assert!(part < part_max, "{}: {part} of the memory", kind.kind());
        assert!(share > share_min, "{}: {share} of the traffic", kind.kind());
    }
}

#[test]
fn silos_hot_end_moves_through_the_store() {
    let (mut program, _) = placed(&silo(16, 1, SiloMix::Tpcc), 5);
    let newest = |program: &Workload| program.hot(0)[0].end();
    let before = newest(&program);
    for _ in 0..100 {
        next(&mut program, 0, 0);
    }
    assert_ne!(newest(&program), before);
}

#[test]
fn silos_popular_keys_drift() {
    let (mut program, ranges) = placed(&silo(64, 1, SiloMix::Ycsb), 5);
    let mut most_read = |now_ns| {
        let mut reads = std::collections::HashMap::<u64, u32>::new();
        for _ in 0..200 {
            for access in next(&mut program, 0, now_ns).accesses() {
                if ranges[0].contains(access.gva()) {
                    *reads.entry(access.gva().0 / 128).or_default() += 1;
                }
            }
        }
        reads.into_iter().max_by_key(|&(_, n)| n).unwrap().0
    };
    let first = most_read(0);
    assert_eq!(most_read(900_000_000), first);
    assert_ne!(most_read(1_000_000_000), first);
}

#[test]
fn bwaves_covers_its_cube() {
    let (mut program, ranges) = placed(&Kind::Bwaves(app(16, 1)), 1);
    let blocks = ranges[2];
    let lines = blocks.len().0.div_ceil(64);
    let mut seen = vec![false; lines as usize];
    while !seen.iter().all(|&s| s) {
        let batch = next(&mut program, 0, 0);
        assert!(batch.ops > 0);
        for access in batch.accesses().iter().filter(|a| blocks.contains(a.gva())) {
            seen[((access.gva().0 - blocks.start().0) / 64) as usize] = true;
        }
    }
}

/// 144 GiB of addresses take a few MiB in the simulator.
#[test]
fn a_large_footprint_is_made_at_once() {
    let size_mib = 144 * GIB / MIB;
    for kind in kinds(size_mib, 36) {
        if matches!(kind, Kind::Graph500(_) | Kind::Pagerank(_)) {
            // Counting the edges of 2^30 vertices takes seconds.
            continue;
        }
        let (mut program, ranges) = placed(&kind, 1);
        let thread = program.threads() - 1;
        for access in next(&mut program, thread, 0).accesses() {
            assert!(ranges.iter().any(|range| range.contains(access.gva())));
        }
    }
}
