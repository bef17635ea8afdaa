//! The epoch loop's decisions, without its effects.
//!
//! # Problem
//! A live agent and a simulator shall decide alike: when to look which processes there are, which
//! blocks to look up, when to read how full the nodes are, what to move in which order, when to
//! give up, and when to wake next. What differs between them is only how that is carried out and
//! what it costs.
//!
//! # Approach
//! A state machine without I/O. A driver tells what happened ([`Input`]) and does what is asked
//! for ([`Request`]), one thing at a time:
//!
//! ```text
//! loop {
//!     match engine.request() {
//!         Request::LookUp { pid, blocks } => { look; engine.push(Input::Located(&places))? }
//!         ...
//!         Request::Sleep { epochs } => { wait; engine.push(Input::Epoch)? }
//!     }
//! }
//! ```
//!
//! An epoch is: refresh (now and then), samples, classification, look-ups, plan, moves, sleep.
//! While nothing is accessed it ends after the samples. Reading how full the nodes are costs more
//! than planning: so the plan is first made with what was read some epochs ago, and only when it
//! is not empty with what is true now. Every block is looked up again in turn, a few in an epoch,
//! and hot ones more often, because others move memory, too. Promotions of which less than half moved show that fast memory
//! does not have what it seemed to have: the rest is given up. What does not move is set
//! aside, see [`ResidencyMap`].
//!
//! # Properties
//! - Between two sleeps there is a bounded number of requests.
//! - Every planned relocation is tried once or given up.
//! - Promotions leave fast memory its level, if nobody else takes of it.
//! - The same inputs give the same requests.
//! - A process that has ended is never asked for again.
//! - Total: nothing that is told, in whatever order, makes it panic, and a [`Misuse`] changes nothing.

mod carrying;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
mod deciding;
mod moves;
mod process;
mod protocol;
mod rechecks;
mod snapshot;
mod strategy;

use std::collections::BTreeMap;

use moves::{Moves, Next};
use process::Process;
use rechecks::Rechecks;

use crate::damon::Prospect;
pub use crate::rule::{Balance, EpochEnd};
pub use moves::BATCH_BLOCKS;
pub use process::ProcessFigures;
pub use protocol::{Direction, Input, Misuse, NodeFacts, Request};
pub use snapshot::{NotAState, Numbers, Saved};
pub use strategy::{ByHeat, Classify, Config, Gain, LookUps, Strategy};

use crate::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, Observation, Pid, RankedRange, ResidencyMap, Sample,
    Share, Spread, VirtRange, WorkingSet, working_set,
};

/// After so many epochs in which nothing was to move, every second one is left out, or more: a stable
/// workload is disturbed half as often, and one that changes is noticed one epoch later.
const CALM_AFTER_EPOCHS: u32 = 8;

/// No more epochs than these count. Each block that moves takes one of them back.
const CALM_MAX: u32 = 2 * CALM_AFTER_EPOCHS;

/// More memory than any machine has. Amounts up to here can be added up without overflow.
const BYTES_MAX: u64 = 1 << 56;

/// What has happened since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Figures {
    /// Epochs in which samples were taken.
    pub epochs: u64,
    /// Samples taken.
    pub samples: u64,
    /// Samples that the tracker lost.
    pub samples_lost: u64,
    /// Samples and records that belong to no known memory, or were malformed.
    pub samples_astray: u64,
    /// Bytes that were tried to move.
    pub tried: ByteCount,
    /// Bytes moved to fast memory, verified.
    pub promoted: ByteCount,
    /// Bytes moved to slow memory, verified.
    pub demoted: ByteCount,
}

/// What an engine is at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Finding out what there is, and what is to move.
    Deciding,
    /// Carrying a plan out.
    Moving,
    /// Nothing.
    Asleep,
}

/// What an engine waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Refresh,
    Samples,
    /// Of the last of the look-ups that are left.
    LookUp,
    /// Node facts, to plan.
    Plan,
    /// Node facts, for the next batch.
    Room,
    /// What becomes of the batch.
    Move,
    Reclaim,
    Asleep,
}

/// The state machine. See the module's text.
#[derive(Debug, Clone)]
pub struct Engine<S: Strategy = ByHeat> {
    strategy: S,
    config: Config,
    processes: BTreeMap<Pid, Process<S::Classifier>>,
    residency: ResidencyMap,
    /// Of those processes that have one.
    shares: BTreeMap<Pid, Share>,
    /// The socket that each process runs on, where it is not 0.
    sockets: BTreeMap<Pid, u32>,
    /// Of the last plan; empty while nothing is accessed.
    ranking: Vec<RankedRange>,
    /// Look-ups that are left, next one last.
    look_ups: Vec<(Pid, Vec<Block>)>,
    rechecks: Rechecks,
    moves: Moves,
    state: State,
    epoch: u32,
    refresh_at: u32,
    /// Epochs in a row in which nothing was to move.
    calm: u32,
    /// Whether the epoch's events repeat those of the last one.
    is_repeat: bool,
    /// Epochs of the usual length that the last sleep took, and the time that moves took since.
    slept: u32,
    moving_ns: u64,
    /// Blocks that more evidence is wanted of.
    wanted: Vec<(Pid, Block)>,
    /// Usable memory of each tier when last looked at.
    usable: Option<ByLevel<ByteCount>>,
    balloon_wants: ByteCount,
    paused: bool,
    /// Samples that are not counted yet.
    batch: Vec<Sample>,
    /// This epoch's samples, and those of them that are astray.
    samples: u64,
    astray: u64,
    figures: Figures,
}

impl<S: Strategy> Engine<S> {
    /// An engine that knows nothing yet: it first asks which processes there are.
    pub fn new(strategy: S, config: Config) -> Self {
        Self {
            slept: 1,
            moving_ns: 0,
            wanted: vec![],
            strategy,
            config,
            processes: BTreeMap::new(),
            residency: ResidencyMap::default(),
            shares: BTreeMap::new(),
            sockets: BTreeMap::new(),
            ranking: vec![],
            look_ups: vec![],
            rechecks: Rechecks::default(),
            moves: Moves::default(),
            state: State::Refresh,
            epoch: 0,
            refresh_at: 0,
            calm: 0,
            is_repeat: false,
            usable: None,
            balloon_wants: ByteCount(0),
            paused: false,
            batch: vec![],
            samples: 0,
            astray: 0,
            figures: Figures::default(),
        }
    }

    /// What is asked for. The same until it is answered, or until a process that it names ends.
    pub fn request(&self) -> Request<'_> {
        match self.state {
            State::Refresh => Request::Refresh,
            State::Samples => Request::Samples {
                most: deciding::SAMPLES_MAX,
                wanted: &self.wanted,
            },
            State::LookUp => {
                let next = self.look_ups.last();
                let (pid, blocks) = next.map_or((Pid(0), &[][..]), |(pid, b)| (*pid, b));
                Request::LookUp { pid, blocks }
            }
            State::Plan | State::Room => Request::ReadNodes,
            State::Move => Request::Move {
                pid: self.moves.batch.first().map_or(Pid(0), |r| r.pid),
                level: self.moves.level,
                direction: self.moves.direction,
                blocks: &self.moves.batch,
            },
            State::Reclaim => Request::Reclaim,
            State::Asleep => Request::Sleep {
                epochs: self.pause_epochs(),
            },
        }
    }

    /// Takes what a driver tells.
    ///
    /// # Errors
    /// When it does not fit what was asked for or what is known; nothing has changed then.
    #[inline]
    pub fn push(&mut self, input: Input<'_>) -> Result<(), Misuse> {
        if let (Input::Sample(sample), State::Samples) = (input, self.state) {
            self.batch.push(sample);
            if self.batch.len() >= deciding::SAMPLES_MAX {
                self.count_samples();
            }
            return Ok(());
        }
        if !self.batch.is_empty() {
            self.count_samples();
        }
        self.push_other(input)
    }

    fn push_other(&mut self, input: Input<'_>) -> Result<(), Misuse> {
        match (input, self.state) {
            (Input::Started(pid), _) => self.start(pid)?,
            (Input::Ended(pid), _) => self.end(pid)?,
            (Input::Space { pid, vmas }, _) => self.set_space(pid, vmas)?,
            (Input::Share { pid, share }, _) => self.set_share(pid, share)?,
            (Input::Machine { sizes, cpus }, _) => self.set_machine(sizes, cpus)?,
            (Input::Near { pid, socket }, _) => self.set_socket(pid, socket)?,
            (Input::BalloonWants(wanted), _) => self.make_room(bounded(wanted)?),
            (Input::Paused(paused), _) => self.pause(paused),
            (Input::Epoch, State::Asleep) => self.begin_epoch(),
            (Input::Epoch, State::Room | State::Reclaim | State::Move) if S::CLASSIFIES_APART => {
                self.moves.take_back();
                self.begin_epoch();
            }
            (Input::Refreshed, State::Refresh) => self.refreshed(),
            (Input::Looked(observation), State::Samples) => self.take_observation(observation),
            (
                Input::SamplesEnd {
                    lost,
                    rejected,
                    is_repeat,
                },
                State::Samples,
            ) => self.end_samples(lost, rejected, is_repeat),
            (Input::Located(placements), State::LookUp) => self.locate(placements)?,
            (Input::LookUpFailed, State::LookUp) => {
                self.look_ups.pop();
                self.next_look_up();
            }
            (Input::Nodes(facts), State::Plan) => {
                let usable = usable(facts)?;
                self.plan(usable);
            }
            (Input::Nodes(facts), State::Room) => {
                let usable = usable(facts)?;
                self.state =
                    match self
                        .moves
                        .advance(&usable, self.strategy.batch_blocks(), S::RECLAIMS_MAX)
                    {
                        Next::Batch => State::Move,
                        Next::Reclaim => State::Reclaim,
                        Next::Done => State::Asleep,
                    };
            }
            (
                Input::Moved {
                    placements,
                    took_ns,
                },
                State::Move,
            ) => self.moved(placements, took_ns)?,
            (Input::MoveFailed, State::Move) => {
                for r in &self.moves.batch {
                    self.residency.failed(r.pid, r.block, self.epoch);
                    self.figures.tried.0 += r.bytes.0;
                }
                self.proceed();
            }
            (Input::Reclaimed, State::Reclaim) => self.state = State::Room,
            (input, _) => {
                return Err(Misuse::NotAsked {
                    input: input.name(),
                    asked: self.request().name(),
                });
            }
        }
        Ok(())
    }

    /// What it is at.
    pub fn stage(&self) -> Stage {
        match self.state {
            State::Refresh | State::Samples | State::LookUp | State::Plan => Stage::Deciding,
            State::Room | State::Move | State::Reclaim => Stage::Moving,
            State::Asleep => Stage::Asleep,
        }
    }

    /// The epoch: how often one has begun.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// What has happened since the start.
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// The memory of a process that may be moved, as it was told last; none of one that is not known.
    pub fn space(&self, pid: Pid) -> &[VirtRange] {
        self.processes.get(&pid).map_or(&[], |p| &p.space)
    }

    /// What is known of how a process accesses its memory; nothing of one that is not known.
    pub fn classifier(&self, pid: Pid) -> Option<&S::Classifier> {
        self.processes.get(&pid).map(|p| &p.classifier)
    }

    /// The processes looked after.
    pub fn processes(&self) -> impl Iterator<Item = ProcessFigures> {
        let figures = |(&pid, p): (&Pid, &Process<_>)| p.figures(pid, &self.residency);
        self.processes.iter().map(figures)
    }

    /// The ranges of all processes, hottest first, as of the last plan; none while nothing is
    /// accessed.
    pub fn ranking(&self) -> &[RankedRange] {
        &self.ranking
    }

    /// Where blocks lie, as far as known.
    pub fn residency(&self) -> &ResidencyMap {
        &self.residency
    }

    /// Bytes of what it remembers of processes and where their blocks lie, without what an allocator adds.
    pub fn state_bytes(&self) -> usize {
        let processes = self.processes.values();
        let heat: usize = processes.map(|p| p.classifier.state_bytes()).sum();
        heat + self.residency.state_bytes()
    }

    /// Blocks that would not move and are left alone for a while.
    pub fn set_aside(&self) -> usize {
        self.residency.set_aside(self.epoch)
    }

    /// Memory in use again and again, and how well it lies.
    pub fn working_set(&self) -> WorkingSet {
        working_set(&self.ranking, &self.residency)
    }

    /// Fast memory that programs could take when the nodes were last looked at.
    pub fn fast_free(&self) -> Option<ByteCount> {
        self.usable.map(|usable| usable.0[0])
    }

    /// What moves have cost and brought.
    pub fn balance(&self) -> Balance {
        self.strategy.balance()
    }

    /// What more evidence promises.
    pub fn prospect(&self) -> Prospect {
        let balance = self.balance();
        Prospect {
            is_calm: self.pause_epochs() > 1 && !balance.is_falling,
            earned: balance.income_ns as f64 * 1e-9,
        }
    }

    /// Epochs of the usual length until the next one.
    fn pause_epochs(&self) -> u32 {
        match self.calm >= CALM_AFTER_EPOCHS && !S::CLASSIFIES_APART {
            true => 2,
            false => 1,
        }
    }

    fn start(&mut self, pid: Pid) -> Result<(), Misuse> {
        if self.processes.contains_key(&pid) {
            return Err(Misuse::KnownProcess(pid));
        }
        let process = Process::new(self.strategy.classifier());
        self.processes.insert(pid, process);
        Ok(())
    }

    fn end(&mut self, pid: Pid) -> Result<(), Misuse> {
        if self.processes.remove(&pid).is_none() {
            return Err(Misuse::UnknownProcess(pid));
        }
        self.residency.forget(pid);
        self.shares.remove(&pid);
        self.sockets.remove(&pid);
        self.ranking.retain(|r| r.pid != pid);
        self.wanted.retain(|(p, _)| *p != pid);
        self.moves.forget(pid);
        let was_asked = matches!(self.request(), Request::LookUp { pid: p, .. } if p == pid);
        self.look_ups.retain(|(p, _)| *p != pid);
        if was_asked {
            self.next_look_up();
        } else if self.state == State::Move && self.moves.batch[0].pid == pid
            || self.state == State::Room && !self.moves.wants_room()
        {
            self.proceed();
        }
        Ok(())
    }

    fn set_space(&mut self, pid: Pid, vmas: &[VirtRange]) -> Result<(), Misuse> {
        if vmas.windows(2).any(|w| w[0].end() > w[1].start()) {
            return Err(Misuse::Unsorted(pid));
        }
        let process = self.processes.get_mut(&pid);
        let process = process.ok_or(Misuse::UnknownProcess(pid))?;
        if process.space != vmas {
            process.classifier.set_space(vmas);
            process.space.clear();
            process.space.extend(vmas);
            process.all_known = false;
            self.residency.restrict(pid, vmas);
            let process = &*process;
            self.moves.keep(pid, |block| process.touches(block));
            if self.state == State::Room && !self.moves.wants_room() {
                self.proceed();
            }
        }
        Ok(())
    }

    fn set_share(&mut self, pid: Pid, share: Option<Share>) -> Result<(), Misuse> {
        if !self.processes.contains_key(&pid) {
            return Err(Misuse::UnknownProcess(pid));
        }
        match share {
            Some(share) => self.shares.insert(pid, share),
            None => self.shares.remove(&pid),
        };
        Ok(())
    }

    fn set_machine(&mut self, sizes: ByLevel<ByteCount>, cpus: u32) -> Result<(), Misuse> {
        for size in sizes.0 {
            bounded(size)?;
        }
        self.config.sizes = sizes;
        self.strategy.set_cpus(cpus);
        // The nodes are not as full as they were.
        self.usable = None;
        Ok(())
    }

    fn set_socket(&mut self, pid: Pid, socket: u32) -> Result<(), Misuse> {
        if !self.processes.contains_key(&pid) {
            return Err(Misuse::UnknownProcess(pid));
        }
        match socket {
            0 => self.sockets.remove(&pid),
            _ => self.sockets.insert(pid, socket),
        };
        Ok(())
    }

    /// What the balloon waits for is demoted at once as far as a batch goes, the rest in the
    /// epochs that follow.
    fn make_room(&mut self, wanted: ByteCount) {
        let is_new = self.balloon_wants.0 == 0 && wanted.0 > 0;
        self.balloon_wants = wanted;
        // The nodes are not as full as they were.
        self.usable = None;
        self.calm = 0;
        if is_new && !self.paused && self.state == State::Asleep {
            self.look_up(true);
        }
    }

    fn take_observation(&mut self, it: Observation) {
        self.samples += 1;
        let process = self.processes.get_mut(&it.pid);
        let Some(process) = process.filter(|p| p.touches(it.block)) else {
            self.astray += 1;
            return;
        };
        let watched_s = it.exposure_ns as f64 * 1e-9;
        let known_s = f64::from(it.events) / process.classifier.rate_of(it.block);
        // A block that is known to be hotter than the least rate may be as hot as before.
        let says_nothing = it.is_least && known_s < watched_s;
        let exposure_s = if says_nothing { known_s } else { watched_s };
        if !says_nothing {
            process.classifier.observe(it.block, it.events, exposure_s);
        }
        let away = match it.events {
            0 => self.residency.away_of(it.pid, it.block),
            _ => {
                let accessed = self.residency.accessed(it.pid, it.block);
                process.all_known &= !accessed.was_absent;
                accessed.away
            }
        };
        self.strategy.saw(away, it.events, Some(exposure_s));
    }

    fn locate(&mut self, placements: &[Spread]) -> Result<(), Misuse> {
        let Some((pid, blocks)) = self.look_ups.last() else {
            return Ok(());
        };
        check(placements, blocks.len())?;
        for (&block, &placement) in blocks.iter().zip(placements) {
            if let Some(before) = self.residency.get(*pid, block) {
                self.rechecks.found(before, placement);
            }
            self.residency.set(*pid, block, placement);
        }
        self.look_ups.pop();
        self.next_look_up();
        Ok(())
    }
}

/// `bytes`, unless no machine has so many.
fn bounded(bytes: ByteCount) -> Result<ByteCount, Misuse> {
    match bytes.0 {
        0..=BYTES_MAX => Ok(bytes),
        more => Err(Misuse::TooMuch(more)),
    }
}

/// Usable memory of each tier.
fn usable(facts: ByLevel<NodeFacts>) -> Result<ByLevel<ByteCount>, Misuse> {
    for tier in &facts.0 {
        bounded(tier.free)?;
    }
    Ok(ByLevel(facts.0.map(|tier| tier.usable())))
}

/// Whether these can be the places of so many blocks.
fn check(placements: &[Spread], asked: usize) -> Result<(), Misuse> {
    let told = placements.len();
    if told != asked {
        return Err(Misuse::Count { asked, told });
    }
    for p in placements {
        let resident = p.resident().0;
        if resident > BLOCK_SIZE {
            return Err(Misuse::Overfull(resident));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tiers_tests;
