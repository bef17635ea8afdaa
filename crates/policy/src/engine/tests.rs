//! Tests of the module's properties and of single epochs. One file, because all use the same engine and the same few
//! helpers.

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
    let is_fast = |b: &u64| plain.kernel.locate(Block(first_block() + b)).0.0[0].0 > 0;
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

/// The agent's rule, in a separate thread.
#[derive(Debug, Clone)]
struct Apart(ByHeat);

impl super::Strategy for Apart {
    type Classifier = crate::Heat;

    const CLASSIFIES_APART: bool = true;

    fn classifier(&self) -> crate::Heat {
        self.0.classifier()
    }

    fn plan(
        &mut self,
        situation: &crate::Situation<'_>,
        heats: &[(Pid, &crate::Heat)],
    ) -> crate::Plan {
        self.0.plan(situation, heats)
    }
}

/// Any input, valid or not.
#[derive(Debug, Clone)]
enum AnyInput {
    /// The right answer to the request.
    Answer,
    Epoch,
    Started(u32),
    Ended(u32),
    Space(u32, Vec<(u64, u64)>),
    BalloonWants(u64),
    Paused(bool),
    Refreshed,
    Sample(u32, u64, u32),
    Looked(u32, u64, u32, u64),
    SamplesEnd(u64, u64, bool),
    Places(Vec<(u64, u64)>, bool),
    Failed(bool),
    Nodes(u64, u64),
    Machine(u64, u32),
    Reclaimed,
}

fn any_input() -> impl Strategy<Value = AnyInput> {
    let pid = 0u32..4;
    let number = || prop_oneof![any::<u64>(), 0..1u64 << 30, Just(u64::MAX), Just(0)];
    let near = prop_oneof![BASE.0..BASE.0 + (200 << 21), any::<u64>()];
    let ranges = prop::collection::vec((near.clone(), number()), 0..4);
    let places = prop::collection::vec((0..3u64 << 20, 0..3u64 << 20), 0..12);
    prop_oneof![
        20 => Just(AnyInput::Answer),
        2 => Just(AnyInput::Epoch),
        1 => pid.clone().prop_map(AnyInput::Started),
        1 => pid.clone().prop_map(AnyInput::Ended),
        1 => (pid.clone(), ranges).prop_map(|(p, r)| AnyInput::Space(p, r)),
        1 => number().prop_map(AnyInput::BalloonWants),
        1 => any::<bool>().prop_map(AnyInput::Paused),
        1 => Just(AnyInput::Refreshed),
        3 => (pid.clone(), near.clone(), any::<u32>(), number()).prop_map(|(p, a, n, x)| AnyInput::Looked(p, a, n, x)),
        9 => (pid, near, any::<u32>()).prop_map(|(p, a, w)| AnyInput::Sample(p, a, w)),
        1 => (number(), number(), any::<bool>()).prop_map(|(l, r, s)| AnyInput::SamplesEnd(l, r, s)),
        1 => (places, any::<bool>()).prop_map(|(p, b)| AnyInput::Places(p, b)),
        1 => any::<bool>().prop_map(AnyInput::Failed),
        1 => (number(), number()).prop_map(|(f, s)| AnyInput::Nodes(f, s)),
        1 => (number(), any::<u32>()).prop_map(|(bytes, cpus)| AnyInput::Machine(bytes, cpus)),
        1 => Just(AnyInput::Reclaimed),
    ]
}

/// Passes an input. An error leaves the engine unchanged.
#[expect(clippy::too_many_lines, reason = "an arm for each input")]
fn tell(plain: &mut Plain, told: &AnyInput, epoch: &EpochScript) -> Result<(), TestCaseError> {
    let spreads = |pairs: &[(u64, u64)]| -> Vec<Spread> {
        let spread = |&(fast, slow): &(u64, u64)| {
            let bytes = [fast, slow / 2, slow - slow / 2, 0];
            Spread(ByLevel(bytes.map(ByteCount)))
        };
        pairs.iter().map(spread).collect()
    };
    let mut vmas = vec![];
    let places;
    let input = match told {
        AnyInput::Answer => {
            // The plain driver does not know processes that were started by chance.
            if plain.engine.request() != Request::Refresh {
                plain.answer(epoch);
                return Ok(());
            }
            Input::Refreshed
        }
        AnyInput::Epoch => Input::Epoch,
        AnyInput::Started(pid) => Input::Started(Pid(*pid)),
        AnyInput::Ended(pid) => Input::Ended(Pid(*pid)),
        AnyInput::Space(pid, ranges) => {
            let range = |&(start, len): &(u64, u64)| {
                VirtRange::new(
                    GuestVirtAddr(start),
                    GuestVirtAddr(start.saturating_add(len)),
                )
            };
            vmas.extend(ranges.iter().filter_map(range));
            Input::Space {
                pid: Pid(*pid),
                vmas: &vmas,
            }
        }
        AnyInput::BalloonWants(bytes) => Input::BalloonWants(ByteCount(*bytes)),
        AnyInput::Paused(paused) => Input::Paused(*paused),
        AnyInput::Refreshed => Input::Refreshed,
        AnyInput::Looked(pid, addr, events, exposure_ns) => Input::Looked(Observation {
            pid: Pid(*pid),
            block: Block::of(GuestVirtAddr(*addr)),
            events: *events,
            exposure_ns: *exposure_ns,
            is_least: *events % 2 == 1,
        }),
        AnyInput::Sample(pid, addr, weight) => Input::Sample(Sample {
            pid: Pid(*pid),
            addr: GuestVirtAddr(*addr),
            weight: *weight,
        }),
        &AnyInput::SamplesEnd(lost, rejected, is_repeat) => Input::SamplesEnd {
            lost,
            rejected,
            is_repeat,
        },
        AnyInput::Places(all, located) => {
            places = spreads(all);
            match located {
                true => Input::Located(&places),
                false => Input::Moved {
                    placements: &places,
                    took_ns: 1000 * places.len() as u64,
                    cpu_ns: places.len() as u64,
                },
            }
        }
        AnyInput::Failed(true) => Input::LookUpFailed,
        AnyInput::Failed(false) => Input::MoveFailed,
        &AnyInput::Nodes(fast, slow) => {
            let facts = |free, kept| NodeFacts {
                free: ByteCount(free),
                kept: ByteCount(kept),
            };
            let (fast, slow) = (facts(fast, slow), facts(slow, fast));
            Input::Nodes(ByLevel([fast, slow, slow, fast]))
        }
        &AnyInput::Machine(bytes, cpus) => Input::Machine {
            sizes: ByLevel([ByteCount(bytes); LEVELS]),
            cpus,
        },
        AnyInput::Reclaimed => Input::Reclaimed,
    };
    if matches!(input, Input::Sample(_)) {
        let _ = plain.engine.push(input);
        return Ok(());
    }
    let before = plain.engine.clone();
    if plain.engine.push(input).is_err() {
        prop_assert_eq!(plain.engine.request(), before.request());
        prop_assert_eq!(plain.engine.figures(), before.figures());
        prop_assert_eq!(plain.engine.stage(), before.stage());
    }
    if let Input::Ended(pid) = input {
        prop_assert!(plain.engine.processes().all(|p| p.pid != pid));
        prop_assert!(plain.engine.ranking().iter().all(|r| r.pid != pid));
    }
    Ok(())
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(48))]

    #[test]
    fn whatever_is_told_it_goes_on_and_the_same_twice(
        seed: u64,
        told in prop::collection::vec(any_input(), 0..300),
    ) {
        let script = Script::new(seed);
        let mut one = Plain::new(&script, BASE);
        let mut two = one.clone();
        let mut alive = BTreeSet::new();
        for (i, told) in told.iter().enumerate() {
            let epoch = &script.epochs[i % script.epochs.len()];
            tell(&mut one, told, epoch)?;
            tell(&mut two, told, epoch)?;
            prop_assert_eq!(one.engine.request(), two.engine.request());
            match told {
                AnyInput::Started(pid) => alive.insert(*pid),
                AnyInput::Ended(pid) => alive.remove(pid),
                _ => false,
            };
            if let Request::LookUp { pid, .. } | Request::Move { pid, .. } = one.engine.request() {
                prop_assert!(alive.contains(&pid.0), "asked for a process that has ended");
            }
        }
    }

    #[test]
    fn an_epoch_asks_for_little_and_tries_nothing_twice(seed: u64) {
        let script = Script::new(seed);
        let mut plain = Plain::new(&script, BASE);
        for epoch in &script.epochs {
            plain.kernel.grow(epoch.grown);
            if plain.engine.stage() == Stage::Asleep {
                plain.engine.push(Input::Epoch).unwrap();
            }
            let (mut requests, mut tried) = (0, BTreeSet::new());
            let mut level = None;
            while plain.engine.stage() != Stage::Asleep {
                requests += 1;
                let (stage, free) = (plain.engine.stage(), plain.kernel.free.fast * BLOCK_SIZE);
                let reserve = script.fast_size().0 / 128;
                let level = *level.get_or_insert(free.min(reserve.max(4 << 20)));
                match plain.engine.request() {
                    Request::Move { direction, blocks, .. } => {
                        prop_assert!((1..=BATCH_BLOCKS).contains(&blocks.len()));
                        for r in blocks {
                            prop_assert!(tried.insert(r.block), "{:?} is tried twice", r.block);
                        }
                        if direction == Direction::Promotion {
                            let bytes: u64 = blocks.iter().map(|r| r.bytes.0).sum();
                            prop_assert!(free >= level + bytes, "{free} - {bytes} < {level}");
                        }
                    }
                    Request::LookUp { blocks, .. } => prop_assert!(blocks.len() <= 8192 + 8),
                    _ => prop_assert!(stage == Stage::Deciding || requests > 1),
                }
                plain.answer(epoch);
            }
            let bound = 6 + 2 * tried.len();
            prop_assert!(requests <= bound, "{requests} requests for {} blocks", tried.len());
        }
        let figures = plain.engine.figures();
        prop_assert!(figures.tried.0 >= figures.promoted.0 + figures.demoted.0);
    }

    #[test]
    fn a_process_that_has_ended_leaves_nothing(seed: u64, at in 0usize..200) {
        let script = Script::new(seed);
        let mut plain = Plain::new(&script, BASE);
        for i in 0..at {
            plain.answer(&script.epochs[i % script.epochs.len()]);
        }
        if plain.engine.processes().count() == 1 {
            plain.engine.push(Input::Ended(PID)).unwrap();
            let mut answers = 0;
            while plain.engine.stage() != Stage::Asleep {
                let asked = plain.engine.request();
                let names_one = matches!(asked, Request::LookUp { .. } | Request::Move { .. });
                prop_assert!(!names_one);
                let input = match asked {
                    Request::Refresh => Input::Refreshed,
                    Request::Samples { .. } => Input::SamplesEnd { lost: 0, rejected: 0, is_repeat: false },
                    _ => Input::Nodes(plain.kernel.nodes()),
                };
                plain.engine.push(input).unwrap();
                answers += 1;
                prop_assert!(answers < 8);
            }
            prop_assert_eq!(plain.engine.set_aside(), 0);
            let whole = range(first_block(), first_block() + 1000);
            let known = plain.engine.residency().movable(PID, &whole, u32::MAX).count();
            prop_assert_eq!((known, plain.engine.ranking().len()), (0, 0));
        }
    }

    #[test]
    fn a_saved_state_goes_on_as_if_it_had_never_been_saved(seed: u64, at in 0usize..40) {
        let script = Script::new(seed);
        let mut plain = Plain::new(&script, BASE);
        let (before, after) = script.epochs.split_at(at.min(script.epochs.len()));
        run(&mut plain, before);
        let mut other = plain.clone();
        let saved = plain.engine.save().unwrap();
        let strategy = ByHeat::new(WORTH_MUCH);
        other.engine = Engine::restore(strategy, script.config(), &saved).unwrap();
        prop_assert_eq!(other.engine.save(), Some(saved));
        prop_assert_eq!(run(&mut other, after), run(&mut plain, after));
        prop_assert_eq!(other.engine.figures(), plain.engine.figures());
    }

    #[test]
    fn a_state_that_was_altered_is_refused_or_works(
        seed: u64,
        altered in prop::collection::vec((any::<prop::sample::Index>(), any::<u64>(), 0u32..64), 0..4),
        cut in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        let script = Script::new(seed);
        let mut plain = Plain::new(&script, BASE);
        run(&mut plain, &script.epochs);
        let mut numbers = plain.engine.save().unwrap();
        for (at, number, shift) in altered {
            let at = at.index(numbers.len());
            numbers[at] = number >> shift;
        }
        if is_cut {
            numbers.truncate(cut.index(numbers.len()));
        }
        let strategy = ByHeat::new(WORTH_MUCH);
        if let Ok(engine) = Engine::restore(strategy, script.config(), &numbers) {
            plain.engine = engine;
            // Even if it believes everything, an epoch has no more requests than this.
            for epoch in &script.epochs[..script.epochs.len().min(6)] {
                if plain.engine.processes().any(|p| p.pid == PID) {
                    plain.epoch(epoch);
                }
            }
        }
    }

    #[test]
    fn epochs_beside_the_moves_lose_no_relocation(seed: u64, every in 1usize..9) {
        let script = Script::new(seed);
        let strategy = Apart(ByHeat::new(WORTH_MUCH));
        let mut plain = Plain::with(strategy, &script, BASE);
        plain.answer(&script.epochs[0]);
        for epoch in &script.epochs {
            plain.kernel.grow(epoch.grown);
            prop_assert!(plain.engine.stage() != Stage::Deciding);
            plain.engine.push(Input::Epoch).unwrap();
            while plain.engine.stage() == Stage::Deciding {
                plain.answer(epoch);
            }
            // The moves get this far before the next epoch.
            for _ in 0..every {
                if plain.engine.stage() == Stage::Moving {
                    plain.answer(epoch);
                }
            }
        }
        let before = plain.engine.figures().tried;
        while plain.engine.stage() == Stage::Moving {
            plain.answer(&EpochScript::default());
        }
        let figures = plain.engine.figures();
        prop_assert!(figures.tried >= before);
        prop_assert_eq!(plain.engine.request(), Request::Sleep { epochs: 1 });
        // The engine knows the true place of each block.
        let mapped = script.fast + script.slow;
        for b in 0..mapped {
            let block = Block(first_block() + b);
            if let Some(known) = plain.engine.residency().get(PID, block) {
                prop_assert_eq!(known, plain.kernel.locate(block));
            }
        }
    }
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
