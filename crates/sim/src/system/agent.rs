//! The agent of `demeter guest` in a simulated guest. The policy's engine decides; the simulated kernel executes, which
//! takes time.
//!
//! The agent is a thread beside the program's threads and executes its plan in batches. If the program needs the same
//! virtual CPU, the scheduler gives the program its share between batches. The next epoch begins when the plan is
//! complete.

mod damon_tracker;
mod manager;
mod moving;
mod nodes;
mod variants;

use std::fmt;

use demeter_policy::engine::{
    Classify, Config, Engine, Gain, Input, Misuse, NodeFacts, Request, Stage, Strategy,
};
use demeter_policy::{
    ByLevel, ByteCount, GuestVirtAddr, Level, PAGE_SIZE, Placer, Sample, Socket, rooms_by_socket,
    thinning,
};

use self::damon_tracker::DamonTracker;
use self::nodes::{loaded_ns, place, sizes_of, usable_of};
use self::variants::Traits;
use super::paper_ranges::Split;
use super::{Context, Manager, NEVER_PS};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_NS;
use crate::machine::ledger::Cause;
use crate::machine::sampler::Sampling;

/// The scheduler's weights of a thread at nice 0, and of the agent at nice -10 (`sched_prio_to_weight`).
const PROGRAM_WEIGHT: u64 = 1024;
const AGENT_WEIGHT: u64 = 9548;

/// Settings of an agent.
#[derive(Debug, Clone)]
pub(crate) struct AgentSettings {
    /// Parameters of range splitting in the paper's design.
    pub(crate) split: Split,
    /// Parameters that set the value of a sample.
    pub(crate) gain: Gain,
    /// Settings of the engine. The guest supplies the sizes of tiers.
    pub(crate) engine: Config,
    /// Chooses target nodes. As the sockets' nodes come first, a socket has the number of its node.
    pub(crate) placer: Placer,
    pub(crate) sampling: Sampling,
    /// Sampling of the paper's design, whose period is that of any machine.
    pub(crate) paper_sampling: Sampling,
    pub(crate) epoch_ps: u64,
    /// Number of virtual CPUs.
    pub(crate) vcpus: u32,
}

/// The source of samples.
#[derive(Debug)]
enum Tracker {
    /// The sampling units, with their records since the last request.
    Sampler(Vec<GuestVirtAddr>),
    /// Accessed bits, through DAMON.
    Damon(Box<DamonTracker>),
}

/// The simulated agent.
pub(crate) struct SimulatedAgent<S: Strategy> {
    settings: AgentSettings,
    traits: Traits,
    /// Creates its strategy, for a given size of fast memory.
    strategy: fn(&AgentSettings, ByteCount) -> S,
    /// None before the start.
    engine: Option<Engine<S>>,
    /// Error: the engine received an input that it had not requested; a bug in this module.
    misuse: Option<Misuse>,
    tracker: Tracker,
    /// Converts the duration of a batch for its report. Tests report zero, as decisions must not depend on machine
    /// speed.
    took_ns: fn(u64) -> u64,
    next_epoch_ps: u64,
    /// Time of its next turn.
    due_ps: u64,
    /// Number of samples so far.
    samples_seen: u64,
    /// Each n-th sample is taken, `n` as here; and the samples of this epoch.
    thinning: u32,
    epoch_samples: u64,
    /// The size of each tier, as the engine knows it. Balloons do not change it.
    sizes: ByLevel<ByteCount>,
    /// Requests of the engine, recorded in tests.
    #[cfg(test)]
    asked: Vec<String>,
}

impl<S: Strategy> SimulatedAgent<S> {
    fn new(
        settings: &AgentSettings,
        traits: Traits,
        strategy: fn(&AgentSettings, ByteCount) -> S,
    ) -> Self {
        Self {
            settings: settings.clone(),
            traits,
            strategy,
            engine: None,
            misuse: None,
            tracker: Tracker::Sampler(vec![]),
            took_ns: |took_ps| took_ps / PS_PER_NS,
            next_epoch_ps: 0,
            due_ps: 0,
            samples_seen: 0,
            thinning: 1,
            epoch_samples: 0,
            sizes: ByLevel::default(),
            #[cfg(test)]
            asked: vec![],
        }
    }

    /// One turn: a batch of its plan or, after the plan, an epoch or a second plan. Returns the time of the next turn.
    fn act(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) -> u64 {
        let Some(mut engine) = self.engine.take() else {
            return NEVER_PS;
        };
        let began_ps = actor.now_ps();
        let is_due = S::CLASSIFIES_APART && began_ps >= self.next_epoch_ps;
        let told = if engine.stage() == Stage::Moving && !is_due {
            self.move_on(&mut engine, guest, actor)
        } else {
            let begins = is_due || engine.stage() == Stage::Asleep || engine.epoch() == 0;
            let epoch = self.run_epoch(&mut engine, begins, guest, actor);
            epoch.map(|ready_ps| {
                let epochs = match engine.request() {
                    _ if !begins => 0,
                    Request::Sleep { epochs } => epochs,
                    _ => 1,
                };
                self.next_epoch_ps += u64::from(epochs) * self.settings.epoch_ps;
                self.next_epoch_ps = self.next_epoch_ps.max(ready_ps);
            })
        };
        if let Err(misuse) = told {
            // Without an engine there are no more turns.
            self.misuse = Some(misuse);
            return NEVER_PS;
        }
        let (now_ps, stage) = (actor.now_ps(), engine.stage());
        let prospect = engine.prospect();
        if stage == Stage::Asleep && S::COUNTS_BLOCKS && matches!(self.tracker, Tracker::Sampler(_))
        {
            let samples = std::mem::take(&mut self.epoch_samples);
            let next = thinning(&prospect, samples, self.thinning, u32::MAX);
            if next != self.thinning {
                self.thinning = next;
                if let Err(misuse) = engine.push(Input::Thinned(next)) {
                    self.misuse = Some(misuse);
                }
            }
        }
        self.engine = Some(engine);
        if stage == Stage::Asleep {
            // If an epoch took too long, the missed ones are skipped.
            self.next_epoch_ps = self.next_epoch_ps.max(now_ps);
            if let Tracker::Damon(tracker) = &mut self.tracker {
                tracker.epoch_ended(prospect, now_ps);
            }
            return self.next_epoch_ps;
        }
        let program_ps = (now_ps - began_ps) * PROGRAM_WEIGHT / AGENT_WEIGHT;
        now_ps + if actor.is_alone() { 0 } else { program_ps }
    }

    /// Runs an epoch up to its plan, from its beginning or from the end of its trial. Returns the time at which the plan is
    /// ready.
    fn run_epoch(
        &mut self,
        engine: &mut Engine<S>,
        begins: bool,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Result<u64, Misuse> {
        let before = engine.figures().samples;
        let mut in_kernel_ps = 0;
        if begins && engine.epoch() > 0 {
            self.push(engine, Input::Epoch)?;
        }
        loop {
            match engine.request() {
                Request::Refresh => {
                    for (pid, vmas) in guest.processes() {
                        if engine.epoch() == 0 {
                            engine.push(Input::Started(pid))?;
                            if self.settings.placer.has_choice() {
                                let socket = Socket::new(guest.socket_of(pid));
                                engine.push(Input::Near { pid, socket })?;
                            }
                        }
                        engine.push(Input::Space { pid, vmas })?;
                    }
                    self.follow(engine, guest)?;
                    self.push(engine, Input::Refreshed)?;
                }
                Request::Samples { most, wanted } => {
                    if let Tracker::Damon(tracker) = &mut self.tracker {
                        tracker.want(wanted);
                    }
                    self.tell_samples(engine, most, guest)?;
                }
                Request::LookUp { blocks, .. } => {
                    let places: Vec<_> = blocks.iter().map(|&b| place(b, guest)).collect();
                    if self.traits.in_kernel {
                        let resident: u64 = places.iter().map(|p| p.resident().0).sum();
                        in_kernel_ps += resident / PAGE_SIZE * actor.costs.paper_page_ps;
                    } else {
                        actor.charge(
                            Cause::Classify,
                            places.len() as u64 * actor.costs.agent_lookup_ps,
                        );
                    }
                    self.push(engine, Input::Located(&places))?;
                }
                Request::ReadNodes if engine.stage() == Stage::Deciding => {
                    self.tell_nodes(engine, Cause::Classify, guest, actor)?;
                }
                // The agent starts with its first epoch.
                Request::Sleep { .. } if engine.epoch() == 0 => {
                    self.push(engine, Input::Epoch)?;
                }
                _ => break,
            }
        }
        let samples = engine.figures().samples - before;
        self.samples_seen += samples;
        self.epoch_samples += samples;
        let ranges: usize = match engine.ranking() {
            [] => (engine.processes())
                .filter_map(|p| engine.classifier(p.pid))
                .map(|classifier| classifier.ranges().count())
                .sum(),
            ranking => ranking.len(),
        };
        // A kernel that manages by ranges examines no single blocks.
        let blocks = match self.traits.in_kernel {
            true => 0,
            false => engine.residency().known_in_all(),
        };
        let costs = actor.costs;
        let work = costs.agent_epoch_ps
            + samples * costs.agent_sample_ps
            + ranges as u64 * costs.agent_range_ps
            + blocks * costs.agent_block_ps;
        actor.charge(Cause::Classify, work);
        actor.charge_all(Cause::Classify, in_kernel_ps);
        Ok(actor.now_ps() + in_kernel_ps)
    }

    /// Reports sizes of tiers that have changed, since nodes come or go.
    fn follow(&mut self, engine: &mut Engine<S>, guest: &Guest) -> Result<(), Misuse> {
        let sizes = sizes_of(guest);
        if !self.settings.placer.has_choice() || sizes == self.sizes {
            return Ok(());
        }
        self.sizes = sizes;
        engine.push(Input::Machine {
            sizes,
            cpus: self.settings.gain.cpus,
        })
    }

    /// Reports this epoch's samples, or the findings of DAMON.
    fn tell_samples(
        &mut self,
        engine: &mut Engine<S>,
        most: usize,
        guest: &Guest,
    ) -> Result<(), Misuse> {
        let (mut lost, mut is_repeat) = (0, false);
        match &mut self.tracker {
            Tracker::Sampler(addresses) => {
                lost = addresses.len().saturating_sub(most) as u64;
                for addr in addresses.drain(..).take(most) {
                    engine.push(Input::Sample(Sample {
                        pid: guest.pid_of(addr),
                        addr,
                        weight: 1,
                    }))?;
                }
            }
            Tracker::Damon(tracker) => {
                let found = tracker.take_found();
                is_repeat = found.is_empty();
                for seen in found {
                    engine.push(Input::Looked(seen))?;
                }
            }
        }
        let end = Input::SamplesEnd {
            lost,
            rejected: 0,
            is_repeat,
        };
        self.push(engine, end)
    }

    fn tell_nodes(
        &mut self,
        engine: &mut Engine<S>,
        cause: Cause,
        guest: &Guest,
        actor: &mut Actor<'_>,
    ) -> Result<(), Misuse> {
        if !self.traits.in_kernel {
            actor.charge(cause, actor.costs.agent_read_nodes_ps);
        }
        let is_moving = engine.stage() == Stage::Moving;
        let mut facts = ByLevel::from_fn(|level| NodeFacts {
            free: usable_of(guest, level),
            kept: ByteCount(0),
            // Copies of one's own are no load of the program's.
            latency_ns: match is_moving {
                true => None,
                false => loaded_ns(guest, actor, level),
            },
        });
        // Promotions that wait for reclaim use the watermark of promotions.
        if S::RECLAIMS_MAX > 0 && is_moving {
            facts.get_mut(Level::First).free = guest.promotable();
        }
        if self.settings.placer.has_choice() {
            let room = |node| {
                (
                    guest.level_of(node),
                    guest.socket_near(node),
                    guest.usable(node),
                )
            };
            for (place, free) in rooms_by_socket(guest.all_nodes().map(room)) {
                engine.push(Input::Room { place, free })?;
            }
        }
        self.push(engine, Input::Nodes(facts))
    }

    /// Sends the engine's answer.
    fn push(&mut self, engine: &mut Engine<S>, input: Input<'_>) -> Result<(), Misuse> {
        engine.push(input)?;
        #[cfg(test)]
        self.asked.push(format!("{:?}", engine.request()));
        Ok(())
    }
}

impl<S: Strategy> fmt::Debug for SimulatedAgent<S> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SimulatedAgent")
            .field("settings", &self.settings)
            .field("traits", &self.traits)
            .finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests;
