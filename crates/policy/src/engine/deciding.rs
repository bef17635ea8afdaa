//! Decides the plan of an epoch.

use std::collections::BTreeMap;

use super::carrying::Plans;
use super::process::Process;
use super::rechecks::RECHECKS;
use super::strategy::Classify;
use super::{Engine, EpochEnd, LookUps, State, Strategy};
use crate::heat::WINDOWS;
use crate::residency::CHUNKS_MAX;
use crate::served::RANKINGS;
use crate::{
    Block, ByLevel, ByteCount, Level, MIB, MoveBudget, Pid, Room, Sample, Situation, rank,
};

/// Maximum number of samples per epoch.
pub(super) const SAMPLES_MAX: usize = 1 << 16;

/// Maximum number of unknown blocks looked up per epoch, the hottest first.
const LOOK_UPS_MAX: usize = 8192;

/// Maximum number of blocks of a process looked up if a strategy wants all: 32 TiB.
const ALL_LOOK_UPS_MAX: usize = 1 << 24;

/// Epochs after which free memory is read even if nothing is to move.
const ROOM_EPOCHS: u32 = 8;

/// Epochs between two computations of ranges from block counts, for small memory.
const RANK_EPOCHS: u32 = 4;

/// Time between two refreshes of processes and mappings, milliseconds.
const REFRESH_MS: u64 = 2000;

/// Epochs between two plans while nothing new was seen. It is coprime to the number of longer windows, so that each has
/// its turn.
const REPEATED_PLAN_EPOCHS: u32 = 5;

const NS_PER_MS: u64 = 1_000_000;

/// Factor of the refresh interval while nothing is accessed.
const IDLE_REFRESH_FACTOR: u64 = 5;

/// If more stray samples than this, and more than a tenth of all, arrive, memory was mapped since the last refresh.
const ASTRAY_MIN: u64 = 16;
const ASTRAY_DIVISOR: u64 = 10;

/// Part of fast memory that stays free, within bounds.
const RESERVE_DIVISOR: u64 = 128;
const RESERVE_MIN: u64 = 4 * MIB;
const RESERVE_MAX: u64 = 64 * MIB;

/// Part of the reserve below which blocks are demoted to restore it.
const LOW_DIVISOR: u64 = 4;

impl<S: Strategy> Engine<S> {
    pub(super) fn begin_epoch(&mut self) {
        self.slept = self.pause_epochs();
        self.epoch = self.epoch.saturating_add(1);
        if self.epoch >= self.refresh_at {
            self.state = State::Refresh;
        } else {
            self.begin_samples();
        }
    }

    pub(super) fn refreshed(&mut self) {
        let is_idle = self.epoch > 0 && self.processes.values().all(Process::is_cold);
        let wait_ms = REFRESH_MS * if is_idle { IDLE_REFRESH_FACTOR } else { 1 };
        let epochs = (wait_ms / self.config.epoch_ms).max(1);
        self.refresh_at = self.epoch.saturating_add(epochs as u32);
        if self.epoch == 0 {
            self.proceed();
        } else {
            self.begin_samples();
        }
    }

    fn begin_samples(&mut self) {
        if self.paused {
            return self.proceed();
        }
        self.samples = 0;
        self.astray = 0;
        self.state = State::Samples;
    }

    /// Counts the new samples.
    pub(super) fn count_samples(&mut self) {
        let mut batch = std::mem::take(&mut self.batch);
        if S::COUNTS_BLOCKS {
            batch.sort_unstable_by_key(|sample| (sample.pid, sample.addr));
        }
        let are_alike = |a: &Sample, b: &Sample| {
            S::COUNTS_BLOCKS && a.pid == b.pid && Block::of(a.addr) == Block::of(b.addr)
        };
        let mut counted = Vec::with_capacity(batch.len());
        for alike in batch.chunk_by(are_alike) {
            let (pid, addr) = (alike[0].pid, alike[0].addr);
            self.samples += alike.len() as u64;
            let process = self.processes.get_mut(&pid);
            let Some(process) = process else {
                self.astray += alike.len() as u64;
                continue;
            };
            let mapped = alike.iter().filter(|sample| process.maps(sample.addr));
            let (count, weight) = mapped.fold((0, 0u32), |(count, weight), sample| {
                (count + 1, weight.saturating_add(sample.weight))
            });
            self.astray += alike.len() as u64 - count;
            if count == 0 {
                continue;
            }
            process.classifier.add(addr, weight);
            counted.push((pid, Block::of(addr), weight));
            let accessed = self.residency.accessed(pid, Block::of(addr));
            process.all_known &= !accessed.was_absent;
            let accesses = weight.saturating_mul(self.thinning);
            self.strategy.saw(accessed.away, accesses, None);
        }
        if S::COUNTS_BLOCKS {
            self.served.add(&counted);
        }
        batch.clear();
        self.batch = batch;
    }

    pub(super) fn end_samples(&mut self, lost: u64, rejected: u64, is_repeat: bool) {
        self.repeats = match is_repeat {
            true => self.repeats.saturating_add(1),
            false => 0,
        };
        let astray = self.astray.saturating_add(rejected);
        let figures = &mut self.figures;
        figures.epochs += 1;
        figures.samples += self.samples;
        figures.samples_lost = figures.samples_lost.saturating_add(lost);
        figures.samples_astray = figures.samples_astray.saturating_add(astray);
        if self.astray > ASTRAY_MIN && self.astray.saturating_mul(ASTRAY_DIVISOR) > self.samples {
            // Memory was mapped since the last refresh, and is in use. Records that a tracker rejects, such as those of
            // kernel memory, do not show that.
            self.refresh_at = self.refresh_at.min(self.epoch.saturating_add(1));
        }
        let slept_ns = (u64::from(self.slept) * self.config.epoch_ms).saturating_mul(NS_PER_MS);
        let elapsed_s = slept_ns.max(std::mem::take(&mut self.moving_ns)) as f64 * 1e-9;
        let is_cold = self.samples == 0 && self.processes.values().all(Process::is_cold);
        // Without new evidence a plan changes slowly, once each window has had its turn.
        let is_light = self.repeats >= WINDOWS as u32
            && self.balloon_wants.0 == 0
            && !self.epoch.is_multiple_of(REPEATED_PLAN_EPOCHS);
        let mut has_news = false;
        if is_light {
            let processes = self.processes.values_mut();
            processes.for_each(|process| process.classifier.pass_time(elapsed_s));
        } else if !is_cold {
            let chunks: usize = self.processes.values().map(|p| p.classifier.chunks()).sum();
            for process in self.processes.values_mut() {
                let part = (CHUNKS_MAX * process.classifier.chunks()).div_ceil(chunks.max(1));
                has_news |= process.classifier.end_epoch(self.epoch, elapsed_s, part);
            }
        }
        let end = EpochEnd {
            epoch: self.epoch,
            elapsed_s,
            is_repeat,
            away: self.residency.away(),
            rate: self.processes.values().map(|p| p.classifier.rate()).sum(),
        };
        self.strategy.end_epoch(&end);
        self.served.end_epoch(elapsed_s);
        if is_light {
            // Requests for evidence stay.
            return self.proceed();
        }
        if is_cold && self.balloon_wants.0 == 0 {
            self.ranking.clear();
            return self.carry_out(Plans::default());
        }
        self.look_up(has_news);
    }

    /// Ranks ranges, and starts the look-ups that a plan needs.
    pub(super) fn look_up(&mut self, has_news: bool) {
        let is_known = self.processes.values().all(|p| p.all_known);
        let is_due = !S::COUNTS_BLOCKS || self.epoch.is_multiple_of(self.ranks_every());
        if !is_known || self.ranking.is_empty() || is_due {
            let spaces = self.processes.iter();
            self.ranking = rank(spaces.map(|(&pid, p)| (pid, p.classifier.ranges())));
        }
        if S::COUNTS_BLOCKS && is_due {
            let (at, spaces) = (self.served.take_turn(), self.processes.iter());
            let ranges = |p: &Process<S::Classifier>| {
                p.classifier.ranges_over(RANKINGS[at]).collect::<Vec<_>>()
            };
            let ranking = rank(spaces.map(|(&pid, p)| (pid, ranges(p))));
            self.served.rank(at, &ranking, &self.residency);
        }
        match self.strategy.look_ups(has_news, self.ranking.first()) {
            LookUps::NoPlan => return self.carry_out(Plans::default()),
            LookUps::Some => self.choose_look_ups(),
            LookUps::All => {
                let wanted = self.processes.iter().map(|(&pid, p)| {
                    let blocks = p.space.iter().flat_map(Block::all_of);
                    (pid, blocks.take(ALL_LOOK_UPS_MAX).collect())
                });
                self.look_ups = wanted.collect();
            }
        }
        self.look_ups.reverse();
        self.next_look_up();
    }

    /// Epochs between two computations of ranges, so that one epoch's work is bounded.
    fn ranks_every(&self) -> u32 {
        let chunks: usize = self.processes.values().map(|p| p.classifier.chunks()).sum();
        RANK_EPOCHS
            .max(u32::try_from(RANK_EPOCHS as usize * chunks / CHUNKS_MAX).unwrap_or(u32::MAX))
    }

    /// Chooses unknown blocks, the hottest first, and some known ones again.
    fn choose_look_ups(&mut self) {
        let mut wanted: BTreeMap<Pid, Vec<Block>> = BTreeMap::new();
        let mut left = LOOK_UPS_MAX;
        let unknown = self
            .ranking
            .iter()
            .filter(|r| self.processes.get(&r.pid).is_some_and(|p| !p.all_known))
            .flat_map(|r| {
                let unknown = self.residency.unknown(r.pid, &r.range);
                unknown.map(|block| (r.pid, block))
            });
        for (pid, block) in unknown.take(LOOK_UPS_MAX) {
            wanted.entry(pid).or_default().push(block);
            left -= 1;
        }
        for (&pid, process) in &mut self.processes {
            process.all_known |= left > 0;
            process.recheck(RECHECKS, wanted.entry(pid).or_default());
        }
        let faster = self.config.slowest.faster();
        let size = ByteCount(faster.map(|level| self.config.sizes.get(level).0).sum());
        for (pid, block) in self.rechecks.take_turn(&self.ranking, size) {
            // Unknown blocks were chosen above, or must wait.
            if self.residency.get(pid, block).is_some() {
                wanted.entry(pid).or_default().push(block);
            }
        }
        wanted.retain(|_, blocks| !blocks.is_empty());
        self.look_ups = wanted.into_iter().collect();
    }

    pub(super) fn next_look_up(&mut self) {
        if !self.look_ups.is_empty() {
            self.state = State::LookUp;
            return;
        }
        let is_due = self.epoch.is_multiple_of(ROOM_EPOCHS);
        if let Some(usable) = self.usable.filter(|_| !is_due) {
            let plans = self.draft(&usable);
            if plans.is_empty() {
                return self.carry_out(plans);
            }
        }
        self.state = State::Plan;
    }

    /// Whether the balloon waits for memory of a tier; it takes memory of the fastest.
    pub(super) fn balloon_waits_at(&self, level: Level) -> bool {
        level == Level::First && self.balloon_wants.0 > 0
    }

    /// Free memory on both sides of the boundary below `level`.
    fn room_of(&self, level: Level, usable: &ByLevel<ByteCount>) -> Room {
        let reserve = self.config.sizes.get(level).0 / RESERVE_DIVISOR;
        let mut fast_reserve = ByteCount(reserve.clamp(RESERVE_MIN, RESERVE_MAX));
        // Where moves must pay, no block is demoted for a reserve alone: programs that filled fast memory left none.
        let mut fast_low = match S::ONLY_WHAT_PAYS {
            true => ByteCount(0),
            false => ByteCount(fast_reserve.0 / LOW_DIVISOR),
        };
        if self.balloon_waits_at(level) {
            fast_reserve.0 += self.balloon_wants.0;
            fast_low = fast_reserve;
        }
        Room {
            fast_free: *usable.get(level),
            fast_missing: *self.missing.get(level),
            fast_reserve,
            fast_low,
            slow_free: ByteCount(level.slower().map(|slower| usable.get(slower).0).sum()),
            batch: self.config.batch,
        }
    }

    /// Takes the tiers' free memory, and plans.
    pub(super) fn plan(&mut self, usable: ByLevel<ByteCount>) {
        self.usable = Some(usable);
        let plans = self.draft(&usable);
        self.carry_out(plans);
    }

    /// Makes plans for all boundaries, the fastest first. Blocks of a trial in this epoch are not tried again.
    pub(super) fn draft(&mut self, usable: &ByLevel<ByteCount>) -> Plans {
        let heats: Vec<(Pid, &S::Classifier)> = (self.processes.iter())
            .map(|(&pid, p)| (pid, &p.classifier))
            .collect();
        let nobody = BTreeMap::new();
        let mut usable = *usable;
        let mut plans = std::mem::take(&mut self.trial).0;
        let tried = plans.len();
        for level in self.config.slowest.faster() {
            let situation = Situation {
                ranking: &self.ranking,
                residency: &self.residency,
                // Shares apply to the fastest tier only.
                shares: match level {
                    Level::First => &self.shares,
                    _ => &nobody,
                },
                sockets: &self.sockets,
                level,
                planned: &plans,
                room: self.room_of(level, &usable),
                fill: self.config.fill,
                budget: MoveBudget::NONE,
                balloon_waits: self.balloon_waits_at(level),
                epoch: self.epoch,
                epoch_ms: self.config.epoch_ms,
                collapses: self.config.collapses,
            };
            let plan = self.strategy.plan(&situation, &heats);
            // Demoted memory uses the nearest free memory below.
            let mut demoted: u64 = plan.demotions.iter().map(|r| r.bytes.0).sum();
            for slower in level.slower() {
                let room = usable.get_mut(slower);
                let taken = demoted.min(room.0);
                room.0 -= taken;
                demoted -= taken;
            }
            plans.push((level, plan));
        }
        Plans(plans.split_off(tried))
    }
}
