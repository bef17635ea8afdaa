//! The agent: drives the policy's engine on a live kernel.
//!
//! [`Engine`] decides when to list processes, which blocks to look up, what to move and when to wake. This module
//! carries that out: it reads targets and mappings from /proc and samples from a tracker, looks up and moves pages
//! through [`Pages`], and writes a status.
//!
//! The agent is one thread. It wakes once per epoch, and half as often while nothing is to move. When nothing is
//! accessed, an epoch only checks the tracker's buffers.
//!
//! Requests are dispatched here. Moves are in `moving`, the status is in `report`.

mod contracts;
mod cpu_time;
mod headroom;
mod machine;
mod moving;
mod process;
mod report;
mod sharing;

use std::collections::btree_map::Entry;
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use contracts::{ReadingBudget, Rules};
use cpu_time::CpuTime;
use demeter_linux::base_page::{OtherBasePages, check_base_pages};
use demeter_linux::cpu;
use demeter_policy::engine::{self, ByHeat, Engine, Gain, Input, Misuse, Request};
use demeter_policy::{ByteCount, GuestVirtAddr, NodeId, Pid, Sample, Tuning};
use machine::{Change, Machine};
use process::Process;
use sharing::Sharing;

use crate::config::{Config, ConfigError};
use crate::heat::Heat;
use crate::mover::Mover;
use crate::nodes::{NodesError, TierOrder, Topology};
use crate::pages::Pages;
use crate::prober::Prober;
use crate::recording::{self, Recorded, RecordedTier, Recorder, RecorderError};
use crate::status::{StatusCell, TierStatus};
use crate::targets::{Target, TargetFinder, TargetsError};
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

/// An error that keeps the agent from starting or running.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// The configuration is invalid.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// The kernel has pages of another size.
    #[error(transparent)]
    Pages(#[from] OtherBasePages),
    /// The machine has no two tiers.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// There are no target processes.
    #[error(transparent)]
    Targets(#[from] TargetsError),
    /// No tracker works, or the tracker failed.
    #[error(transparent)]
    Tracker(#[from] TrackerError),
    /// The recording cannot be written.
    #[error(transparent)]
    Recorder(#[from] RecorderError),
    /// Hot-plug changed the number of tiers: the agent must start again.
    #[error("the machine's tiers have changed since the start")]
    OtherTiers,
    /// A bug of ours.
    #[error("the engine rejects an input: {0}; this is a bug, please report it")]
    Misuse(#[from] Misuse),
}

impl AgentError {
    /// Whether it may pass by itself: another process has the tracker's hardware.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Tracker(error) if error.is_temporary())
    }

    /// Whether another tracker is to take over at once.
    pub fn has_successor(&self) -> bool {
        use TrackerError::{Outdone, Silent};
        matches!(self, Self::Tracker(Outdone { .. } | Silent { .. }))
    }
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

/// Time since the agent started. Tests stop it: the machine's speed must not change a decision.
struct Clock(Box<dyn Fn() -> Times + Send>);

/// A reading of the clock, or the difference of two.
#[derive(Debug, Clone, Copy, Default)]
struct Times {
    elapsed: Duration,
    /// CPU time of the agent's thread: a program that preempts it costs nothing.
    cpu: Duration,
}

impl Clock {
    fn live() -> Self {
        let born = Instant::now();
        Self(Box::new(move || Times {
            elapsed: born.elapsed(),
            cpu: cpu::of_this_thread(),
        }))
    }

    fn now(&self) -> Duration {
        self.start().elapsed
    }

    fn start(&self) -> Times {
        (self.0)()
    }

    fn since(&self, began: Times) -> Times {
        let now = self.start();
        Times {
            elapsed: now.elapsed.saturating_sub(began.elapsed),
            cpu: now.cpu.saturating_sub(began.cpu),
        }
    }
}

fn nanoseconds(time: Duration) -> u64 {
    u64::try_from(time.as_nanos()).unwrap_or(u64::MAX)
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

/// Checks the configuration, the kernel, the targets and the tiers before anything is set up, in this order.
pub fn check(
    root: &Path,
    config: &Config,
    measure: impl FnOnce(&Topology) -> BTreeMap<NodeId, u32>,
) -> Result<Checked, AgentError> {
    config.check()?;
    check_base_pages(root)?;
    let finder = TargetFinder::new(root, config.targets()?);
    finder.check()?;
    let (order, measured_ns) = find_tiers(root, config, measure)?;
    Ok(Checked {
        finder,
        order,
        measured_ns,
    })
}

/// Finds the tiers of a machine; `measure` returns each node's latency in nanoseconds.
pub fn find_tiers(
    root: &Path,
    config: &Config,
    measure: impl FnOnce(&Topology) -> BTreeMap<NodeId, u32>,
) -> Result<(TierOrder, BTreeMap<NodeId, u32>), NodesError> {
    let mut topology = Topology::read(root)?;
    let measured_ns = measure(&topology);
    topology.set_measured(&measured_ns);
    Ok((config.order(&topology)?, measured_ns))
}

/// The findings of [`check`].
pub struct Checked {
    /// Finds the processes to manage.
    pub finder: TargetFinder,
    /// The tiers.
    pub order: TierOrder,
    /// Measured latency of a load from each node, nanoseconds.
    pub measured_ns: BTreeMap<NodeId, u32>,
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
            cpus,
        } = effects;
        let machine = Machine::read(&root, &config, measured_ns, cpus)?;
        let (tiers, nodes_left_alone) = machine.describe();
        let tuning = &config.tuning;
        let gain = Gain {
            loads_per_sample: tracker.loads_per_sample(),
            waits: tracker.waits(),
            latency_ns: machine.latency_ns(),
            cpus,
        };
        let engine_config = engine::Config {
            sizes: machine.sizes(),
            slowest: machine.tiers().slowest(),
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
            let header = recording_header(tuning, tracker.as_ref(), &gain, tiers);
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
            mover: Mover::new(machine.tiers().clone(), false),
            huge_pages: huge_pages_always(&root),
            prober: Prober::new(machine.tiers().clone()),
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

    /// Checks which nodes and CPUs came or went.
    fn follow_nodes(&mut self) -> Result<(), AgentError> {
        self.followed = Instant::now();
        match self.machine.follow(&self.config) {
            Ok(Change::None) => return Ok(()),
            Ok(Change::Amounts) => {}
            Ok(Change::Nodes) => {
                tracing::info!("the nodes by tier are {} now", self.machine.tiers());
                let tiers = self.machine.tiers();
                self.prober = Prober::new(tiers.clone());
                self.mover = Mover::new(tiers.clone(), false);
                self.rules.managed = tiers.nodes().collect();
            }
            Ok(Change::Tiers) => return Err(AgentError::OtherTiers),
            // The remaining nodes make no tiers: the former tiers stay, and a removed node has no free memory.
            Err(error) => {
                self.error = Some(error.to_string());
                return Ok(());
            }
        }
        let (tiers, nodes_left_alone) = self.machine.describe();
        self.status.update(|s| {
            s.tiers = tiers;
            s.nodes_left_alone = nodes_left_alone;
        });
        let (sizes, cpus) = (self.machine.sizes(), self.machine.cpus());
        Ok(self.engine.push(Input::Machine { sizes, cpus })?)
    }

    /// Carries the engine's requests out, until it sleeps.
    fn act(&mut self) -> Result<u32, AgentError> {
        loop {
            match self.engine.request() {
                Request::Sleep { epochs } => {
                    self.tracker.epoch_ended(self.engine.prospect())?;
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
                    let facts = self.machine.facts()?;
                    self.engine.push(Input::Nodes(facts))?;
                }
                Request::Move { .. } => self.move_batch()?,
                // A live kernel reclaims by itself.
                Request::Reclaim => self.engine.push(Input::Reclaimed)?,
            }
        }
    }

    /// Lists processes and reads their mappings.
    fn refresh(&mut self) -> Result<(), AgentError> {
        let targets = match self.finder.find() {
            // Without a new list the engine keeps the old one.
            Err(error @ TargetsError::Read { .. }) => {
                self.error = Some(error.to_string());
                return Ok(self.engine.push(Input::Refreshed)?);
            }
            found => found?,
        };
        let same = |p: &Process, t: &Target| p.target.start_ticks == t.start_ticks;
        let is_target = |pid: Pid, p: &Process| targets.iter().any(|t| t.pid == pid && same(p, t));
        let has_gone = |(&pid, p): (&Pid, &Process)| (!is_target(pid, p)).then_some(pid);
        let gone: Vec<Pid> = self.processes.iter().filter_map(has_gone).collect();
        for &pid in &gone {
            self.processes.remove(&pid);
            self.mover.forget(pid);
            self.engine.push(Input::Ended(pid))?;
        }
        let mut changed = !gone.is_empty();
        for target in targets {
            let pid = target.pid;
            if let Entry::Vacant(vacant) = self.processes.entry(pid) {
                tracing::info!("looking after {pid} ({})", target.comm);
                vacant.insert(Process::new(target));
                self.engine.push(Input::Started(pid))?;
                changed = true;
            }
        }
        self.share()?;
        for (&pid, process) in &mut self.processes {
            if self.machine.has_choice() {
                process.look_where_it_runs(&self.root, |cpu| self.machine.node_of_cpu(cpu));
                let socket = process.near().map_or(0, |node| node.0);
                if process.socket != socket {
                    self.engine.push(Input::Near { pid, socket })?;
                    process.socket = socket;
                }
            }
        }
        self.budget.begin(self.clock.now());
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        for pid in pids {
            self.read_space(pid);
        }
        self.divide()?;
        if changed {
            let pids: Vec<Pid> = self.processes.keys().copied().collect();
            self.tracker.set_targets(&pids)?;
        }
        Ok(self.engine.push(Input::Refreshed)?)
    }

    /// Reads a process's mappings, and which of them are left alone.
    fn read_space(&mut self, pid: Pid) {
        let Some(process) = self.processes.get_mut(&pid) else {
            return;
        };
        let reasons = |process: &Process| Vec::from_iter(process.left_alone.keys().copied());
        let before = reasons(process);
        let read = process.read_space(&self.root, &self.rules, &mut self.budget, &self.clock);
        if let Err(error) = read {
            self.error = Some(error.to_string());
        }
        for (hold, bytes) in &process.left_alone {
            if !before.contains(hold) && !hold.is_passing() {
                let (name, why) = (process.name(), hold.why());
                tracing::info!("leaving alone {bytes} of {name} {why}");
            }
        }
    }

    /// Gives the engine each process's movable memory.
    fn divide(&mut self) -> Result<(), Misuse> {
        let mapped = self.processes.iter().map(|(&pid, p)| (pid, p.mapped()));
        let spaces = self.sharing.divide(&mapped.collect());
        for (pid, vmas) in &spaces {
            self.engine.push(Input::Space { pid: *pid, vmas })?;
        }
        Ok(())
    }

    /// Gives the engine each process's share of fast memory.
    fn share(&mut self) -> Result<(), AgentError> {
        let mut shares = BTreeMap::new();
        // The first matching cgroup takes precedence, so it is inserted last.
        for (path, share) in self.config.shares().into_iter().rev() {
            match self.finder.in_cgroup(path) {
                Ok(pids) => shares.extend(pids.into_iter().map(|pid| (Pid(pid), share))),
                Err(error) => {
                    // Shares stay as they are.
                    self.error = Some(error.to_string());
                    return Ok(());
                }
            }
        }
        for (&pid, process) in &mut self.processes {
            let share = shares.get(&pid).copied();
            if process.share != share {
                self.engine.push(Input::Share { pid, share })?;
                process.share = share;
            }
        }
        Ok(())
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

    /// Notes that a process ended before a refresh saw it.
    fn end(&mut self, pid: Pid) -> Result<(), AgentError> {
        self.processes.remove(&pid);
        self.mover.forget(pid);
        self.engine.push(Input::Ended(pid))?;
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        Ok(self.tracker.set_targets(&pids)?)
    }
}

/// The facts that a recording starts with.
fn recording_header(
    tuning: &Tuning,
    tracker: &dyn Tracker,
    gain: &Gain,
    tiers: Vec<TierStatus>,
) -> recording::Header {
    recording::Header {
        agent: env!("CARGO_PKG_VERSION").into(),
        tracker: tracker.name().into(),
        tuning: tuning.clone(),
        tiers: tiers.into_iter().map(RecordedTier::from).collect(),
        loads_per_sample: gain.loads_per_sample,
        waits: gain.waits,
        cpus: gain.cpus,
    }
}

/// Whether transparent huge pages are set to "always".
fn huge_pages_always(root: &Path) -> bool {
    let file = root.join("sys/kernel/mm/transparent_hugepage/enabled");
    std::fs::read_to_string(file).is_ok_and(|mode| mode.contains("[always]"))
}

#[cfg(test)]
pub(crate) mod conformance;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod topologies;
