//! The CPU time budget of looks, and their measured prices.
//!
//! # Properties
//! - In any time t the CPU time is at most the share times t, plus the savings, plus one round.
//! - While nothing is new, a calm agent spends its reduced share, and the savings fill up.

use std::time::Duration;

use super::{CALM_PART, Cost, HIGHEST_PRICES, SAVED_PER_CPU};

/// The CPU time budget.
#[derive(Debug, Clone)]
pub(super) struct Budget {
    /// Share of one CPU; more than zero.
    share: f64,
    /// Saved CPU time, seconds; negative if more was spent.
    saved_s: f64,
    saved_max_s: f64,
    /// When the savings were last updated.
    saved_at: Duration,
    /// No round starts before, unless something is new.
    rest_until: Duration,
    is_calm: bool,
}

impl Budget {
    /// A full budget with a share of one CPU, on a machine with `cpus` CPUs.
    pub(super) fn new(share: f64, cpus: u32, now: Duration) -> Self {
        let saved_max_s = SAVED_PER_CPU.as_secs_f64() * f64::from(cpus.max(1));
        Self {
            share,
            saved_s: saved_max_s,
            saved_max_s,
            saved_at: now,
            rest_until: now,
            is_calm: false,
        }
    }

    /// The share of one CPU.
    pub(super) fn share(&self) -> f64 {
        self.share
    }

    /// The share to spend while nothing is new.
    pub(super) fn pace(&self) -> f64 {
        match self.is_calm {
            true => self.share * CALM_PART,
            false => self.share,
        }
    }

    /// Saved CPU time, seconds.
    pub(super) fn saved_s(&mut self, now: Duration) -> f64 {
        let since_s = now.saturating_sub(self.saved_at).as_secs_f64();
        self.saved_s = (self.saved_s + since_s * self.share).min(self.saved_max_s);
        self.saved_at = self.saved_at.max(now);
        self.saved_s
    }

    /// When the next round may start. If something `is_new`, it may use the savings.
    pub(super) fn due(&mut self, is_new: bool, now: Duration) -> Duration {
        let owed_s = -self.saved_s(now);
        let paid = after(now, owed_s.max(0.0) / self.share);
        match is_new {
            true => paid,
            false => paid.max(self.rest_until),
        }
    }

    /// Subtracts the CPU time of a pass.
    pub(super) fn pay(&mut self, spent: Duration) {
        self.saved_s -= spent.as_secs_f64();
    }

    /// Sets the rest after a round, so that its cost averages to `pace`.
    pub(super) fn rest(&mut self, began: Duration, spent: Duration, pace: f64) {
        self.rest_until = after(began, spent.as_secs_f64() / pace);
    }

    /// Sets whether the agent has nothing to do. When that ends, so does the rest.
    pub(super) fn set_calm(&mut self, is_calm: bool, now: Duration) {
        if self.is_calm && !is_calm {
            self.rest_until = self.rest_until.min(now);
        }
        self.is_calm = is_calm;
    }
}

/// Adds seconds, saturating.
fn after(now: Duration, seconds: f64) -> Duration {
    let later = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    now.saturating_add(later)
}

/// Measured prices, averaged over all passes, so that a pass's fixed cost is included in proportion.
#[derive(Debug, Clone, Copy)]
pub(super) struct Prices {
    /// Cost of the cheapest pass so far, an upper bound of a pass's fixed cost.
    pass_s: f64,
    looked_s: f64,
    looks: f64,
    set_s: f64,
    set: f64,
}

impl Default for Prices {
    /// The highest known prices, with the weight of one measurement.
    fn default() -> Self {
        let (look, set) = HIGHEST_PRICES;
        Self {
            pass_s: f64::INFINITY,
            looked_s: look.as_secs_f64(),
            looks: 1.0,
            set_s: set.as_secs_f64(),
            set: 1.0,
        }
    }
}

impl Prices {
    /// Adds the cost of a pass.
    pub(super) fn add(&mut self, looks: u64, cost: &Cost) {
        let spent = cost.looking + cost.setting;
        self.pass_s = self.pass_s.min(spent.as_secs_f64());
        self.looked_s += cost.looking.as_secs_f64();
        self.looks += looks as f64;
        self.set_s += cost.setting.as_secs_f64();
        self.set += cost.set as f64;
    }

    /// Fixed CPU time of a pass, seconds; 0 before the first measurement.
    pub(super) fn pass_s(&self) -> f64 {
        if self.pass_s.is_finite() {
            self.pass_s
        } else {
            0.0
        }
    }

    /// CPU time of a look, seconds.
    pub(super) fn look_s(&self) -> f64 {
        self.looked_s / self.looks
    }

    /// CPU time of `looks` looks at a block, seconds.
    pub(super) fn block_s(&self, looks: u32) -> f64 {
        self.set_s() + self.look_s() * f64::from(looks)
    }

    /// CPU time to set a region, seconds.
    pub(super) fn set_s(&self) -> f64 {
        self.set_s / self.set
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    #[test]
    fn an_agent_that_wakes_does_not_wait_for_a_calm_ones_rest() {
        let mut budget = Budget::new(0.01, 1, Duration::ZERO);
        budget.set_calm(true, Duration::ZERO);
        budget.pay(SECOND / 100);
        budget.rest(Duration::ZERO, SECOND / 100, budget.pace());
        let calm = budget.due(false, SECOND);
        assert!(calm > SECOND * 15 && calm < SECOND * 17, "{calm:?}");
        assert_eq!(budget.due(true, SECOND), SECOND);
        budget.set_calm(false, SECOND);
        assert_eq!(budget.due(false, SECOND), SECOND);
    }

    #[test]
    fn many_looks_settle_the_price() {
        let mut prices = Prices::default();
        let cost = Cost {
            looking: Duration::from_millis(16),
            setting: Duration::from_millis(52),
            set: 4000,
        };
        prices.add(16_000, &cost);
        assert!((1e-6..1.1e-6).contains(&prices.look_s()));
        assert!((13e-6..13.2e-6).contains(&prices.set_s()));
    }

    proptest! {
        #[test]
        fn no_more_is_spent_than_the_share_and_the_savings(
            rounds in prop::collection::vec((1u64..4000, 0u64..3000, any::<[bool; 2]>()), 1..200),
            share in 0.001f64..1.0, cpus in 1u32..9,
        ) {
            let mut budget = Budget::new(share, cpus, Duration::ZERO);
            let savings = SAVED_PER_CPU.as_secs_f64() * f64::from(cpus);
            let (mut now, mut spent, mut last) = (Duration::ZERO, 0.0, 0.0);
            for (cost_ms, wait_ms, [is_new, is_calm]) in rounds {
                now += Duration::from_millis(wait_ms);
                budget.set_calm(is_calm, now);
                if budget.due(is_new, now) > now {
                    continue;
                }
                prop_assert!(spent - last <= now.as_secs_f64() * share + savings + 1e-6);
                let cost = Duration::from_millis(cost_ms);
                budget.pay(cost);
                budget.rest(now, cost, budget.pace());
                last = cost.as_secs_f64();
                spent += last;
            }
        }
    }
}
