//! The agent: drives the policy's engine on a live kernel.
//!
//! [`Engine`] decides when to list processes, which blocks to look up, what to move and when to wake. This module
//! carries that out: it reads targets and mappings from /proc and samples from a tracker, looks up and moves pages
//! through [`Pages`], and writes a status.
//!
//! The agent is one thread. It wakes once per epoch, and half as often while nothing is to move. When nothing is
//! accessed, an epoch only checks the tracker's buffers.
//!
//! Requests are dispatched here. Processes and nodes are followed in `following`, moves are in `moving`, the status is in
//! `report`.

mod check;
mod clock;
mod contracts;
mod cpu_time;
mod error;
mod following;
mod headroom;
mod machine;
mod moving;
mod process;
mod report;
mod sharing;

use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

pub use check::{Checked, check, find_tiers};
use clock::{Clock, nanoseconds};
use contracts::{ReadingBudget, Rules};
use cpu_time::CpuTime;
use demeter_linux::report::thp_mode;
use demeter_policy::engine::{self, ByHeat, Engine, Gain, Input, Request};
use demeter_policy::{ByteCount, GuestVirtAddr, NodeId, Pid, Sample, Tuning};
pub use error::AgentError;
use machine::Machine;
use process::Process;
use sharing::Sharing;

use crate::config::Config;
use crate::heat::Heat;
use crate::latency::LoadProbe;
use crate::mover::Mover;
use crate::pages::Pages;
use crate::prober::Prober;
use crate::recording::{self, Recorded, RecordedTier, Recorder};
use crate::status::{StatusCell, TierStatus};
use crate::targets::{TargetFinder, TargetsError};
use crate::tracker::{Tracker, TrackerError};

/// Time between two checks of nodes and CPUs.
const NODES_EVERY: Duration = Duration::from_secs(4);

/// Non-target processes that are remembered, besides those of one epoch.
const STRANGERS_MAX: usize = 4096;

/// A command to a running agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Stop observing and moving until `Resume`.
    Pause,
    /// Continue after a pause.
    Resume,
    /// Keep this much more fast memory free for the balloon; zero when the balloon no longer waits.
    MakeRoom(ByteCount),
    /// Publish the heat of all memory to listeners.
    Look,
    /// End, and leave memory where it is.
    Stop,
}

/// The agent. See the module's text.
pub struct Agent {
    root: PathBuf,
    config: Config,
    machine: Machine,
    /// When nodes and CPUs were last checked.
    followed: Instant,
    cpu_time: CpuTime,
    finder: TargetFinder,
    tracker: Box<dyn Tracker>,
    pages: Box<dyn Pages>,
    status: StatusCell,

    engine: Recorded,
    processes: BTreeMap<Pid, Process>,
    prober: Prober,
    mover: Mover,
    /// Small pages are promoted as huge ones.
    huge_pages: bool,
    samples: Vec<Sample>,
    /// Rules for memory that is left alone, and the time budget for reading policies.
    rules: Rules,
    budget: ReadingBudget,
    sharing: Sharing,
    /// Sampled processes that are no targets.
    strangers: BTreeSet<Pid>,
    paused: bool,
    clock: Clock,
    /// The last error that was logged.
    warned: Option<String>,
    /// The last error of this epoch that does not end the agent.
    error: Option<String>,
}

/// Why the agent's loop ended.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// It was asked to stop.
    Stopped,
    /// All processes named in the configuration have ended.
    NothingLeft,
    /// The machine has more tiers or fewer than at the start.
    OtherTiers,
}

/// The agent's interfaces to the machine.
pub struct Effects {
    /// Finds the processes to manage.
    pub finder: TargetFinder,
    /// The source of samples.
    pub tracker: Box<dyn Tracker>,
    /// The kernel that moves pages.
    pub pages: Box<dyn Pages>,
    /// Measured latency of a load from each node, nanoseconds.
    pub measured_ns: BTreeMap<NodeId, u32>,
    /// Measures latency under load.
    pub load: LoadProbe,
    /// CPUs that programs run on.
    pub cpus: u32,
}

impl Agent {
    /// Creates an agent for the system below `root`.
    ///
    /// Finds its targets at once, so that a pid that does not exist is an error.
    pub fn new(
        root: PathBuf,
        config: Config,
        effects: Effects,
        status: StatusCell,
    ) -> Result<Self, AgentError> {
        config.check()?;
        let Effects {
            finder,
            tracker,
            pages,
            measured_ns,
            load,
            cpus,
        } = effects;
        let machine = Machine::read(&root, &config, (measured_ns, load), cpus)?;
        let (tiers, nodes_left_alone) = machine.describe();
        let tuning = &config.tuning;
        let gain = Gain {
            loads_per_sample: tracker.loads_per_sample(),
            waits: tracker.waits(),
            latency_ns: machine.latency_ns(),
            cpus,
        };
        let huge_pages = huge_pages_always(&root);
        let engine_config = engine::Config {
            sizes: machine.sizes(),
            slowest: machine.tiers().slowest(),
            collapses: huge_pages,
            ..engine::Config::new(tuning, ByteCount(0))
        };
        status.update(|s| {
            s.version = env!("CARGO_PKG_VERSION").into();
            s.tracker = tracker.name().into();
            s.tiers.clone_from(&tiers);
            s.nodes_left_alone = nodes_left_alone;
        });
        let mut engine = Recorded::new(Engine::new(ByHeat::new(gain), engine_config));
        if let Some(path) = &config.record {
            let header = recording_header(tuning, tracker.as_ref(), &gain, tiers, huge_pages);
            let recorder = Recorder::start(path, config.record_max_mib, header, &engine)?;
            engine.record(recorder);
        }
        let mut agent = Self {
            engine,
            finder,
            rules: Rules {
                managed: machine.tiers().nodes().collect(),
                respect_policies: config.respect_policies,
            },
            budget: ReadingBudget::default(),
            sharing: Sharing::default(),
            strangers: BTreeSet::new(),
            clock: Clock::live(),
            warned: None,
            config,
            mover: machine.mover(),
            huge_pages,
            prober: machine.prober(),
            machine,
            followed: Instant::now(),
            cpu_time: CpuTime::new(cpus),
            tracker,
            pages,
            status,
            processes: BTreeMap::new(),
            samples: vec![],
            root,
            paused: false,
            error: None,
        };
        agent.act()?;
        Ok(agent)
    }

    /// Runs until `Stop`, or until all named processes have ended.
    pub fn run(&mut self, controls: &Receiver<Control>) -> Result<Ended, AgentError> {
        let ended = self.run_epochs(controls);
        if let Err(error) = self.engine.finish() {
            tracing::warn!("{error}");
        }
        ended
    }

    fn run_epochs(&mut self, controls: &Receiver<Control>) -> Result<Ended, AgentError> {
        let epoch = self.config.tuning.epoch();
        let mut next = Instant::now() + epoch;
        loop {
            match controls.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Control::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Ended::Stopped);
                }
                Ok(Control::Pause) => self.set_paused(true)?,
                Ok(Control::Resume) => self.set_paused(false)?,
                Ok(Control::MakeRoom(wanted)) => self.make_room(wanted)?,
                Ok(Control::Look) => self.status.heat.tell(Heat::of(&self.engine)),
                Err(RecvTimeoutError::Timeout) => {
                    let epochs = match self.step() {
                        Err(AgentError::Targets(TargetsError::NoProcess(_))) => {
                            return Ok(Ended::NothingLeft);
                        }
                        Err(AgentError::OtherTiers) => return Ok(Ended::OtherTiers),
                        epochs => epochs?,
                    };
                    // Missed epochs are skipped.
                    next = (next + epoch * epochs).max(Instant::now());
                }
            }
        }
    }

    fn set_paused(&mut self, paused: bool) -> Result<(), AgentError> {
        if paused != self.paused {
            if paused {
                self.tracker.pause()?
            } else {
                self.tracker.resume()?
            }
            self.paused = paused;
            self.engine.push(Input::Paused(paused))?;
            self.status.update(|s| s.paused = paused);
            tracing::info!("{}", if paused { "paused" } else { "resumed" });
        }
        Ok(())
    }

    /// Makes room for the balloon: one batch at once, the rest in later epochs.
    fn make_room(&mut self, wanted: ByteCount) -> Result<(), AgentError> {
        self.status.update(|s| s.balloon_wants_bytes = wanted.0);
        self.engine.push(Input::BalloonWants(wanted))?;
        self.act().map(drop)
    }

    /// Runs one epoch. Returns the number of epochs until the next one is due.
    pub fn step(&mut self) -> Result<u32, AgentError> {
        if self.followed.elapsed() >= NODES_EVERY {
            self.follow_nodes()?;
        }
        self.engine.push(Input::Epoch)?;
        self.act()
    }

    /// Carries the engine's requests out, until it sleeps.
    fn act(&mut self) -> Result<u32, AgentError> {
        loop {
            match self.engine.request() {
                Request::Sleep { epochs } => {
                    let before = self.tracker.thinning();
                    self.tracker.epoch_ended(self.engine.prospect())?;
                    let thinning = self.tracker.thinning();
                    if thinning != before {
                        self.engine.push(Input::Thinned(thinning))?;
                    }
                    self.report();
                    return Ok(epochs);
                }
                Request::Refresh => self.refresh()?,
                Request::Samples { most, wanted } => {
                    self.tracker.want(wanted);
                    self.take_samples(most)?;
                }
                Request::LookUp { pid, blocks } => {
                    let space = self.engine.space(pid);
                    let placements = self.prober.look(&mut *self.pages, pid, space, blocks);
                    self.engine.push(match &placements {
                        Ok(placements) => Input::Located(placements),
                        Err(_) => Input::LookUpFailed,
                    })?;
                    self.hinder(pid, placements.err())?;
                }
                Request::ReadNodes => {
                    // Copies of its own are no load of programs.
                    let facts = match self.engine.stage() {
                        engine::Stage::Moving => self.machine.facts()?,
                        _ => self.machine.facts_under_load()?,
                    };
                    for (place, free) in self.machine.rooms_by_socket() {
                        self.engine.push(Input::Room { place, free })?;
                    }
                    self.engine.push(Input::Nodes(facts))?;
                }
                Request::Move { pid, .. } => {
                    if self.is_ready(pid)? {
                        self.move_batch()?;
                    }
                }
                Request::Collapse { pid, .. } => {
                    if self.is_ready(pid)? {
                        self.collapse_batch()?;
                    }
                }
                // A live kernel reclaims by itself.
                Request::Reclaim => self.engine.push(Input::Reclaimed)?,
            }
        }
    }

    /// Passes the tracker's samples to the engine.
    fn take_samples(&mut self, most: usize) -> Result<(), AgentError> {
        self.samples.clear();
        let drained = match self.tracker.drain(&mut self.samples, most) {
            Ok(drained) => drained,
            // The tracker has resynchronized: one epoch's samples are lost.
            Err(error @ TrackerError::Corrupt { .. }) => {
                self.error = Some(error.to_string());
                Default::default()
            }
            Err(error) => return Err(error.into()),
        };
        // Memory that is left alone must not count as newly mapped memory.
        let is_left_alone = |pid: Pid, addr: GuestVirtAddr| {
            let process = self.processes.get(&pid);
            process.is_some_and(|process| process.is_left_alone(addr))
        };
        if self.strangers.len() > STRANGERS_MAX {
            self.strangers.clear();
        }
        let known = &self.processes;
        self.strangers.retain(|pid| !known.contains_key(pid));
        let before = self.strangers.clone();
        for &sample in &self.samples {
            // An unknown process triggers one refresh only: if it were a target, that refresh would find it.
            if !known.contains_key(&sample.pid) {
                self.strangers.insert(sample.pid);
                if before.contains(&sample.pid) {
                    continue;
                }
            }
            if let Some(placed) = self.sharing.place(sample)
                && !is_left_alone(placed.pid, placed.addr)
            {
                self.engine.push(Input::Sample(placed))?;
            }
        }
        for &seen in self.tracker.observed() {
            if let Some(placed) = self.sharing.place_observation(seen)
                && !is_left_alone(placed.pid, placed.block.start())
            {
                self.engine.push(Input::Looked(placed))?;
            }
        }
        Ok(self.engine.push(Input::SamplesEnd {
            lost: drained.lost,
            rejected: drained.rejected,
            is_repeat: drained.is_repeat,
        })?)
    }
}

/// The facts that a recording starts with.
fn recording_header(
    tuning: &Tuning,
    tracker: &dyn Tracker,
    gain: &Gain,
    tiers: Vec<TierStatus>,
    collapses: bool,
) -> recording::Header {
    recording::Header {
        agent: env!("CARGO_PKG_VERSION").into(),
        tracker: tracker.name().into(),
        tuning: tuning.clone(),
        tiers: tiers.into_iter().map(RecordedTier::from).collect(),
        loads_per_sample: gain.loads_per_sample,
        waits: gain.waits,
        cpus: gain.cpus,
        collapses,
    }
}

/// Whether transparent huge pages are set to "always".
fn huge_pages_always(root: &Path) -> bool {
    thp_mode(root, "enabled").as_deref() == Some("always")
}

#[cfg(test)]
pub(crate) mod conformance;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod topologies;
