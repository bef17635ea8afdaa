//! What an epoch decides, from its beginning to its plan.

use std::collections::BTreeMap;

use super::process::Process;
use super::rechecks::RECHECKS;
use super::strategy::Classify;
use super::{Engine, LookUps, NodeFacts, State, Strategy};
use crate::{Block, ByteCount, MIB, PerTier, Pid, Plan, Relocation, Room, Situation, Tier, rank};

/// The most samples that are taken in one epoch.
pub(super) const SAMPLES_MAX: usize = 1 << 16;

/// Blocks of unknown place that are looked up in one epoch, hottest first.
const LOOK_UPS_MAX: usize = 2048;

/// Blocks of each process where a strategy wants all: 32 TiB.
const ALL_LOOK_UPS_MAX: usize = 1 << 24;

/// Epochs after which it is looked at how full the nodes are, even when nothing is to move.
const ROOM_EPOCHS: u32 = 8;

/// Milliseconds between two looks at which processes and mappings there are.
const REFRESH_MS: u64 = 2000;

/// How many times as long while nothing is accessed.
const IDLE_REFRESH_FACTOR: u64 = 5;

/// More samples astray than this, and than a tenth of all, mean memory that was mapped since the
/// last look.
const ASTRAY_MIN: u64 = 16;
const ASTRAY_PART: u64 = 10;

/// Part of fast memory that stays free, within bounds.
const RESERVE_PART: u64 = 128;
const RESERVE_MIN: u64 = 4 * MIB;
const RESERVE_MAX: u64 = 64 * MIB;

/// Part of fast memory that must have come free to end a rest.
const GIVEN_PART: u64 = 8;

/// Part of the reserve below which blocks leave to restore it.
const LOW_PART: u64 = 4;

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

    pub(super) fn end_samples(&mut self, lost: u64, rejected: u64, is_repeat: bool) {
        let was_rehearsing = self.account.is_rehearsing();
        let astray = self.astray.saturating_add(rejected);
        let figures = &mut self.figures;
        figures.epochs += 1;
        figures.samples += self.samples;
        figures.samples_lost = figures.samples_lost.saturating_add(lost);
        figures.samples_astray = figures.samples_astray.saturating_add(astray);
        if astray > ASTRAY_MIN && astray.saturating_mul(ASTRAY_PART) > self.samples {
            // Memory was mapped since the last look, and is in use.
            self.refresh_at = self.refresh_at.min(self.epoch.saturating_add(1));
        }
        self.account.end_samples(self.slept, is_repeat);
        match (was_rehearsing, self.account.is_rehearsing()) {
            // What comes now is done.
            (true, false) => self.residency.forget_moves(),
            // Looks shall come soon.
            (false, true) => self.calm = 0,
            _ => {}
        }
        let is_cold = self.samples == 0 && self.processes.values().all(Process::is_cold);
        if is_cold && self.balloon_wants.0 == 0 {
            self.ranking.clear();
            return self.carry_out(self.put_back());
        }
        let mut has_news = false;
        for process in self.processes.values_mut() {
            has_news |= process.classifier.end_epoch();
        }
        self.look_up(has_news);
    }

    /// Ranks, and begins to look up what is to be known for a plan.
    pub(super) fn look_up(&mut self, has_news: bool) {
        let spaces = self.processes.iter();
        self.ranking = rank(spaces.map(|(&pid, p)| (pid, p.classifier.ranges())));
        if self.rests() {
            self.state = State::Plan;
            return;
        }
        match self.strategy.look_ups(has_news, self.ranking.first()) {
            LookUps::NoPlan => return self.carry_out(Plan::default()),
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

    /// Unknown blocks, hottest first, and some known ones again.
    fn choose_look_ups(&mut self) {
        let mut wanted: BTreeMap<Pid, Vec<Block>> = BTreeMap::new();
        let mut left = LOOK_UPS_MAX;
        let unknown = self
            .ranking
            .iter()
            .filter(|r| self.processes.get(&r.pid).is_some_and(|p| !p.all_known))
            .flat_map(|r| Block::all_of(&r.range).map(|b| (r.pid, b)))
            .filter(|&(pid, b)| self.residency.get(pid, b).is_none());
        for (pid, block) in unknown.take(LOOK_UPS_MAX) {
            wanted.entry(pid).or_default().push(block);
            left -= 1;
        }
        for (&pid, process) in &mut self.processes {
            process.all_known |= left > 0;
            process.recheck(RECHECKS, wanted.entry(pid).or_default());
        }
        let fast_size = self.config.fast_size;
        for (pid, block) in self.rechecks.take_turn(&self.ranking, fast_size) {
            // What is unknown is asked for above, or has to wait like the others.
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
        if let Some(room) = self.room.filter(|_| !is_due) {
            let plan = self.draft(room);
            if plan.is_empty() {
                return self.carry_out(plan);
            }
        }
        self.state = State::Plan;
    }

    /// What the tiers have to give.
    pub(super) fn room_of(&self, facts: PerTier<NodeFacts>) -> Room {
        let reserve = self.config.fast_size.0 / RESERVE_PART;
        let mut fast_reserve = ByteCount(reserve.clamp(RESERVE_MIN, RESERVE_MAX));
        // Where moves have to pay, none is for a reserve alone: programs that filled fast memory left none.
        let mut fast_low = match S::KEEPS_ACCOUNT {
            true => ByteCount(0),
            false => ByteCount(fast_reserve.0 / LOW_PART),
        };
        if self.balloon_wants.0 > 0 {
            fast_reserve.0 += self.balloon_wants.0;
            fast_low = fast_reserve;
        }
        Room {
            fast_free: facts.fast.usable(),
            fast_reserve,
            fast_low,
            slow_free: facts.slow.usable(),
            batch: self.config.batch,
        }
    }

    /// Whether it rests. A balloon does not wait for the end of it.
    fn rests(&self) -> bool {
        self.account.is_resting() && self.balloon_wants.0 == 0
    }

    /// Takes in what the tiers have to give, and plans; while it rests, only if much fast memory has come free since: a host
    /// has given some, or a program has ended.
    pub(super) fn plan(&mut self, room: Room) {
        if self.rests() {
            let before = self.room.map_or(room.fast_free, |before| before.fast_free);
            let given = room.fast_free.0.saturating_sub(before.0);
            let is_much = given > self.config.fast_size.0 / GIVEN_PART;
            if !is_much || !self.account.try_again() {
                self.room = Some(Room {
                    fast_free: before.min(room.fast_free),
                    ..room
                });
                return self.carry_out(self.put_back());
            }
        }
        self.room = Some(room);
        let plan = self.draft(room);
        let plan = self.rehearse(plan);
        self.carry_out(plan);
    }

    /// What brings memory back to where it lay before a trial that has failed, if it shall.
    fn put_back(&self) -> Plan {
        match self.room {
            Some(_) if self.account.puts_back() => Plan {
                promotions: self.moved_to(Tier::Slow),
                demotions: self.moved_to(Tier::Fast),
                // All of it: the reserve was not free before the trial either.
                level: ByteCount(0),
                is_short: false,
            },
            _ => Plan::default(),
        }
    }

    /// Blocks that were moved to this tier not long ago and can leave it, a batch of them.
    fn moved_to(&self, tier: Tier) -> Vec<Relocation> {
        let mut left = self.config.batch.0;
        let moved = self.processes.keys().flat_map(|&pid| {
            let moved = self
                .residency
                .moved_to(pid, tier, self.account.tick(), self.epoch);
            moved.map(move |(block, bytes)| Relocation { pid, block, bytes })
        });
        moved
            .take_while(|r| {
                let fits = r.bytes.0 <= left;
                left = left.saturating_sub(r.bytes.0);
                fits
            })
            .collect()
    }

    /// Whether plans are only rehearsed. A balloon does not wait for that.
    fn is_rehearsing(&self) -> bool {
        self.account.is_rehearsing() && self.balloon_wants.0 == 0
    }

    /// What is carried out of a plan: nothing while plans are rehearsed. Its blocks count as moved then, for what the
    /// next looks find in them.
    pub(super) fn rehearse(&mut self, plan: Plan) -> Plan {
        if !self.is_rehearsing() {
            return plan;
        }
        if self.account.wants_rehearsal() {
            self.residency.forget_moves();
            let (tick, ticks) = (self.account.tick(), self.account.watch_ticks());
            let mut note = |relocations: &[Relocation], to: Tier| {
                for r in relocations {
                    let residency = &mut self.residency;
                    residency.count_as_moved(r.pid, r.block, to, tick, ticks);
                }
                ByteCount(relocations.iter().map(|r| r.bytes.0).sum())
            };
            let promoted = note(&plan.promotions, Tier::Fast);
            let demoted = note(&plan.demotions, Tier::Slow);
            self.account.rehearse(promoted, demoted);
        }
        Plan::default()
    }

    pub(super) fn draft(&self, room: Room) -> Plan {
        self.strategy.plan(&Situation {
            ranking: &self.ranking,
            residency: &self.residency,
            shares: &self.shares,
            room,
            fill: self.config.fill,
            budget: match self.is_rehearsing() {
                true => self.account.rehearsal_budget(),
                false => self.account.budget(),
            },
            balloon_waits: self.balloon_wants.0 > 0,
            epoch: self.epoch,
        })
    }
}
