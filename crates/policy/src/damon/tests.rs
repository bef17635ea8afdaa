use std::collections::BTreeSet;

use proptest::prelude::*;

use super::*;
use crate::{BLOCK_SIZE, GuestVirtAddr, Observation, PAGE_SIZE, VirtRange};

const CPUS: u32 = 2;

fn ranges(blocks: &[(u64, u64)]) -> Vec<VirtRange> {
    let at = |block: u64| GuestVirtAddr(block * BLOCK_SIZE);
    let range = |&(first, len): &(u64, u64)| VirtRange::new(at(first), at(first + len)).unwrap();
    blocks.iter().map(range).collect()
}

fn observer(blocks: u64) -> Observer {
    let mut observer = Observer::new(CPU_PERCENT, CPUS, Duration::ZERO);
    observer.set_memory(Pid(1), &ranges(&[(0, blocks)]));
    observer
}

/// The next pass; rests are skipped.
fn pass(observer: &mut Observer, now: &mut Duration) -> Look {
    loop {
        match observer.next(*now) {
            Next::Look(look) => return look,
            Next::Rest(until) => *now = until,
            Next::Idle => panic!("there is memory"),
        }
    }
}

/// Cost of a pass on hardware.
fn cost(look: &Look) -> Cost {
    let blocks = look.blocks.len() as u32;
    Cost {
        looking: Duration::from_nanos(1200) * blocks * look.pass.looks,
        setting: Duration::from_micros(13) * blocks,
        set: blocks.into(),
    }
}

/// Reports a pass's results.
fn answer(
    observer: &mut Observer,
    look: &Look,
    accesses: impl Fn(Pid, Block) -> u32,
    page_bytes: u64,
) -> Vec<Observation> {
    let found = look.blocks.iter().map(|&(pid, block)| Found {
        pid,
        block,
        accesses: accesses(pid, block),
        page_bytes: NonZero::new(page_bytes),
    });
    let (found, mut out) = (found.collect::<Vec<_>>(), vec![]);
    observer.found(look, look.pass.length(), &cost(look), &found, &mut out);
    out
}

#[test]
fn a_block_that_is_always_found_is_looked_at_for_shorter_and_then_reported() {
    let (mut observer, mut now) = (observer(10), Duration::ZERO);
    let mut intervals = vec![];
    let told = loop {
        let look = pass(&mut observer, &mut now);
        intervals.push(look.pass.interval);
        let told = answer(&mut observer, &look, |_, _| look.pass.looks, BLOCK_SIZE);
        if !told.is_empty() {
            break told;
        }
    };
    assert_eq!(intervals, RUNGS.map(|pass| pass.interval));
    assert_eq!(told.len(), 10);
    // The next time, the longer intervals are skipped.
    let next = pass(&mut observer, &mut now);
    assert_eq!(next.pass.interval, RUNGS[3].interval);
}

#[test]
fn a_page_that_hides_in_the_tlb_from_short_looks_keeps_its_lower_bound() {
    let (mut observer, mut now) = (observer(1), Duration::ZERO);
    let mut rates = vec![];
    for _ in 0..6 {
        let look = pass(&mut observer, &mut now);
        let found = if look.pass.is_flushed {
            look.pass.looks
        } else {
            0
        };
        let told = answer(&mut observer, &look, |_, _| found, BLOCK_SIZE);
        rates.extend(
            told.iter()
                .map(|t| f64::from(t.events) / t.exposure_ns as f64 * 1e9),
        );
    }
    assert!(rates.len() >= 2);
    assert!(rates.iter().all(|&rate| rate > 200.0), "{rates:?}");
}

#[test]
fn what_looks_without_a_flush_find_is_a_lower_bound() {
    let (mut observer, mut now) = (observer(1), Duration::ZERO);
    let (mut bounds, mut estimates) = (0, 0);
    for _ in 0..12 {
        let look = pass(&mut observer, &mut now);
        let found = look.pass.looks - u32::from(!look.pass.is_flushed);
        for told in answer(&mut observer, &look, |_, _| found, BLOCK_SIZE) {
            bounds += u32::from(told.is_least);
            estimates += u32::from(!told.is_least);
        }
    }
    assert!(bounds > 0 && estimates == 0, "{bounds} {estimates}");
}

#[test]
fn neighbours_of_a_newly_hot_block_are_next() {
    let (mut observer, mut now) = (observer(100_000), Duration::ZERO);
    while observer.unknown() > 0 || !observer.round.is_over() {
        let look = pass(&mut observer, &mut now);
        answer(&mut observer, &look, |_, _| 0, PAGE_SIZE);
    }
    // A hot set appears where there was none.
    let is_hot = |block: u64| (50_000..50_400).contains(&block);
    let mut found = BTreeSet::new();
    let began = now;
    while found.len() < 360 {
        let look = pass(&mut observer, &mut now);
        let hot = |_, Block(block)| if is_hot(block) { look.pass.looks } else { 0 };
        answer(&mut observer, &look, hot, PAGE_SIZE);
        found.extend(
            look.blocks
                .iter()
                .filter(|(_, b)| is_hot(b.0))
                .map(|(_, b)| b.0),
        );
        assert!(
            now - began < Duration::from_secs(60),
            "{} found",
            found.len()
        );
    }
}

#[test]
fn the_policys_wishes_come_in_the_next_round() {
    let (mut observer, mut now) = (observer(100_000), Duration::ZERO);
    let wanted = [7, 70_000, 200_000].map(|block| (Pid(1), Block(block)));
    observer.want(&wanted);
    let mut blocks = vec![];
    while blocks.is_empty() || !observer.round.is_over() {
        let look = pass(&mut observer, &mut now);
        answer(&mut observer, &look, |_, _| 0, PAGE_SIZE);
        blocks.extend(look.blocks);
    }
    assert!(wanted[..2].iter().all(|at| blocks.contains(at)));
    assert!(!blocks.contains(&wanted[2]), "it is not mapped");
}

#[test]
fn a_mapping_that_grows_is_looked_at_where_it_is_new() {
    let (mut observer, mut now) = (observer(50), Duration::ZERO);
    let look = pass(&mut observer, &mut now);
    assert_eq!(look.blocks.len(), 50);
    answer(&mut observer, &look, |_, _| 1, PAGE_SIZE);
    observer.set_memory(Pid(1), &ranges(&[(0, 100)]));
    assert_eq!(observer.unknown(), 50);
    let look = pass(&mut observer, &mut now);
    let new = look.blocks.iter().filter(|(_, block)| block.0 >= 50);
    assert_eq!(new.count(), 50);
}

#[test]
fn what_gives_no_answer_does_not_hold_up_the_rest() {
    let (mut observer, mut now) = (observer(10_000), Duration::ZERO);
    for _ in 0..20 {
        let look = pass(&mut observer, &mut now);
        observer.found(&look, look.pass.length(), &cost(&look), &[], &mut vec![]);
    }
    assert_eq!(observer.unknown(), 0);
}

#[test]
fn nothing_is_looked_at_before_there_is_memory() {
    let mut observer = Observer::new(CPU_PERCENT, CPUS, Duration::ZERO);
    assert_eq!(observer.next(Duration::ZERO), Next::Idle);
    observer.set_memory(Pid(1), &ranges(&[(0, 10)]));
    observer.retain(&[Pid(2)]);
    assert_eq!(observer.next(Duration::ZERO), Next::Idle);
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Each block is looked at repeatedly, and reported at most once per round. Passes and budget stay within bounds.
    #[test]
    fn all_memory_has_its_turn_within_the_budget(
        spaces in prop::collection::vec(prop::collection::vec((1u64..50, 1u64..300), 1..4), 1..4),
        seed: u64, wishes in prop::collection::vec((1u32..4, 0u64..400), 0..20),
    ) {
        let mut observer = Observer::new(CPU_PERCENT, CPUS, Duration::ZERO);
        let mut unseen = BTreeSet::new();
        for (pid, gaps) in (1..).zip(&spaces) {
            let mut next = 0;
            let space: Vec<_> = gaps.iter().map(|&(gap, len)| {
                let first = next + gap;
                next = first + len;
                (first, len)
            }).collect();
            unseen.extend(ranges(&space).iter().flat_map(Block::all_of).map(|b| (Pid(pid), b)));
            observer.set_memory(Pid(pid), &ranges(&space));
        }
        let all = unseen.clone();
        let wishes: Vec<_> = wishes.into_iter().map(|(pid, b)| (Pid(pid), Block(b))).collect();
        let mut chance = crate::chance::Chance::new(seed);
        let (mut now, mut spent, mut last, mut passes) = (Duration::ZERO, 0.0, 0.0, 0);
        let mut reported = BTreeSet::new();
        while passes < 200 || !unseen.is_empty() {
            passes += 1;
            prop_assert!(passes < 5000, "{} of {} blocks are left out", unseen.len(), all.len());
            observer.want(&wishes);
            let is_new_round = observer.round.is_over();
            let look = pass(&mut observer, &mut now);
            if is_new_round {
                reported.clear();
                let share = CPU_PERCENT / 100.0 * now.as_secs_f64();
                let savings = SAVED_PER_CPU.as_secs_f64() * f64::from(CPUS);
                prop_assert!(spent - last <= share + savings + 1e-6);
                last = 0.0;
            }
            prop_assert!(!look.blocks.is_empty() && look.blocks.len() <= SET_MAX);
            prop_assert!(look.blocks.is_sorted() && look.blocks.windows(2).all(|w| w[0] != w[1]));
            prop_assert!(look.blocks.iter().all(|at| all.contains(at)));
            let draws: Vec<u32> = look.blocks.iter()
                .map(|_| (chance.draw() * f64::from(look.pass.looks + 1)) as u32).collect();
            let place = |pid, block| look.blocks.binary_search(&(pid, block)).unwrap();
            let out = answer(&mut observer, &look, |pid, block| draws[place(pid, block)], PAGE_SIZE);
            for seen in out {
                prop_assert!(reported.insert((seen.pid, seen.block)), "reported twice in a round");
                prop_assert!(seen.exposure_ns > 0);
                unseen.remove(&(seen.pid, seen.block));
            }
            let cost = cost(&look);
            last += (cost.looking + cost.setting).as_secs_f64();
            spent += (cost.looking + cost.setting).as_secs_f64();
            now += look.pass.length();
        }
    }
}
