use demeter_policy::{BLOCK_SIZE, ByteCount, TierBytes};
use proptest::prelude::*;

use super::*;
use crate::pages::simulated::{SharedPages, SimulatedPages};

const FAST: NodeId = NodeId(0);
const SLOW: NodeId = NodeId(1);

const HUGE: Pid = Pid(1);
const SMALL: Pid = Pid(2);

struct World {
    pages: SharedPages,
    mover: Mover,
}

/// Two processes, one of huge and one of base pages, each with `blocks` blocks in slow memory; `free` blocks of free
/// fast memory.
fn world(blocks: u64, free: u64, collapse: bool) -> World {
    let mut pages = SimulatedPages::new(free * BLOCK_SIZE, 1 << 40);
    for (pid, huge) in [(HUGE, true), (SMALL, false)] {
        for b in 0..blocks {
            pages.map_block(pid, b, huge, SLOW);
        }
    }
    World {
        pages: SharedPages::new(pages, None),
        mover: Mover::new("0/1".parse().unwrap(), collapse),
    }
}

impl World {
    fn migrate(
        &mut self,
        direction: Direction,
        pid: Pid,
        blocks: std::ops::Range<u64>,
    ) -> Result<(Vec<Spread>, Vec<Errno>), PagesError> {
        let space: Vec<_> = VirtRange::new(GuestVirtAddr(0), GuestVirtAddr(1 << 30))
            .into_iter()
            .collect();
        let blocks: Vec<_> = blocks.map(Block).collect();
        let to = match direction {
            Direction::Promotion => FAST,
            Direction::Demotion => SLOW,
        };
        let pages = &mut self.pages;
        self.mover
            .migrate(pages, (Level::First, direction), to, pid, &space, &blocks)
    }

    fn promote(&mut self, pid: Pid, blocks: std::ops::Range<u64>) -> Vec<Spread> {
        self.migrate(Direction::Promotion, pid, blocks).unwrap().0
    }
}

fn placement(fast: u64, slow: u64) -> Spread {
    Spread::from(TierBytes {
        fast: ByteCount(fast),
        slow: ByteCount(slow),
    })
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn what_is_asked_for_moves_and_nothing_else(n in 1u64..10, part in 0u64..10, free in 0u64..12) {
        let part = part.min(n);
        let mut w = world(n, free, false);
        for pid in [HUGE, SMALL] {
            let before = w.pages.lock().free[&FAST] / BLOCK_SIZE;
            let told = w.promote(pid, 0..part);
            let moved = part.min(before);
            prop_assert_eq!(told.iter().map(|p| p.bytes.0[0].0).sum::<u64>(), moved * BLOCK_SIZE);
            prop_assert_eq!(w.pages.lock().on(pid, FAST).0, moved * BLOCK_SIZE);
        }
        // And back.
        for pid in [HUGE, SMALL] {
            let (told, _) = w.migrate(Direction::Demotion, pid, 0..part).unwrap();
            prop_assert!(told.iter().all(|p| *p == placement(0, BLOCK_SIZE)));
        }
        prop_assert_eq!(w.pages.lock().free[&FAST], free * BLOCK_SIZE);
    }
}

#[test]
fn huge_pages_take_one_address_each() {
    let mut w = world(8, 8, false);
    assert_eq!(w.promote(HUGE, 0..8), [placement(BLOCK_SIZE, 0); 8]);
    assert_eq!(w.pages.lock().migrate_calls, 1);
}

#[test]
fn a_process_of_small_pages_is_seldom_asked_for_huge_ones() {
    let mut w = world(40, 40, false);
    for b in 0..16 {
        w.promote(SMALL, b..b + 1);
    }
    assert_eq!(w.pages.lock().migrate_calls, 17, "the first batch asked");
    w.promote(SMALL, 16..17);
    assert_eq!(
        w.pages.lock().migrate_calls,
        19,
        "the seventeenth did again"
    );
    w.mover.forget(SMALL);
    w.promote(SMALL, 17..18);
    assert_eq!(w.pages.lock().migrate_calls, 21);
}

#[test]
fn small_pages_are_promoted_as_huge_ones_where_that_is_wanted() {
    let mut w = world(8, 8, true);
    assert_eq!(w.promote(SMALL, 0..8), [placement(BLOCK_SIZE, 0); 8]);
    assert_eq!(w.pages.lock().migrate_calls, 1);
}

#[test]
fn blocks_with_many_holes_are_not_filled() {
    let mut w = world(2, 8, true);
    for page in 0..=HOLES_MAX as u64 {
        for block in 0..2 {
            let is_a_few = block == 0 && page == 0;
            if !is_a_few {
                let start = block * BLOCK_SIZE + page * 8 * 4096;
                w.pages.lock().unmap(SMALL, start);
            }
        }
    }
    let left = BLOCK_SIZE - (HOLES_MAX as u64 + 1) * 4096;
    let places = w.promote(SMALL, 0..2);
    assert_eq!(places, [placement(BLOCK_SIZE, 0), placement(left, 0)]);
}

#[test]
fn what_sticks_is_seen_to_the_page() {
    let mut w = world(4, 8, false);
    w.pages.lock().stuck.insert((HUGE, 2 * BLOCK_SIZE));
    w.pages.lock().stuck.insert((SMALL, BLOCK_SIZE + 4096));
    let (places, reasons) = w.migrate(Direction::Promotion, HUGE, 0..4).unwrap();
    assert_eq!(places[1], placement(BLOCK_SIZE, 0));
    assert_eq!(places[2], placement(0, BLOCK_SIZE));
    assert_eq!(reasons[2], Errno(libc::EBUSY));
    let places = w.promote(SMALL, 0..4);
    assert_eq!(places[1], placement(BLOCK_SIZE - 4096, 4096));
    assert_eq!(places[2], placement(BLOCK_SIZE, 0));
}

#[test]
fn a_process_that_has_gone_is_an_error() {
    let mut w = world(4, 4, false);
    w.pages.lock().kill(HUGE);
    let result = w.migrate(Direction::Promotion, HUGE, 0..4);
    assert!(matches!(result, Err(PagesError::Gone(HUGE))), "{result:?}");
    assert_eq!(w.promote(SMALL, 0..4), [placement(BLOCK_SIZE, 0); 4]);
}

/// Blocks of small pages: a third on each of nodes 0 (fast), 1 (fast) and 2 (slow).
fn spread(collapse: bool) -> World {
    let mut pages = SimulatedPages::new(1 << 30, 1 << 30);
    pages.free.insert(NodeId(2), 1 << 30);
    for page in 0..PAGES_PER_BLOCK {
        let node = NodeId((page * 3 / PAGES_PER_BLOCK) as u32);
        pages.map(SMALL, page * 4096, 4096, node);
    }
    World {
        pages: SharedPages::new(pages, None),
        mover: Mover::new("0,1/2".parse().unwrap(), collapse),
    }
}

#[test]
fn pages_on_any_node_of_the_tier_stay_where_they_are() {
    for collapse in [false, true] {
        let mut w = spread(collapse);
        let on = |w: &World| [0, 1, 2].map(|node| w.pages.lock().on(SMALL, NodeId(node)).0 >> 12);
        assert_eq!(on(&w), [171, 171, 170]);
        let space = [VirtRange::new(GuestVirtAddr(0), GuestVirtAddr(1 << 30)).unwrap()];
        let (to, blocks) = (NodeId(1), [Block(0)]);
        let moved = w.mover.migrate(
            &mut w.pages,
            (Level::First, Direction::Promotion),
            to,
            SMALL,
            &space,
            &blocks,
        );
        assert_eq!(moved.unwrap().0, [placement(BLOCK_SIZE, 0)]);
        assert_eq!(on(&w), [171, 341, 0]);
    }
}

#[test]
fn small_pages_of_one_node_become_a_huge_page_in_place() {
    let mut w = world(4, 4, false);
    let missing = |page: u64| page.is_multiple_of(8);
    // A block with holes, and one on two nodes.
    for (block, node_of) in [(100, [SLOW, SLOW]), (101, [SLOW, FAST])] {
        for page in 0..PAGES_PER_BLOCK {
            let node = node_of[(page % 2) as usize];
            if block == 101 || !missing(page) {
                w.pages
                    .lock()
                    .map(SMALL, (block * PAGES_PER_BLOCK + page) * 4096, 4096, node);
            }
        }
    }
    let pages_of = |w: &World, block: u64| w.pages.lock().pages_of(SMALL, Block(block));
    let on = |w: &World| [FAST, SLOW].map(|node| w.pages.lock().on(SMALL, node));
    let before = on(&w);
    let blocks = [0, 100, 101].map(Block);
    w.mover.collapse(&mut w.pages, SMALL, &blocks).unwrap();
    assert_eq!(on(&w), before, "nothing has moved, and no hole was filled");
    assert_eq!(pages_of(&w, 0), 1);
    assert_eq!(pages_of(&w, 100), PAGES_PER_BLOCK * 7 / 8);
    assert_eq!(pages_of(&w, 101), PAGES_PER_BLOCK);
}
