//! How a plan is carried out, from its first batch to sleep.

use super::moves::Moves;
use super::protocol::{Direction, Misuse};
use super::{CALM_MAX, Engine, State, Strategy, check};
use crate::{ByteCount, Placement, Plan};

/// Blocks of which more evidence is asked for at once.
pub(super) const WANTED_MAX: usize = 512;

impl<S: Strategy> Engine<S> {
    /// Begins with a plan, or goes on without one.
    pub(super) fn carry_out(&mut self, plan: Plan) {
        self.want(&plan);
        if plan.is_empty() {
            self.calm = (self.calm + 1).min(CALM_MAX);
        } else if !self.paused {
            // A few blocks are no news to an engine that has had nothing to move for long.
            let blocks = plan.promotions.len() + plan.demotions.len();
            let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
            self.calm = self.calm.saturating_sub(blocks);
            self.moves.add(plan);
        }
        self.proceed();
    }

    /// What is left of a plan is given up when somebody asks for a pause.
    pub(super) fn pause(&mut self, paused: bool) {
        self.paused = paused;
        if paused {
            self.moves.give_up();
            if matches!(self.state, State::Room | State::Reclaim) {
                self.proceed();
            }
        }
    }

    /// Chooses the blocks of which more evidence would decide most: what moves now, and what nearly did.
    fn want(&mut self, plan: &Plan) {
        let moving = plan.promotions.iter().chain(&plan.demotions);
        self.wanted.clear();
        self.wanted.extend(moving.map(|r| (r.pid, r.block)));
        self.wanted.extend(&plan.undecided);
        self.wanted.truncate(WANTED_MAX);
    }

    /// Goes on with the moves, or to sleep.
    pub(super) fn proceed(&mut self) {
        self.moves.end_batch();
        self.state = if self.moves.is_done() {
            State::Asleep
        } else if self.moves.wants_room() {
            State::Room
        } else {
            // Without promotions it does not matter how much room there is.
            self.moves
                .advance(ByteCount(0), self.strategy.batch_blocks(), 0);
            State::Move
        };
    }

    pub(super) fn moved(&mut self, placements: &[Placement], took_ns: u64) -> Result<(), Misuse> {
        let Moves {
            batch, direction, ..
        } = &self.moves;
        check(placements, batch.len())?;
        let direction = *direction;
        // What the host takes through the balloon is not this agent's to pay for, to be judged by or to undo.
        let is_ordered = direction == Direction::Demotion && self.balloon_wants.0 > 0;
        let (mut tried, mut moved) = (0, 0);
        for (r, placement) in batch.iter().zip(placements) {
            let left = direction.left(placement);
            tried += r.bytes.0;
            moved += r.bytes.0.saturating_sub(left.0);
            if left.0 == 0 {
                let to = direction.to();
                self.residency.moved(r.pid, r.block, to, *placement);
            } else {
                self.residency.set(r.pid, r.block, *placement);
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
        self.strategy.moved(direction, tried, took_ns, is_ordered);
        if direction == Direction::Promotion && moved * 2 < tried.0 {
            // More of the same would only cost time.
            self.moves.give_up_promotions();
        }
        self.proceed();
        Ok(())
    }
}
