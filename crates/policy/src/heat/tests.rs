use std::time::Duration;

use proptest::prelude::*;

use super::*;
use crate::chance::Chance;
use crate::damon::Observer;
use crate::{Pid, ResidencyMap, TierBytes};

const BASE: u64 = 1 << 20;

fn space(blocks: u64) -> [VirtRange; 1] {
    let (start, end) = (Block(BASE).start(), Block(BASE + blocks).start());
    [VirtRange::new(start, end).unwrap()]
}

fn heat(blocks: u64) -> Heat {
    let mut heat = Heat::default();
    heat.set_space(&space(blocks));
    heat
}

/// Observed events of a block in a window.
fn events_of(heat: &Heat, window: usize, block: Block) -> f64 {
    let at = (block.0 % CHUNK_BLOCKS as u64) as usize;
    let chunk = heat.find(block.0 / CHUNK_BLOCKS as u64);
    chunk.map_or(0.0, |c| heat.seen(&heat.chunks[c], window, 0, at).0)
}

/// Runs epochs of half a second in which each block has a random number of events with mean `mean`.
fn sampled(blocks: u64, epochs: u32, seed: u64, mean: impl Fn(u64) -> f64) -> Heat {
    let (mut heat, mut chance) = (heat(blocks), Chance::new(seed));
    for epoch in 1..=epochs {
        for b in 0..blocks {
            let mean = mean(b);
            let draws = (4.0 * mean).ceil().max(1.0);
            let events = (0..draws as u32)
                .filter(|_| chance.draw() < mean / draws)
                .count();
            if events > 0 {
                heat.add(Block(BASE + b), events as u32);
            }
        }
        heat.end_epoch(epoch, 0.5, usize::MAX);
    }
    heat
}

fn rates(heat: &Heat, window: usize, blocks: u64) -> Vec<f64> {
    (0..blocks)
        .map(|b| heat.estimate(window, Block(BASE + b)).rate)
        .collect()
}

#[test]
fn where_all_blocks_are_alike_all_estimates_nearly_are() {
    for seed in 1..6 {
        let heat = sampled(1500, 40, seed, |_| 0.7);
        for window in 0..WINDOWS {
            let rates = rates(&heat, window, 1500);
            let (least, most) = rates
                .iter()
                .fold((f64::MAX, 0.0f64), |(a, b), &r| (a.min(r), b.max(r)));
            assert!(
                most < 1.25 * least,
                "window {window}, seed {seed}: {least} to {most}"
            );
        }
    }
}

#[test]
fn a_single_hot_block_keeps_its_own_rate_and_a_hot_neighbourhood_shares_one() {
    let heat = sampled(1500, 40, 1, |b| match b {
        700 => 20.0,
        1000..1200 => 1.0,
        _ => 0.05,
    });
    let rates = rates(&heat, 2, 1500);
    assert!((30.0..50.0).contains(&rates[700]), "{}", rates[700]);
    assert!(rates[701] < 1.0, "{}", rates[701]);
    let hot = &rates[1000..1200];
    assert!(hot.iter().all(|rate| (0.9..3.5).contains(rate)), "{hot:?}");
}

#[test]
fn what_was_seldom_watched_counts_for_little() {
    let mut heat = heat(512);
    for epoch in 1..20 {
        for b in (0..512).filter(|b| b % 2 == u64::from(epoch) % 2) {
            let events = if b < 64 { 4 } else { 0 };
            heat.observe(Block(BASE + b), events, 0.0005);
        }
        heat.end_epoch(epoch, 0.5, usize::MAX);
    }
    let rates = rates(&heat, 1, 512);
    assert!(
        rates[..64].iter().all(|rate| *rate > 30.0),
        "{:?}",
        &rates[..64]
    );
    assert!(
        rates[64..].iter().all(|rate| *rate < 10.0),
        "{:?}",
        &rates[64..]
    );
}

#[test]
fn one_of_eight_samples_shows_the_same_rates_with_less_certainty() {
    let run = |thinning: u32| {
        let mut heat = heat(64);
        for epoch in 1..=80 {
            // The last quarter is thinned: rates stay, whatever was taken before.
            let thinning = if epoch > 60 { thinning } else { 1 };
            heat.set_thinning(thinning);
            (0..64).for_each(|b| heat.add(Block(BASE + b), 8 * (1 + b as u32 / 32) / thinning));
            heat.end_epoch(epoch, 0.5, usize::MAX);
        }
        heat
    };
    let (all, some) = (run(1), run(8));
    for window in 0..WINDOWS {
        let (all_rate, rate) = (all.rate(window), some.rate(window));
        assert!(
            (all_rate - rate).abs() < 1e-6 * all_rate,
            "window {window}: {rate}"
        );
        let sure = |heat: &Heat| heat.estimate(window, Block(BASE + 63)).sure;
        assert!(sure(&some) < 0.95 * sure(&all), "window {window}");
        assert_eq!(some.span_s(window), all.span_s(window));
    }
}

#[test]
fn without_events_nothing_is_hot_and_a_silent_process_grows_cold() {
    let mut heat = sampled(100, 20, 1, |_| 1.0);
    assert!(!heat.is_cold());
    for epoch in 21..80 {
        heat.end_epoch(epoch, 0.5, usize::MAX);
    }
    assert!(heat.is_cold());
    assert!(
        rates(&Heat::default(), 0, 4)
            .iter()
            .all(|rate| *rate == 0.0)
    );
}

#[test]
fn a_process_that_nobody_looks_at_is_not_idle() {
    let mut heat = heat(8);
    heat.observe(Block(BASE), 4, 1e-3);
    for epoch in 1..200 {
        heat.end_epoch(epoch, 0.5, usize::MAX);
    }
    assert!(!heat.is_cold());
    assert!((heat.estimate(WINDOWS - 1, Block(BASE)).rate - 4e3).abs() < 1.0);
}

#[test]
fn a_block_takes_no_more_bytes_than_is_said() {
    let heat = sampled(4096, 1, 1, |_| 1.0);
    assert!(heat.state_bytes() <= 25 * 4096, "{}", heat.state_bytes());
}

/// The tracker without a PMU needs most: heat with exposures, the place, and the observer's state. The extremes of a chunk
/// add a quarter of a byte for each of its blocks.
#[test]
fn all_bookkeeping_takes_at_most_64_bytes_a_block() {
    let (blocks, pid) = (4096, Pid(1));
    let (mut heat, mut residency) = (heat(blocks), ResidencyMap::default());
    let mut observer = Observer::new(1.0, 1, Duration::ZERO);
    observer.set_memory(pid, &space(blocks));
    for b in 0..blocks {
        heat.observe(Block(BASE + b), 1, 0.1);
        residency.set(pid, Block(BASE + b), TierBytes::default());
    }
    let bytes = heat.state_bytes() + residency.state_bytes() + observer.state_bytes();
    let a_block = bytes as f64 / blocks as f64;
    assert!((40.0..63.5).contains(&a_block), "{a_block} bytes");
}

/// As in a process that reserves addresses without using them.
#[test]
fn the_largest_address_space_costs_what_is_seen_of_it() {
    let mut heat = Heat::default();
    let end = crate::GuestVirtAddr(u64::MAX);
    heat.set_space(&[VirtRange::new(crate::GuestVirtAddr(0), end).unwrap()]);
    heat.add(Block(77), 5);
    heat.end_epoch(1, 0.5, usize::MAX);
    assert!(heat.ranges().len() < 10);
    assert!(heat.state_bytes() < 1 << 16);
}

proptest! {
    #[test]
    fn events_of_groups_are_those_of_their_blocks(
        events in prop::collection::vec((0u64..1200, 1u32..50), 1..200), epochs in 1u32..300,
    ) {
        let mut heat = heat(1200);
        for (n, &(block, events)) in events.iter().enumerate() {
            heat.add(Block(BASE + block), events);
            if n.is_multiple_of(5) {
                (0..epochs).for_each(|epoch| heat.end_epoch(epoch, 0.5, usize::MAX));
            }
        }
        for window in 0..WINDOWS {
            for chunk in &heat.chunks {
                let cells = chunk.events.map(|cell| cell[window]);
                for (level, size) in [(1, 8), (2, 64), (3, 512)] {
                    for (group, blocks) in cells[..CHUNK_BLOCKS].chunks(size).enumerate() {
                        let (sum, group) = (blocks.iter().sum::<f32>(), cells[FIRST[level] + group]);
                        prop_assert!((sum - group).abs() <= 1e-3 * sum.max(1e-3), "{} {}", sum, group);
                    }
                }
            }
        }
    }

    #[test]
    fn of_two_in_one_group_the_one_with_more_events_is_no_colder(
        events in prop::collection::vec(0u32..40, 512), window in 0..WINDOWS,
    ) {
        let mut heat = heat(512);
        for (b, &events) in events.iter().enumerate() {
            heat.add(Block(BASE + b as u64), events);
        }
        (1..5).for_each(|epoch| heat.end_epoch(epoch, 0.5, usize::MAX));
        let rates = rates(&heat, window, 512);
        for (events, rates) in events.chunks(8).zip(rates.chunks(8)) {
            for a in 0..8 {
                for b in 0..8 {
                    prop_assert!(events[a] <= events[b] || rates[a] >= rates[b] * (1.0 - 1e-9));
                }
            }
        }
    }

    #[test]
    fn one_by_one_and_all_at_once_estimates_are_the_same(
        events in prop::collection::vec((0u64..1000, 1u32..30), 0..100), window in 0..WINDOWS,
    ) {
        let mut heat = heat(1000);
        for &(block, events) in &events {
            heat.add(Block(BASE + block), events);
        }
        (1..9).for_each(|epoch| heat.end_epoch(epoch, 0.5, usize::MAX));
        let mut all = [Estimate::default(); CHUNK_BLOCKS];
        for first in [BASE, BASE + 512] {
            let chunk = heat.of_chunk(Block(first));
            chunk.estimates(window, &mut all);
            for (at, estimate) in all.iter().enumerate() {
                prop_assert_eq!(*estimate, heat.estimate(window, Block(first + at as u64)));
                prop_assert_eq!(*estimate, chunk.first_estimates(window + 1, at)[window]);
            }
        }
    }

    #[test]
    fn ranges_partition_the_space(
        vmas in prop::collection::vec((0u64..4000, 1u64..700), 1..8),
        events in prop::collection::vec((0u64..5000, 1u32..100), 0..200),
    ) {
        let mut at = BASE;
        let space: Vec<VirtRange> = vmas.iter().map(|&(gap, len)| {
            let start = at + gap;
            at = start + len;
            VirtRange::new(Block(start).start(), Block(at).start()).unwrap()
        }).collect();
        let mut heat = Heat::default();
        heat.set_space(&space);
        for &(block, events) in &events {
            heat.add(Block(BASE + block), events);
        }
        heat.end_epoch(1, 0.5, usize::MAX);
        let ranges = heat.ranges();
        prop_assert!(ranges.windows(2).all(|w| w[0].range.end() <= w[1].range.start()));
        let bytes = |ranges: &mut dyn Iterator<Item = VirtRange>| ranges.map(|r| r.len().0).sum::<u64>();
        let covered = bytes(&mut ranges.iter().map(|r| r.range));
        prop_assert_eq!(covered, bytes(&mut space.iter().copied()));
        for r in &ranges {
            // Adjacent mappings are one memory.
            let is_mapped = |b: Block| space.iter().any(|s| s.contains(b.start()));
            prop_assert!(Block::all_of(&r.range).all(is_mapped));
        }
    }

    #[test]
    fn a_space_that_changes_keeps_what_stays(
        events in prop::collection::vec((0u64..1500, 1u32..30), 1..100), len in 1u64..1500,
    ) {
        let mut heat = heat(1500);
        for &(block, events) in &events {
            heat.add(Block(BASE + block), events);
        }
        heat.end_epoch(1, 0.5, usize::MAX);
        let before: Vec<f64> = (0..len).map(|b| events_of(&heat, 1, Block(BASE + b))).collect();
        heat.set_space(&space(len));
        let after: Vec<f64> = (0..len).map(|b| events_of(&heat, 1, Block(BASE + b))).collect();
        prop_assert_eq!(before, after);
        prop_assert_eq!(events_of(&heat, 1, Block(BASE + len)), 0.0);
    }

    #[test]
    fn a_saved_heat_is_the_same(
        events in prop::collection::vec((0u64..1500, 1u32..30, any::<bool>()), 0..100),
    ) {
        let mut one = heat(1500);
        for &(block, events, is_watched) in &events {
            match is_watched {
                true => one.observe(Block(BASE + block), events, 0.3),
                false => one.add(Block(BASE + block), events),
            }
        }
        (1..9).for_each(|epoch| one.end_epoch(epoch, 0.5, usize::MAX));
        let saved = postcard::to_allocvec(&one).unwrap();
        let other: Heat = postcard::from_bytes(&saved).unwrap();
        let other = other.restored(&space(1500)).unwrap();
        for window in 0..WINDOWS {
            prop_assert_eq!(rates(&one, window, 1500), rates(&other, window, 1500));
        }
        prop_assert_eq!(saved, postcard::to_allocvec(&other).unwrap());
    }
}
