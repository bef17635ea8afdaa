//! Tests of single epochs, with the helpers of [`properties`].

mod properties;

use std::collections::BTreeSet;

use proptest::prelude::*;

use super::conformance::{EpochScript, HARDWARE, PID, Plain, Script, WORTH_MUCH, hot_set};
use super::{BATCH_BLOCKS, ByHeat, Direction, Engine, Input, Misuse, NodeFacts, Request, Stage};
use crate::damon::Prospect;
use crate::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, GuestVirtAddr, LEVELS, Observation, Pid, Sample, Spread,
    TierBytes, VirtRange,
};

const BASE: GuestVirtAddr = GuestVirtAddr(1 << 40);

/// The plainest driver on a machine with hardware's costs of moves and samples.
fn hardware(script: &Script) -> Plain {
    let mut plain = Plain::with(ByHeat::new(HARDWARE), script, BASE);
    plain.block_ns = 700_000;
    plain
}

fn range(first: u64, end: u64) -> VirtRange {
    VirtRange::new(Block(first).start(), Block(end).start()).unwrap()
}

fn first_block() -> u64 {
    Block::of(BASE).0
}

/// Number of these blocks in fast memory.
fn in_fast(plain: &Plain, blocks: std::ops::Range<u64>) -> usize {
    let is_fast = |b: &u64| plain.kernel.locate(Block(first_block() + b)).bytes.0[0].0 > 0;
    blocks.filter(is_fast).count()
}

/// Plays a script, and returns the requests by epoch.
fn run(plain: &mut Plain, epochs: &[EpochScript]) -> Vec<Vec<String>> {
    epochs.iter().map(|e| plain.epoch(e)).collect()
}

#[test]
fn the_hot_set_comes_into_fast_memory_and_then_nothing_moves() {
    let script = hot_set(100, 300, 350..400, 80);
    let mut plain = hardware(&script);
    run(&mut plain, &script.epochs[..8]);
    assert_eq!(in_fast(&plain, 350..400), 50);
    // Some cold blocks are accessed in each epoch, the others never: these are demoted next.
    run(&mut plain, &script.epochs[8..50]);
    let before = plain.engine.figures();
    assert!(before.promoted.0 <= 80 * BLOCK_SIZE);
    let asked = run(&mut plain, &script.epochs[50..]);
    assert_eq!(in_fast(&plain, 350..400), 50);
    let after = plain.engine.figures();
    assert_eq!(
        (after.promoted, after.demoted),
        (before.promoted, before.demoted)
    );
    assert_eq!(after.tried.0, after.promoted.0 + after.demoted.0);
    // Every second epoch is skipped, and free memory is read rarely.
    assert!(
        asked[20..]
            .iter()
            .all(|a| a.last().unwrap() == "Sleep { epochs: 2 }")
    );
    let reads = asked[20..].iter().flatten().filter(|a| *a == "ReadNodes");
    assert!((1..=2).contains(&reads.count()));
    let set = plain.engine.working_set();
    assert!(
        (50..72).contains(&(set.placement.fast.0 / BLOCK_SIZE)),
        "{set:?}"
    );
    assert!(set.fast_hit_permille.unwrap() > 900);
}

#[test]
fn what_a_trial_tells_about_cost_is_used_in_the_same_epoch() {
    let script = hot_set(100, 300, 350..400, 20);
    let mut plain = Plain::new(&script, BASE);
    let by_epoch = script.epochs.iter().map(|epoch| {
        let asked = plain.epoch(epoch);
        let is_move = |a: &&String| a.starts_with("Move");
        (
            asked.iter().filter(is_move).count(),
            in_fast(&plain, 350..400),
        )
    });
    let first = by_epoch.into_iter().find(|(moves, _)| *moves > 0);
    // Two blocks one by one, then all others in batches.
    let (moves, fast) = first.unwrap();
    assert!(
        moves > 2 && fast == 50,
        "{fast} of 50 blocks, {moves} calls"
    );
}

#[test]
fn an_agent_is_calm_until_moved_memory_earns_less_than_before() {
    let script = hot_set(100, 300, 350..400, 60);
    let mut plain = hardware(&script);
    assert_eq!(plain.engine.prospect(), Prospect::OPEN);
    run(&mut plain, &script.epochs);
    let settled = plain.engine.prospect();
    assert!(settled.is_calm && settled.earned > 0.0, "{settled:?}");
    // One hot block is left, and is accessed less. Nothing is worth a move.
    let moved = plain.engine.figures().promoted;
    let quiet = EpochScript {
        grown: 0,
        samples: vec![360; 10],
    };
    run(&mut plain, &vec![quiet.clone(); 12]);
    assert_eq!(plain.engine.figures().promoted, moved);
    let falling = plain.engine.prospect();
    assert!(!falling.is_calm, "{falling:?}");
    // After a while the old income is forgotten.
    run(&mut plain, &vec![quiet; 100]);
    let quiet = plain.engine.prospect();
    assert!(
        quiet.is_calm && quiet.earned < settled.earned / 10.0,
        "{quiet:?}"
    );
}

#[test]
fn idle_memory_promises_nothing() {
    let mut script = hot_set(100, 300, 350..400, 40);
    script.batch_mib = 0;
    let mut plain = hardware(&script);
    run(&mut plain, &script.epochs);
    assert!(plain.engine.prospect().promised > 0.0);
    let idle = EpochScript {
        grown: 0,
        samples: vec![],
    };
    run(&mut plain, &vec![idle; 60]);
    assert_eq!(plain.engine.prospect().promised, 0.0);
}

#[test]
fn an_agent_that_only_observes_moves_nothing() {
    let mut script = hot_set(100, 300, 350..400, 40);
    script.batch_mib = 0;
    let mut plain = hardware(&script);
    run(&mut plain, &script.epochs);
    let figures = plain.engine.figures();
    assert_eq!((figures.tried, figures.samples > 0), (ByteCount(0), true));
    assert_eq!(in_fast(&plain, 350..400), 0);
    assert!(plain.engine.working_set().placement.slow.0 >= 40 * BLOCK_SIZE);
}

#[test]
fn while_nothing_is_accessed_an_epoch_is_a_look_at_the_samples() {
    let script = hot_set(20, 20, 30..40, 10);
    let mut plain = Plain::new(&script, BASE);
    run(&mut plain, &script.epochs);
    let idle = vec![EpochScript::default(); 90];
    let asked = run(&mut plain, &idle);
    assert!(plain.engine.ranking().is_empty());
    let requests: BTreeSet<_> = asked[50..].iter().flatten().map(String::as_str).collect();
    let samples = "Samples { most: 65536, wanted: [] }";
    assert_eq!(requests, ["Refresh", samples, "Sleep { epochs: 2 }"].into());
    let refreshes = asked[50..].iter().flatten().filter(|a| *a == "Refresh");
    assert_eq!(refreshes.count(), 2, "every twentieth epoch");
}

#[test]
fn hot_memory_that_something_else_demoted_comes_back() {
    for every in [1, 2] {
        let script = hot_set(400, 600, 700..900, 60);
        let mut plain = Plain::new(&script, BASE);
        run(&mut plain, &script.epochs[..40]);
        assert_eq!(in_fast(&plain, 700..900), 200);
        for block in (700..900).step_by(every) {
            let block = Block(first_block() + block);
            plain.kernel.migrate(block, Direction::Demotion);
        }
        assert!(in_fast(&plain, 700..900) <= 200 - 100 / every);
        run(&mut plain, &script.epochs[40..56]);
        assert!(
            in_fast(&plain, 700..900) >= 195,
            "{}",
            in_fast(&plain, 700..900)
        );
    }
}

#[test]
fn samples_astray_bring_the_next_refresh_forward() {
    let script = hot_set(20, 20, 30..40, 3);
    let mut plain = Plain::new(&script, BASE);
    run(&mut plain, &script.epochs);
    let astray = EpochScript {
        grown: 0,
        samples: vec![1000; 50],
    };
    let asked = run(&mut plain, &[astray, EpochScript::default()]);
    assert_eq!(asked[1][0], "Refresh");
}

#[test]
fn records_that_a_tracker_rejects_do_not() {
    let mut plain = hardware(&Script::new(3));
    plain.epoch(&EpochScript::default());
    plain.engine.push(Input::Epoch).unwrap();
    let rejects = Input::SamplesEnd {
        lost: 0,
        rejected: 1 << 20,
        is_repeat: false,
    };
    plain.engine.push(rejects).unwrap();
    while plain.engine.stage() != Stage::Asleep {
        plain.answer(&EpochScript::default());
    }
    plain.engine.push(Input::Epoch).unwrap();
    assert_ne!(plain.engine.request(), Request::Refresh);
}

#[test]
fn a_program_that_filled_fast_memory_keeps_it() {
    let mut script = hot_set(100, 100, 0..50, 40);
    script.fast_free = 0;
    let mut plain = hardware(&script);
    run(&mut plain, &script.epochs);
    assert_eq!(in_fast(&plain, 0..50), 50);
    // Twenty cold blocks are accessed in each epoch, of which ten are in fast memory already.
    assert!(plain.engine.figures().demoted.0 <= 10 * BLOCK_SIZE);
}

#[test]
fn room_for_the_balloon_is_made_at_once() {
    let script = hot_set(100, 300, 350..400, 20);
    let mut plain = Plain::new(&script, BASE);
    run(&mut plain, &script.epochs[..10]);
    let wanted = ByteCount(40 * BLOCK_SIZE);
    plain.engine.push(Input::BalloonWants(wanted)).unwrap();
    while plain.engine.stage() != Stage::Asleep {
        plain.answer(&EpochScript::default());
    }
    assert!(plain.kernel.free.fast >= 40);
    assert_eq!(in_fast(&plain, 350..400), 50);
    run(&mut plain, &script.epochs[10..]);
    assert!(plain.kernel.free.fast >= 40, "nothing comes back");
}

#[test]
fn a_pause_ends_what_is_under_way() {
    let script = hot_set(100, 300, 350..400, 20);
    let mut plain = Plain::new(&script, BASE);
    while plain.engine.stage() != Stage::Moving {
        plain.answer(&script.epochs[0]);
    }
    plain.engine.push(Input::Paused(true)).unwrap();
    assert_eq!(plain.engine.stage(), Stage::Asleep);
    let asked = run(&mut plain, &script.epochs);
    let asked: BTreeSet<_> = asked.iter().flatten().map(String::as_str).collect();
    assert_eq!(asked, ["Refresh", "Sleep { epochs: 1 }"].into());
    plain.engine.push(Input::Paused(false)).unwrap();
    run(&mut plain, &script.epochs);
    assert_eq!(in_fast(&plain, 350..400), 50);
}

#[test]
fn promotions_that_do_not_succeed_are_given_up() {
    let mut script = hot_set(0, 300, 100..200, 4);
    script.fast_free = 150;
    script.stuck = (0..300).collect();
    let mut plain = Plain::new(&script, BASE);
    let asked = run(&mut plain, &script.epochs);
    let moves = asked.iter().map(|epoch| {
        let is_move = |a: &&String| a.starts_with("Move");
        epoch.iter().filter(is_move).count()
    });
    let moves: Vec<_> = moves.collect();
    assert!(
        moves.iter().all(|&n| n <= 1) && moves.contains(&1),
        "{moves:?}"
    );
    assert!(plain.engine.set_aside() > 0);
}

#[test]
fn misuse_is_named() {
    let script = hot_set(10, 10, 15..20, 2);
    let mut engine = Plain::new(&script, BASE).engine;
    let said = |r: Result<(), Misuse>| r.unwrap_err().to_string();
    assert_eq!(
        said(engine.push(Input::Epoch)),
        "input `epoch` does not answer request `refresh`"
    );
    assert_eq!(
        said(engine.push(Input::Ended(Pid(9)))),
        "process 9 is not known"
    );
    engine.push(Input::Started(PID)).unwrap();
    assert_eq!(
        engine.push(Input::Started(PID)),
        Err(Misuse::KnownProcess(PID))
    );
    let vmas = &[range(4, 6), range(5, 9)];
    let space = Input::Space { pid: PID, vmas };
    assert_eq!(engine.push(space), Err(Misuse::Unsorted(PID)));
    let wanted = Input::BalloonWants(ByteCount(u64::MAX));
    assert_eq!(engine.push(wanted), Err(Misuse::TooMuch(u64::MAX)));

    let mut plain = Plain::new(&script, BASE);
    while !matches!(plain.engine.request(), Request::LookUp { .. }) {
        plain.answer(&script.epochs[0]);
    }
    let full = Spread::from(TierBytes {
        fast: ByteCount(BLOCK_SIZE),
        slow: ByteCount(1),
    });
    let engine = &mut plain.engine;
    let Request::LookUp { blocks, .. } = engine.request() else {
        unreachable!()
    };
    let asked = blocks.len();
    assert_eq!(
        engine.push(Input::Located(&[])),
        Err(Misuse::Count { asked, told: 0 })
    );
    assert_eq!(
        engine.push(Input::Located(&vec![full; asked])),
        Err(Misuse::Overfull(BLOCK_SIZE + 1))
    );
}

/// A look that always finds an access gives a lower bound, and does not cool a hotter block.
#[test]
fn the_least_rate_does_not_cool_a_block() {
    let script = hot_set(4, 4, 0..1, 1);
    let rate_after = |is_least: bool, events: u32| {
        let mut plain = hardware(&script);
        while !matches!(plain.engine.request(), Request::Samples { .. }) {
            plain.answer(&script.epochs[0]);
        }
        let look = |plain: &mut Plain, events, is_least| {
            let seen = Input::Looked(Observation {
                pid: PID,
                block: Block(first_block()),
                events,
                exposure_ns: 600_000,
                is_least,
            });
            plain.engine.push(seen).unwrap();
        };
        look(&mut plain, 400, false);
        // The value counts as known after the end of an epoch.
        plain.epoch(&script.epochs[0]);
        plain.engine.push(Input::Epoch).unwrap();
        while !matches!(plain.engine.request(), Request::Samples { .. }) {
            plain.answer(&script.epochs[0]);
        }
        look(&mut plain, events, is_least);
        plain.epoch(&script.epochs[0]);
        let (heat, block) = (&plain.engine.processes[&PID].classifier, first_block());
        heat.estimate(0, Block(block)).rate
    };
    let hot = rate_after(true, 4);
    assert!(rate_after(false, 4) < 0.7 * hot);
    assert!(rate_after(true, 4000) > 2.0 * hot);
}
