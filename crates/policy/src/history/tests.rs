use proptest::prelude::*;

use super::*;
use crate::chance::Chance;
use crate::engine::Strategy;
use crate::{MIB, Pid, RankedRange, ResidencyMap, Room, TierBytes, rank};

const PID: Pid = Pid(1);

fn blocks(first: u64, end: u64) -> VirtRange {
    let at = |block: u64| GuestVirtAddr(block * BLOCK_SIZE);
    VirtRange::new(at(first), at(end)).unwrap()
}

/// A look that finds these blocks accessed.
fn look(histories: &mut Histories, accessed: impl IntoIterator<Item = u64>) -> bool {
    for block in accessed {
        histories.add(GuestVirtAddr(block * BLOCK_SIZE + 4096), 1);
    }
    histories.end_epoch(0, 0.5, usize::MAX)
}

/// Number of set bits of each block.
fn ones(histories: &Histories) -> Vec<(u64, u32)> {
    let of = |r: ClassifiedRange| {
        let blocks: Vec<_> = Block::all_of(&r.range).collect();
        let each = (r.count / blocks.len() as f64) as u32;
        blocks.into_iter().map(move |block| (block.0, each))
    };
    histories.ranges().flat_map(of).collect()
}

/// The plan if block i has `ones[i]` set bits and is in fast memory if `in_fast[i]`.
fn planned(ones: &[u32], in_fast: &[bool], free_blocks: u64, hot_ones: u32) -> Plan {
    let mut histories = Histories::default();
    histories.set_space(&[blocks(0, ones.len() as u64)]);
    for i in 0..32 {
        // One block is always accessed, so that each look counts.
        let accessed = (0..ones.len()).filter(|&b| i < ones[b]);
        look(&mut histories, accessed.map(|b| b as u64));
    }
    let ranking: Vec<RankedRange> = rank([(PID, histories.ranges())]);
    let mut residency = ResidencyMap::default();
    for (block, &fast) in in_fast.iter().enumerate() {
        let mut placement = TierBytes::default();
        let tier = if fast {
            &mut placement.fast
        } else {
            &mut placement.slow
        };
        tier.0 = BLOCK_SIZE;
        residency.set(PID, Block(block as u64), placement);
    }
    ByHistory { hot_ones }.plan(
        &Situation {
            ranking: &ranking,
            shares: &Default::default(),
            sockets: &Default::default(),
            level: crate::Level::First,
            planned: &[],
            residency: &residency,
            room: Room {
                fast_free: ByteCount(free_blocks * BLOCK_SIZE),
                fast_reserve: ByteCount(0),
                fast_missing: ByteCount(0),
                fast_low: ByteCount(0),
                slow_free: ByteCount(1 << 40),
                batch: ByteCount(1 << 40),
            },
            fill: crate::FillThreshold(0.0),
            budget: MoveBudget::NONE,
            balloon_waits: false,
            epoch: 1,
            epoch_ms: 500,
            collapses: false,
        },
        &[],
    )
}

#[test]
fn hot_blocks_fill_free_memory_and_take_the_place_of_cold_ones() {
    let ones = [32, 0, 0, 22, 21, 30];
    let in_fast = [false, true, true, false, false, true];
    let plan = planned(&ones, &in_fast, 1, HOT_ONES);
    let moved = |moves: &[crate::Relocation]| moves.iter().map(|r| r.block.0).collect::<Vec<_>>();
    assert_eq!(moved(&plan.promotions), [0, 3], "21 ones are not hot");
    assert_eq!(plan.demotions.len(), 1, "one of them fits");
}

#[test]
fn the_working_set_is_what_is_hot_wherever_it_lies() {
    let mut histories = Histories::default();
    histories.set_space(&[blocks(0, 8)]);
    for i in 0..32 {
        look(
            &mut histories,
            [0, 1].into_iter().chain((i < 21).then_some(2)),
        );
    }
    let mut residency = ResidencyMap::default();
    let fast = TierBytes {
        fast: ByteCount(BLOCK_SIZE),
        ..TierBytes::default()
    };
    let slow = TierBytes {
        slow: ByteCount(BLOCK_SIZE / 2),
        ..TierBytes::default()
    };
    residency.set(PID, Block(0), fast);
    residency.set(PID, Block(1), slow);
    residency.set(PID, Block(2), fast);
    let ranking = rank([(PID, histories.ranges())]);
    let set = ByHistory::default().working_set(&ranking, &residency);
    assert_eq!((set.fast, set.slow), (fast.fast, slow.slow));
}

#[test]
fn an_interval_without_any_access_is_none() {
    let mut histories = Histories::default();
    histories.set_space(&[blocks(0, 2)]);
    assert!(look(&mut histories, [1]));
    let before = histories.clone();
    assert!(!look(&mut histories, []));
    assert_eq!(histories, before);
    // Unmapped memory does not count, either.
    assert!(!look(&mut histories, [7]));
    assert_eq!(histories, before);
}

#[test]
fn a_window_finds_what_tells_a_hot_eighth() {
    // 400 blocks; each hot one is accessed 18,000 times per second, each other one 285 times.
    const FAST: ByteCount = ByteCount(200 * MIB);
    let found = |window: Duration| {
        let part = |rate: f64| 1.0 - (-rate * window.as_secs_f64()).exp();
        (50.0 * part(18_000.0) + 350.0 * part(285.0)) as u64
    };
    let mut window = Window::new(Duration::from_millis(100));
    for _ in 0..64 {
        window.looked(found(window.now()), FAST);
    }
    let s = window.now().as_secs_f64();
    let cold_ones = 32.0 * (1.0 - (-285.0 * s).exp());
    assert!(cold_ones < 10.0, "{cold_ones} after {:?}", window.now());
}

/// Histories of blocks that looks find accessed at random, each with the probability `of`.
fn looked(histories: &mut Histories, chance: &mut Chance, count: u64, of: impl Fn(u64) -> f64) {
    let accessed: Vec<_> = (0..count)
        .filter(|&block| chance.draw() < of(block))
        .collect();
    look(histories, accessed);
}

proptest! {
    #[test]
    fn chance_hardly_ever_contradicts_histories_and_a_change_does(
        seed: u64,
        background in 0.02f64..0.5,
        hot in 20u64..60,
        count in 150u64..400,
    ) {
        let mut chance = Chance::new(seed);
        let mut histories = Histories::default();
        histories.set_space(&[blocks(0, count)]);
        let first = |block: u64| if block < hot { 0.97 } else { background };
        let mut contradicted = 0;
        for _ in 0..132 {
            looked(&mut histories, &mut chance, count, first);
            contradicted += u32::from(histories.are_contradicted());
        }
        // One random outlier is among the latest four looks four times.
        prop_assert!(contradicted <= 4, "{contradicted} of 100");
        let other = |block: u64| if block >= count - hot { 0.97 } else { background };
        for _ in 0..LATEST {
            looked(&mut histories, &mut chance, count, other);
        }
        prop_assert!(histories.are_contradicted());
    }

    /// Every four looks have another length, which changes how often blocks are found accessed.
    #[test]
    fn looks_of_another_length_do_not_contradict(
        seed: u64,
        background in 0.02f64..0.7,
        hot in 0u64..60,
        count in 60u64..400,
        lengths in prop::collection::vec(0.5f64..2.0, 33),
    ) {
        let mut chance = Chance::new(seed);
        let mut histories = Histories::default();
        histories.set_space(&[blocks(0, count)]);
        let mut contradicted = 0;
        for length in lengths {
            for _ in 0..LATEST {
                let of = |block| {
                    let missed: f64 = if block < hot { 0.03 } else { 1.0 - background };
                    1.0 - missed.powf(length)
                };
                looked(&mut histories, &mut chance, count, of);
                contradicted += u32::from(histories.are_contradicted());
            }
        }
        prop_assert!(contradicted <= 4, "{contradicted} of 100");
    }

    #[test]
    fn a_history_counts_the_last_looks(bits in prop::collection::vec(any::<bool>(), 1..100)) {
        let mut history = History::default();
        for i in 0..bits.len() {
            history.push(bits[i]);
            let from = (i + 1).saturating_sub(32);
            let ones = bits[from..=i].iter().filter(|&&b| b).count() as u32;
            prop_assert_eq!(history.ones(), ones);
        }
    }

    #[test]
    fn ranges_partition_the_space_and_blocks_keep_their_histories(
        looks in prop::collection::vec(prop::collection::vec(0u64..40, 1..40), 0..40),
        cut in (0u64..40, 1u64..20),
    ) {
        let mut histories = Histories::default();
        histories.set_space(&[blocks(0, 10), blocks(12, 40)]);
        let mut model = [History::default(); 40];
        for accessed in looks {
            let is_mapped = |b: &u64| !(10..12).contains(b);
            look(&mut histories, accessed.iter().copied());
            if accessed.iter().any(is_mapped) {
                for (b, history) in model.iter_mut().enumerate() {
                    history.push(accessed.contains(&(b as u64)));
                }
            }
        }
        let want = |of: &mut dyn Iterator<Item = u64>| -> Vec<(u64, u32)> {
            of.map(|b| (b, model[b as usize].ones())).collect()
        };
        prop_assert_eq!(ones(&histories), want(&mut (0..10).chain(12..40)));
        // Only a part of it stays.
        let (first, end) = (cut.0, (cut.0 + cut.1).min(40));
        histories.set_space(&[blocks(first, end)]);
        let is_new = |b: u64| (10..12).contains(&b);
        let kept: Vec<_> = ones(&histories).into_iter().filter(|(b, _)| !is_new(*b)).collect();
        prop_assert_eq!(kept, want(&mut (first..end).filter(|b| !is_new(*b))));
    }

    #[test]
    fn nothing_lukewarm_is_promoted_or_exchanged_for_its_like(
        blocks in prop::collection::vec((0u32..=32, any::<bool>()), 1..60),
        free in 0u64..10,
        hot_ones in 1u32..=32,
    ) {
        let (ones, in_fast): (Vec<_>, Vec<_>) = blocks.into_iter().unzip();
        let plan = planned(&ones, &in_fast, free, hot_ones);
        let of = |r: &crate::Relocation| ones[r.block.0 as usize];
        let coldest = plan.promotions.iter().map(of).min();
        prop_assert!(coldest.is_none_or(|ones| ones >= hot_ones));
        let warmest = plan.demotions.iter().map(of).max();
        if let Some((warmest, hottest)) = warmest.zip(plan.promotions.iter().map(of).max()) {
            prop_assert!(hottest >= warmest + hot_ones);
        }
        prop_assert!(plan.demotions.is_empty() || !plan.promotions.is_empty());
    }

    #[test]
    fn a_window_keeps_to_its_bounds_and_reaches_them(
        interval_ms in 0u64..2000,
        found in prop::collection::vec(0u64..500, 0..100),
    ) {
        let interval = Duration::from_millis(interval_ms);
        let mut window = Window::new(interval);
        let bounds = Window::LEAST..=interval.max(Window::LEAST);
        let fast = ByteCount(200 * BLOCK_SIZE);
        for found in found {
            window.looked(found, fast);
            prop_assert!(bounds.contains(&window.now()));
        }
        for (found, end) in [(500, bounds.start()), (1, bounds.end())] {
            for _ in 0..400 {
                window.looked(found, fast);
            }
            // Steps of a quarter end slightly below.
            let now = window.now();
            prop_assert!(now.abs_diff(*end) <= Duration::from_micros(10), "{now:?} {end:?}");
        }
    }
}
