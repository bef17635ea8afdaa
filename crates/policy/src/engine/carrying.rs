//! Carries a plan out, from its first batch to sleep.

use super::facts::check;
use super::moves::Moves;
use super::protocol::Misuse;
use super::{CALM_MAX, Engine, State, Strategy};
use crate::tier::Direction;
use crate::{Block, ByLevel, ByteCount, LEVELS, Level, Pid, Plan, Spread};

/// Maximum number of blocks for which more evidence is requested.
pub(super) const WANTED_MAX: usize = 512;

/// The plans of an epoch, each for the boundary below a tier, the fastest first.
#[derive(Debug, Clone, Default)]
pub(super) struct Plans(pub(super) Vec<(Level, Plan)>);

impl Plans {
    /// Whether nothing moves.
    pub(super) fn is_empty(&self) -> bool {
        self.0.iter().all(|(_, plan)| plan.is_empty())
    }

    /// The blocks to move.
    pub(super) fn blocks(&self) -> impl Iterator<Item = (Pid, Block)> + '_ {
        self.0.iter().flat_map(|(_, plan)| plan.blocks())
    }
}

impl<S: Strategy> Engine<S> {
    /// Starts to carry out an epoch's plans, or continues without one.
    pub(super) fn carry_out(&mut self, plans: Plans) {
        self.want(&plans);
        if plans.is_empty() {
            // An epoch without new observations does not count as calm.
            self.calm = (self.calm + u32::from(self.repeats == 0)).min(CALM_MAX);
        } else if !self.paused {
            // After long calm, a few blocks count as no change.
            let blocks = plans.blocks().count();
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            self.calm = self.calm.saturating_sub(blocks);
            if S::COUNTS_BLOCKS {
                // Moves change free memory: the next plan is made once, with a new reading.
                self.usable = None;
            }
        }
        if !self.paused {
            if !self.strategy.knows_prices() {
                self.trial = plans.clone();
            }
            for (level, plan) in plans.0 {
                self.moves.add(level, plan);
            }
        }
        self.proceed();
    }

    /// Pauses or resumes. A pause drops the rest of the plan.
    pub(super) fn pause(&mut self, paused: bool) {
        self.paused = paused;
        if paused {
            self.moves.give_up();
            self.trial = Plans::default();
            if matches!(self.state, State::Room | State::Reclaim) {
                self.proceed();
            }
        }
    }

    /// Requests evidence of the blocks where it matters most: first the moving ones, then alternately near candidates
    /// and moved blocks. Without evidence of moved blocks the benefit of moves would be unknown, and an empty budget
    /// would stay empty.
    fn want(&mut self, plans: &Plans) {
        let mut moved = std::mem::take(&mut self.wanted);
        moved.retain(|&(pid, block)| self.residency.away_of(pid, block).is_some());
        if self.ranking.is_empty() {
            // While nothing is accessed there is no evidence.
            moved.clear();
        }
        // A tracker may only manage the first few.
        let turn = moved.len().min(1);
        moved.rotate_left(turn);
        let mut undecided = plans
            .0
            .iter()
            .flat_map(|(_, plan)| plan.undecided.iter().copied());
        let mut moved = moved.into_iter();
        self.wanted.extend(plans.blocks());
        while self.wanted.len() < WANTED_MAX {
            let next = [undecided.next(), moved.next()];
            if next == [None, None] {
                break;
            }
            self.wanted.extend(next.into_iter().flatten());
        }
        self.wanted.truncate(WANTED_MAX);
    }

    /// Continues with the moves, plans again after a trial, or goes to sleep.
    pub(super) fn proceed(&mut self) {
        self.moves.end_batch();
        self.state = if self.moves.is_done() {
            match !self.trial.is_empty() && self.strategy.knows_prices() {
                true => State::Plan,
                false => {
                    self.trial = Plans::default();
                    State::Asleep
                }
            }
        } else if self.moves.wants_room() {
            State::Room
        } else if self.moves.collapse(self.strategy.batch_blocks()) {
            State::Collapse
        } else {
            // Demotions alone fit into the room that the plan was made with.
            let room = ByLevel([ByteCount(u64::MAX); LEVELS]);
            self.moves.advance(&room, self.strategy.batch_blocks(), 0);
            State::Move
        };
    }

    pub(super) fn collapsed(&mut self, took_ns: u64, cpu_ns: u64) {
        let mut tried = ByteCount(0);
        for r in &self.moves.batch {
            tried.0 += r.bytes.0;
            self.residency.collapsed(r.pid, r.block);
        }
        self.moving_ns = self.moving_ns.saturating_add(took_ns);
        self.figures.collapsed.0 += tried.0;
        self.strategy.collapsed(tried, cpu_ns);
        self.proceed();
    }

    pub(super) fn moved(
        &mut self,
        spreads: &[Spread],
        took_ns: u64,
        cpu_ns: u64,
    ) -> Result<(), Misuse> {
        let Moves {
            batch,
            level,
            direction,
            ..
        } = &self.moves;
        check(spreads, batch.len())?;
        let (level, direction) = (*level, *direction);
        // Memory that the balloon takes is not charged to the agent, judged or undone.
        let is_ordered = self.balloon_waits_at(level) && direction == Direction::Demotion;
        let (mut tried, mut moved) = (0, 0);
        for (r, spread) in batch.iter().zip(spreads) {
            let left = direction.left(&spread.at(level));
            tried += r.bytes.0;
            moved += r.bytes.0.saturating_sub(left.0);
            if left.0 == 0 {
                let way = (level, direction);
                let below = match direction {
                    Direction::Promotion => self.residency.get(r.pid, r.block),
                    Direction::Demotion => Some(*spread),
                };
                let process = self.processes.get(&r.pid).filter(|_| !is_ordered);
                if let (Some(process), Some(below)) = (process, below) {
                    (self.strategy).crossed(&process.classifier, r.block, way, &below);
                }
                self.residency.moved(r.pid, r.block, way, *spread);
            } else {
                self.residency.set(r.pid, r.block, *spread);
                self.residency.failed(r.pid, r.block, self.epoch);
            }
        }
        self.figures.tried.0 += tried;
        match direction {
            Direction::Promotion => self.figures.promoted.0 += moved,
            Direction::Demotion => self.figures.demoted.0 += moved,
        }
        let tried = ByteCount(tried);
        self.moving_ns = self.moving_ns.saturating_add(took_ns);
        self.strategy.moved(direction, tried, cpu_ns, is_ordered);
        if direction == Direction::Promotion && moved * 2 < tried.0 {
            // More promotions would only cost time.
            self.moves.give_up_promotions();
            self.trial = Plans::default();
        }
        self.proceed();
        Ok(())
    }
}
