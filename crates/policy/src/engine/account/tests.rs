//! The properties of the module's text, through an engine on a kernel that is a map.

use proptest::prelude::*;

use super::rehearsal::REHEARSAL_TICKS;
use super::rests::{LOSS_SHARE, UNUSED_TICKS};
use super::*;
use crate::engine::conformance::{EpochScript, PID, Plain, Script, hot_set};
use crate::engine::{BATCH_BLOCKS, Config, Engine, Input, Numbers, Ranges, Stage};
use crate::{BLOCK_SIZE, GuestVirtAddr, MIB};

const BASE: GuestVirtAddr = GuestVirtAddr(1 << 40);

/// The lab's: a sample stands for 5.6 ms.
const GAIN: Gain = Gain {
    loads_per_sample: Some(4093),
    latency_ns: PerTier {
        fast: 640,
        slow: 2000,
    },
    cpus: 1,
};

/// A block takes 10 ms.
const BLOCK_NS: u64 = 10_000_000;

/// An engine with an account, on a script's machine.
fn rig(script: &Script, gain: Gain) -> Plain {
    let tuning = script.tuning();
    let config = Config::new(&tuning, script.fast_size(), gain);
    let mut plain = Plain::new(script, BASE);
    plain.engine = Engine::new(Ranges(tuning.classifier()), config);
    plain.block_ns = BLOCK_NS;
    plain
}

/// Blocks moved so far, in both directions.
fn moved(plain: &Plain) -> u64 {
    let figures = plain.engine.figures();
    (figures.promoted.0 + figures.demoted.0) / BLOCK_SIZE
}

/// How many of these blocks lie in fast memory.
fn in_fast(plain: &Plain, blocks: std::ops::Range<u64>) -> usize {
    let at = |b: u64| crate::Block(crate::Block::of(BASE).0 + b);
    let is_fast = |b: &u64| plain.kernel.locate(at(*b)).fast.0 > 0;
    blocks.filter(is_fast).count()
}

/// One epoch of a program that is at `from` and uses `len` blocks of `all`, each in turn.
fn window(from: u64, len: u64, all: u64, samples: u64) -> EpochScript {
    let sample = |i| (from + i % len) % all;
    EpochScript {
        grown: 0,
        samples: (0..samples).map(sample).collect(),
    }
}

/// The time that all trials so far may have cost: their stakes and what was lent on them, a
/// batch of each direction that was under way, and as much again to undo them.
fn stakes_ns(rests: u64) -> u64 {
    let lent = CREDIT_MAX_NS as u64;
    let batches = 2 * BATCH_BLOCKS as u64 * BLOCK_NS;
    2 * (STAKE_NS + lent + batches + rests * (STAKE_NS / TRIAL_PART as u64 + lent + batches))
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(12))]

    #[test]
    fn on_any_stream_moves_cost_no_more_than_stakes_and_what_they_brought(
        seed: u64, wanted in prop_oneof![Just(0), 1u64..80],
    ) {
        let script = Script::new(seed);
        let mut plain = rig(&script, GAIN);
        // Also beside a balloon that never gets what it wants: it does not pay for promotions.
        plain.engine.push(Input::BalloonWants(ByteCount(wanted * BLOCK_SIZE))).unwrap();
        let (mut rests, mut gross_ns, mut before) = (0, 0, plain.engine.balance());
        for epoch in script.epochs.iter().cycle().take(300) {
            plain.epoch(epoch);
            let now = plain.engine.balance();
            gross_ns += (now.benefit_ns - before.benefit_ns).max(0) as u64;
            rests += u64::from(now.is_resting && !before.is_resting);
            before = now;
            let bound_ns = stakes_ns(rests) + gross_ns;
            prop_assert!(now.cost_ns <= bound_ns, "{} > {bound_ns}", now.cost_ns);
            let promoted = plain.engine.figures().promoted.0 / BLOCK_SIZE;
            prop_assert!(now.cost_ns >= promoted * BLOCK_NS);
        }
    }

    /// A host that takes memory from an agent that has just started leaves it its stake.
    #[test]
    fn what_the_host_takes_is_not_charged_judged_or_undone(taken in 24u64..45) {
        let mut script = hot_set(100, 300, 350..400, 40);
        script.fast_free = 0;
        let mut plain = rig(&script, GAIN);
        plain.epoch(&EpochScript::default());
        plain.engine.push(Input::BalloonWants(ByteCount(taken * BLOCK_SIZE))).unwrap();
        while plain.engine.stage() != Stage::Asleep {
            plain.answer(&script.epochs[0]);
        }
        prop_assert!(plain.kernel.free.fast >= taken);
        prop_assert!(moved(&plain) * BLOCK_NS > STAKE_NS);
        prop_assert_eq!(plain.engine.balance(), Balance::default());
        // But measured.
        let [_, demotion] = plain.engine.account.prices;
        prop_assert!(demotion.is_known());
        plain.kernel.free.fast -= taken;
        plain.engine.push(Input::BalloonWants(ByteCount(0))).unwrap();
        let (tick, epoch) = (plain.engine.account.tick(), plain.engine.epoch());
        let to_undo = plain.engine.residency().moved_to(PID, Tier::Slow, tick, epoch);
        prop_assert_eq!(to_undo.count(), 0);
        for epoch in &script.epochs {
            plain.epoch(epoch);
            prop_assert!(!plain.engine.balance().is_resting);
        }
        prop_assert_eq!(in_fast(&plain, 350..400), 50);
    }

    /// Whatever its length and speed: also where it comes back within the horizon.
    #[test]
    fn on_a_sweep_moves_die_out(step in 5u64..60, len in 20u64..60, samples in 60u64..500) {
        let mut script = hot_set(100, 300, 350..400, 0);
        script.epochs = (0..400).map(|n| window(n * step, len, 400, samples)).collect();
        let mut plain = rig(&script, GAIN);
        let mut elapsed_ns = 0;
        for epoch in &script.epochs {
            plain.epoch(epoch);
            elapsed_ns += 500_000_000 * u64::from(plain.engine.pause_epochs());
        }
        let now = plain.engine.balance();
        let lost_ns = now.cost_ns as i64 - now.benefit_ns;
        // The trials that failed, and the first and the last one.
        let bound_ns = elapsed_ns / LOSS_SHARE + 2 * stakes_ns(0);
        prop_assert!(lost_ns <= bound_ns as i64, "{lost_ns} > {bound_ns} ns");
    }

    #[test]
    fn a_stable_hot_set_comes_into_fast_memory_and_a_moved_one_is_followed(
        first in 100u64..300, second in 100u64..300, samples in 60u64..600,
    ) {
        let (first, second) = (first / 2 * 2, second / 2 * 2);
        let mut script = hot_set(100, 300, first..first + 50, 16);
        let cut = |script: &Script| -> Vec<_> {
            let cut = |e: &EpochScript| EpochScript {
                grown: 0,
                samples: e.samples.iter().copied().cycle().take(samples as usize).collect(),
            };
            script.epochs.iter().map(cut).collect()
        };
        script.epochs = cut(&script);
        let mut plain = rig(&script, GAIN);
        for epoch in &script.epochs {
            plain.epoch(epoch);
        }
        prop_assert!(in_fast(&plain, first..first + 50) >= 45);
        let other = hot_set(100, 300, second..second + 50, 16);
        for epoch in cut(&other) {
            plain.epoch(&epoch);
        }
        prop_assert!(in_fast(&plain, second..second + 50) >= 45);
        prop_assert!(!plain.engine.balance().is_resting);
    }

    /// As fast as without an account, but for three epochs.
    #[test]
    fn a_stable_hot_set_comes_soon(hot in 100u64..350) {
        let script = hot_set(100, 300, hot..hot + 50, 20);
        let epochs_of = |plain: &mut Plain| {
            let mut epochs = script.epochs.iter();
            epochs.position(|epoch| {
                plain.epoch(epoch);
                in_fast(plain, hot..hot + 50) >= 45
            })
        };
        let free = epochs_of(&mut Plain::new(&script, BASE));
        let ours = epochs_of(&mut rig(&script, GAIN));
        let (free, ours) = (free.unwrap_or(99), ours.unwrap_or(99));
        prop_assert!(ours <= free + 3, "{ours} epochs instead of {free}");
    }

    #[test]
    fn nothing_that_is_told_overflows(
        told in prop::collection::vec((any::<u32>(), 0u8..6, any::<u64>(), 0u32..9), 0..200),
        loads in prop::option::of(any::<u32>()), slow: u32, cpus: u32, stake: u64, epoch_ms in 1u64..60_000,
    ) {
        let latency_ns = PerTier { fast: 80, slow };
        let gain = Gain { loads_per_sample: loads, latency_ns, cpus };
        let mut account = Account::new(gain, stake, epoch_ms, true);
        for (weight, kind, number, epochs) in told {
            match kind {
                0 => account.take_sample(weight, Some(Tier::Fast)),
                1 => account.take_sample(weight, Some(Tier::Slow)),
                2 => account.end_samples(epochs.clamp(1, REST_EPOCHS), number % 2 == 0),
                3 => account.take_sighting(weight, Some(Tier::Fast)),
                4 => account.take_sighting(weight, Some(Tier::Slow)),
                _ => {
                    account.pay(Direction::Promotion, ByteCount(weight.into()), number);
                    account.planned(true, true, 1);
                }
            }
            prop_assert!(account.budget().sample_ps >= 0.0);
            let (mut saved, mut other) = (vec![], Account::new(gain, 0, epoch_ms, true));
            account.save(&mut saved);
            prop_assert!(other.restore(&mut Numbers::new(&saved)).is_ok());
            prop_assert_eq!(other.budget(), account.budget());
        }
    }
}

proptest! {
    #[test]
    fn what_is_repeated_or_not_confirmed_brings_nothing(
        looks in prop::collection::vec((0u32..4, -100i32..100), 1..60),
    ) {
        let gain = Gain { loads_per_sample: None, ..GAIN };
        let mut account = Account::new(gain, 0, 500, true);
        account.rehearsal = None;
        let brought_ns = |account: &Account| account.balance().benefit_ns;
        let (mut before, mut unseen) = (0, 0);
        for (repeats, net) in looks {
            for _ in 0..repeats {
                let so_far_ns = brought_ns(&account);
                account.take_sample(100, Some(Tier::Fast));
                account.end_samples(1, true);
                prop_assert_eq!(brought_ns(&account), so_far_ns);
                unseen += 1;
            }
            let so_far_ns = brought_ns(&account);
            let tier = if net > 0 { Tier::Fast } else { Tier::Slow };
            account.take_sighting(net.unsigned_abs(), Some(tier));
            account.take_sighting(100 - net.unsigned_abs(), None);
            account.end_samples(1, false);
            // What two looks agree on, for all the time since the first.
            let agreed = net.clamp(before.min(0), before.max(0));
            let share = f64::from(agreed) / 100.0;
            let wanted_ns = share * f64::from(unseen + 1) * 500e6 * SHARE_OF_TIME;
            prop_assert!(((brought_ns(&account) - so_far_ns) as f64 - wanted_ns).abs() < 10.0);
            (before, unseen) = (net, 0);
        }
    }
}

proptest! {
    /// The looks that a plan is rehearsed for, each with the ticks since the one before and what it found for the plan.
    #[test]
    fn a_plan_is_carried_out_when_all_looks_after_it_agree_that_it_pays(
        looks in prop::collection::vec((1u32..5, -20i64..100), 1..40), blocks in 1u64..200, losses in 0u32..3,
    ) {
        let gain = Gain { loads_per_sample: None, ..GAIN };
        let mut account = Account::new(gain, STAKE_NS, 500, true);
        let bytes = ByteCount(blocks * BLOCK_SIZE);
        account.rest_ms = REST_MIN_MS << losses;
        let (mut confirmed, mut least_ns, mut is_noted) = ((0, 0), i64::MAX, false);
        for (ticks, net) in looks {
            for _ in 1..ticks {
                account.end_samples(1, true);
                prop_assert!(!account.wants_rehearsal(), "what is repeated is no look");
            }
            let tier = if net > 0 { Tier::Fast } else { Tier::Slow };
            account.take_sighting(net.unsigned_abs() as u32, Some(tier));
            account.take_sighting(100 - net.unsigned_abs() as u32, None);
            account.end_samples(1, false);
            let income_ns = (net as f64 / 100.0 * 500e6 * SHARE_OF_TIME) as i64;
            let cost_ns = cost_of(&account, bytes);
            let charged_ns = cost_ns + cost_ns / DISTURBANCE_PART as i64;
            let pays = is_noted && 20 * income_ns >= charged_ns;
            confirmed = if pays { (confirmed.0 + ticks, confirmed.1 + 1) } else { (0, 0) };
            least_ns = if pays { least_ns.min(income_ns) } else { i64::MAX };
            let is_over = confirmed.0 >= REHEARSAL_TICKS << losses && confirmed.1 >= 1 << losses;
            prop_assert_eq!(account.is_rehearsing(), !is_over);
            prop_assert_eq!(account.balance().benefit_ns, 0);
            if !account.is_rehearsing() {
                prop_assert!((account.steady_ns - least_ns).abs() <= 1);
                break;
            }
            is_noted |= account.wants_rehearsal();
            if account.wants_rehearsal() {
                account.rehearse(bytes, bytes);
            }
        }
    }
}

proptest! {
    #[test]
    fn a_plan_that_no_longer_pays_at_its_true_price_is_given_up_and_goes_back(
        net in 1u32..100, blocks in 1u64..200, block_us in 1u64..100_000,
    ) {
        let gain = Gain { loads_per_sample: None, ..GAIN };
        let mut account = Account::new(gain, STAKE_NS, 500, true);
        let bytes = ByteCount(blocks * BLOCK_SIZE);
        let look = |account: &mut Account| {
            account.take_sighting(net, Some(Tier::Fast));
            account.take_sighting(100 - net, None);
            account.end_samples(REHEARSAL_TICKS, false);
        };
        look(&mut account);
        account.rehearse(bytes, bytes);
        look(&mut account);
        prop_assume!(!account.is_rehearsing());
        let may_go_on = account.pay(Direction::Demotion, ByteCount(BLOCK_SIZE), block_us * 1000);
        let pays = 20 * account.steady_ns >= cost_of(&account, bytes);
        prop_assert_eq!(account.is_resting(), !pays);
        prop_assert!(pays || !may_go_on);
        prop_assert_eq!(account.caution(), if pays { 1 } else { 2 });
        prop_assert!(!account.puts_back(), "an exchange is not left half done");
        look(&mut account);
        prop_assert_eq!(account.puts_back(), !pays);
        // A look after it has no say: what it finds is income.
        if pays {
            account.pay(Direction::Demotion, ByteCount(BLOCK_SIZE), 10_000_000_000);
            prop_assert!(!account.is_resting());
        }
    }
}

#[test]
fn a_direction_that_was_not_measured_is_no_cheaper_than_the_other() {
    let mut account = Account::new(GAIN, STAKE_NS, 500, true);
    account.pay(Direction::Demotion, ByteCount(8 * MIB), 80_000_000);
    let Budget {
        promotion_ps,
        demotion_ps,
        ..
    } = account.budget();
    assert!(demotion_ps > 7_000 && promotion_ps == demotion_ps);
    // What was measured counts.
    account.pay(Direction::Promotion, ByteCount(8 * MIB), 8_000_000);
    let Budget {
        promotion_ps,
        demotion_ps,
        ..
    } = account.budget();
    assert!(promotion_ps < 1_500 && demotion_ps > 7_000);
}

proptest! {
    #[test]
    fn half_of_what_is_known_of_prices_is_forgotten_later_after_each_loss(losses in 0u32..4, epochs in 1u32..REST_EPOCHS) {
        let mut account = Account::new(GAIN, STAKE_NS, 500, true);
        (0..losses).for_each(|_| account.lost());
        let bytes = 8 * MIB;
        account.pay(Direction::Demotion, ByteCount(bytes), 80_000_000);
        let ticks = (PRICE_HORIZONS * account.horizon_ticks()) << losses;
        while account.tick() < ticks {
            prop_assert_eq!(account.prices[Direction::Demotion as usize].bytes, bytes);
            account.end_samples(epochs, true);
        }
        prop_assert_eq!(account.prices[Direction::Demotion as usize].bytes, bytes / 2);
    }
}

/// What it costs to promote and to demote so much.
fn cost_of(account: &Account, bytes: ByteCount) -> i64 {
    let budget = account.budget();
    ((budget.promotion_ps + budget.demotion_ps) * bytes.0 / 1000) as i64
}

#[test]
fn a_slow_small_batch_does_not_stop_all_moves_for_ever() {
    let mut account = Account::new(GAIN, STAKE_NS, 500, true);
    let promotion_ps = |account: &Account| account.budget().promotion_ps;
    for _ in 0..16 {
        account.pay(Direction::Promotion, ByteCount(4 * MIB), 4 * 5_000_000);
    }
    let usual_ps = promotion_ps(&account);
    assert!((4000..5000).contains(&usual_ps), "{usual_ps}");
    // The kernel had to wait: forty times as dear as usual.
    account.pay(Direction::Promotion, ByteCount(MIB), 200_000_000);
    assert!(promotion_ps(&account) < 2 * usual_ps);
    // All that was measured was dear; once it is long ago, a move is tried again.
    for _ in 0..64 {
        account.pay(Direction::Promotion, ByteCount(MIB), 200_000_000);
    }
    assert!(promotion_ps(&account) > 20 * usual_ps);
    for _ in 0..12 * PRICE_HORIZONS * account.horizon_ticks() {
        account.end_samples(1, false);
    }
    assert!(promotion_ps(&account) < usual_ps);
}

#[test]
fn a_calm_agent_that_has_nothing_to_confirm_sleeps_until_there_may_be_news() {
    let mut script = hot_set(100, 300, 350..400, 0);
    script.epochs = vec![Default::default(); 20];
    let looks_seldom = Gain {
        loads_per_sample: None,
        ..GAIN
    };
    for (gain, slept, slept_with_a_plan) in [(GAIN, 2, 2), (looks_seldom, 4, 2)] {
        let mut plain = rig(&script, gain);
        for epoch in &script.epochs {
            plain.epoch(epoch);
        }
        assert!(!plain.engine.balance().is_resting);
        assert_eq!(plain.engine.pause_epochs(), slept);
        if plain.engine.account.rehearses() {
            plain
                .engine
                .account
                .rehearse(ByteCount(MIB), ByteCount(MIB));
        }
        assert_eq!(plain.engine.pause_epochs(), slept_with_a_plan);
    }
}

#[test]
fn while_it_rests_it_looks_nothing_up_and_then_tries_again() {
    let mut script = hot_set(100, 300, 350..400, 0);
    script.epochs = (0..400).map(|n| window(n * 30, 40, 400, 300)).collect();
    let mut plain = rig(&script, GAIN);
    let mut epochs = script.epochs.iter();
    let mut next = |plain: &mut Plain| plain.epoch(epochs.next().expect("it rests before the end"));
    while !plain.engine.balance().is_resting {
        next(&mut plain);
    }
    let asked = next(&mut plain);
    assert!(plain.engine.balance().is_resting);
    assert!(!asked.iter().any(|a| a.starts_with("LookUp")), "{asked:?}");
    assert_eq!(asked.last().unwrap(), "Sleep { epochs: 4 }");
    assert_eq!(plain.engine.stage(), Stage::Asleep);
    let before = moved(&plain);
    while plain.engine.balance().is_resting {
        next(&mut plain);
    }
    while !plain.engine.balance().is_resting {
        next(&mut plain);
    }
    assert!(moved(&plain) > before, "a trial moves something");
}

/// A window that is wider than what fits, and comes back when its horizon is over.
#[test]
fn a_trial_that_fails_leaves_memory_where_it_lay() {
    let mut script = hot_set(100, 300, 350..400, 0);
    script.epochs = (0..400).map(|n| window(n * 30, 40, 400, 300)).collect();
    let mut plain = rig(&script, GAIN);
    let (mut most_away, mut is_back) = (0, false);
    for epoch in &script.epochs {
        plain.epoch(epoch);
        let away = 100 - in_fast(&plain, 0..100);
        most_away = most_away.max(away);
        is_back |= most_away > 4 && away == 0 && plain.engine.balance().is_resting;
    }
    assert!(is_back, "{most_away} blocks were away at the most");
}

/// What a trial has moved stays while it brings something, and goes back once it does not.
#[test]
fn what_was_kept_goes_back_when_it_has_lost_what_it_brought() {
    let mut account = Account::new(GAIN, STAKE_NS, 500, true);
    let cost_ns = 250_000_000;
    account.pay(Direction::Promotion, ByteCount(50 * MIB), cost_ns);
    while !account.is_resting() {
        account.planned(true, true, 1);
    }
    let sampled = |account: &mut Account, in_tier: Tier, wanted_ns: u64| {
        let sample_ns = GAIN.sample_ns().unwrap() as u64;
        // The program waits for memory all the time; most of it was never moved.
        account.take_sample(90, None);
        account.take_sample((wanted_ns / sample_ns) as u32, Some(in_tier));
        account.end_samples(REST_EPOCHS, false);
    };
    let brought_ns = |account: &Account| account.balance().benefit_ns.unsigned_abs();
    while account.rest == Rest::Watch {
        let missing_ns = (cost_ns * 3 / 4).saturating_sub(brought_ns(&account));
        sampled(&mut account, Tier::Fast, missing_ns.min(60_000_000));
    }
    assert!((cost_ns / 2..cost_ns).contains(&brought_ns(&account)));
    assert!(account.is_resting() && !account.puts_back());
    sampled(&mut account, Tier::Slow, 10_000_000);
    assert!(!account.puts_back(), "it has brought enough still");
    for _ in 0..3 {
        sampled(&mut account, Tier::Slow, 50_000_000);
    }
    assert!(account.puts_back());
}

/// What has lost at the end of its horizon may have paid for itself before its pause ends.
#[test]
fn a_pause_ends_once_its_trial_has_paid_for_itself() {
    let mut account = Account::new(GAIN, STAKE_NS, 500, true);
    account.pay(Direction::Promotion, ByteCount(50 * MIB), 400_000_000);
    while !account.is_resting() {
        account.planned(true, true, 1);
    }
    let cost_ns = account.trial_cost_ns as i64;
    let (mut has_paused, mut before_ns) = (false, 0);
    while account.is_resting() {
        has_paused |= account.rest == Rest::Pause;
        before_ns = account.balance().benefit_ns;
        // The program waits for memory all the time; most of it was never moved.
        account.take_sample(90, None);
        account.take_sample(8, Some(Tier::Fast));
        account.end_samples(REST_EPOCHS, false);
    }
    assert!(has_paused && before_ns < cost_ns && account.balance().benefit_ns >= cost_ns);
    assert!(account.tick() < account.loss_paid_at, "that is early");
}

proptest! {
    #[test]
    fn what_has_gained_goes_back_once_it_has_lost_as_much_as_that_costs(
        cost_ms in 20u64..1_000, gained in 0u32..400, loss in 1u32..60,
    ) {
        let mut account = Account::new(GAIN, STAKE_NS, 500, true);
        let sampled = |account: &mut Account, samples: u32, in_tier: Tier| {
            account.take_sample(90, None);
            account.take_sample(samples, Some(in_tier));
            account.end_samples(REST_EPOCHS, false);
        };
        account.pay(Direction::Promotion, ByteCount(50 * MIB), cost_ms * 1_000_000);
        let (cost_ns, mut left) = (account.trial_cost_ns as i64, gained);
        while left > 0 {
            let samples = left.min(40);
            sampled(&mut account, samples, Tier::Fast);
            left -= samples;
        }
        while !account.is_resting() {
            account.planned(true, true, 1);
        }
        let best_ns = account.trial_benefit_ns;
        let mut before_ns = best_ns;
        while !account.puts_back() {
            prop_assert!(best_ns - before_ns < cost_ns, "too late");
            before_ns = account.trial_benefit_ns;
            sampled(&mut account, loss, Tier::Slow);
            prop_assume!(account.is_resting(), "a pause has ended before");
        }
        let has_lost_ns = best_ns - account.trial_benefit_ns;
        prop_assert!(has_lost_ns >= cost_ns || account.trial_benefit_ns < cost_ns / 2, "too soon");
    }
}

proptest! {
    #[test]
    fn a_trial_that_lost_is_undone_once_nothing_uses_what_it_moved(used in 0u32..12) {
        let mut account = Account::new(GAIN, STAKE_NS, 500, true);
        account.pay(Direction::Promotion, ByteCount(50 * MIB), STAKE_NS);
        while !account.puts_back() {
            account.take_sample(1, (account.tick() < used).then_some(Tier::Fast));
            account.end_samples(1, false);
            account.planned(true, true, 1);
            prop_assert!(account.tick() <= used + UNUSED_TICKS);
        }
        prop_assert_eq!(account.tick(), used + UNUSED_TICKS);
    }
}

/// Lets looks find what moves that have cost a lot bring, parts of a hundred of what is accessed, and returns those that were
/// taken until the moves are undone, or all.
fn looks_until_undone(looks: &[i64]) -> &[i64] {
    let gain = Gain {
        loads_per_sample: None,
        ..GAIN
    };
    let mut account = Account::new(gain, STAKE_NS, 500, true);
    account.rehearsal = None;
    account.pay(Direction::Promotion, ByteCount(50 * MIB), 100 * STAKE_NS);
    let is_undone = |&net: &i64| {
        let tier = if net > 0 { Tier::Fast } else { Tier::Slow };
        account.take_sighting(net.unsigned_abs() as u32, Some(tier));
        account.take_sighting(100 - net.unsigned_abs() as u32, None);
        account.end_samples(4, false);
        account.planned(true, true, 4);
        account.puts_back()
    };
    let undone_at = looks.iter().position(is_undone);
    &looks[..undone_at.map_or(looks.len(), |at| at + 1)]
}

proptest! {
    #[test]
    fn nothing_goes_back_that_looks_have_found_no_loss_in(
        looks in prop::collection::vec(-40i64..60, 2..40),
    ) {
        let taken = looks_until_undone(&looks);
        prop_assume!(taken.len() < looks.len());
        let agree = taken.iter().rev().take(2).all(|&net| net < 0);
        prop_assert!(agree || taken.iter().sum::<i64>() <= 0, "{taken:?}");
    }
}

#[test]
fn what_looks_find_a_loss_in_by_turns_goes_back_if_it_loses_on_the_whole() {
    let [gains, loses] = [[30, -20], [20, -30]].map(|two| two.repeat(30));
    assert_eq!(looks_until_undone(&gains).len(), gains.len());
    assert!(looks_until_undone(&loses).len() < 20);
}

proptest! {
    #[test]
    fn a_pause_that_ends_early_has_made_up_for_its_loss(cost_ms in 200u64..2_000, losses in 0u32..4) {
        let mut account = Account::new(GAIN, STAKE_NS, 500, true);
        (0..losses).for_each(|_| account.lost());
        let cost_ns = cost_ms * 1_000_000;
        account.pay(Direction::Promotion, ByteCount(50 * MIB), cost_ns);
        while !account.puts_back() {
            prop_assert!(!account.is_resting() || !account.try_again(), "its trial is to be judged");
            account.end_samples(1, false);
            account.planned(true, true, 1);
        }
        // It costs as much to undo it.
        let lost_ns = 2 * (cost_ns + cost_ns / DISTURBANCE_PART);
        let least_ms = LOSS_SHARE * (lost_ns / 1_000_000);
        let (judged_at, rest_until) = (account.tick(), account.rest_until);
        while !account.try_again() {
            account.end_samples(1, false);
        }
        let waited_ms = u64::from(account.tick() - judged_at) * 500;
        prop_assert!(waited_ms + 500 >= least_ms && waited_ms <= least_ms, "{} ms", waited_ms);
        prop_assert!(account.tick() <= rest_until && !account.is_resting());
    }
}

/// A sweep never pays, and its rests get longer and longer. Then the host gives memory that a hot set fits in.
#[test]
fn who_is_given_fast_memory_tries_again_soon() {
    let mut script = hot_set(100, 300, 350..400, 0);
    script.epochs = (0..400).map(|n| window(n * 30, 40, 400, 300)).collect();
    let mut plain = rig(&script, GAIN);
    for epoch in &script.epochs {
        plain.epoch(epoch);
    }
    let is_pausing =
        |plain: &Plain| plain.engine.account.rest_until > plain.engine.account.tick() + 100;
    let mut epochs = script.epochs.iter().cycle();
    while !is_pausing(&plain) {
        plain.epoch(epochs.next().expect("they go round"));
    }
    let hot = &hot_set(100, 300, 350..400, 1).epochs[0];
    let wait = |plain: &mut Plain, epochs: usize| {
        (0..epochs).position(|_| {
            plain.epoch(hot);
            !plain.engine.balance().is_resting
        })
    };
    // What comes free by little ends no rest.
    plain.kernel.free.fast += 8;
    assert_eq!(wait(&mut plain, 5), None);
    plain.kernel.free.fast += 52;
    let paid_at = plain.engine.account.loss_paid_at;
    let least = paid_at.saturating_sub(plain.engine.account.tick()) / REST_EPOCHS;
    let waited = wait(&mut plain, 100).expect("it tries again");
    assert!(
        waited as u32 <= least + 1,
        "{waited} epochs instead of {least}"
    );
    assert!(in_fast(&plain, 350..400) > 0, "there is room");
}

/// Also where nobody sees anything any more, or wants anything.
#[test]
fn who_can_pay_for_nothing_is_judged() {
    for loads_per_sample in [GAIN.loads_per_sample, None] {
        let gain = Gain {
            loads_per_sample,
            ..GAIN
        };
        let mut account = Account::new(gain, STAKE_NS, 500, true);
        account.pay(Direction::Promotion, ByteCount(50 * MIB), STAKE_NS + 1);
        let moved_at = account.tick();
        while !account.puts_back() {
            account.end_samples(2, false);
            account.planned(true, false, 2);
            let left = (moved_at + account.watch_ticks()).saturating_sub(account.tick());
            assert!(left >= account.horizon_ticks() - 4, "too late to undo it");
        }
    }
}
