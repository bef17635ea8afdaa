//! The agent in a guest, as `demeter guest` runs it: the same policy, the same epochs; the kernel
//! beneath it is the simulated one.

use demeter_policy::{
    BLOCK_SIZE, Block, ByteCount, ClassifierConfig, FillThreshold, GuestVirtAddr, MIB, Placement,
    Plan, RankedRange, Relocation, ResidencyMap, Room, VirtRange, plan,
};

use super::heat::PID;
use super::{Classify, Heat, Parts, Relocate, Track};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::sampler::{Record, Sampling};

/// Blocks in one batch of moves.
const BATCH_BLOCKS: usize = 8;

/// Blocks of unknown place that are looked up in one epoch, hottest first.
const LOOKUPS_MAX: usize = 2048;

/// Asking the kernel where a block lies (assumed: a page or two of a `move_pages` call).
const LOOKUP_PS: u64 = 300_000;

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
}

/// The agent.
#[derive(Debug)]
pub(crate) struct Agent {
    settings: AgentSettings,
    parts: Parts,
    /// None until the first epoch, when the process's mappings are known.
    heat: Option<Heat>,
    residency: ResidencyMap,
    /// Whether every block was looked up.
    all_known: bool,
    samples: Vec<GuestVirtAddr>,
    epoch: u32,
    /// Samples so far.
    pub(crate) samples_seen: u64,
}

impl Agent {
    pub(crate) fn new(parts: Parts, settings: &AgentSettings) -> Self {
        Self {
            settings: *settings,
            parts,
            heat: None,
            residency: ResidencyMap::default(),
            all_known: false,
            samples: vec![],
            epoch: 0,
            samples_seen: 0,
        }
    }

    /// Whether a thread of its own empties the sampling units' buffers.
    pub(crate) fn has_worker(&self) -> bool {
        self.parts.track == Track::SamplesByWorker
    }

    /// What to sample.
    pub(crate) fn sampling(&self) -> Sampling {
        self.settings.sampling
    }

    /// Time between two decisions.
    pub(crate) fn epoch_ps(&self) -> u64 {
        self.settings.epoch_ps
    }

    /// Takes what a sampling unit recorded.
    pub(crate) fn take(&mut self, records: impl Iterator<Item = Record>) {
        self.samples.extend(records.map(|r| r.gva));
    }

    /// One epoch: classifies, plans, moves.
    pub(crate) fn run_epoch(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        self.epoch += 1;
        let (classifier, by_block) = (
            self.settings.classifier,
            self.parts.classify == Classify::Blocks,
        );
        let heat = self.heat.get_or_insert_with(|| match by_block {
            true => Heat::blocks(guest.vmas()),
            false => Heat::ranges(classifier, guest.vmas()),
        });
        let samples = self.samples.len() as u64;
        self.samples_seen += samples;
        for addr in self.samples.drain(..) {
            heat.add(addr);
        }
        heat.end_epoch();
        let ranking = heat.ranking();
        let work = EPOCH_PS + samples * ADD_PS + ranking.len() as u64 * RANGE_PS;
        actor.charge(Cause::Classify, work);
        self.look_up(&ranking, guest, actor);
        let plan = self.plan(&ranking, guest);
        self.execute(&plan, guest, actor);
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

    fn plan(&self, ranking: &[RankedRange], guest: &Guest) -> Plan {
        let fast_total = u64::from(guest.frames_of(TierId::Fast)) << guest.page_bits();
        let reserve = (fast_total / 128).clamp(4 * MIB, 64 * MIB);
        let room = Room {
            fast_free: guest.usable(TierId::Fast),
            fast_reserve: ByteCount(reserve),
            fast_low: ByteCount(reserve / 4),
            slow_free: guest.usable(TierId::Slow),
            batch: self.settings.batch,
        };
        let fill = FillThreshold(f64::from(self.settings.classifier.tau_split));
        plan(ranking, &self.residency, &room, fill, self.epoch)
    }

    /// Promotes while there is room, then demotes a batch, and so on.
    fn execute(&mut self, plan: &Plan, guest: &mut Guest, actor: &mut Actor<'_>) {
        let (mut up, mut down) = (&plan.promotions[..], &plan.demotions[..]);
        loop {
            let mut room = guest.usable(TierId::Fast).0;
            let fits = |r: &&Relocation| {
                let fits = r.bytes.0 <= room;
                room -= if fits { r.bytes.0 } else { 0 };
                fits
            };
            let n = up.iter().take(BATCH_BLOCKS).take_while(fits).count();
            let (list, n, to) = if n > 0 {
                (&mut up, n, TierId::Fast)
            } else if !down.is_empty() {
                let n = down.len().min(BATCH_BLOCKS);
                (&mut down, n, TierId::Slow)
            } else {
                return;
            };
            let (batch, rest) = list.split_at(n);
            *list = rest;
            for relocation in batch {
                self.move_block(relocation, to, guest, actor);
            }
        }
    }

    fn move_block(
        &mut self,
        relocation: &Relocation,
        to: TierId,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) {
        let block = relocation.block;
        let made_huge =
            to == TierId::Fast && guest.wants_huge() && guest.collapse(block, to, actor);
        if !made_huge {
            if self.parts.relocate == Relocate::OneByOne {
                guest.migrate_block_singly(block, to, actor);
            } else {
                guest.migrate_block(block, to, actor);
            }
        }
        self.look_at(block, guest);
        let left = self.residency.get(PID, block).map_or(0, |p| match to {
            TierId::Fast => p.slow.0,
            TierId::Slow => p.fast.0,
        });
        if left == 0 {
            self.residency.moved(PID, block);
        } else {
            self.residency.failed(PID, block, self.epoch);
        }
    }
}
