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

#[test]
fn a_loss_counts_as_if_the_program_did_as_much_as_before_and_a_gain_as_it_is() {
    const BLOCKS: u64 = 10;
    // The benefit of an epoch with these samples of promoted and of demoted blocks.
    let earned_of = |promoted: u64, of_promoted: u32, of_demoted: u32| {
        let mut rule = Rule::new(HARDWARE);
        let [up, down] = [(Level::Second, Level::First), (Level::First, Level::Second)];
        let mut away = ByLevel::<ByLevel<u64>>::default();
        for ((home, now), blocks, samples) in
            [(up, promoted, of_promoted), (down, BLOCKS, of_demoted)]
        {
            *away.get_mut(home).get_mut(now) = blocks;
            rule.saw(Some(Away { home, now }), samples, None);
        }
        rule.end_epoch(&EpochEnd {
            epoch: 1,
            elapsed_s: 0.5,
            is_repeat: false,
            away,
            rate: 1000.0,
        });
        rule.balance().benefit_ns as f64
    };
    let earned_ns = |of_promoted, of_demoted| earned_of(BLOCKS, of_promoted, of_demoted);
    let one_ns = earned_ns(100, 0) / 100.0;
    let [fast_ns, slow_ns] = [0, 1].map(|tier| f64::from(HARDWARE.latency_ns.0[tier]));
    let slowdown = slow_ns / fast_ns;
    assert!(one_ns > 0.0 && slowdown > 2.0);
    for (promoted, demoted, net) in [
        (0, 100, -100.0 * slowdown),
        (100, 90, 10.0),
        (90, 100, 90.0 - 100.0 * slowdown),
    ] {
        let earned = earned_ns(promoted, demoted) / one_ns;
        assert!(
            (earned - net).abs() < 1e-3,
            "{promoted} {demoted}: {earned}"
        );
    }
    // Blocks that were demoted without an exchange only lose.
    assert!((earned_of(0, 0, 100) / one_ns + 100.0).abs() < 1e-3);
}
