//! Small pages that become huge ones where they lie.

use std::collections::BTreeSet;

use super::*;

/// Slow memory of small pages that is warm, below fast memory that is hot. A move costs `move_ns` a block.
fn warm_below_hot(move_ns: u64) -> World {
    let mut world = World::new(&[(1, 8, 8)], 0);
    world.collapses = true;
    for direction in [Direction::Promotion, Direction::Demotion] {
        for _ in 0..2 {
            world.rule.moved(direction, blocks(64), 64 * move_ns, true);
        }
    }
    world
}

fn warm(_: Pid, b: u64) -> u32 {
    if b < 8 { 100 } else { 10 }
}

#[test]
fn small_pages_become_huge_once_they_have_cost_as_much_and_each_block_once() {
    let mut world = warm_below_hot(700_000);
    let mut collapsed = vec![];
    for _ in 0..400 {
        let plan = world.epoch(warm);
        assert!(plan.promotions.is_empty(), "{plan:?}");
        world.collapse(&plan, 700_000);
        collapsed.extend(plan.collapses.iter().map(|r| r.block.0 - FIRST));
    }
    collapsed.sort_unstable();
    assert_eq!(collapsed, (8..16).collect::<Vec<_>>());
}

#[test]
fn collapses_leave_the_first_tokens_for_moves_and_wait_for_a_price() {
    let mut world = warm_below_hot(2_000_000);
    for _ in 0..40 {
        let plan = world.epoch(warm);
        // Each takes a hundred times what it should.
        world.collapse(&plan, 200_000_000);
        let first_s = TOKENS_S * f64::from(HARDWARE.cpus);
        assert!(world.rule.tokens_s > first_s - 0.8, "{:?}", world.rule);
    }
    let mut world = World::new(&[(1, 8, 8)], 0);
    world.collapses = true;
    assert!((0..40).all(|_| world.epoch(warm).collapses.is_empty()));
}

#[test]
fn blocks_with_holes_or_in_two_tiers_stay_small() {
    let mut world = warm_below_hot(700_000);
    let with = |fast: u64, slow: u64| TierBytes {
        fast: ByteCount(fast),
        slow: ByteCount(slow),
    };
    let few = BLOCK_SIZE / 16;
    let block = |b: u64| Block(FIRST + b);
    let places = [
        (8, with(0, BLOCK_SIZE - few)),
        (9, with(0, BLOCK_SIZE - few - 4096)),
        (10, with(few, BLOCK_SIZE - few)),
    ];
    for (b, place) in places {
        world.residency.set(Pid(1), block(b), place);
    }
    let mut collapsed = BTreeSet::new();
    for _ in 0..400 {
        let plan = world.epoch(warm);
        world.collapse(&plan, 700_000);
        collapsed.extend(plan.collapses.iter().map(|r| r.block));
    }
    let expected = (8..16).filter(|b| ![9, 10].contains(b)).map(block);
    assert_eq!(collapsed, expected.collect());
}
