//! Properties that hold after any inputs.

use super::*;

/// The agent's rule, in a separate thread.
#[derive(Debug, Clone)]
struct Apart(ByHeat);

impl crate::engine::Strategy for Apart {
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
    Collapsed(u64),
    Thinned(u32),
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
        1 => (0u64..1 << 40).prop_map(AnyInput::Collapsed),
        1 => any::<u32>().prop_map(AnyInput::Thinned),
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
            ByLevel(bytes.map(ByteCount)).into()
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
        &AnyInput::Thinned(thinning) => Input::Thinned(thinning),
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
        &AnyInput::Collapsed(took_ns) => Input::Collapsed {
            took_ns,
            cpu_ns: took_ns,
        },
        &AnyInput::Nodes(fast, slow) => {
            let facts = |free, kept| NodeFacts {
                free: ByteCount(free),
                kept: ByteCount(kept),
                // Any number a driver may report.
                latency_ns: Some(free as u32),
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
            if let Request::LookUp { pid, .. }
            | Request::Move { pid, .. }
            | Request::Collapse { pid, .. } = one.engine.request()
            {
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
            let (mut level, movers) = (None, plain.engine.movers());
            while plain.engine.stage() != Stage::Asleep {
                requests += 1;
                let (stage, free) = (plain.engine.stage(), plain.kernel.free.fast * BLOCK_SIZE);
                let reserve = script.fast_size().0 / 128;
                let level = *level.get_or_insert(free.min(reserve.max(4 << 20)));
                match plain.engine.request() {
                    Request::Move { direction, blocks, .. } => {
                        prop_assert!((1..=BATCH_BLOCKS * movers).contains(&blocks.len()));
                        for r in blocks {
                            prop_assert!(tried.insert(r.block), "{:?} is tried twice", r.block);
                        }
                        if direction == Direction::Promotion {
                            let bytes: u64 = blocks.iter().map(|r| r.bytes.0).sum();
                            prop_assert!(free >= level + bytes, "{free} - {bytes} < {level}");
                        }
                    }
                    Request::Collapse { blocks, .. } => {
                        prop_assert!((1..=BATCH_BLOCKS * movers).contains(&blocks.len()));
                        for r in blocks {
                            prop_assert!(tried.insert(r.block), "{:?} is tried twice", r.block);
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
                let names_one = matches!(
                    asked,
                    Request::LookUp { .. } | Request::Move { .. } | Request::Collapse { .. }
                );
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
        let bytes = postcard::to_allocvec(&saved).unwrap();
        let read = postcard::from_bytes(&bytes).unwrap();
        other.engine = Engine::restore(&ByHeat::new(WORTH_MUCH), script.config(), read).unwrap();
        let again = other.engine.save().unwrap();
        prop_assert_eq!(postcard::to_allocvec(&again).unwrap(), bytes);
        prop_assert_eq!(run(&mut other, after), run(&mut plain, after));
        prop_assert_eq!(other.engine.figures(), plain.engine.figures());
    }

    #[test]
    fn a_state_that_was_altered_is_refused_or_works(
        seed: u64,
        altered in prop::collection::vec((any::<prop::sample::Index>(), any::<u8>()), 0..4),
        cut in any::<prop::sample::Index>(),
        is_cut: bool,
    ) {
        let script = Script::new(seed);
        let mut plain = Plain::new(&script, BASE);
        run(&mut plain, &script.epochs);
        let mut bytes = postcard::to_allocvec(&plain.engine.save().unwrap()).unwrap();
        for (at, byte) in altered {
            let at = at.index(bytes.len());
            bytes[at] = byte;
        }
        if is_cut {
            bytes.truncate(cut.index(bytes.len()));
        }
        let strategy = ByHeat::new(WORTH_MUCH);
        let state = postcard::from_bytes(&bytes).ok();
        let restore = |state| Engine::restore(&strategy, script.config(), state).ok();
        if let Some(engine) = state.and_then(restore) {
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
