//! The epoch loop: what a tracker saw goes through the policy, what the policy plans is carried
//! out, and what came of it is told.
//!
//! One thread, one wake per epoch, and half as many while nothing is to move. When nothing is
//! accessed an epoch is a look at the tracker's buffers and nothing else.

mod process;

use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::Instant;

use demeter_policy::{
    Block, ByteCount, FillThreshold, MIB, Pid, Plan, RankedRange, ResidencyMap, Room, Sample,
    VirtRange, plan, rank, working_set,
};
use process::Process;

use crate::config::{Config, ConfigError};
use crate::mover::{Memory, Mover, Outcome};
use crate::nodes::{NodeMemory, NodesError, Topology};
use crate::pages::{Pages, PagesError};
use crate::residency::{Prober, Tiers};
use crate::status::StatusCell;
use crate::targets::{Target, TargetFinder, TargetsError};
use crate::tracker::{Tracker, TrackerError};

/// The most samples that are taken in one epoch.
const SAMPLES_MAX: usize = 1 << 16;

/// Blocks of unknown place that are looked up in one epoch, hottest first.
const LOOKUPS_MAX: usize = 2048;

/// Blocks of known place that are looked up again in one epoch, in turn.
const RECHECKS: usize = 8;

/// Epochs after which it is looked at how full the nodes are, even when nothing is to move.
const ROOM_EPOCHS: u32 = 8;

/// Milliseconds between two looks at which processes and VMAs there are; five times as many
/// while nothing is accessed.
const REFRESH_MS: u64 = 2000;

/// After so many epochs in which nothing was to move, every second wake is left out: a stable
/// workload is disturbed half as often, and one that changes is noticed one epoch later.
const CALM_AFTER_EPOCHS: u32 = 8;

/// What others ask of a running agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Command {
    /// Neither observe nor move until told to.
    Pause,
    /// Go on.
    Resume,
    /// Leave so much more fast memory free from now on: the balloon waits for it. Zero when it
    /// waits no longer.
    MakeRoom(ByteCount),
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
}

/// The agent. See the module's text.
pub struct Agent {
    root: PathBuf,
    config: Config,
    tiers: Tiers,
    fast_reserve: ByteCount,
    finder: TargetFinder,
    tracker: Box<dyn Tracker>,
    pages: Box<dyn Pages>,
    status: StatusCell,

    processes: BTreeMap<Pid, Process>,
    spaces: BTreeMap<Pid, Vec<VirtRange>>,
    residency: ResidencyMap,
    prober: Prober,
    mover: Mover,
    samples: Vec<Sample>,
    epoch: u32,
    refresh_at: u32,
    /// Epochs in a row in which nothing was to move.
    calm: u32,
    /// How full the nodes were when last looked at.
    room: Option<Room>,
    /// Fast memory that the balloon waits for.
    balloon_wants: ByteCount,
    paused: bool,
}

/// What ended the loop.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Ended {
    /// Somebody asked for it.
    Stopped,
    /// The processes that were named have all ended.
    NothingLeft,
}

/// Finds what does not fit before anything is set up: bad values, processes or a cgroup that are
/// not there, a machine without two tiers; in this order.
pub fn check(root: &Path, config: &Config) -> Result<(), AgentError> {
    config.check()?;
    TargetFinder::new(root, config.targets()?).find()?;
    config.tiers(&Topology::read(root)?)?;
    Ok(())
}

impl Agent {
    /// An agent on the system below `root`, with its two effects: a tracker and a kernel that
    /// moves pages. Finds its targets at once, so that a pid that is not there is an error.
    pub fn new(
        root: PathBuf,
        config: Config,
        tracker: Box<dyn Tracker>,
        pages: Box<dyn Pages>,
        status: StatusCell,
    ) -> Result<Self, AgentError> {
        config.check()?;
        let topology = Topology::read(&root)?;
        let tiers = config.tiers(&topology)?;
        let finder = TargetFinder::new(&root, config.targets()?);
        let fast = topology.nodes.iter().find(|n| n.id == tiers.fast);
        let fast_total = fast.map_or(0, |n| n.total.0);
        status.update(|s| {
            s.version = env!("CARGO_PKG_VERSION");
            s.tracker = tracker.name().into();
            s.fast_node = tiers.fast.0;
            s.slow_node = tiers.slow.0;
        });
        let mut agent = Self {
            fast_reserve: ByteCount((fast_total / 128).clamp(4 * MIB, 64 * MIB)),
            config,
            tiers,
            finder,
            mover: Mover::new(tiers, tracker.sees_huge_pages() && huge_pages_always(&root)),
            tracker,
            pages,
            status,
            processes: BTreeMap::new(),
            spaces: BTreeMap::new(),
            residency: ResidencyMap::default(),
            prober: Prober::new(tiers),
            samples: vec![],
            root,
            epoch: 0,
            refresh_at: 0,
            calm: 0,
            room: None,
            balloon_wants: ByteCount(0),
            paused: false,
        };
        agent.refresh()?;
        Ok(agent)
    }

    /// Runs until told to stop, or until the processes that were named have ended.
    pub fn run(&mut self, commands: &Receiver<Command>) -> Result<Ended, AgentError> {
        let epoch = self.config.tuning.epoch();
        let mut next = Instant::now() + epoch;
        loop {
            match commands.recv_timeout(next.saturating_duration_since(Instant::now())) {
                Ok(Command::Stop) | Err(RecvTimeoutError::Disconnected) => {
                    return Ok(Ended::Stopped);
                }
                Ok(Command::Pause) => self.set_paused(true)?,
                Ok(Command::Resume) => self.set_paused(false)?,
                Ok(Command::MakeRoom(wanted)) => self.make_room(wanted)?,
                Err(RecvTimeoutError::Timeout) => {
                    match self.step() {
                        Err(AgentError::Targets(TargetsError::NoProcess(_))) => {
                            return Ok(Ended::NothingLeft);
                        }
                        result => result?,
                    }
                    let epochs = if self.calm < CALM_AFTER_EPOCHS { 1 } else { 2 };
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
            self.status.update(|s| s.paused = paused);
            tracing::info!("{}", if paused { "paused" } else { "resumed" });
        }
        Ok(())
    }

    /// What the balloon waits for is demoted at once as far as a batch goes, the rest in the
    /// epochs that follow.
    fn make_room(&mut self, wanted: ByteCount) -> Result<(), AgentError> {
        let is_new = self.balloon_wants.0 == 0 && wanted.0 > 0;
        self.balloon_wants = wanted;
        self.status.update(|s| s.balloon_wants_bytes = wanted.0);
        // The nodes are not as full as they were.
        self.room = None;
        self.calm = 0;
        if is_new && !self.paused {
            self.relocate()?;
        }
        Ok(())
    }

    /// One epoch.
    pub fn step(&mut self) -> Result<(), AgentError> {
        self.epoch = self.epoch.saturating_add(1);
        if self.epoch >= self.refresh_at {
            self.refresh()?;
        }
        if self.paused {
            return Ok(());
        }
        let astray = self.take_samples()?;
        if astray {
            // Memory was mapped since the last look, and is in use.
            self.refresh_at = self.refresh_at.min(self.epoch + 1);
        }
        let is_cold = self.samples.is_empty() && self.processes.values().all(Process::is_cold);
        if is_cold && self.balloon_wants.0 == 0 {
            self.status.update(|s| {
                s.epochs += 1;
                s.working_set_fast_bytes = 0;
                s.working_set_slow_bytes = 0;
            });
            self.calm = self.calm.saturating_add(1);
            return Ok(());
        }
        for process in self.processes.values_mut() {
            process.classifier.end_epoch();
        }
        self.relocate()
    }

    /// Plans by what is known and carries the plan out.
    fn relocate(&mut self) -> Result<(), AgentError> {
        let ranking = rank(
            self.processes
                .iter()
                .map(|(&pid, p)| (pid, p.classifier.ranges())),
        );
        self.look_up(&ranking);
        let (plan, level) = self.plan(&ranking)?;
        self.calm = if plan.is_empty() {
            self.calm.saturating_add(1)
        } else {
            0
        };
        let usable = || NodeMemory::read_all(&self.root, [self.tiers.fast]).map(|[m]| m.usable());
        let spare = || ByteCount(usable().map_or(0, |u| u.0.saturating_sub(level.0)));
        let mut memory = Memory {
            pages: &mut *self.pages,
            spaces: &self.spaces,
            residency: &mut self.residency,
            epoch: self.epoch,
        };
        let outcome = self.mover.execute(&plan, &mut memory, spare);
        self.tell(&ranking, &plan, &outcome);
        Ok(())
    }

    /// Looks which processes there are and what they map.
    fn refresh(&mut self) -> Result<(), AgentError> {
        let targets = self.finder.find()?;
        let same = |p: &Process, t: &Target| p.target.start_ticks == t.start_ticks;
        let is_target = |pid: Pid, p: &Process| targets.iter().any(|t| t.pid == pid && same(p, t));
        let before = self.processes.len();
        self.processes.retain(|&pid, p| is_target(pid, p));
        let mut changed = self.processes.len() != before;
        for target in &targets {
            if !self.processes.contains_key(&target.pid) {
                let config = self.config.tuning.classifier();
                self.processes
                    .insert(target.pid, Process::new(target.clone(), config));
                tracing::info!("looking after {} ({})", target.pid, target.comm);
                changed = true;
            }
        }
        for (&pid, process) in &mut self.processes {
            if process.read_space(&self.root) {
                self.residency.restrict(pid, &process.space);
                self.spaces.insert(pid, process.space.clone());
            }
        }
        self.residency
            .retain(|pid| self.processes.contains_key(&pid));
        self.mover.retain(|pid| self.processes.contains_key(&pid));
        self.spaces
            .retain(|pid, _| self.processes.contains_key(pid));
        if changed {
            let pids: Vec<Pid> = self.processes.keys().copied().collect();
            self.tracker.set_targets(&pids)?;
        }
        let idle = self.epoch > 0 && self.processes.values().all(Process::is_cold);
        let wait_ms = REFRESH_MS * if idle { 5 } else { 1 };
        let epochs = (wait_ms / self.config.tuning.epoch_ms).max(1);
        self.refresh_at = self.epoch.saturating_add(epochs as u32);
        Ok(())
    }

    /// Hands the tracker's samples to the classifiers. True when many belong to no known memory.
    fn take_samples(&mut self) -> Result<bool, AgentError> {
        self.samples.clear();
        let drained = match self.tracker.drain(&mut self.samples, SAMPLES_MAX) {
            Ok(drained) => drained,
            // The ring is in step again: one epoch's samples are lost, not the agent.
            Err(error @ TrackerError::Corrupt { .. }) => {
                tracing::warn!("{error}");
                self.status
                    .update(|s| s.last_error = Some(error.to_string()));
                Default::default()
            }
            Err(error) => return Err(error.into()),
        };
        let mut astray = drained.rejected;
        for sample in &self.samples {
            match self.processes.get_mut(&sample.pid) {
                Some(p) if p.maps(sample.addr) => {
                    p.classifier.add(sample.addr, sample.weight);
                    let block = Block::of(sample.addr);
                    p.all_known &= !self.residency.accessed(sample.pid, block);
                }
                _ => astray += 1,
            }
        }
        self.status.update(|s| {
            s.samples += self.samples.len() as u64;
            s.samples_lost += drained.lost;
            s.samples_rejected += astray;
        });
        Ok(astray > 16 && astray * 10 > self.samples.len() as u64)
    }

    /// Finds out where blocks lie: unknown ones hottest first, and some known ones again.
    fn look_up(&mut self, ranking: &[RankedRange]) {
        let mut wanted: BTreeMap<Pid, Vec<Block>> = BTreeMap::new();
        let mut left = LOOKUPS_MAX;
        let unknown = ranking
            .iter()
            .filter(|r| self.processes.get(&r.pid).is_some_and(|p| !p.all_known))
            .flat_map(|r| Block::all_of(&r.range).map(|b| (r.pid, b)))
            .filter(|&(pid, b)| self.residency.get(pid, b).is_none());
        for (pid, block) in unknown.take(LOOKUPS_MAX) {
            wanted.entry(pid).or_default().push(block);
            left -= 1;
        }
        for (&pid, process) in &mut self.processes {
            process.all_known |= left > 0;
            let again = process.recheck(RECHECKS);
            wanted.entry(pid).or_default().extend(again);
        }
        for (pid, blocks) in wanted {
            let space = &self.spaces[&pid];
            match self.prober.look(&mut *self.pages, pid, space, &blocks) {
                Ok(placements) => {
                    for (block, placement) in blocks.into_iter().zip(placements) {
                        self.residency.set(pid, block, placement);
                    }
                }
                // The next refresh sees that it has gone.
                Err(PagesError::Gone(_)) => {}
                Err(error) => self
                    .status
                    .update(|s| s.last_error = Some(error.to_string())),
            }
        }
    }

    /// Plans this epoch's relocations; also says how much fast memory they have to leave free.
    ///
    /// Reading how full the nodes are costs more than planning. So the plan is first made with
    /// what was read some epochs ago, and only when it is not empty with what is true now.
    fn plan(&mut self, ranking: &[RankedRange]) -> Result<(Plan, ByteCount), AgentError> {
        let fill = FillThreshold(f64::from(self.config.tuning.tau_split));
        let draft = |room: &Room| plan(ranking, &self.residency, room, fill, self.epoch);
        let remembered = self
            .room
            .filter(|_| !self.epoch.is_multiple_of(ROOM_EPOCHS));
        if let Some(room) = remembered.filter(|room| draft(room).is_empty()) {
            return Ok((Plan::default(), room.level()));
        }
        let [fast, slow] = NodeMemory::read_all(&self.root, [self.tiers.fast, self.tiers.slow])?;
        let mut fast_reserve = self.fast_reserve;
        let mut fast_low = ByteCount(fast_reserve.0 / 4);
        if self.balloon_wants.0 > 0 {
            fast_reserve.0 = fast_reserve.0.saturating_add(self.balloon_wants.0);
            fast_low = fast_reserve;
        }
        let room = Room {
            fast_free: fast.usable(),
            fast_reserve,
            fast_low,
            slow_free: slow.usable(),
            batch: self.config.tuning.batch(),
        };
        let plan = draft(&room);
        self.room = Some(room);
        self.status.update(|s| s.fast_free_bytes = room.fast_free.0);
        Ok((plan, room.level()))
    }

    fn tell(&self, ranking: &[RankedRange], plan: &Plan, outcome: &Outcome) {
        let targets = self
            .processes
            .iter()
            .map(|(&pid, p)| p.status(pid, &self.residency));
        let targets: Vec<_> = targets.collect();
        let aside = self.residency.set_aside(self.epoch) as u64;
        let used = working_set(ranking, &self.residency);
        self.status.update(|s| {
            s.epochs += 1;
            s.targets = targets;
            s.tried_bytes += outcome.tried.0;
            s.promoted_bytes += outcome.promoted.0;
            s.demoted_bytes += outcome.demoted.0;
            for (errno, bytes) in &outcome.failed {
                *s.failed_bytes.entry(errno.name()).or_default() += bytes;
            }
            s.blocks_set_aside = aside;
            s.working_set_fast_bytes = used.placement.fast.0;
            s.working_set_slow_bytes = used.placement.slow.0;
            s.fast_hit_permille = used.fast_hit_permille.or(s.fast_hit_permille);
            if outcome.error.is_some() {
                s.last_error.clone_from(&outcome.error);
            }
        });
        if let Some(error) = &outcome.error {
            tracing::warn!("{error}");
        }
        tracing::debug!(
            epoch = self.epoch,
            samples = self.samples.len(),
            ranges = ranking.len(),
            planned = plan.promotions.len() + plan.demotions.len(),
            promoted_mib = outcome.promoted.0 / MIB,
            demoted_mib = outcome.demoted.0 / MIB,
            tried_mib = outcome.tried.0 / MIB,
        );
        for range in ranking.iter().take(8) {
            let at = self.residency.placement(range.pid, &range.range);
            tracing::trace!(
                range = %range.range,
                count = range.count,
                fast_mib = at.fast.0 / MIB,
                slow_mib = at.slow.0 / MIB,
            );
        }
    }
}

/// Whether the system backs all memory with huge pages where it can.
fn huge_pages_always(root: &Path) -> bool {
    let file = root.join("sys/kernel/mm/transparent_hugepage/enabled");
    std::fs::read_to_string(file).is_ok_and(|mode| mode.contains("[always]"))
}

#[cfg(test)]
mod tests;
