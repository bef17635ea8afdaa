//! Fast memory that is divided between processes.

use super::*;

pub(super) fn share(pid: u32, guaranteed_blocks: u64, weight: u32) -> (Pid, Share) {
    let share = Share {
        group: pid,
        guarantee: blocks(guaranteed_blocks),
        weight,
    };
    (Pid(pid), share)
}

#[test]
fn equal_heat_is_held_by_weight() {
    let mut world = World::new(&[(1, 0, 120), (2, 100, 0)], 4);
    let epochs = |world: &mut World, events: fn(Pid, u64) -> u32| {
        for _ in 0..40 {
            let plan = world.epoch(events);
            world.apply(&plan);
        }
    };
    epochs(&mut world, |_, _| 20);
    assert_eq!(world.in_fast(2), 100, "without shares nothing is hotter");
    world.shares = [share(1, 0, 3), share(2, 0, 1)].into();
    epochs(&mut world, |_, _| 20);
    assert_eq!((world.in_fast(1), world.in_fast(2)), (78, 26));
    // Memory that one does not use is the other's.
    epochs(&mut world, |pid, _| if pid == Pid(2) { 20 } else { 0 });
    assert_eq!(world.in_fast(2), 100);
}

#[test]
fn a_guarantee_that_ends_within_a_block_is_held_all_the_same() {
    let mut world = World::new(&[(1, 0, 120), (2, 100, 0)], 0);
    world.shares = [share(1, 30, 1), share(2, 0, 9)].into();
    world.shares.get_mut(&Pid(1)).unwrap().guarantee.0 -= 4096;
    for _ in 0..40 {
        let plan = world.epoch(|_, _| 20);
        world.apply(&plan);
    }
    assert!(world.plan().is_empty());
    assert_eq!((world.in_fast(1), world.in_fast(2)), (30, 70));
}

#[test]
fn who_has_no_share_is_one_of_the_others() {
    let mut world = World::new(&[(1, 0, 100), (2, 50, 0), (3, 50, 0)], 0);
    world.shares = [share(1, 0, 3)].into();
    for _ in 0..40 {
        let plan = world.epoch(|_, _| 20);
        world.apply(&plan);
    }
    assert_eq!(world.in_fast(1), 75);
}
