use proptest::prelude::*;

use super::*;

fn range(first: u64, end: u64) -> VirtRange {
    VirtRange::new(Block(first).start(), Block(end).start()).unwrap()
}

const FAST: TierBytes = TierBytes {
    fast: ByteCount(BLOCK_SIZE),
    slow: ByteCount(0),
};

#[test]
fn what_was_absent_is_forgotten_when_it_is_accessed() {
    let mut map = ResidencyMap::default();
    map.set(Pid(1), Block(1), FAST);
    map.set(Pid(1), Block(2), TierBytes::default());
    let accessed = [1, 2, 2, 3].map(|b| map.accessed(Pid(1), Block(b)).was_absent);
    assert_eq!(accessed, [false, true, false, false]);
    assert_eq!(map.get(Pid(1), Block(1)), Some(FAST.into()));
    assert_eq!(map.get(Pid(1), Block(2)), None);
}

#[test]
fn back_off_doubles_and_success_forgets_it() {
    let mut map = ResidencyMap::default();
    map.set(Pid(1), Block(5), FAST);
    let movable = |m: &ResidencyMap, epoch| m.movable(Pid(1), &range(0, 10), epoch).count();
    assert_eq!(movable(&map, 0), 1);
    map.failed(Pid(1), Block(5), 0);
    assert_eq!((movable(&map, 3), movable(&map, 4)), (0, 1));
    map.failed(Pid(1), Block(5), 4);
    assert_eq!((movable(&map, 11), movable(&map, 12)), (0, 1));
    map.failed(Pid(1), Block(5), 12);
    map.moved(Pid(1), Block(5), UP, FAST.into());
    assert_eq!(movable(&map, 12), 1);
    for epoch in 0..1000 {
        map.failed(Pid(1), Block(5), epoch);
    }
    assert_eq!(map.set_aside(1000), 1);
    assert_eq!(movable(&map, 999 + (4 << 8)), 1);
}

const SLOW: TierBytes = TierBytes {
    fast: ByteCount(0),
    slow: ByteCount(BLOCK_SIZE),
};

const UP: (Level, Direction) = (Level::First, Direction::Promotion);
const DOWN: (Level, Direction) = (Level::First, Direction::Demotion);

/// The place of a block that is wholly in one tier.
fn all_in(level: Level) -> Spread {
    let bytes = |at| ByteCount(if at == level { BLOCK_SIZE } else { 0 });
    ByLevel::from_fn(bytes).into()
}

#[test]
fn home_is_where_a_block_was_found_over_several_moves() {
    let mut map = ResidencyMap::default();
    map.set(Pid(1), Block(5), all_in(Level::Third));
    let mut moved = |boundary, direction, to| {
        let spread = all_in(to);
        map.moved(Pid(1), Block(5), (boundary, direction), spread);
        map.away_of(Pid(1), Block(5))
    };
    let away = |now| {
        let home = Level::Third;
        Some(Away { home, now })
    };
    use Direction::{Demotion, Promotion};
    use Level::{First, Second, Third};
    assert_eq!(moved(Second, Promotion, Second), away(Second));
    assert_eq!(moved(First, Promotion, First), away(First));
    assert_eq!(moved(First, Demotion, Second), away(Second));
    assert_eq!(moved(Second, Demotion, Third), None);
}

proptest! {
    #[test]
    fn unknown_blocks_are_those_without_a_place(
        known in prop::collection::btree_set(0u64..1600, 0..800),
        (first, len) in (0u64..1600, 1u64..1600),
        full in prop::option::of(0u64..3),
    ) {
        let mut map = ResidencyMap::default();
        let full = full.map_or(0..0, |chunk| chunk * 512..(chunk + 1) * 512);
        known.iter().copied().chain(full).for_each(|b| map.set(Pid(1), Block(b), FAST));
        let range = range(first, first + len);
        let unknown: Vec<Block> = map.unknown(Pid(1), &range).collect();
        let blocks = Block::all_of(&range);
        let expected = blocks.filter(|&b| map.get(Pid(1), b).is_none());
        prop_assert_eq!(unknown, expected.collect::<Vec<_>>());
    }
}

#[test]
fn a_block_is_away_until_it_is_back_or_something_else_moves_it() {
    let mut map = ResidencyMap::default();
    map.set(Pid(1), Block(5), FAST);
    assert_eq!(map.away_of(Pid(1), Block(5)), None);
    map.moved(Pid(1), Block(5), DOWN, SLOW.into());
    map.set(Pid(1), Block(5), SLOW);
    let demoted = Away {
        home: Level::First,
        now: Level::Second,
    };
    assert_eq!(map.away_of(Pid(1), Block(5)), Some(demoted));
    assert_eq!(map.away().0[0].0[1], 1);
    map.moved(Pid(1), Block(5), UP, FAST.into());
    assert_eq!(map.away_of(Pid(1), Block(5)), None, "it is where it was");
    map.moved(Pid(1), Block(5), DOWN, SLOW.into());
    map.set(Pid(1), Block(5), FAST);
    assert_eq!(
        map.away_of(Pid(1), Block(5)),
        None,
        "somebody has brought it back"
    );
    assert_eq!(map.away(), ByLevel::default());
}

#[test]
fn sums_by_chunk_are_those_of_the_blocks() {
    let mut map = ResidencyMap::default();
    for b in (0..2000).step_by(3) {
        map.set(Pid(1), Block(b), if b % 2 == 0 { FAST } else { SLOW });
    }
    map.set(Pid(1), Block(3), FAST);
    map.accessed(Pid(1), Block(6));
    for (first, end) in [(0, 2000), (1, 512), (511, 513), (100, 1600)] {
        let blocks = map.movable(Pid(1), &range(first, end), 0);
        let sum = blocks.fold((0, 0), |sum, (_, p)| (sum.0 + p.fast.0, sum.1 + p.slow.0));
        let whole = map.placement(Pid(1), &range(first, end));
        assert_eq!((whole.fast.0, whole.slow.0), sum);
    }
}

#[test]
fn restricting_forgets_what_is_unmapped() {
    let mut map = ResidencyMap::default();
    for b in 0..10 {
        map.set(Pid(1), Block(b), FAST);
    }
    map.restrict(Pid(1), &[range(2, 4), range(9, 12)]);
    let left: Vec<_> = map
        .movable(Pid(1), &range(0, 20), 0)
        .map(|(b, _)| b.0)
        .collect();
    assert_eq!(left, [2, 3, 9]);
    assert_eq!(
        map.placement(Pid(1), &range(3, 10)).fast,
        ByteCount(2 * BLOCK_SIZE)
    );
    map.forget(Pid(1));
    assert_eq!(map.get(Pid(1), Block(2)), None);
}
