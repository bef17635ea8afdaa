use demeter_policy::BLOCK_SIZE;
use proptest::prelude::*;

use super::*;
use crate::pages::simulated::{SharedPages, SimulatedPages};

const TIERS: Tiers = Tiers {
    fast: NodeId(0),
    slow: NodeId(1),
};

struct World {
    pages: SharedPages,
    collapse: bool,
    spaces: BTreeMap<Pid, Vec<VirtRange>>,
    residency: ResidencyMap,
    plan: Plan,
}

fn relocation(pid: u32, block: u64) -> Relocation {
    Relocation {
        pid: Pid(pid),
        block: Block(block),
        bytes: ByteCount(BLOCK_SIZE),
    }
}

/// Two processes, one of huge and one of base pages: `up` slow blocks to promote and `down` fast
/// ones to demote in each, `spare` blocks of free fast memory.
fn world(up: u64, down: u64, spare: u64) -> World {
    let mut pages = SimulatedPages::new(spare * BLOCK_SIZE, 1 << 40);
    let (mut spaces, mut residency, mut plan) =
        (BTreeMap::new(), ResidencyMap::default(), Plan::default());
    for (pid, huge) in [(1, true), (2, false)] {
        for b in 0..up + down {
            let node = if b < up { TIERS.slow } else { TIERS.fast };
            pages.map_block(Pid(pid), b, huge, node);
            let (fast, slow) = if b < up {
                (0, BLOCK_SIZE)
            } else {
                (BLOCK_SIZE, 0)
            };
            let placement = Placement {
                fast: ByteCount(fast),
                slow: ByteCount(slow),
            };
            residency.set(Pid(pid), Block(b), placement);
            let list = if b < up {
                &mut plan.promotions
            } else {
                &mut plan.demotions
            };
            list.push(relocation(pid, b));
        }
        let end = Block(up + down).start();
        spaces.insert(
            Pid(pid),
            VirtRange::new(GuestVirtAddr(0), end).into_iter().collect(),
        );
    }
    World {
        pages: SharedPages::new(pages, None),
        collapse: false,
        spaces,
        residency,
        plan,
    }
}

impl World {
    fn execute(&mut self) -> Outcome {
        let kernel = self.pages.clone();
        let spare = || ByteCount(kernel.lock().free[&TIERS.fast]);
        let mut memory = Memory {
            pages: &mut self.pages,
            spaces: &self.spaces,
            residency: &mut self.residency,
            epoch: 0,
        };
        Mover::new(TIERS, self.collapse).execute(&self.plan, &mut memory, spare)
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(32))]
    #[test]
    fn all_moves_and_free_fast_memory_keeps_its_level(n in 0u64..20, spare in 0u64..8) {
        let mut w = world(n, n, spare);
        let outcome = w.execute();
        let bytes = 2 * n * BLOCK_SIZE;
        prop_assert_eq!((outcome.promoted.0, outcome.demoted.0, outcome.tried.0), (bytes, bytes, 2 * bytes));
        prop_assert!(outcome.failed.is_empty() && outcome.error.is_none());
        prop_assert_eq!(w.pages.lock().free[&TIERS.fast], spare * BLOCK_SIZE);
        for pid in [Pid(1), Pid(2)] {
            prop_assert_eq!(w.pages.lock().on(pid, TIERS.fast).0, n * BLOCK_SIZE);
            for b in 0..2 * n {
                let fast = w.residency.get(pid, Block(b)).unwrap().fast.0;
                prop_assert_eq!(fast, if b < n { BLOCK_SIZE } else { 0 });
            }
        }
    }
}

#[test]
fn huge_pages_take_one_address_each() {
    let mut w = world(8, 0, 8);
    w.plan.promotions.retain(|r| r.pid == Pid(1));
    assert_eq!(w.execute().promoted.0, 8 * BLOCK_SIZE);
    assert_eq!(w.pages.lock().migrate_calls, 1);
}

#[test]
fn small_pages_are_promoted_as_huge_ones_where_that_is_wanted() {
    let mut w = world(8, 0, 8);
    w.collapse = true;
    w.plan.promotions.retain(|r| r.pid == Pid(2));
    assert_eq!(w.execute().promoted.0, 8 * BLOCK_SIZE);
    assert_eq!(w.pages.lock().migrate_calls, 1);
}

#[test]
fn a_block_that_sticks_is_reported_and_set_aside() {
    let mut w = world(4, 0, 8);
    w.pages.lock().stuck.insert((Pid(1), 2 * BLOCK_SIZE));
    w.pages.lock().stuck.insert((Pid(2), BLOCK_SIZE + 4096));
    let outcome = w.execute();
    assert_eq!(outcome.promoted.0, 7 * BLOCK_SIZE - 4096);
    assert_eq!(
        outcome.failed,
        [(Errno(libc::EBUSY), BLOCK_SIZE + 4096)].into()
    );
    assert_eq!(w.residency.set_aside(0), 2);
}

#[test]
fn without_room_nothing_is_promoted_beyond_it() {
    let mut w = world(4, 0, 3);
    let outcome = w.execute();
    assert_eq!(outcome.promoted.0, 3 * BLOCK_SIZE);
    assert_eq!(w.pages.lock().free[&TIERS.fast], 0);
}

#[test]
fn a_process_that_ends_takes_nothing_else_with_it() {
    let mut w = world(4, 4, 0);
    w.pages.lock().kill(Pid(1));
    w.pages.lock().free.insert(TIERS.fast, 0);
    let outcome = w.execute();
    assert_eq!(outcome.demoted.0, 4 * BLOCK_SIZE);
    assert_eq!(w.pages.lock().on(Pid(2), TIERS.fast).0, 4 * BLOCK_SIZE);
    assert_eq!(outcome.error, None);
}
