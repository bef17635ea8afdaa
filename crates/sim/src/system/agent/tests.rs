//! Conformance of the simulated agent as a driver of its engine: it decides as the live agent does.

use demeter_policy::engine::ByHeat;
use demeter_policy::engine::conformance::{EpochScript, Rig, Script, WORTH_MUCH, conforms};
use demeter_policy::{BLOCK_SIZE, Block, Distances, NodeId, Tier, Tuning};
use proptest::prelude::*;

use super::*;
use crate::error::SimError;
use crate::guest::Watermarks;
use crate::guest::tests::Bench;
use crate::machine::cost::PS_PER_NS;
use crate::machine::sampler::Record;

/// Pages of 256 KiB.
const SCALE_BITS: u32 = 6;

/// The simulated agent on a guest described by a script.
struct SimulatedRig {
    bench: Bench,
    agent: SimulatedAgent<ByHeat>,
    base: GuestVirtAddr,
    mapped: u64,
    /// Number of requests checked so far.
    seen: usize,
}

fn settings(tuning: &Tuning) -> AgentSettings {
    let sampling = Sampling {
        period: 1,
        threshold_ps: PS_PER_NS,
    };
    AgentSettings {
        split: Split::of(tuning),
        gain: WORTH_MUCH,
        engine: Config {
            collapses: true,
            ..Config::new(tuning, ByteCount(0))
        },
        sampling,
        paper_sampling: sampling,
        epoch_ps: tuning.epoch_ms * 1_000_000_000,
        placer: Placer::new(vec![vec![NodeId(0)], vec![NodeId(1)]], Distances::new()),
        vcpus: 1,
    }
}

impl SimulatedRig {
    /// Maps blocks and moves them to one node.
    fn map(&mut self, blocks: u64, to: Tier) -> GuestVirtAddr {
        let base = self.bench.map(blocks * BLOCK_SIZE);
        assert_eq!(
            self.bench.fill(base, blocks * BLOCK_SIZE),
            blocks * BLOCK_SIZE
        );
        for b in 0..blocks {
            let block = Block(Block::of(base).0 + b);
            self.bench
                .act(|guest, actor| guest.migrate_block(block, to, actor));
        }
        self.mapped += blocks;
        base
    }

    fn free(&self, node: Tier) -> u64 {
        self.bench.guest.usable(node).0 / BLOCK_SIZE
    }
}

impl Rig for SimulatedRig {
    fn new(script: &Script) -> Self {
        let slow = ByteCount((script.slow + script.slow_free) * BLOCK_SIZE);
        let nodes = [script.fast_size(), slow];
        let bench = Bench::with(SCALE_BITS, nodes, false, Watermarks::NONE);
        let mut rig = Self {
            bench,
            agent: SimulatedAgent::product(&settings(&script.tuning())),
            base: GuestVirtAddr(0),
            mapped: 0,
            seen: 0,
        };
        rig.base = rig.map(script.fast, Tier::Fast);
        for _ in 0..script.slow {
            rig.map(1, Tier::Slow);
        }
        assert_eq!(rig.free(Tier::Fast), script.fast_free);
        assert_eq!(rig.free(Tier::Slow), script.slow_free);
        let first = Block::of(rig.base).0;
        rig.bench.guest.pinned = script.stuck.iter().map(|b| Block(first + b)).collect();
        rig.agent.took_ns = |_| 0;
        rig.agent.start(&rig.bench.guest, 0, false);
        rig
    }

    fn base(&self) -> GuestVirtAddr {
        self.base
    }

    fn epoch(&mut self, epoch: &EpochScript) -> Vec<String> {
        for _ in 0..epoch.grown.min(self.free(Tier::Slow)) {
            self.map(1, Tier::Slow);
        }
        let at = |b: &u64| Record {
            gva: GuestVirtAddr(self.base.0 + b * BLOCK_SIZE),
        };
        let records: Vec<_> = epoch.samples.iter().map(at).collect();
        self.agent.take_samples(&records);
        let agent = &mut self.agent;
        for turn in 0.. {
            assert!(turn < 1000, "an epoch ends");
            self.bench.act(|guest, actor| agent.act(guest, actor));
            if agent
                .engine
                .as_ref()
                .is_some_and(|e| e.stage() == Stage::Asleep)
            {
                break;
            }
        }
        // The agent sends its first request before any input.
        let first = (self.seen == 0).then(|| "Refresh".to_string());
        let asked: Vec<_> = first.into_iter().chain(agent.asked.drain(..)).collect();
        self.seen += asked.len();
        asked
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(24))]
    #[test]
    fn the_simulated_agent_conforms(seed: u64) {
        let conforms = conforms::<SimulatedRig>(&Script::new(seed));
        prop_assert!(conforms.is_ok(), "{:?}", conforms);
    }
}

#[test]
fn epochs_come_at_their_time_and_every_second_one_is_left_out_when_nothing_moves() {
    let script = Script {
        epochs: vec![],
        ..demeter_policy::engine::conformance::hot_set(10, 10, 2..6, 0)
    };
    let mut rig = SimulatedRig::new(&script);
    let epoch_ps = rig.agent.settings.epoch_ps;
    let mut due = vec![0];
    for i in 0..24 {
        let agent = &mut rig.agent;
        let now_ps = rig.bench.act(|guest, actor| {
            let wait_ps = due[i].max(actor.now_ps()) - actor.now_ps();
            actor.charge(Cause::Idle, wait_ps);
            agent.act(guest, actor)
        });
        due.push(now_ps);
    }
    let gaps: Vec<u64> = due.windows(2).map(|w| (w[1] - w[0]) / epoch_ps).collect();
    assert_eq!(gaps[2..5], [1, 1, 1], "{gaps:?}");
    assert_eq!(gaps[20..], [2, 2, 2, 2], "{gaps:?}");
}

#[test]
fn a_misused_engine_ends_the_simulation_instead_of_the_process() {
    let mut rig = SimulatedRig::new(&demeter_policy::engine::conformance::hot_set(
        10,
        10,
        2..6,
        0,
    ));
    let agent = &mut rig.agent;
    assert!(agent.fault().is_none());
    let pids: Vec<_> = (rig.bench).act(|guest, _| guest.processes().map(|(pid, _)| pid).collect());
    // The agent's first turn reports the process once more.
    let started = Input::Started(pids[0]);
    agent.engine.as_mut().unwrap().push(started).unwrap();
    let due_ps = rig.bench.act(|guest, actor| agent.act(guest, actor));
    assert_eq!(due_ps, NEVER_PS);
    assert!(matches!(agent.fault(), Some(SimError::Agent(_))));
}
