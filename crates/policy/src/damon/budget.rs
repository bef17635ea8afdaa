//! When looking may go on, so that it keeps within a share of one CPU.
//!
//! Something is there at the start, and what is not spent is saved, up to a bound: at the start, and when memory that was
//! hot is no longer, passes follow one another in haste. Afterwards each is paid for by a rest.
//!
//! Properties:
//! - In any time t no more is spent than share x t, what may be saved, and one pass.
//! - After looks of an agent that is not calm, none begins before they are paid for at three times the share.

use std::time::Duration;

/// In haste looks take so many times the share: where they are dear, the second one shall not come before it can
/// confirm what the first has found, and then leave nothing for one that can.
const HASTE_PART: f64 = 3.0;

/// While the agent is calm, these parts of the share are used: to look at all memory, and to watch what is hot.
const CALM_PART: f64 = 0.15;
const WATCH_PART: f64 = 0.12;

/// CPU time that may be saved, and is there at the start: a round of all passes where a look costs the most, and
/// elsewhere a second one, so that what the first finds is confirmed soon. More would cost a program that nothing helps more
/// than it may: all of it is spent each time that chance wakes an agent.
const SAVED_MAX: Duration = Duration::from_millis(250);

/// The longest rest from looks at all memory: after it one is due if something is saved, whatever the last one cost.
const REST_MAX: Duration = Duration::from_secs(20);

/// CPU time to spend.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    /// Of one CPU; more than zero.
    share: f64,
    /// CPU time that is there to spend, seconds; below zero it is owed.
    saved_s: f64,
    /// Until when saving is counted in.
    saved_at: Duration,
    /// All memory is not looked at until then.
    rest_until: Duration,
    /// Nor is watched what is hot.
    watched_until: Duration,
}

impl Budget {
    /// Of so much of one CPU, with what there is at the start.
    pub(super) fn new(percent: f64, now: Duration) -> Self {
        Self {
            share: (percent / 100.0).max(1e-3),
            saved_s: SAVED_MAX.as_secs_f64(),
            saved_at: now,
            rest_until: now,
            watched_until: now,
        }
    }

    /// Whether all memory may be looked at.
    pub(super) fn allows(&mut self, now: Duration) -> bool {
        self.has_saved(now) && now >= self.rest_until
    }

    /// Whether what is hot may be watched.
    pub(super) fn allows_watch(&mut self, now: Duration) -> bool {
        self.has_saved(now) && now >= self.watched_until
    }

    /// Pays for what was looked at since `started`.
    pub(super) fn spend(&mut self, started: Duration, spent: Duration, is_calm: bool) {
        self.saved_s -= spent.as_secs_f64();
        let part = if is_calm { CALM_PART } else { HASTE_PART };
        self.rest_until = started + spent.div_f64(self.share * part).min(REST_MAX);
    }

    /// Pays for what was watched since `started`.
    pub(super) fn spend_on_watch(&mut self, started: Duration, spent: Duration) {
        self.saved_s -= spent.as_secs_f64();
        self.watched_until = started + spent.div_f64(self.share * WATCH_PART);
    }

    /// What the last watch has found is to be confirmed: the next one does not wait.
    pub(super) fn watch_again(&mut self) {
        self.watched_until = self.saved_at;
    }

    /// The agent is no longer calm.
    pub(super) fn wake(&mut self) {
        self.rest_until = self.saved_at;
    }

    fn has_saved(&mut self, now: Duration) -> bool {
        self.save(now);
        self.saved_s > 0.0
    }

    fn save(&mut self, now: Duration) {
        let saved = now.saturating_sub(self.saved_at).as_secs_f64() * self.share;
        self.saved_s = (self.saved_s + saved).min(SAVED_MAX.as_secs_f64());
        self.saved_at = now;
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_calm_agent_rests_until_it_wakes() {
        let start = Duration::from_secs(7);
        let mut budget = Budget::new(5.0, start);
        budget.spend(start, Duration::from_millis(100), true);
        assert!(!budget.allows(start + Duration::from_millis(13_300)));
        assert!(budget.allows(start + Duration::from_millis(13_400)));
        budget.spend(start, Duration::from_millis(100), true);
        budget.wake();
        assert!(budget.allows(start + Duration::from_millis(13_500)));
    }

    proptest! {
        #[test]
        fn a_second_look_in_haste_comes_when_it_can_confirm_the_first(
            spent_ms in 1u64..150, percent in 0.5f64..10.0,
        ) {
            let start = Duration::from_secs(7);
            let mut budget = Budget::new(percent, start);
            let spent = Duration::from_millis(spent_ms);
            budget.spend(start, spent, false);
            let rest = spent.div_f64(percent / 100.0 * HASTE_PART).min(REST_MAX);
            prop_assert!(!budget.allows(start + rest.mul_f64(0.99)));
            prop_assert!(budget.allows(start + rest.mul_f64(1.01)));
        }
    }

    proptest! {
        #[test]
        fn no_more_is_spent_than_the_share_and_what_was_saved(
            passes in prop::collection::vec((1u64..400, 1u64..3000, any::<[bool; 2]>()), 1..200),
            percent in 0.1f64..100.0,
        ) {
            let mut budget = Budget::new(percent, Duration::ZERO);
            let start = budget.saved_at;
            let (mut now, mut spent, mut last) = (start, 0.0, 0.0);
            for (cost_ms, wait_ms, [is_calm, is_watch]) in passes {
                now += Duration::from_millis(wait_ms);
                let is_allowed = match is_watch {
                    true => budget.allows_watch(now),
                    false => budget.allows(now),
                };
                if !is_allowed {
                    continue;
                }
                let bound = (now - start).as_secs_f64() * percent / 100.0;
                prop_assert!(spent - last <= bound + SAVED_MAX.as_secs_f64() + 1e-6);
                let cost = Duration::from_millis(cost_ms);
                match is_watch {
                    true => budget.spend_on_watch(now, cost),
                    false => budget.spend(now, cost, is_calm),
                }
                last = cost.as_secs_f64();
                spent += last;
            }
        }
    }
}
