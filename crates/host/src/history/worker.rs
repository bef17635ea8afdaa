//! The thread that scans one VM's memory and moves it between tiers.
//!
//! A turn is due when the busiest virtual CPU has run for an interval, so an idle VM costs nothing
//! and keeps its history. Turns come sooner when the histories are contradicted, and later when
//! scanning would take too much CPU time; [`Pace`] decides. A sleeping VM reports no working set,
//! so the policy may give its fast memory to others.

use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, RecvTimeoutError};
use std::time::{Duration, Instant};

use demeter_linux::cpu::{self, Scheduled};
use demeter_linux::mover::Mover;
use demeter_linux::nodes::{NodeMemory, Pair};
use demeter_linux::pages::Pages;
use demeter_linux::prober::Prober;
use demeter_policy::engine::{self, Engine, Input, NodeFacts, Request};
use demeter_policy::history::{ByHistory, Histories, Pace, Window};
use demeter_policy::{
    Block, ByteCount, FillThreshold, GuestVirtAddr, Level, NodeId, PerTier, Sample, Spread,
    TierBytes, Tuning, VirtRange,
};
use demeter_proto::{NodeStats, Permille, Stats};
use tokio::sync::{oneshot, watch};

use super::look::AccessBits;
use super::sleep::Sleep;
use super::{HistoryError, VmMemory};
use crate::config::VmConfig;

/// Rate limit of moves in one direction. It is the only limit, because the host cannot measure the
/// benefit of moves.
const RATE_LIMIT_MIB_S: u64 = 256;

/// Interval between counts of where all memory lies. The guest allocates memory by itself.
const COUNT_EVERY: Duration = Duration::from_secs(2);

/// Minimum pause; the kernel's run times of virtual CPUs are no finer.
const PAUSE_MIN: Duration = Duration::from_millis(1);

/// Interval between reports. They come even without a change, like an agent's, because the receiver
/// smooths them over time.
const REPORT_EVERY: Duration = Duration::from_millis(100);

/// A command for the thread.
#[derive(Debug)]
pub(super) enum HistoryCommand {
    /// Count where the memory lies.
    Count(oneshot::Sender<TierBytes>),
    /// Change the fast memory that the VM may have.
    Grant {
        fast: ByteCount,
        answer: oneshot::Sender<TierBytes>,
    },
    /// End the thread.
    Stop,
}

/// The thread's reports.
#[derive(Debug, Clone, Default, PartialEq)]
pub(crate) struct HistoryState {
    /// The VM's memory use, in the form of an agent's report.
    pub usage: Option<Stats>,
    /// The error that ended the thread, if any.
    pub failed: Option<String>,
}

/// The thread's state.
pub(super) struct Worker {
    root: PathBuf,
    memory: VmMemory,
    blocks: Vec<Block>,
    tiers: Pair,
    /// The configuration's node numbers, for reports.
    nodes: PerTier<NodeId>,
    pages: Box<dyn Pages>,
    bits: Box<dyn AccessBits>,
    reports: watch::Sender<HistoryState>,

    strategy: ByHistory,
    engine: Engine<ByHistory>,
    prober: Prober,
    mover: Mover,
    interval: Duration,
    window: Window,
    pace: Pace,
    /// Fast memory that the VM may have.
    grant: ByteCount,
    /// Memory that the VM has in each tier.
    usage: TierBytes,
    /// The shortage that the engine was given.
    shortage: ByteCount,
    counted: Instant,
    /// Time of the last scan.
    looked: Instant,
    /// Time of the last report.
    reported: Option<Instant>,
    /// Scheduler times of each virtual CPU at the last scan.
    vcpu_times: Vec<Scheduled>,
    sleep: Sleep,
    started: Instant,
    accessed: Vec<GuestVirtAddr>,
    /// Time spent on moves in this turn.
    moving: Duration,
}

impl Worker {
    /// Counts where the memory lies. That placement is the VM's first grant.
    pub fn new(
        root: &Path,
        config: &VmConfig,
        memory: VmMemory,
        tiers: Pair,
        pages: Box<dyn Pages>,
        bits: Box<dyn AccessBits>,
        reports: watch::Sender<HistoryState>,
    ) -> Result<Self, HistoryError> {
        let interval = config.history.interval();
        let strategy = ByHistory {
            hot_ones: config.history.hot_ones,
        };
        let tuning = Tuning {
            rate_limit_mib_s: RATE_LIMIT_MIB_S,
            ..Tuning::default()
        };
        let engine_config = engine::Config {
            // Disabled here: the strategy has its own threshold.
            fill: FillThreshold(0.0),
            epoch_ms: config.history.interval_ms.max(1),
            ..engine::Config::new(&tuning, config.sizes().fast)
        };
        let mut blocks: Vec<Block> = memory.ranges.iter().flat_map(Block::all_of).collect();
        blocks.dedup();
        let now = Instant::now();
        let mut worker = Self {
            root: root.into(),
            blocks,
            tiers,
            nodes: config.nodes(),
            pages,
            bits,
            reports,
            strategy,
            engine: Engine::new(strategy, engine_config),
            prober: Prober::new(tiers.into()),
            // The host does not make huge pages for the VM.
            mover: Mover::new(tiers.into(), false),
            interval,
            window: Window::new(interval),
            pace: Pace::default(),
            grant: ByteCount(0),
            usage: TierBytes::default(),
            shortage: ByteCount(0),
            counted: now,
            looked: now,
            reported: None,
            vcpu_times: vec![Scheduled::default(); memory.vcpus.len()],
            sleep: Sleep::new(memory.vcpus.len(), now),
            started: now,
            memory,
            accessed: vec![],
            moving: Duration::ZERO,
        };
        worker.count()?;
        worker.grant = worker.usage.fast;
        worker.act()?;
        Ok(worker)
    }

    /// Fast memory that the VM may have.
    pub fn grant(&self) -> ByteCount {
        self.grant
    }

    /// Works until it gets a stop command or fails.
    pub fn run(mut self, orders: &Receiver<HistoryCommand>) {
        if let Err(error) = self.work(orders) {
            let failed = Some(error.to_string());
            self.reports
                .send_modify(|report| report.failed = failed.clone());
        }
    }

    fn work(&mut self, orders: &Receiver<HistoryCommand>) -> Result<(), HistoryError> {
        let mut next = Instant::now();
        loop {
            let wait = next.saturating_duration_since(Instant::now());
            match orders.recv_timeout(wait) {
                Ok(HistoryCommand::Stop) | Err(RecvTimeoutError::Disconnected) => return Ok(()),
                Ok(HistoryCommand::Count(answer)) => {
                    self.count()?;
                    // The asker may have stopped waiting.
                    let _ = answer.send(self.usage);
                }
                Ok(HistoryCommand::Grant { fast, answer }) => {
                    self.grant = fast;
                    self.make_room()?;
                    let _ = answer.send(self.usage);
                }
                Err(RecvTimeoutError::Timeout) => next = Instant::now() + self.turn()?,
            }
        }
    }

    /// Scans, decides and moves, if that is due. Returns the pause until the next turn.
    fn turn(&mut self) -> Result<Duration, HistoryError> {
        let vcpu_times = self.vcpu_times();
        let sleeps = self.sleep.observe(Instant::now(), &vcpu_times);
        let after = self.looked.elapsed();
        let since = vcpu_times.iter().zip(&self.vcpu_times);
        let ran = since.map(|(now, before)| now.since(before).ran).max();
        let interval = self.pace.interval(self.interval);
        let left = interval.saturating_sub(ran.unwrap_or_default());
        if left > Duration::ZERO {
            // A sleeping VM must give memory back, too.
            if self.shortage.0 > 0 {
                self.count()?;
                self.epoch()?;
            }
            if sleeps {
                self.report(true);
            }
            return Ok(left.max(PAUSE_MIN));
        }
        self.vcpu_times = vcpu_times;
        self.looked = Instant::now();
        let before = cpu::of_this_thread();
        self.moving = Duration::ZERO;
        self.accessed.clear();
        let kernel = self.bits.look(self.window.now(), &mut self.accessed)?;
        self.window.looked(self.accessed.len() as u64, self.grant);
        if self.counted.elapsed() >= COUNT_EVERY {
            self.count()?;
        }
        self.epoch()?;
        self.report(sleeps);
        // Time for moves does not count against the scanning budget.
        let spent = cpu::of_this_thread().saturating_sub(before + self.moving) + kernel;
        let histories = self.histories();
        let is_contradicted = histories.is_some_and(Histories::are_contradicted);
        let rest = self.pace.looked(spent, after, is_contradicted);
        Ok(rest.max(PAUSE_MIN))
    }

    /// The histories of the VM's memory.
    fn histories(&self) -> Option<&Histories> {
        self.engine.classifier(self.memory.process)
    }

    /// Scheduler times of each virtual CPU. A CPU counts as always running if the kernel does not
    /// report it.
    fn vcpu_times(&self) -> Vec<Scheduled> {
        let always = || Scheduled {
            ran: self.started.elapsed(),
            waited: Duration::ZERO,
        };
        let of = |&thread| cpu::scheduled(&self.root, thread).unwrap_or_else(always);
        self.memory.vcpus.iter().map(of).collect()
    }

    fn epoch(&mut self) -> Result<(), HistoryError> {
        self.engine.push(Input::Epoch)?;
        self.act()?;
        self.accessed.clear();
        self.make_room()
    }

    /// Has the engine demote the fast memory beyond the grant, and updates the shortage after each
    /// step. With the old shortage, the next epoch would demote the same amount again.
    fn make_room(&mut self) -> Result<(), HistoryError> {
        loop {
            let shortage = ByteCount(self.usage.fast.0.saturating_sub(self.grant.0));
            if shortage == self.shortage {
                return Ok(());
            }
            self.shortage = shortage;
            self.engine.push(Input::BalloonWants(shortage))?;
            self.act()?;
        }
    }

    /// Carries out the engine's requests until it sleeps.
    fn act(&mut self) -> Result<(), HistoryError> {
        let pid = self.memory.process;
        loop {
            match self.engine.request() {
                Request::Sleep { .. } => return Ok(()),
                Request::Refresh => {
                    if self.engine.space(pid).is_empty() {
                        self.engine.push(Input::Started(pid))?;
                        let vmas = &self.memory.ranges;
                        self.engine.push(Input::Space { pid, vmas })?;
                    }
                    self.engine.push(Input::Refreshed)?;
                }
                Request::Samples { most, .. } => {
                    let lost = self.accessed.len().saturating_sub(most) as u64;
                    for &addr in self.accessed.iter().take(most) {
                        self.engine.push(Input::Sample(Sample {
                            pid,
                            addr,
                            weight: 1,
                        }))?;
                    }
                    let end = Input::SamplesEnd {
                        lost,
                        rejected: 0,
                        is_repeat: false,
                    };
                    self.engine.push(end)?;
                }
                Request::LookUp { pid, blocks } => {
                    let space: &[VirtRange] = &self.memory.ranges;
                    let found = self.prober.look(&mut *self.pages, pid, space, blocks)?;
                    self.engine.push(Input::Located(&found))?;
                }
                Request::ReadNodes => {
                    let facts = self.facts()?;
                    self.engine.push(Input::Nodes(facts.into()))?;
                }
                Request::Move { .. } => self.move_batch()?,
                // Never asked: its settings have no collapses.
                Request::Collapse { .. } => self.engine.push(Input::Collapsed {
                    took_ns: 0,
                    cpu_ns: 0,
                })?,
                Request::Reclaim => self.engine.push(Input::Reclaimed)?,
            }
        }
    }

    /// Memory of each node that the VM may still take.
    fn facts(&self) -> Result<PerTier<NodeFacts>, HistoryError> {
        let nodes = [self.tiers.fast, self.tiers.slow];
        let memory = NodeMemory::read_all(&self.root, nodes)?;
        let (fast, slow) = (memory[0], memory[1]);
        let granted = ByteCount(self.grant.0.saturating_sub(self.usage.fast.0));
        Ok(PerTier {
            fast: NodeFacts {
                free: fast.usable().min(granted),
                kept: ByteCount(0),
                latency_ns: None,
            },
            slow: NodeFacts {
                free: slow.free,
                kept: slow.high_watermark,
                latency_ns: None,
            },
        })
    }

    fn move_batch(&mut self) -> Result<(), HistoryError> {
        let Request::Move {
            pid,
            level,
            direction,
            blocks: batch,
        } = self.engine.request()
        else {
            return Ok(());
        };
        let before = cpu::of_this_thread();
        let began = Instant::now();
        let blocks: Vec<Block> = batch.iter().map(|r| r.block).collect();
        let left = |placements: &[Spread]| -> u64 {
            let left = |spread: &Spread| direction.left(&spread.at(level)).0;
            placements.iter().map(left).sum()
        };
        let tried: u64 = batch.iter().map(|r| r.bytes.0).sum();
        let to = match direction {
            engine::Direction::Promotion => self.tiers.fast,
            engine::Direction::Demotion => self.tiers.slow,
        };
        let (placements, _) = self.mover.migrate(
            &mut *self.pages,
            (level, direction),
            to,
            pid,
            &self.memory.ranges,
            &blocks,
        )?;
        let moved = tried.saturating_sub(left(&placements));
        let to = self.usage.get_mut(direction.to());
        to.0 = to.0.saturating_add(moved);
        let from = match direction {
            engine::Direction::Promotion => &mut self.usage.slow,
            engine::Direction::Demotion => &mut self.usage.fast,
        };
        from.0 = from.0.saturating_sub(moved);
        let took_ns = u64::try_from(began.elapsed().as_nanos()).unwrap_or(u64::MAX);
        let spent = cpu::of_this_thread().saturating_sub(before);
        self.engine.push(Input::Moved {
            placements: &placements,
            took_ns,
            cpu_ns: u64::try_from(spent.as_nanos()).unwrap_or(u64::MAX),
        })?;
        self.moving += spent;
        Ok(())
    }

    /// Counts where all of the memory lies.
    fn count(&mut self) -> Result<(), HistoryError> {
        let (pid, space) = (self.memory.process, &self.memory.ranges);
        let placements = self
            .prober
            .look(&mut *self.pages, pid, space, &self.blocks)?;
        self.usage = TierBytes {
            fast: ByteCount(placements.iter().map(|p| p.at(Level::First).fast.0).sum()),
            slow: ByteCount(placements.iter().map(|p| p.at(Level::First).slow.0).sum()),
        };
        self.counted = Instant::now();
        Ok(())
    }

    /// Reports the VM's memory use, if that is due.
    fn report(&mut self, sleeps: bool) {
        if self.reported.is_some_and(|at| at.elapsed() < REPORT_EVERY) {
            return;
        }
        self.reported = Some(Instant::now());
        let engine = &self.engine;
        let (set, fast_hit) = if sleeps {
            // A sleeping VM accesses nothing.
            (TierBytes::default(), Some(1000))
        } else {
            let residency = engine.residency();
            let set = self.strategy.working_set(engine.ranking(), residency);
            // Until then no block can count as hot, so the working set is unknown, not empty.
            let looks = self.histories().map_or(0, Histories::looks);
            let is_known = looks >= self.strategy.hot_ones;
            let fast_hit = engine.working_set().fast_hit_permille;
            (set, fast_hit.filter(|_| is_known))
        };
        let node = |node, used: ByteCount, working_set| NodeStats {
            node,
            total: used,
            free: ByteCount(0),
            held: ByteCount(0),
            working_set,
        };
        let stats = Stats {
            psi_some: Permille::new(0),
            psi_full: Permille::new(0),
            // A share of scans that found an access, because bits do not tell how often.
            fast_hit: fast_hit.map(Permille::new),
            relocation: None,
            benefit: None,
            oom_returned: ByteCount(0),
            nodes: vec![
                node(self.nodes.fast, self.usage.fast, set.fast),
                node(self.nodes.slow, self.usage.slow, set.slow),
            ],
        };
        self.reports
            .send_modify(|report| report.usage = Some(stats));
    }
}
