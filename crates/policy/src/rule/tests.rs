use std::collections::{BTreeMap, BTreeSet};

use proptest::prelude::*;

use super::machine::{
    self, Machine, Outcome, hardware, hot_set, lab, run, scattered, sweep, window, zipf,
};
use super::*;
use crate::chance::Chance;
use crate::engine::conformance::HARDWARE;
use crate::{
    Block, FillThreshold, Heat, MoveBudget, Pid, Plan, ResidencyMap, Room, Share, Situation,
    Socket, Sockets, TierBytes, VirtRange,
};

const FIRST: u64 = 1 << 20;

fn blocks(n: u64) -> ByteCount {
    ByteCount(n * BLOCK_SIZE)
}

/// A machine with several processes, whose blocks have any places and events.
#[derive(Debug, Clone)]
struct World {
    heats: Vec<(Pid, Heat)>,
    residency: ResidencyMap,
    shares: BTreeMap<Pid, Share>,
    sockets: Sockets,
    room: Room,
    rule: Rule,
    epoch: u32,
    collapses: bool,
}

fn place(in_fast: bool) -> TierBytes {
    TierBytes {
        fast: blocks(u64::from(in_fast)),
        slow: blocks(u64::from(!in_fast)),
    }
}

impl World {
    /// Processes with a pid, blocks in fast memory and blocks in slow memory each.
    fn new(processes: &[(u32, u64, u64)], fast_free: u64) -> Self {
        let mut world = Self {
            heats: vec![],
            residency: ResidencyMap::default(),
            shares: BTreeMap::new(),
            sockets: Sockets::default(),
            room: Room {
                fast_free: blocks(fast_free),
                fast_reserve: ByteCount(0),
                fast_low: ByteCount(0),
                slow_free: blocks(1 << 20),
                batch: blocks(1 << 20),
            },
            rule: Rule::new(HARDWARE),
            epoch: 0,
            collapses: false,
        };
        for &(pid, fast, slow) in processes {
            let mut heat = Heat::default();
            let (start, end) = (Block(FIRST).start(), Block(FIRST + fast + slow).start());
            heat.set_space(&[VirtRange::new(start, end).unwrap()]);
            for b in 0..fast + slow {
                world
                    .residency
                    .set(Pid(pid), Block(FIRST + b), place(b < fast));
            }
            world.heats.push((Pid(pid), heat));
        }
        world
    }

    /// An epoch in which each block has as many samples as `events` says.
    fn epoch(&mut self, events: impl Fn(Pid, u64) -> u32) -> Plan {
        self.epoch += 1;
        let mut rate = 0.0;
        for (pid, heat) in &mut self.heats {
            for (block, _) in self.residency.all(*pid) {
                let events = events(*pid, block.0 - FIRST);
                heat.add(block, events);
                self.rule
                    .saw(self.residency.away_of(*pid, block), events, None);
            }
            heat.end_epoch(self.epoch, 0.5, usize::MAX);
            rate += heat.rate(0);
        }
        self.rule.end_epoch(&EpochEnd {
            epoch: self.epoch,
            elapsed_s: 0.5,
            is_repeat: false,
            away: self.residency.away(),
            rate,
        });
        self.plan()
    }

    fn plan(&mut self) -> Plan {
        let heats: Vec<_> = self.heats.iter().map(|(pid, heat)| (*pid, heat)).collect();
        let situation = Situation {
            ranking: &[],
            residency: &self.residency,
            shares: &self.shares,
            sockets: &self.sockets,
            level: Level::First,
            planned: &[],
            room: self.room,
            fill: FillThreshold(0.0),
            budget: MoveBudget::NONE,
            balloon_waits: false,
            epoch: self.epoch,
            epoch_ms: 500,
            collapses: self.collapses,
        };
        plan(&mut self.rule, &situation, &heats)
    }

    /// Carries a plan out at the price of hardware.
    fn apply(&mut self, plan: &Plan) {
        let both = [
            (&plan.demotions, Direction::Demotion),
            (&plan.promotions, Direction::Promotion),
        ];
        for (relocations, direction) in both {
            for r in relocations {
                let to_fast = direction == Direction::Promotion;
                let way = (Level::First, direction);
                let below = self.residency.get(r.pid, r.block).unwrap();
                let below = match direction {
                    Direction::Promotion => below,
                    Direction::Demotion => place(false).into(),
                };
                let heat = &self.heats.iter().find(|(pid, _)| *pid == r.pid).unwrap().1;
                self.rule.crossed(heat, r.block, way, &below);
                self.residency
                    .moved(r.pid, r.block, way, place(to_fast).into());
                let free = &mut self.room.fast_free.0;
                *free = if to_fast {
                    *free - r.bytes.0
                } else {
                    *free + r.bytes.0
                };
                self.rule.moved(direction, r.bytes, 700_000, false);
            }
        }
    }

    /// Carries collapses out, which take `took_ns` each.
    fn collapse(&mut self, plan: &Plan, took_ns: u64) {
        for r in &plan.collapses {
            self.residency.collapsed(r.pid, r.block);
            self.rule.spent(took_ns);
        }
    }

    fn in_fast(&self, pid: u32) -> u64 {
        let known = self.residency.all(Pid(pid));
        known
            .iter()
            .filter(|(_, known)| known.placement().fast.0 > 0)
            .count() as u64
    }
}

fn share(pid: u32, guaranteed_blocks: u64, weight: u32) -> (Pid, Share) {
    let share = Share {
        group: pid,
        guarantee: blocks(guaranteed_blocks),
        weight,
    };
    (Pid(pid), share)
}

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
fn a_hot_set_comes_into_fast_memory_and_then_nothing_moves() {
    for (machine, t90_s) in [
        (hardware(128, 1), 2.0),
        (hardware(2000, 4), 3.0),
        (hardware(8000, 8), 4.0),
        (lab(400), 10.0),
    ] {
        let n = machine.blocks;
        for outcome in [
            run(&machine, 40.0, 1, hot_set(n - n / 10, n / 10)),
            run(&machine, 40.0, 2, hot_set(n / 2, n / 10)),
        ] {
            assert!(outcome.t90_s <= t90_s, "{n} blocks: {outcome:?}");
            assert!(outcome.end > 2.1, "{n} blocks: {outcome:?}");
            assert!(outcome.moved < n as u64 / 4, "{n} blocks: {outcome:?}");
        }
    }
}

#[test]
fn single_hot_blocks_are_found() {
    for machine in [hardware(500, 4), hardware(4000, 4)] {
        let outcome = run(&machine, 40.0, 1, scattered(machine.blocks / 10));
        assert!(outcome.end > 1.85, "{outcome:?}");
    }
}

#[test]
fn memory_that_is_used_evenly_stays() {
    for machine in [hardware(500, 4), hardware(4000, 8), lab(400)] {
        let even = |_, share: &mut Vec<f64>| {
            let n = share.len();
            share.fill(1.0 / n as f64);
        };
        let outcome = run(&machine, 60.0, 3, even);
        assert!(outcome.moved <= 4, "{outcome:?}");
    }
}

#[test]
fn a_sweep_and_a_hot_set_that_never_stays_lose_little() {
    for machine in [hardware(500, 1), lab(400), hardware(4000, 1)] {
        let outcomes = [
            run(&machine, 60.0, 1, sweep(3.0)),
            run(&machine, 60.0, 1, sweep(20.0)),
            run(&machine, 60.0, 1, window(machine.blocks / 20, 2.0)),
        ];
        for outcome in outcomes {
            assert!(outcome.mean > 0.93, "{machine:?}: {outcome:?}");
        }
    }
}

/// A process on the second socket. Four cold blocks lie in fast memory near the first socket, where `free` more are free.
/// Then come `near` blocks near its own, and four hot ones in slow memory. Returns the blocks that a plan demotes and promotes.
fn plan_of_two_sockets(near: u64, free: u64, events_near: u32) -> [Vec<u64>; 2] {
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
    // Prices are known.
    for direction in [Direction::Promotion, Direction::Demotion] {
        for _ in 0..2 {
            world.rule.moved(direction, blocks(8), 8 * 700_000, true);
        }
    }
    let mut plan = Plan::default();
    while plan.promotions.is_empty() && world.epoch < 100 {
        plan = world.epoch(|_, b| match b {
            0..4 => 0,
            b if b < 4 + near => events_near,
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

#[test]
fn unused_memory_stays_though_fast_memory_is_free_and_no_price_is_known() {
    let mut world = World::new(&[(1, 4, 0), (2, 0, 4)], 8);
    for _ in 0..10 {
        let plan = world.epoch(|pid, _| if pid == Pid(1) { 10 } else { 0 });
        assert!(plan.is_empty(), "{plan:?}");
    }
}

#[test]
fn the_first_move_does_not_make_the_price() {
    let mut price = Price::default();
    price.pay(4 << 20, 111_000_000);
    assert!(!price.is_known());
    assert_eq!(price.seconds(2 << 20), 0.0);
    price.pay(4 << 20, 2_800_000);
    assert!(price.is_known());
    assert!(price.seconds(2 << 20) < 2e-3);
}

#[test]
fn a_slow_small_batch_does_not_stop_all_moves_for_ever() {
    let mut price = Price::default();
    (0..16).for_each(|_| price.pay(4 << 20, 4 * 700_000));
    let usual_ps = price.ps_per_byte();
    price.pay(1 << 20, 20_000_000);
    assert!(price.ps_per_byte() < 3 * usual_ps);
    (0..64).for_each(|_| price.pay(1 << 20, 200_000_000));
    assert!(price.ps_per_byte() > 20 * usual_ps);
    (0..40).for_each(|_| price.age());
    assert!(price.ps_per_byte() < 3 * usual_ps);
}

/// A pair of blocks. It costs the events in the block that lies in slow memory, and the exchanges, in units of an event.
struct Pair {
    /// Events in an epoch of each of the two, epoch by epoch.
    events: Vec<[u32; 2]>,
    exchange: f64,
}

impl Pair {
    /// The cost of the best sequence of exchanges, with all events known.
    fn optimum(&self) -> f64 {
        let mut cost = [0.0, self.exchange];
        for events in &self.events {
            // In state 0 the first block is in slow memory, in state 1 the second.
            let stay = [0, 1].map(|state| cost[state] + f64::from(events[state]));
            cost = [0, 1].map(|state| stay[state].min(stay[1 - state] + self.exchange));
        }
        cost[0].min(cost[1])
    }

    /// The cost under the rule, and how often it exchanges.
    fn online(&self) -> (f64, u32) {
        let mut world = World::new(&[(1, 1, 1)], 0);
        world.rule.gain.cpus = 1 << 20;
        world.rule.tokens_s = 1e9;
        let event_s = world.rule.load.event_s.0[1];
        let took_ns = (self.exchange * event_s / 2.0 * 1e9) as u64;
        for _ in 0..64 {
            world.rule.promotion.pay(BLOCK_SIZE, took_ns);
            world.rule.demotion.pay(BLOCK_SIZE, took_ns);
        }
        let (mut cost, mut exchanges) = (0.0, 0);
        for events in &self.events {
            let slow = world
                .residency
                .get(Pid(1), Block(FIRST + 1))
                .unwrap()
                .at(Level::First)
                .slow
                .0
                > 0;
            // The second of the world's blocks is in slow memory at first.
            let state = if slow { 0 } else { 1 };
            cost += f64::from(events[state]);
            let plan = world.epoch(|_, b| events[1 - b as usize]);
            if !plan.promotions.is_empty() {
                assert_eq!((plan.promotions.len(), plan.demotions.len()), (1, 1));
                world.apply(&plan);
                cost += self.exchange;
                exchanges += 1;
            }
        }
        (cost, exchanges)
    }
}

#[test]
#[ignore = "a table to look at; a minute in release"]
fn table() {
    let _ = machine::PID;
    let show = |name: &str, what: &str, o: Outcome| {
        let Outcome {
            mean,
            end,
            moved,
            t90_s,
        } = o;
        println!("{name:9} {what:12} mean {mean:.3} end {end:.3} moved {moved:6} t90 {t90_s:5.1}");
    };
    let slow_moves = Machine {
        exchange_s: 45e-3,
        ..lab(4000)
    };
    let machines: [(&str, Machine, f64); 6] = [
        ("800M lab", lab(400), 120.0),
        ("8G lab", lab(4000), 180.0),
        ("8G slow", slow_moves, 180.0),
        ("1G hw4", hardware(500, 4), 60.0),
        ("8G hw", hardware(4000, 1), 120.0),
        ("64G hw8", hardware(32000, 8), 60.0),
    ];
    for (name, m, s) in machines {
        let n = m.blocks;
        let large = m.fast_blocks * 13 / 10;
        show(name, "hot", run(&m, s, 1, hot_set(n - n / 10, n / 10)));
        show(name, "scattered", run(&m, s, 1, scattered(n / 10)));
        show(
            name,
            "hot 1.3x",
            run(&m, s, 1, hot_set(n - large - 1, large)),
        );
        show(name, "zipf", run(&m, s, 1, zipf()));
        show(name, "sweep 3", run(&m, s, 1, sweep(3.0)));
        show(name, "sweep 20", run(&m, s, 1, sweep(20.0)));
        for every_s in [2.0, 6.0, 30.0] {
            show(
                name,
                &format!("window {every_s}"),
                run(&m, s, 1, window(n / 20, every_s)),
            );
        }
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(64))]

    /// Where both have hundreds of events, so that none is chance, and the window remembers all that matters.
    #[test]
    fn a_pair_costs_at_most_three_times_the_optimum_and_an_exchange(
        phases in prop::collection::vec((1usize..40, any::<bool>(), 0u32..200), 1..12), exchange in 400f64..4000.0,
    ) {
        let events: Vec<[u32; 2]> = phases.iter().flat_map(|&(epochs, first, other)| {
            let (hot, cold) = (1000, other);
            std::iter::repeat_n(if first { [hot, cold] } else { [cold, hot] }, epochs)
        }).collect();
        let pair = Pair { events, exchange };
        let (optimum, (online, exchanges)) = (pair.optimum(), pair.online());
        // Chance and whole epochs cost a few hundred events for each exchange.
        let slack = exchange + 1500.0 * f64::from(1 + exchanges);
        prop_assert!(online <= 3.0 * optimum + slack, "{online} instead of {optimum}, {exchanges} exchanges");
    }

    #[test]
    fn traffic_settles_where_loaded_tiers_are_equally_fast(
        used in 0.3f64..6.0,
        is_in_fast in any::<bool>(),
        seed in 0u64..1 << 32,
    ) {
        let machine = hardware(1000, 8);
        let hot = machine.blocks / 10;
        let first = if is_in_fast { 0 } else { machine.blocks - hot };
        let hits_unmanaged = 0.025 + if is_in_fast { 0.9 } else { 0.0 };
        let hits_most = 0.925;
        // `used` times the bandwidth that the program would take from idle fast memory.
        let peak = machine.accesses(hits_most, machine.fast_ns) / used;
        let machine = Machine { peak, ..machine };
        let rate = |hits| machine.accesses(hits, machine.fast_ns(hits));
        let (mut least, mut most) = (0.0, hits_most);
        for _ in 0..40 {
            let hits = (least + most) / 2.0;
            match machine.fast_ns(hits) < machine.slow_ns {
                true => least = hits,
                false => most = hits,
            }
        }
        let outcome = run(&machine, 60.0, seed, hot_set(first, hot));
        let settled = outcome.end * rate(hits_unmanaged) / rate(least);
        prop_assert!(settled > 0.95, "{} of the balance: {:?}", settled, outcome);
        // While it learns, moves and late measurements cost a few seconds of the minute.
        prop_assert!(outcome.mean > 0.93, "{:?}", outcome);
        prop_assert!(outcome.moved < machine.blocks as u64, "{:?}", outcome);
    }

    #[test]
    fn on_any_stream_moves_cost_what_is_allowed_and_earned_and_the_way_back(
        seed: u64, parts in prop::collection::vec((1u64..30, 0u64..100, 5u64..60), 4..20),
    ) {
        let mut world = World::new(&[(1, 25, 75)], 0);
        world.rule.gain.cpus = 1;
        world.rule.tokens_s = TOKENS_S;
        let mut chance = Chance::new(seed);
        let mut seconds = 0.0;
        for &(epochs, first, len) in &parts {
            for _ in 0..epochs {
                let hot: BTreeSet<u64> = (0..len).map(|b| (first + b) % 100).collect();
                let counts: Vec<u32> = (0..100).map(|b| {
                    let most = if hot.contains(&b) { 12.0 } else { 2.0 };
                    (chance.draw() * most) as u32
                }).collect();
                let plan = world.epoch(|_, b| counts[b as usize]);
                world.apply(&plan);
                seconds += 0.5;
            }
        }
        let balance = world.rule.balance();
        let allowed_s = TOKENS_S + TRICKLE * seconds + balance.benefit_ns.max(0) as f64 * 1e-9;
        // An epoch's plan may end a little above what is left.
        let cost_s = balance.cost_ns as f64 * 1e-9;
        prop_assert!(cost_s <= 2.0 * (allowed_s + 0.5), "{cost_s} of {allowed_s}");
    }

    #[test]
    fn neither_tier_is_promised_more_than_it_has(
        processes in prop::collection::vec((0u64..60, 1u64..60), 1..4), free in 0u64..20, slow_free in 0u64..20,
        batch in 1u64..40, seed: u64, epochs in 1u32..12,
    ) {
        let processes: Vec<_> = (1..).zip(&processes).map(|(pid, &(fast, slow))| (pid, fast, slow)).collect();
        let mut world = World::new(&processes, free);
        let mut chance = Chance::new(seed);
        let counts: Vec<u32> = (0..1000).map(|_| if chance.draw() < 0.1 { 50 } else { 0 }).collect();
        world.room.slow_free = blocks(slow_free);
        world.room.batch = blocks(batch);
        for _ in 0..epochs {
            let plan = world.epoch(|pid, b| counts[(u64::from(pid.0) * 200 + b) as usize]);
            prop_assert_eq!(&plan, &world.clone().plan());
            let bytes = |r: &[crate::Relocation]| r.iter().map(|r| r.bytes.0).sum::<u64>();
            let (up, down) = (bytes(&plan.promotions), bytes(&plan.demotions));
            prop_assert!(up <= world.room.fast_free.0 + down && down <= world.room.slow_free.0 + up);
            prop_assert!(up.max(down) <= world.room.batch.0);
            let mut seen = BTreeSet::new();
            for r in plan.promotions.iter().chain(&plan.demotions) {
                prop_assert!(seen.insert((r.pid, r.block)), "moved twice");
            }
            if world.room.fast_free.0 == 0 {
                prop_assert_eq!(up, down);
            }
            world.apply(&plan);
        }
    }

    #[test]
    fn a_guarantee_is_never_undercut_while_its_owner_uses_it(
        guarantees in prop::collection::vec((0u64..40, 1u32..9), 3), seed: u64,
    ) {
        let mut world = World::new(&[(1, 40, 40), (2, 40, 40), (3, 40, 40)], 0);
        world.shares = (1..).zip(&guarantees).map(|(pid, &(g, w))| share(pid, g, w)).collect();
        let mut chance = Chance::new(seed);
        let counts: Vec<u32> = (0..400).map(|_| 3 + (chance.draw() * 60.0) as u32).collect();
        for _ in 0..30 {
            let before: Vec<u64> = (1..4).map(|pid| world.in_fast(pid)).collect();
            let plan = world.epoch(|pid, b| counts[(u64::from(pid.0 - 1) * 100 + b) as usize]);
            world.apply(&plan);
            for (pid, (had, (guarantee, _))) in (1..4).zip(before.iter().zip(&guarantees)) {
                let has = world.in_fast(pid);
                prop_assert!(has >= *had.min(guarantee), "{pid} has {has} of {guarantee}, had {had}");
            }
        }
    }
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
