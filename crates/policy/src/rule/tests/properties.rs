//! The rule's properties.

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::machine::{Machine, hardware, hot_set, run};
use super::shares::share;
use super::*;
use crate::chance::Chance;

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
