//! The agent in a guest, as `demeter guest` runs it: the same policy, the same epochs; the kernel
//! beneath it is the simulated one.
//!
//! It is a thread beside the program's: it carries its plan out in batches, and where the program
//! wants the same virtual CPU the scheduler gives the program its share in between. The next
//! epoch begins when the plan is done.

use demeter_policy::{
    BLOCK_SIZE, Block, ByteCount, ClassifierConfig, FillThreshold, GuestVirtAddr, MIB, PAGE_SIZE,
    Placement, Plan, RankedRange, Relocation, ResidencyMap, Room, Situation, VirtRange, plan,
};

use super::halves::exchange;
use super::heat::PID;
use super::moves::{Moves, Next};
use super::{Context, Heat, Manager};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::sampler::{Record, Sampling};

/// The scheduler's weights of a thread at nice 0, and of the agent at its nice -10
/// (`sched_prio_to_weight`).
const PROGRAM_WEIGHT: u64 = 1024;
const AGENT_WEIGHT: u64 = 9548;

/// After so many epochs in which nothing was to move, every second wake is left out.
const CALM_AFTER_EPOCHS: u32 = 8;

/// Blocks of unknown place that are looked up in one epoch, hottest first.
const LOOKUPS_MAX: usize = 2048;

/// Asking the kernel where a block lies (assumed: a page or two of a `move_pages` call).
const LOOKUP_PS: u64 = 300_000;

/// Finding out in the kernel in which node a page lies, where all pages are looked at in a row: its
/// entry and its record, which is held for a moment (assumed).
const LOOK_AT_PAGE_PS: u64 = 100_000;

/// Adding a sample to the classifier (measured: `cargo bench -p demeter-policy`).
const ADD_PS: u64 = 10_000;

/// An epoch's fixed work, and that for each range (measured likewise).
const EPOCH_PS: u64 = 10_000_000;
const RANGE_PS: u64 = 25_000;

/// What an agent is set to.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct AgentSettings {
    pub(crate) classifier: ClassifierConfig,
    pub(crate) sampling: Sampling,
    pub(crate) epoch_ps: u64,
    /// The most that moves in one direction in an epoch.
    pub(crate) batch: ByteCount,
    /// Virtual CPUs of its machine.
    pub(crate) vcpus: u32,
}

/// Which Demeter an agent is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Design {
    /// The product: the policy crate's ranges, and its plan in batches whose translations are
    /// flushed together.
    Product,
    /// The product, with a thread that polls for samples.
    Polling,
    /// The product, with a counter for every block of 2 MiB instead of ranges.
    Blocks,
    /// The product's promotions only, page by page, each flushed alone; reclaim makes room.
    Sequential,
    /// The paper's: ranges that are halved; pages exchanged one by one, each flushed alone, without
    /// a limit to what moves in an epoch.
    Paper,
}

/// The agent.
#[derive(Debug)]
pub(crate) struct Agent {
    settings: AgentSettings,
    design: Design,
    /// None until the first epoch, when the process's mappings are known.
    heat: Option<Heat>,
    residency: ResidencyMap,
    /// Whether every block was looked up.
    all_known: bool,
    samples: Vec<GuestVirtAddr>,
    epoch: u32,
    /// Epochs in a row in which nothing was to move.
    calm: u32,
    next_epoch_ps: u64,
    /// What is left of the last epoch's plan.
    moves: Moves,
    /// Samples so far.
    samples_seen: u64,
}

impl Agent {
    /// Nothing seen yet.
    pub(crate) fn new(design: Design, settings: &AgentSettings) -> Self {
        Self {
            settings: *settings,
            design,
            heat: None,
            residency: ResidencyMap::default(),
            all_known: false,
            samples: vec![],
            epoch: 0,
            calm: 0,
            next_epoch_ps: 0,
            moves: Moves::default(),
            samples_seen: 0,
        }
    }

    /// One epoch: classifies and plans.
    fn run_epoch(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        self.epoch += 1;
        let settings = self.settings;
        let heat = self.heat.get_or_insert_with(|| match self.design {
            Design::Blocks => Heat::blocks(guest.vmas()),
            Design::Paper => Heat::halves(&settings.classifier, settings.vcpus),
            _ => Heat::ranges(settings.classifier, guest.vmas()),
        });
        let samples = self.samples.len() as u64;
        self.samples_seen += samples;
        for addr in self.samples.drain(..) {
            heat.add(addr);
            self.all_known &= !self.residency.accessed(PID, Block::of(addr));
        }
        let has_news = heat.end_epoch();
        let ranking = heat.ranking();
        let work = EPOCH_PS + samples * ADD_PS + ranking.len() as u64 * RANGE_PS;
        actor.charge(Cause::Classify, work);
        let room = self.room(guest);
        let (plan, ready_ps) = match self.design {
            Design::Paper if !has_news => (Plan::default(), actor.now_ps()),
            Design::Paper => self.plan_exchange(&ranking, guest, actor),
            _ => {
                self.look_up(&ranking, guest, actor);
                let fill = FillThreshold(f64::from(settings.classifier.tau_split));
                let plan = plan(&Situation {
                    ranking: &ranking,
                    residency: &self.residency,
                    room,
                    fill,
                    epoch: self.epoch,
                });
                (plan, actor.now_ps())
            }
        };
        self.calm = if plan.is_empty() { self.calm + 1 } else { 0 };
        let is_calm = self.calm >= CALM_AFTER_EPOCHS && self.design != Design::Paper;
        self.next_epoch_ps += (1 + u64::from(is_calm)) * settings.epoch_ps;
        self.next_epoch_ps = self.next_epoch_ps.max(ready_ps);
        self.moves.add(plan, room.level(), self.design);
    }

    /// Plans as the paper's kernel does: in a thread of its own, and where there is something to
    /// exchange it looks at all pages. Tells when that is ready, too.
    fn plan_exchange(
        &mut self,
        ranking: &[RankedRange],
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> (Plan, u64) {
        let blocks: Vec<Block> = guest.vmas().iter().flat_map(Block::all_of).collect();
        for block in blocks {
            self.look_at(block, guest);
        }
        let capacity = u64::from(guest.frames_of(TierId::Fast)) << guest.page_bits();
        let plan = exchange(ranking, &self.residency, ByteCount(capacity), self.epoch);
        let Some(plan) = plan else {
            return (Plan::default(), actor.now_ps());
        };
        let resident = |r: &RankedRange| self.residency.placement(PID, &r.range).resident();
        let pages: u64 = ranking.iter().map(|r| resident(r).0 / PAGE_SIZE).sum();
        let look_ps = pages * LOOK_AT_PAGE_PS;
        actor.charge_all(Cause::Classify, look_ps);
        (plan, actor.now_ps() + look_ps)
    }

    /// Finds out where blocks lie that are not known yet.
    fn look_up(&mut self, ranking: &[RankedRange], guest: &mut Guest, actor: &mut Actor<'_>) {
        if self.all_known {
            return;
        }
        let unknown = ranking
            .iter()
            .flat_map(|r| Block::all_of(&r.range))
            .filter(|&b| self.residency.get(PID, b).is_none());
        let blocks: Vec<Block> = unknown.take(LOOKUPS_MAX).collect();
        self.all_known = blocks.len() < LOOKUPS_MAX;
        actor.charge(Cause::Classify, blocks.len() as u64 * LOOKUP_PS);
        for block in blocks {
            self.look_at(block, guest);
        }
    }

    fn look_at(&mut self, block: Block, guest: &mut Guest) {
        let end = GuestVirtAddr(block.start().0 + BLOCK_SIZE);
        if let Some(range) = VirtRange::new(block.start(), end) {
            let [fast, slow] = guest.placement(&range);
            self.residency.set(PID, block, Placement { fast, slow });
        }
    }

    /// What the nodes have to give now.
    fn room(&self, guest: &Guest) -> Room {
        let fast_total = u64::from(guest.frames_of(TierId::Fast)) << guest.page_bits();
        let reserve = (fast_total / 128).clamp(4 * MIB, 64 * MIB);
        Room {
            fast_free: guest.usable(TierId::Fast),
            fast_reserve: ByteCount(reserve),
            fast_low: ByteCount(reserve / 4),
            slow_free: guest.usable(TierId::Slow),
            batch: self.settings.batch,
        }
    }

    /// Carries the next batch of the plan out.
    fn move_on(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        match self.moves.next(self.design, guest) {
            Next::Nothing => {}
            Next::WakeReclaim => {
                guest.reclaim(actor, u64::MAX);
            }
            Next::Batch(to, batch) => {
                let planned: u64 = batch.iter().map(|r| r.bytes.0).sum();
                let left: u64 = batch
                    .iter()
                    .map(|r| self.move_block(r, to, guest, actor).0)
                    .sum();
                if to == TierId::Fast && left * 2 > planned {
                    self.moves.give_up_promotions();
                }
            }
        }
    }

    /// Moves a block; tells how much of it did not move.
    fn move_block(
        &mut self,
        relocation: &Relocation,
        to: TierId,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> ByteCount {
        let block = relocation.block;
        if to == TierId::Fast && guest.wants_huge() {
            guest.collapse(block, actor);
        }
        if !matches!(self.design, Design::Sequential | Design::Paper) {
            guest.migrate_block(block, to, actor);
        } else {
            guest.migrate_block_singly(block, to, actor);
        }
        self.look_at(block, guest);
        let placement = self.residency.get(PID, block).unwrap_or_default();
        let left = match to {
            TierId::Fast => placement.slow,
            TierId::Slow => placement.fast,
        };
        if left.0 == 0 {
            self.residency.moved(PID, block);
        } else {
            self.residency.failed(PID, block, self.epoch);
        }
        left
    }
}

impl Manager for Agent {
    fn sampling(&self, _k: u32) -> Option<Sampling> {
        Some(self.settings.sampling)
    }

    fn has_worker(&self) -> bool {
        self.design == Design::Polling
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.next_epoch_ps = now_ps + self.settings.epoch_ps;
        self.next_epoch_ps
    }

    /// Its turn: a batch of its plan or, once that is done, an epoch.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let began_ps = actor.now_ps();
        // The paper's kernel classifies in a thread of its own, so that exchanges queue up.
        let queues = self.design == Design::Paper && began_ps >= self.next_epoch_ps;
        if self.moves.is_done() || queues {
            self.run_epoch(guest, actor);
        } else {
            self.move_on(guest, actor);
        }
        let now_ps = actor.now_ps();
        if self.moves.is_done() {
            // An epoch that took too long is not made up for.
            self.next_epoch_ps = self.next_epoch_ps.max(now_ps);
            return self.next_epoch_ps;
        }
        let program_ps = (now_ps - began_ps) * PROGRAM_WEIGHT / AGENT_WEIGHT;
        now_ps + if actor.is_alone() { 0 } else { program_ps }
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.samples.extend(records.iter().map(|r| r.gva));
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}
