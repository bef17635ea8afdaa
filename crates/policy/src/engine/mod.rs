//! The decisions of the epoch loop, as a state machine without I/O.
//!
//! # Problem
//! A live agent and a simulator must decide alike. They decide when to list processes and read free memory, which
//! blocks to look up, what to move in which order, when to give up, and when to wake. They differ only in how this is
//! carried out, and in its cost.
//!
//! # Approach
//! A driver reports events ([`Input`]) and carries out requests ([`Request`]), one at a time:
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
//! An epoch is: refresh (sometimes), samples, classification, look-ups, plan, moves, sleep. While nothing is accessed
//! it ends after the samples.
//!
//! Reading free memory costs time, too. While nothing is to move, the plan is made with a reading of some epochs ago.
//! Only if it is not empty, it is made again with a new reading. After moves it is made once, with a new reading.
//!
//! A first plan moves a few blocks to learn what moves cost. A second one in the same epoch then uses the same evidence.
//!
//! Every block is looked up again in turn, a few per epoch, and hot ones more often, because others move memory, too.
//! If less than half of a batch of promotions moves, fast memory has less room than it seemed to have, and the rest is
//! dropped. Unmovable blocks are retried later, see [`ResidencyMap`]. Collapses come last; each block is tried once.
//!
//! # Properties
//! - Between two sleeps there is a bounded number of requests.
//! - Every planned relocation is tried once or dropped.
//! - Promotions leave fast memory its level, if no other program takes memory.
//! - The same inputs give the same requests.
//! - A process that has ended is never requested again.
//! - No sequence of inputs panics, and a [`Misuse`] changes nothing.

mod carrying;
#[cfg(any(test, feature = "testing"))]
pub mod conformance;
mod deciding;
mod facts;
mod moves;
mod process;
mod protocol;
mod rechecks;
mod snapshot;
mod strategy;

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use carrying::Plans;
use facts::{bounded, usable};
use moves::{Moves, Next};
use process::Process;
use rechecks::Rechecks;

use crate::damon::Prospect;
pub use crate::rule::{Balance, EpochEnd, Gain};
pub use crate::saved::NotAState;
use crate::served::Served;
pub use crate::tier::Direction;
pub use moves::BATCH_BLOCKS;
pub use process::ProcessFigures;
pub use protocol::{Input, Misuse, NodeFacts, Request};
pub use snapshot::Snapshot;
pub use strategy::{ByHeat, Classify, Config, LookUps, Strategy};

use crate::{
    Block, ByLevel, ByteCount, Pid, RankedRange, ResidencyMap, Sample, Share, Sockets, VirtRange,
    WorkingSet, working_set,
};

/// Number of epochs without moves after which every second epoch, or more, is skipped. A stable workload is disturbed
/// half as often, and a change is noticed one epoch later.
const CALM_AFTER_EPOCHS: u32 = 8;

/// Upper limit of counted calm epochs. Each moved block takes one back.
const CALM_MAX: u32 = 2 * CALM_AFTER_EPOCHS;

/// Counters since the start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Figures {
    /// Epochs in which samples were taken.
    pub epochs: u64,
    /// Samples taken.
    pub samples: u64,
    /// Samples that the tracker lost.
    pub samples_lost: u64,
    /// Samples and records outside of known memory, or malformed.
    pub samples_astray: u64,
    /// Bytes that the engine tried to move.
    pub tried: ByteCount,
    /// Bytes moved to fast memory, verified.
    pub promoted: ByteCount,
    /// Bytes moved to slow memory, verified.
    pub demoted: ByteCount,
    /// Bytes whose small pages were to become huge ones where they lie.
    pub collapsed: ByteCount,
}

/// The engine's phase.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stage {
    /// Collecting facts and deciding what to move.
    Deciding,
    /// Carrying a plan out.
    Moving,
    /// Sleeping.
    Asleep,
}

/// The input that an engine waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum State {
    Refresh,
    Samples,
    /// Answer to the last remaining look-up.
    LookUp,
    /// Free memory, to plan.
    Plan,
    /// Free memory, for the next batch.
    Room,
    /// The result of the batch.
    Move,
    /// The end of a batch of collapses.
    Collapse,
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
    /// Shares of processes that have one.
    shares: BTreeMap<Pid, Share>,
    /// The sockets that processes run on, and free memory near each.
    sockets: Sockets,
    /// Ranking of the last plan; empty while nothing is accessed.
    ranking: Vec<RankedRange>,
    /// Share of accesses that the hottest memory serves. A restored engine measures it anew.
    served: Served,
    /// Remaining look-ups; the next one is last.
    look_ups: Vec<(Pid, Vec<Block>)>,
    rechecks: Rechecks,
    moves: Moves,
    /// This epoch's plan if it was to show what moves cost. Another one follows in the same epoch.
    trial: Plans,
    state: State,
    epoch: u32,
    refresh_at: u32,
    /// Number of consecutive epochs without moves.
    calm: u32,
    /// Number of consecutive epochs whose events repeat earlier ones.
    repeats: u32,
    /// Length of the last sleep in normal epochs, and the duration of moves since.
    slept: u32,
    moving_ns: u64,
    /// Blocks for which more evidence is requested.
    wanted: Vec<(Pid, Block)>,
    /// Usable memory of each tier at the last reading, and memory that the tier lacks until any is usable.
    usable: Option<ByLevel<ByteCount>>,
    missing: ByLevel<ByteCount>,
    balloon_wants: ByteCount,
    /// The thinning `n`: each n-th sample is taken.
    thinning: u32,
    paused: bool,
    /// Samples that are not counted yet.
    batch: Vec<Sample>,
    /// Number of this epoch's samples, and of stray ones.
    samples: u64,
    astray: u64,
    figures: Figures,
}

impl<S: Strategy> Engine<S> {
    /// Creates an engine, which first requests a refresh.
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
            sockets: Sockets::default(),
            ranking: vec![],
            served: Served::default(),
            look_ups: vec![],
            rechecks: Rechecks::default(),
            moves: Moves::default(),
            trial: Plans::default(),
            state: State::Refresh,
            epoch: 0,
            refresh_at: 0,
            calm: 0,
            repeats: 0,
            usable: None,
            missing: ByLevel::default(),
            balloon_wants: ByteCount(0),
            thinning: 1,
            paused: false,
            batch: vec![],
            samples: 0,
            astray: 0,
            figures: Figures::default(),
        }
    }

    /// The present request. It stays until it is answered, or until its process ends.
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
            State::Collapse => Request::Collapse {
                pid: self.moves.batch.first().map_or(Pid(0), |r| r.pid),
                blocks: &self.moves.batch,
            },
            State::Reclaim => Request::Reclaim,
            State::Asleep => Request::Sleep {
                epochs: self.pause_epochs(),
            },
        }
    }

    /// Takes an input.
    ///
    /// # Errors
    /// The input does not fit the request or known facts; nothing has changed then.
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
            (Input::Room { place, free }, _) => self.sockets.set_room(place, bounded(free)?),
            (Input::BalloonWants(wanted), _) => self.make_room(bounded(wanted)?),
            (Input::Thinned(thinning), _) => self.thin(thinning),
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
                let latency_ns = ByLevel(facts.0.map(|tier| tier.latency_ns));
                self.strategy.loaded(&latency_ns);
                self.missing = ByLevel(facts.0.map(|tier| tier.missing()));
                self.plan(usable);
            }
            (Input::Nodes(facts), State::Room) => {
                let usable = usable(facts)?;
                let most = self.strategy.batch_blocks();
                match self.moves.advance(&usable, most, S::RECLAIMS_MAX) {
                    Next::Batch => self.state = State::Move,
                    Next::Reclaim => self.state = State::Reclaim,
                    Next::Done => self.proceed(),
                }
            }
            (
                Input::Moved {
                    placements,
                    took_ns,
                    cpu_ns,
                },
                State::Move,
            ) => self.moved(placements, took_ns, cpu_ns)?,
            (Input::MoveFailed, State::Move) => {
                for r in &self.moves.batch {
                    self.residency.failed(r.pid, r.block, self.epoch);
                    self.figures.tried.0 += r.bytes.0;
                }
                self.proceed();
            }
            (Input::Collapsed { took_ns, cpu_ns }, State::Collapse) => {
                self.collapsed(took_ns, cpu_ns);
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

    /// The engine's phase.
    pub fn stage(&self) -> Stage {
        match self.state {
            State::Refresh | State::Samples | State::LookUp | State::Plan => Stage::Deciding,
            State::Room | State::Move | State::Collapse | State::Reclaim => Stage::Moving,
            State::Asleep => Stage::Asleep,
        }
    }

    /// The epoch: number of epochs that have started.
    pub fn epoch(&self) -> u32 {
        self.epoch
    }

    /// Counters since the start.
    pub fn figures(&self) -> Figures {
        self.figures
    }

    /// Movable memory of a process; empty if it is unknown.
    pub fn space(&self, pid: Pid) -> &[VirtRange] {
        self.processes.get(&pid).map_or(&[], |p| &p.space)
    }

    /// The classifier of a process; `None` if it is unknown.
    pub fn classifier(&self, pid: Pid) -> Option<&S::Classifier> {
        self.processes.get(&pid).map(|p| &p.classifier)
    }

    /// The managed processes.
    pub fn processes(&self) -> impl Iterator<Item = ProcessFigures> {
        let mut ranked: BTreeMap<Pid, (usize, f64)> = BTreeMap::new();
        for range in &self.ranking {
            let (ranges, samples) = ranked.entry(range.pid).or_default();
            *ranges += 1;
            *samples += range.count;
        }
        self.processes.iter().map(move |(&pid, process)| {
            let (ranges, samples) = ranked.get(&pid).copied().unwrap_or_default();
            ProcessFigures {
                pid,
                ranges,
                samples,
                placement: process.placement(pid, &self.residency),
            }
        })
    }

    /// Ranges of all processes at the last plan, the hottest first; empty while nothing is accessed.
    pub fn ranking(&self) -> &[RankedRange] {
        &self.ranking
    }

    /// The share of sampled accesses that the hottest memory of each size serves.
    pub fn served(&self) -> &Served {
        &self.served
    }

    /// Known places of blocks.
    pub fn residency(&self) -> &ResidencyMap {
        &self.residency
    }

    /// Memory for processes and places of blocks, bytes, without the allocator's overhead.
    pub fn state_bytes(&self) -> usize {
        let processes = self.processes.values();
        let heat: usize = processes.map(|p| p.classifier.state_bytes()).sum();
        let decisions = self.strategy.state_bytes() + self.served.state_bytes();
        heat + self.residency.state_bytes() + decisions
    }

    /// Number of unmovable blocks that wait for a retry.
    pub fn set_aside(&self) -> usize {
        self.residency.set_aside(self.epoch)
    }

    /// The working set, and its share in fast memory.
    pub fn working_set(&self) -> WorkingSet {
        working_set(&self.ranking, &self.residency)
    }

    /// Estimated accesses per second of all processes, in the units of added samples.
    pub fn rate(&self) -> f64 {
        let processes = self.processes.values();
        processes.map(|p| p.classifier.rate()).sum()
    }

    /// Fast memory available to programs at the last reading.
    pub fn fast_free(&self) -> Option<ByteCount> {
        self.usable.map(|usable| usable.0[0])
    }

    /// Cost and benefit of moves.
    pub fn balance(&self) -> Balance {
        self.strategy.balance()
    }

    /// The number of threads that move a batch together. It follows the machine's CPUs.
    pub fn movers(&self) -> usize {
        self.strategy.movers()
    }

    /// The expected value of more evidence.
    pub fn prospect(&self) -> Prospect {
        let balance = self.balance();
        Prospect {
            is_calm: self.pause_epochs() > 1 && !balance.is_falling,
            earned: balance.income_ns as f64 * 1e-9,
            // While nothing is accessed no plan is made, and the last one's promise is void.
            promised: match self.ranking.is_empty() {
                true => 0.0,
                false => balance.promise_ns as f64 * 1e-9,
            },
        }
    }

    /// Number of normal epochs until the next one.
    fn pause_epochs(&self) -> u32 {
        match self.calm >= CALM_AFTER_EPOCHS && !S::CLASSIFIES_APART {
            true => 2,
            false => 1,
        }
    }
}

#[cfg(test)]
mod tests;
#[cfg(test)]
mod tiers_tests;
