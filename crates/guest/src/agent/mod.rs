//! The agent: does what the policy's engine asks for, on a live kernel.
//!
//! [`Engine`] decides when to look which processes there are, which blocks to look up, what to move
//! and when to wake. Here is how: targets and mappings from /proc, samples from a tracker, places
//! and moves through [`Pages`], and a status of what came of it.
//!
//! One thread, one wake per epoch, and half as many while nothing is to move. When nothing is
//! accessed an epoch is a look at the tracker's buffers and nothing else.
//!
//! Here is the dispatch of the engine's requests. Moves are in `moving`, the status is in `report`.

mod contracts;
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

use contracts::{Budget, Rules};
use demeter_policy::engine::{self, ByHeat, Engine, Gain, Input, Misuse, Request};
use demeter_policy::{ByteCount, GuestVirtAddr, NodeId, Pid, Sample};
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
use crate::status::StatusCell;
use crate::targets::{Target, TargetFinder, TargetsError};
use crate::tracker::{Tracker, TrackerError};

/// Time between two looks at which nodes and CPUs there are.
const NODES_EVERY: Duration = Duration::from_secs(4);

/// Processes that are remembered as no targets, one epoch's besides.
const STRANGERS_MAX: usize = 4096;

/// What others ask of a running agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Control {
    /// Neither observe nor move until told to.
    Pause,
    /// Go on.
    Resume,
    /// Leave so much more fast memory free from now on: the balloon waits for it. Zero when it
    /// waits no longer.
    MakeRoom(ByteCount),
    /// Tell those who listen how hot which memory is.
    Look,
    /// End, and leave memory as it is.
    Stop,
}

/// Why the agent cannot start or go on.
#[derive(Debug, thiserror::Error)]
pub enum AgentError {
    /// A bad configuration.
    #[error(transparent)]
    Config(#[from] ConfigError),
    /// No two tiers.
    #[error(transparent)]
    Nodes(#[from] NodesError),
    /// No targets.
    #[error(transparent)]
    Targets(#[from] TargetsError),
    /// No tracker, or one that failed.
    #[error(transparent)]
    Tracker(#[from] TrackerError),
    /// Nothing can be recorded.
    #[error(transparent)]
    Recorder(#[from] RecorderError),
    /// Memory came or went so that there are more tiers or fewer: an agent has to begin anew.
    #[error("the machine has other tiers than at the start")]
    OtherTiers,
    /// An error of ours.
    #[error("the agent told its engine what does not fit: {0}; please report this")]
    Misuse(#[from] Misuse),
}

impl AgentError {
    /// Whether it may pass by itself: somebody else has what the tracker needs.
    pub fn is_temporary(&self) -> bool {
        matches!(self, Self::Tracker(error) if error.is_temporary())
    }
}

/// The agent. See the module's text.
pub struct Agent {
    root: PathBuf,
    config: Config,
    machine: Machine,
    /// When it was last looked which nodes and CPUs there are.
    followed: Instant,
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
    /// The rules for memory that is left alone, and the time to find it.
    rules: Rules,
    budget: Budget,
    sharing: Sharing,
    /// Processes that are no targets, though samples of them come.
    strangers: BTreeSet<Pid>,
    paused: bool,
    clock: Clock,
    /// The last error that was logged.
    warned: Option<String>,
    /// The last error of this epoch that does not end the agent.
    error: Option<String>,
}

/// The time since the agent started. In tests it stands still: how fast a machine is must decide nothing.
struct Clock(Box<dyn Fn() -> Duration + Send>);

impl Clock {
    fn live() -> Self {
        let born = Instant::now();
        Self(Box::new(move || born.elapsed()))
    }

    fn now(&self) -> Duration {
        (self.0)()
    }

    /// How long ago something began, nanoseconds.
    fn took_ns(&self, began: Duration) -> u64 {
        let took = self.now().saturating_sub(began);
        u64::try_from(took.as_nanos()).unwrap_or(u64::MAX)
    }
}

/// What ended the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Somebody asked for it.
    Stopped,
    /// The processes that were named have all ended.
    NothingLeft,
    /// The machine has more tiers or fewer than at the start.
    OtherTiers,
}

/// Finds what does not fit before anything is set up: bad values, processes or a cgroup that are
/// not there, a machine without two tiers; in this order.
pub fn check(
    root: &Path,
    config: &Config,
    measure: impl FnOnce(&Topology) -> BTreeMap<NodeId, u32>,
) -> Result<Checked, AgentError> {
    config.check()?;
    let finder = TargetFinder::new(root, config.targets()?);
    finder.check()?;
    let (order, measured_ns) = find_tiers(root, config, measure)?;
    Ok(Checked {
        finder,
        order,
        measured_ns,
    })
}

/// The tiers of a machine, and the latency of each node as `measure` finds it, nanoseconds.
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
    /// Finds the processes to look after.
    pub finder: TargetFinder,
    /// The tiers.
    pub order: TierOrder,
    /// Latency of a load from each node that was measured, nanoseconds.
    pub measured_ns: BTreeMap<NodeId, u32>,
}

/// What an agent acts on a machine by.
pub struct Effects {
    /// Finds the processes to look after.
    pub finder: TargetFinder,
    /// Where samples come from.
    pub tracker: Box<dyn Tracker>,
    /// The kernel that moves pages.
    pub pages: Box<dyn Pages>,
    /// Latency of a load from each node that was measured, nanoseconds.
    pub measured_ns: BTreeMap<NodeId, u32>,
    /// CPUs that programs run on.
    pub cpus: u32,
}

impl Agent {
    /// An agent on the system below `root`. Finds its targets at once, so that a pid that is not
    /// there is an error.
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
            let header = recording::Header {
                agent: env!("CARGO_PKG_VERSION").into(),
                tracker: tracker.name().into(),
                tuning: tuning.clone(),
                tiers: tiers.into_iter().map(RecordedTier::from).collect(),
                loads_per_sample: gain.loads_per_sample,
                waits: gain.waits,
                cpus: gain.cpus,
            };
            engine.record(Recorder::start(
                path,
                config.record_max_mib,
                header,
                &engine,
            )?);
        }
        let mut agent = Self {
            engine,
            finder,
            rules: Rules {
                managed: machine.tiers().nodes().collect(),
                respect_policies: config.respect_policies,
            },
            budget: Budget::default(),
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

    /// Runs until told to stop, or until the processes that were named have ended.
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
                    // An epoch that took too long is not made up for.
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

    /// What the balloon waits for is made room for at once as far as a batch goes, the rest in the
    /// epochs that follow.
    fn make_room(&mut self, wanted: ByteCount) -> Result<(), AgentError> {
        self.status.update(|s| s.balloon_wants_bytes = wanted.0);
        self.engine.push(Input::BalloonWants(wanted))?;
        self.act().map(drop)
    }

    /// One epoch. Returns after how many epochs the next one is due.
    pub fn step(&mut self) -> Result<u32, AgentError> {
        if self.followed.elapsed() >= NODES_EVERY {
            self.follow_nodes()?;
        }
        self.engine.push(Input::Epoch)?;
        self.act()
    }

    /// Looks which nodes and CPUs have come or gone.
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
            // The nodes that are left make no tiers: the former ones stay, and a node that has gone has no room.
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

    /// Does what the engine asks for, until it sleeps.
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

    /// Looks which processes there are and what they map.
    fn refresh(&mut self) -> Result<(), AgentError> {
        let targets = match self.finder.find() {
            // Nothing is known anew, and nothing else follows from it.
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

    /// Reads what a process maps, and what of it is left alone.
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

    /// Tells which memory of which process may be moved.
    fn divide(&mut self) -> Result<(), Misuse> {
        let mapped = self.processes.iter().map(|(&pid, p)| (pid, p.mapped()));
        let spaces = self.sharing.divide(&mapped.collect());
        for (pid, vmas) in &spaces {
            self.engine.push(Input::Space { pid: *pid, vmas })?;
        }
        Ok(())
    }

    /// Tells which process has which share of fast memory.
    fn share(&mut self) -> Result<(), AgentError> {
        let mut shares = BTreeMap::new();
        // The first cgroup that has a process counts, so that it is put in last.
        for (path, share) in self.config.shares().into_iter().rev() {
            match self.finder.in_cgroup(path) {
                Ok(pids) => shares.extend(pids.into_iter().map(|pid| (Pid(pid), share))),
                Err(error) => {
                    // All keep what they have.
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

    /// Hands the tracker's samples on.
    fn take_samples(&mut self, most: usize) -> Result<(), AgentError> {
        self.samples.clear();
        let drained = match self.tracker.drain(&mut self.samples, most) {
            Ok(drained) => drained,
            // The ring is in step again: one epoch's samples are lost, not the agent.
            Err(error @ TrackerError::Corrupt { .. }) => {
                self.error = Some(error.to_string());
                Default::default()
            }
            Err(error) => return Err(error.into()),
        };
        // Memory that is left alone does not pass for memory that was mapped since the last look.
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
            // A new process is news once: if it were a target, the next look would find it.
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

    /// Takes note that a process has gone before a refresh has seen it.
    fn end(&mut self, pid: Pid) -> Result<(), AgentError> {
        self.processes.remove(&pid);
        self.mover.forget(pid);
        self.engine.push(Input::Ended(pid))?;
        let pids: Vec<Pid> = self.processes.keys().copied().collect();
        Ok(self.tracker.set_targets(&pids)?)
    }
}

/// Whether the system backs all memory with huge pages where it can.
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
