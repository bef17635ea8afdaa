//! When an engine moves nothing, for how long, and what becomes of what it has moved: the account's text says why.

use super::{Account, HORIZON_MS};

/// Ticks for which nothing can be paid for before the engine rests, where samples tell of each
/// epoch. A tracker that does not know what a sample stands for looks now and then; what moves have
/// brought may show at the end of the horizon only.
const BROKE_TICKS: u32 = 4;

/// A trial that has lost is judged before its horizon ends once what it has moved has brought nothing for so long: memory
/// that went down for it is missed sooner or later.
pub(super) const UNUSED_TICKS: u32 = 8;

/// Time of the first rest, and of the longest that follows from doubling.
pub(super) const REST_MIN_MS: u64 = HORIZON_MS;
pub(super) const REST_MAX_MS: u64 = 32 * HORIZON_MS;

/// A rest takes this many times what the trial before it has lost.
pub(super) const LOSS_SHARE: u64 = 100;

/// What a trial that has lost has moved stays if it has brought this part of what it has cost:
/// it will bring more.
const KEEP_PART: i64 = 2;

/// Epochs of which one is waited for while resting.
pub(in crate::engine) const REST_EPOCHS: u32 = 4;

/// Nanoseconds in a millisecond.
const NS_PER_MS: u64 = 1_000_000;

/// What an engine that does not move anything waits for.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Rest {
    /// What its trial will have brought.
    Watch,
    /// A better time; what the trial has moved stays.
    Pause,
    /// That what was begun of a plan that is given up ends.
    GivenUp,
    /// A better time, after what the trial has moved is back.
    PutBack,
    /// A better time, after a trial that had gained when it ended; what it has moved may still lose.
    Gained,
}

impl Account {
    /// Whether it rests.
    pub(in crate::engine) fn is_resting(&self) -> bool {
        self.rest_until > 0
    }

    /// Takes note of a plan, `ticks` after the last one: whether it has anything, and whether there would
    /// have been more if the account could have paid for it.
    pub(in crate::engine) fn planned(&mut self, is_empty: bool, is_short: bool, ticks: u32) {
        // Who can pay for nothing has not been paid for what it has moved, whatever it wants now.
        let is_broke = is_empty && (is_short || self.left_ns() <= 0);
        if !is_broke || self.is_resting() || !self.is_kept {
            self.broke_ticks = 0;
            return;
        }
        self.broke_ticks = self.broke_ticks.saturating_add(ticks);
        let has_gained = self.trial_gain_ns() >= 0;
        let has_paid = has_gained && self.trial_benefit_ns > 0;
        if has_paid && self.rehearses() && self.broke_ticks >= BROKE_TICKS {
            // What was gained is spent, perhaps because a hot set has moved. Another rehearsal costs nothing.
            self.broke_ticks = 0;
            self.rest_ms = REST_MIN_MS;
            self.begin_trial();
        } else if self.broke_ticks >= self.patience() {
            self.broke_ticks = 0;
            self.rest = if has_gained {
                Rest::Gained
            } else {
                Rest::Watch
            };
            if has_gained {
                self.rest_ms = REST_MIN_MS;
            }
            self.rest_for(HORIZON_MS);
        }
    }

    /// Ticks for which nothing can be paid for before the engine rests.
    pub(super) fn patience(&self) -> u32 {
        match self.gain.loads_per_sample {
            Some(_) => BROKE_TICKS,
            None => self.horizon_ticks().max(BROKE_TICKS),
        }
    }

    /// Goes on with a rest, to its end.
    pub(super) fn rest(&mut self, is_repeat: bool) {
        let is_over = self.tick >= self.rest_until;
        match self.rest {
            // It has paid for itself, sooner or later.
            Rest::Watch | Rest::Pause if self.trial_gain_ns() >= 0 => self.begin_trial(),
            // Not before somebody has looked.
            Rest::Watch if !is_repeat && (is_over || self.is_of_no_use()) => self.judge(),
            // What was kept has turned out to bring nothing.
            Rest::Pause | Rest::Gained if self.has_failed() => self.judge(),
            Rest::Gained if is_over && self.trial_gain_ns() < 0 => self.judge(),
            Rest::GivenUp => self.rest = Rest::PutBack,
            _ if is_over && self.rest != Rest::Watch => self.begin_trial(),
            _ => {}
        }
    }

    fn begin_trial(&mut self) {
        self.rest_until = 0;
        if self.rehearses() {
            self.begin_rehearsal();
        }
        // Neither what came in meanwhile nor a debt counts: chance would make either.
        self.balance_ns = self.trial_ns;
        self.trial_benefit_ns = 0;
        self.trial_best_ns = 0;
        self.trial_cost_ns = 0;
        self.trial_found_ns = 0;
        self.is_losing = false;
        self.unused_ticks = 0;
    }

    /// Whether its moves are undone: it has brought little or lost much again, and brings nothing steadily. Few looks say that
    /// by chance, too, and to undo moves costs as much as they did: they must have found a loss.
    fn has_failed(&self) -> bool {
        let has_brought_little = self.trial_benefit_ns < self.trial_cost_ns as i64 / KEEP_PART;
        let found_loss = !self.rehearses() || self.is_losing || self.trial_found_ns <= 0;
        (has_brought_little || self.has_lost_again()) && self.steady_ns <= 0 && found_loss
    }

    /// Whether it has lost as much since its best time as it costs to undo its moves.
    fn has_lost_again(&self) -> bool {
        let cost_ns = self.trial_cost_ns as i64;
        cost_ns > 0 && self.trial_best_ns - self.trial_benefit_ns >= cost_ns
    }

    /// Whether nothing uses any more what it has moved.
    fn is_of_no_use(&self) -> bool {
        self.has_failed() && (self.unused_ticks >= UNUSED_TICKS || self.has_lost_again())
    }

    /// A trial has lost: says whether its moves are undone.
    fn judge(&mut self) {
        let undoes = self.has_failed();
        self.rest = if undoes { Rest::PutBack } else { Rest::Pause };
        self.pause(undoes);
    }

    /// A trial has lost that costs more than its plan was found to bring. Its moves are undone once it has ended.
    pub(super) fn give_up(&mut self) {
        self.rehearsal = None;
        self.rest = Rest::GivenUp;
        self.pause(true);
    }

    /// Says for how long there is no trial after one that has lost.
    fn pause(&mut self, undoes: bool) {
        let undoing_ns = if undoes { self.trial_cost_ns as i64 } else { 0 };
        let lost_ns = undoing_ns - self.trial_gain_ns();
        let lost_ms = lost_ns.max(0).unsigned_abs() / NS_PER_MS;
        let least_ms = REST_MIN_MS.max(lost_ms.saturating_mul(LOSS_SHARE));
        self.loss_paid_at = self.tick_after(least_ms);
        self.rest_for(self.rest_ms.max(least_ms));
        self.lost();
    }

    /// Takes note of a loss: the next rest is longer, and a plan is found right later.
    pub(super) fn lost(&mut self) {
        self.rest_ms = (2 * self.rest_ms).min(REST_MAX_MS);
    }

    /// How many looks have to find a plan right, and how many times as late as at first half of what is known of prices is
    /// forgotten: one at first, and twice as many for each loss since a trial has gained. A sweep that comes by in step with the
    /// looks passes one by chance, and many only if it is no chance.
    pub(super) fn caution(&self) -> u32 {
        (self.rest_ms / REST_MIN_MS) as u32
    }

    fn rest_for(&mut self, ms: u64) {
        self.rest_until = self.tick_after(ms);
    }

    fn tick_after(&self, ms: u64) -> u32 {
        let ticks = u32::try_from((ms / self.epoch_ms).max(1)).unwrap_or(u32::MAX);
        self.tick.saturating_add(ticks)
    }

    /// Ends a rest before its time, if no trial is to be judged and the last one's loss has been made up for. Whether it has.
    pub(in crate::engine) fn try_again(&mut self) -> bool {
        let may = self.rest != Rest::Watch && self.tick >= self.loss_paid_at;
        if may {
            self.begin_trial();
        }
        may
    }

    /// Whether what the last trial has moved goes back.
    pub(in crate::engine) fn puts_back(&self) -> bool {
        self.is_resting() && self.rest == Rest::PutBack
    }
}
