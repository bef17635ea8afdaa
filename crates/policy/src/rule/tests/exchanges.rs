//! Exchanges within an epoch.

use super::*;

#[test]
fn exchanges_that_do_not_fit_an_epoch_go_on_in_the_next_one() {
    let mut world = World::new(&[(1, 8, 8)], 0);
    for direction in [Direction::Promotion, Direction::Demotion] {
        // An exchange takes a fifth of an epoch, and pays in the longest window only.
        for _ in 0..2 {
            world
                .rule
                .moved(direction, blocks(64), 64 * 50_000_000, true);
        }
    }
    let mut exchanged = vec![];
    while exchanged.iter().sum::<usize>() < 8 && world.epoch < 1000 {
        let plan = world.epoch(|_, b| if b < 8 { 0 } else { 2 });
        world.apply(&plan);
        exchanged.push(plan.promotions.len());
    }
    let first = exchanged.iter().position(|n| *n > 0);
    assert_eq!(exchanged[first.unwrap()..], [6, 2]);
}

#[test]
fn free_fast_memory_is_filled_first() {
    let mut world = World::new(&[(1, 10, 90)], 30);
    for _ in 0..4 {
        let plan = world.epoch(|_, b| if (50..70).contains(&b) { 40 } else { 0 });
        assert!(plan.demotions.is_empty());
        world.apply(&plan);
    }
    assert_eq!(world.in_fast(1), 30);
}

#[test]
fn threads_that_move_together_move_more_in_a_batch_and_in_an_epoch() {
    let planned = |cpus| {
        let mut world = World::new(&[(1, 60, 400)], 0);
        world.rule = Rule::new(Gain { cpus, ..HARDWARE });
        for _ in 0..8 {
            world.epoch(|_, b| if b >= 300 { 400 } else { 0 });
        }
        // Twenty milliseconds a block: an exchange takes 40 ms, and an epoch has 500.
        for direction in [Direction::Promotion, Direction::Demotion] {
            for _ in 0..2 {
                (world.rule).moved(direction, blocks(1), 20_000_000, true);
            }
        }
        (world.rule.batch_blocks(8), world.plan().promotions.len())
    };
    let ((one_batch, one), (two_batch, two)) = (planned(8), planned(16));
    assert_eq!((one_batch, two_batch), (1, 2));
    assert!(one > 0 && two >= 2 * one - 2, "{one} {two}");
}

#[test]
fn unused_memory_stays_though_fast_memory_is_free_and_no_price_is_known() {
    let mut world = World::new(&[(1, 4, 0), (2, 0, 4)], 8);
    for _ in 0..10 {
        let plan = world.epoch(|pid, _| if pid == Pid(1) { 10 } else { 0 });
        assert!(plan.is_empty(), "{plan:?}");
    }
}

#[test]
fn missing_fast_memory_is_made_up_by_the_coldest_before_anything_is_promoted() {
    let missing = |hottest: u32| {
        let mut world = World::new(&[(1, 20, 20)], 0);
        world.room.fast_missing = blocks(5);
        let plan = world.epoch(|_, b| if b == 30 { hottest } else { 2 });
        (plan.demotions.len(), plan.promotions.len())
    };
    assert_eq!(missing(400), (6, 1));
    assert_eq!(missing(2), (0, 0));
}
