//! The tokens that moves cost, and what earns them.

use super::*;

#[test]
fn exchanges_that_cost_too_much_as_yet_promise_something_and_even_use_promises_nothing() {
    let promise_after = |of_slow: u32| {
        let mut world = World::new(&[(1, 4, 4)], 0);
        for direction in [Direction::Promotion, Direction::Demotion] {
            // Ten seconds for each block.
            for _ in 0..2 {
                world.rule.moved(direction, blocks(8), 80_000_000_000, true);
            }
        }
        for _ in 0..40 {
            let plan = world.epoch(|_, b| if b < 4 { 10 } else { of_slow });
            assert!(plan.is_empty(), "{plan:?}");
        }
        world.rule.balance().promise_ns
    };
    assert!(promise_after(100) > 0);
    assert_eq!(promise_after(10), 0);
}

#[test]
fn what_was_hot_before_it_was_moved_is_trusted_once_it_earns() {
    let mut world = World::new(&[(1, 10, 90)], 0);
    let hot = |_, b: u64| if (50..60).contains(&b) { 40 } else { 0 };
    for _ in 0..8 {
        world.epoch(hot);
    }
    let plan = world.plan();
    assert!(!plan.promotions.is_empty());
    let before_s = world.rule.spendable_s();
    world.apply(&plan);
    assert!(
        world.rule.spendable_s() < before_s,
        "nothing has earned yet"
    );
    let mut cold = world.clone();
    let benefit_ns = world.rule.balance().benefit_ns;
    world.epoch(hot);
    let earned_s = (world.rule.balance().benefit_ns - benefit_ns) as f64 * 1e-9;
    assert!(earned_s > 0.0);
    let lent_s = world.rule.spendable_s() - world.rule.tokens_s;
    assert!(lent_s > 2.0 * earned_s, "{lent_s} {earned_s}");
    cold.epoch(|_, _| 0);
    assert!(cold.rule.spendable_s() <= cold.rule.tokens_s);
}

#[test]
fn what_exchanges_promise_is_lent_as_far_as_moved_memory_earns_what_was_expected() {
    let mut world = World::new(&[(1, 10, 90)], 0);
    let rule = &mut world.rule;
    rule.promises.get_mut(Level::First)[2] = 3.0;
    let lent_s = |rule: &Rule| rule.spendable_s() - rule.tokens_s;
    assert_eq!(lent_s(rule), 0.0, "nothing has earned yet");
    rule.income = [2.0, 1.0, 1.0];
    assert_eq!(lent_s(rule), (1.0 + 3.0) * 16.0);
    rule.income = [0.5, 1.0, 1.0];
    assert_eq!(lent_s(rule), (1.0 + 3.0) * 16.0 / 2.0);
    rule.income = [-0.5, 1.0, 1.0];
    assert_eq!(lent_s(rule), 0.0);
    // Promises of the two short windows do not count.
    rule.income = [1.0; STEADY_WINDOWS];
    *rule.promises.get_mut(Level::First) = [3.0, 3.0, 0.0, 0.0, 0.0];
    assert_eq!(lent_s(rule), 16.0);
}

#[test]
fn what_is_looked_at_rarely_earns_as_much() {
    let earned = |seen_at: &[u32]| {
        let mut rule = Rule::new(HARDWARE);
        let away = Away {
            home: Level::Second,
            now: Level::First,
        };
        let mut all = ByLevel::<ByLevel<u64>>::default();
        *all.get_mut(away.home).get_mut(away.now) = 10;
        for epoch in 1..=8 {
            if seen_at.contains(&epoch) {
                rule.saw(Some(away), 4, Some(0.001));
            }
            rule.end_epoch(&EpochEnd {
                epoch,
                elapsed_s: 0.5,
                is_repeat: false,
                away: all,
                rate: 100_000.0,
            });
        }
        rule.balance().benefit_ns
    };
    let always = earned(&[1, 2, 3, 4, 5, 6, 7, 8]);
    assert!(always > 0);
    for seen_at in [&[1][..], &[1, 5], &[1, 2, 8]] {
        let part = earned(seen_at) as f64 / always as f64;
        assert!((part - 1.0).abs() < 1e-6, "{seen_at:?}: {part}");
    }
    assert_eq!(earned(&[]), 0);
}
