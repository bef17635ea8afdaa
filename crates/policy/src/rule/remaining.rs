//! Time and memory that an epoch's plan may still use.

use super::unit::Unit;
use super::{FIRST_BLOCKS, Rule};
use crate::sockets::Rooms;
use crate::{BLOCK_SIZE, Level, Plan, Relocation, Situation};

/// Time and room that the plan may still use.
pub(super) struct Remaining {
    tokens_s: f64,
    /// Tokens that moves do not need: those beyond the first ones, without loans.
    spare_s: f64,
    /// Time of all threads that move, until the epoch ends.
    pub(super) epoch_s: f64,
    pub(super) may_promote: u64,
    may_demote: u64,
    /// Events a second whose memory may still move.
    pub(super) may_shift: f64,
    pub(super) fast_free: u64,
    /// Fast memory that stays free, including what the tier lacks.
    pub(super) level: u64,
    slow_free: u64,
    /// Free fast memory near each socket.
    pub(super) rooms: Rooms,
}

impl Remaining {
    pub(super) fn of(rule: &Rule, situation: &Situation<'_>) -> Self {
        let room = &situation.room;
        let most = match rule.knows_prices() || situation.balloon_waits {
            true => room.batch.0,
            false => room.batch.0.min(FIRST_BLOCKS as u64 * BLOCK_SIZE),
        };
        let spent_s = |(_, plan): &(Level, Plan)| {
            let bytes = |moves: &[Relocation]| moves.iter().map(|r| r.bytes.0).sum();
            rule.promotion_s(bytes(&plan.promotions)) + rule.demotion_s(bytes(&plan.demotions))
        };
        let spent_s: f64 = situation.planned.iter().map(spent_s).sum();
        Self {
            tokens_s: rule.spendable_s() - spent_s,
            spare_s: rule.spare_s() - spent_s,
            epoch_s: rule.movers_s(situation) - spent_s,
            may_promote: most,
            may_demote: most.saturating_add(room.fast_missing.0),
            may_shift: rule.load.most_events(&rule.gain, situation.level),
            fast_free: room.fast_free.0,
            level: room.level().0 + room.fast_missing.0,
            slow_free: room.slow_free.0,
            rooms: situation.sockets.rooms_of(situation.level),
        }
    }

    /// Whether no exchange can be paid for in this epoch any more, or the tiers' latencies have to be measured first.
    pub(super) fn is_spent(&self) -> bool {
        self.epoch_s <= 0.0 || self.is_broke() || self.may_shift <= 0.0
    }

    /// Whether only moves home may be made.
    pub(super) fn is_broke(&self) -> bool {
        self.tokens_s <= 0.0
    }

    pub(super) fn has_room_for(&self, bytes: u64) -> bool {
        self.fast_free >= self.level + bytes
    }

    pub(super) fn can_demote(&self, bytes: u64) -> bool {
        bytes <= self.may_demote.min(self.slow_free)
    }

    /// Whether a block can be collapsed where it lies.
    pub(super) fn can_collapse(&self, bytes: u64) -> bool {
        !self.is_spent() && self.spare_s > 0.0 && bytes <= self.may_promote.min(self.slow_free)
    }

    /// One thread collapses blocks while the others that move wait. Its block takes the place of another one.
    pub(super) fn collapse(&mut self, bytes: u64, cost_s: f64, movers: f64) {
        self.spend(cost_s);
        self.epoch_s -= cost_s * (movers - 1.0);
        self.slow_free -= bytes;
        self.may_promote -= bytes;
    }

    fn spend(&mut self, cost_s: f64) {
        self.tokens_s -= cost_s;
        self.spare_s -= cost_s;
        self.epoch_s -= cost_s;
    }

    pub(super) fn promote(&mut self, hot: &Unit<'_>, cost_s: f64) {
        let bytes = hot.bytes;
        self.spend(cost_s);
        self.rooms.take(hot.socket, bytes);
        self.fast_free -= bytes.min(self.fast_free);
        self.slow_free += bytes;
        self.may_promote -= bytes;
    }

    pub(super) fn demote(&mut self, cold: &Unit<'_>, cost_s: f64) {
        let bytes = cold.bytes;
        self.spend(cost_s);
        self.rooms.give(cold.socket, bytes);
        self.fast_free += bytes;
        self.slow_free -= bytes;
        self.may_demote -= bytes;
    }
}
