//! Memory of several sockets.

use super::*;

/// A process on the second socket. Four cold blocks lie in fast memory near the first socket, where `free` more are free.
/// Then come `near` blocks near its own, and four hot ones in slow memory. Returns the blocks that a plan demotes and promotes.
fn plan_of_two_sockets(near: u64, free: u64, events_near: u32) -> [Vec<u64>; 2] {
    plan_of(near, free, |b| if b < 4 { 0 } else { events_near }, |_| ())
}

/// The same with these events in each fast block, in a world that was changed.
fn plan_of(
    near: u64,
    free: u64,
    events: impl Fn(u64) -> u32,
    change: impl FnOnce(&mut World),
) -> [Vec<u64>; 2] {
    let mut world = World::new(&[(1, 4 + near, 4)], free);
    let second = Socket::new(1);
    world.sockets.of.insert(Pid(1), second);
    for (socket, room) in [(Socket::default(), free), (second, 0)] {
        let place = (Level::First, socket);
        world.sockets.set_room(place, blocks(room));
    }
    for b in 4..4 + near {
        let spread = Spread {
            socket: second,
            ..place(true).into()
        };
        world.residency.set(Pid(1), Block(FIRST + b), spread);
    }
    change(&mut world);
    // Prices are known.
    for direction in [Direction::Promotion, Direction::Demotion] {
        for _ in 0..2 {
            world.rule.moved(direction, blocks(8), 8 * 700_000, true);
        }
    }
    let mut plan = Plan::default();
    while plan.promotions.is_empty() && world.epoch < 100 {
        plan = world.epoch(|pid, b| match b {
            _ if pid != Pid(1) => 0,
            b if b < 4 + near => events(b),
            _ => 100,
        });
    }
    [plan.demotions, plan.promotions].map(|moves| {
        let mut all: Vec<u64> = moves.iter().map(|r| r.block.0 - FIRST).collect();
        all.sort_unstable();
        all
    })
}

#[test]
fn an_exchange_on_its_own_socket_goes_before_free_memory_of_another_one() {
    let [demoted, promoted] = plan_of_two_sockets(4, 4, 0);
    assert_eq!(promoted, [8, 9, 10, 11]);
    assert_eq!(demoted, [4, 5, 6, 7]);
}

#[test]
fn where_its_own_socket_holds_hot_memory_free_memory_of_another_one_is_used() {
    let [demoted, promoted] = plan_of_two_sockets(4, 4, 100);
    assert_eq!(promoted, [8, 9, 10, 11]);
    assert_eq!(demoted, [0u64; 0]);
    // However much of it there is, cold memory near another socket is exchanged.
    let [demoted, promoted] = plan_of_two_sockets(40, 0, 100);
    assert_eq!(promoted, [44, 45, 46, 47]);
    assert_eq!(demoted, [0, 1, 2, 3]);
}

#[test]
fn missing_memory_is_made_up_on_the_sockets_own_node() {
    let lacks = |world: &mut World| world.room.fast_missing = blocks(3);
    let [demoted, promoted] = plan_of(20, 0, |_| 0, lacks);
    assert_eq!(promoted.len(), 4);
    assert_eq!(demoted.len(), 7);
    assert!(demoted.iter().all(|&block| block >= 4), "{demoted:?}");
}

#[test]
fn a_few_cold_pages_near_do_not_keep_cold_memory_elsewhere_from_leaving() {
    // Another process has them.
    let few = |world: &mut World| {
        world.sockets.of.insert(Pid(2), Socket::new(1));
        let mut pages = Spread {
            socket: Socket::new(1),
            ..place(true).into()
        };
        pages.bytes.0[0] = ByteCount(4096);
        world.add(Pid(2), 1, |_| pages);
    };
    let [demoted, promoted] = plan_of(40, 0, |b| if b < 4 { 0 } else { 100 }, few);
    assert_eq!(promoted, [44, 45, 46, 47]);
    assert_eq!(demoted, [0, 0, 1, 2, 3]);
}
