//! The CPU time budget of looks, and their measured prices.
//!
//! # Properties
//! - In any time t the CPU time is at most the share times t, plus the savings, plus one round.
//! - While nothing is new, a calm agent spends its reduced share, and the savings fill up.
//! - Rounds come irregularly, at the mean rate that pays for them.
//! - In any time t looks cost at most a round and a sum of four. Three are what moves earn, an eighth of what exchanges
//!   promise, and the reduced share. The fourth is the share times [`LEARNS`] times log t.

use std::time::Duration;

use super::{CALM_SHARE, Cost, HIGHEST_PRICES, LEARNS, Prospect, SAVED_PER_CPU};
use crate::chance::Chance;

/// The CPU time budget.
#[derive(Debug, Clone)]
pub(super) struct LookBudget {
    /// Share of one CPU; more than zero.
    share: f64,
    /// Saved CPU time, seconds; negative if more was spent.
    saved_s: f64,
    saved_max_s: f64,
    /// When the savings were last updated.
    saved_at: Duration,
    /// The start of the last round that a rest pays for, and its CPU time.
    last_round: (Duration, Duration),
    /// The places of the last round and of the next one in their periods, from 0 to 1. Regular rounds would always find the
    /// same blocks in use where a program sweeps its memory in the same period.
    places: [f64; 2],
    chance: Chance,
    prospect: Prospect,
    /// The last time at which a block was unknown.
    known_since: Duration,
}

impl LookBudget {
    /// A full budget with a share of one CPU, on a machine with `cpus` CPUs.
    pub(super) fn new(share: f64, cpus: u32, now: Duration) -> Self {
        let saved_max_s = SAVED_PER_CPU.as_secs_f64() * f64::from(cpus.max(1));
        Self {
            share,
            saved_s: saved_max_s,
            saved_max_s,
            saved_at: now,
            last_round: (now, Duration::ZERO),
            places: [0.0; 2],
            chance: Chance::new(0),
            prospect: Prospect::OPEN,
            known_since: now,
        }
    }

    /// The share of one CPU.
    pub(super) fn share(&self) -> f64 {
        self.share
    }

    /// The share of one CPU to spend while nothing is new.
    pub(super) fn pace(&self, now: Duration) -> f64 {
        let Prospect {
            is_calm,
            earned,
            promised,
        } = self.prospect;
        let known = now.saturating_sub(self.known_since);
        let learning = self.share * LEARNS.div_duration_f64(known.max(LEARNS));
        let news = if is_calm { 0.0 } else { learning.max(earned) };
        news.max(promised * CALM_SHARE)
            .clamp(self.share * CALM_SHARE, self.share)
    }

    /// Begins to learn anew: there are unknown blocks.
    pub(super) fn learn(&mut self, now: Duration) {
        self.known_since = now;
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
            false => {
                let (began, spent) = self.last_round;
                let [place, next] = self.places;
                let periods = 1.0 + next - place;
                paid.max(after(began, periods * spent.as_secs_f64() / self.pace(now)))
            }
        }
    }

    /// Subtracts the CPU time of a pass.
    pub(super) fn pay(&mut self, spent: Duration) {
        self.saved_s -= spent.as_secs_f64();
    }

    /// Sets the round that the next rest pays for.
    pub(super) fn rest(&mut self, began: Duration, spent: Duration) {
        self.last_round = (began, spent);
        self.places = [self.places[1], self.chance.draw()];
    }

    /// Sets the prospect from now on.
    pub(super) fn set_prospect(&mut self, prospect: Prospect) {
        self.prospect = prospect;
    }
}

/// Adds seconds, saturating.
fn after(now: Duration, seconds: f64) -> Duration {
    let later = Duration::try_from_secs_f64(seconds).unwrap_or(Duration::MAX);
    now.saturating_add(later)
}

/// A price per unit, measured by passes that cost a fixed time as well.
///
/// It is the slope from the cheapest pass to the mean of all. The cheapest one itself counts as if it had no fixed cost,
/// so passes of equal size yield their mean.
#[derive(Debug, Clone, Copy, Default)]
struct Price {
    passes: f64,
    spent_s: f64,
    units: f64,
    /// CPU time and units of the cheapest pass.
    cheapest: Option<(f64, f64)>,
}

impl Price {
    fn add(&mut self, spent: Duration, units: u64) {
        let pass = (spent.as_secs_f64(), units as f64);
        self.passes += 1.0;
        self.spent_s += pass.0;
        self.units += pass.1;
        self.cheapest = match self.cheapest {
            Some(cheapest) if cheapest.0 <= pass.0 => Some(cheapest),
            _ => Some(pass),
        };
    }

    /// CPU time of one unit, seconds; `guess` counts as one more measured unit.
    fn unit_s(&self, guess: Duration) -> f64 {
        let (least_s, least) = self.cheapest.unwrap_or_default();
        let more_s = (self.spent_s - self.passes * least_s).max(0.0);
        let more = (self.units - self.passes * least).max(0.0);
        let own_s = if least > 0.0 { least_s } else { 0.0 };
        (more_s + own_s + guess.as_secs_f64()) / (more + least + 1.0)
    }

    /// Fixed CPU time of a pass, seconds.
    fn fixed_s(&self, guess: Duration) -> f64 {
        let (least_s, least) = self.cheapest.unwrap_or_default();
        (least_s - least * self.unit_s(guess)).max(0.0)
    }
}

/// Measured prices of looks and regions.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Prices {
    look: Price,
    set: Price,
}

impl Prices {
    /// Adds the cost of a pass.
    pub(super) fn add(&mut self, looks: u64, cost: &Cost) {
        self.look.add(cost.looking, looks);
        self.set.add(cost.setting, cost.set);
    }

    /// Whether a pass was measured.
    pub(super) fn is_measured(&self) -> bool {
        self.look.cheapest.is_some()
    }

    /// Fixed CPU time of a pass, seconds; 0 before the first measurement.
    pub(super) fn pass_s(&self) -> f64 {
        let (look, set) = HIGHEST_PRICES;
        self.look.fixed_s(look) + self.set.fixed_s(set)
    }

    /// CPU time of a look, seconds.
    pub(super) fn look_s(&self) -> f64 {
        self.look.unit_s(HIGHEST_PRICES.0)
    }

    /// CPU time to set a region, seconds.
    pub(super) fn set_s(&self) -> f64 {
        self.set.unit_s(HIGHEST_PRICES.1)
    }

    /// CPU time of `looks` looks at a block, seconds.
    pub(super) fn block_s(&self, looks: u32) -> f64 {
        self.set_s() + self.look_s() * f64::from(looks)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const SECOND: Duration = Duration::from_secs(1);

    const CALM: Prospect = Prospect {
        is_calm: true,
        earned: 1.0,
        promised: 0.0,
    };

    #[test]
    fn an_agent_that_wakes_does_not_wait_for_a_calm_ones_rest() {
        let mut budget = LookBudget::new(0.01, 1, Duration::ZERO);
        budget.set_prospect(CALM);
        budget.pay(SECOND / 100);
        budget.rest(Duration::ZERO, SECOND / 100);
        budget.places = [0.0; 2];
        assert_eq!(budget.due(false, SECOND), SECOND * 8);
        assert_eq!(budget.due(true, SECOND), SECOND);
        budget.set_prospect(Prospect::OPEN);
        assert_eq!(budget.due(false, SECOND), SECOND);
    }

    #[test]
    fn a_calm_agent_looks_at_what_promises_much() {
        let mut budget = LookBudget::new(0.02, 1, Duration::ZERO);
        let mut pace = |promised| {
            budget.set_prospect(Prospect {
                is_calm: true,
                earned: 0.0,
                promised,
            });
            budget.pace(SECOND * 100)
        };
        assert_eq!(pace(0.0), 0.02 * CALM_SHARE);
        assert_eq!(pace(0.1), 0.1 * CALM_SHARE);
        assert_eq!(pace(1.0), 0.02);
    }

    #[test]
    fn rounds_come_at_any_time_of_their_periods_and_no_more_often() {
        let mut budget = LookBudget::new(0.01, 1, Duration::ZERO);
        // Moves earn enough for rounds at the full share.
        budget.set_prospect(Prospect {
            is_calm: false,
            earned: 1.0,
            promised: 0.0,
        });
        let (mut now, mut quarters) = (Duration::ZERO, [0; 4]);
        for round in 1..=400 {
            budget.pay(SECOND / 100);
            budget.rest(now, SECOND / 100);
            now = budget.due(false, now);
            let [_, place] = budget.places;
            assert!((now.as_secs_f64() - f64::from(round) - place).abs() < 1e-3);
            quarters[(now.subsec_nanos() / 250_000_000) as usize] += 1;
        }
        assert!(
            quarters.iter().all(|&n| (70..130).contains(&n)),
            "{quarters:?}"
        );
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

    #[test]
    fn fixed_costs_do_not_make_blocks_dear() {
        let mut prices = Prices::default();
        let mut add = |blocks: u64| {
            let looks = 4 * blocks;
            let cost = Cost {
                looking: Duration::from_micros(9000 + 50 * looks),
                setting: Duration::from_micros(7000 + 70 * blocks),
                set: blocks,
            };
            prices.add(looks, &cost);
            (prices.look_s(), prices.set_s(), prices.pass_s())
        };
        // A single pass does not tell what is fixed.
        let (look_s, ..) = add(60);
        assert!((85e-6..90e-6).contains(&look_s), "{look_s}");
        add(1500);
        for _ in 0..20 {
            add(60);
            add(3);
        }
        let (look_s, set_s, pass_s) = add(60);
        assert!((49e-6..55e-6).contains(&look_s), "{look_s}");
        assert!((69e-6..75e-6).contains(&set_s), "{set_s}");
        assert!((0.015..0.0165).contains(&pass_s), "{pass_s}");
    }

    #[test]
    fn looks_become_rare_unless_moves_earn_what_they_cost() {
        let mut budget = LookBudget::new(0.02, 1, Duration::ZERO);
        let mut spent_s = |from: u32, to: u32, earned| {
            budget.set_prospect(Prospect {
                is_calm: false,
                earned,
                promised: 0.0,
            });
            (from..to).map(|s| budget.pace(SECOND * s)).sum::<f64>()
        };
        let most = |from: f64, to: f64| 0.02 * LEARNS.as_secs_f64() * (to / from).ln();
        let calm = 0.02 * CALM_SHARE;
        let first = spent_s(0, 60, 0.0);
        assert!(first <= 0.02 * LEARNS.as_secs_f64() + most(6.0, 60.0) + calm * 60.0);
        assert!(spent_s(60, 240, 0.0) <= most(59.0, 240.0) + calm * 180.0);
        assert!((spent_s(240, 250, 0.01) - 0.1).abs() < 1e-9);
        assert!((spent_s(250, 260, 1.0) - 0.2).abs() < 1e-9);
    }

    proptest! {
        #[test]
        fn no_more_is_spent_than_the_share_and_the_savings(
            rounds in prop::collection::vec((1u64..4000, 0u64..3000, any::<[bool; 2]>(), 0.0f64..1.0), 1..200),
            share in 0.001f64..1.0, cpus in 1u32..9,
        ) {
            let mut budget = LookBudget::new(share, cpus, Duration::ZERO);
            let savings = SAVED_PER_CPU.as_secs_f64() * f64::from(cpus);
            let (mut now, mut spent, mut last) = (Duration::ZERO, 0.0, 0.0);
            for (cost_ms, wait_ms, [is_new, is_calm], earned) in rounds {
                now += Duration::from_millis(wait_ms);
                budget.set_prospect(Prospect {
                    is_calm,
                    earned,
                    promised: earned,
                });
                if budget.due(is_new, now) > now {
                    continue;
                }
                prop_assert!(spent - last <= now.as_secs_f64() * share + savings + 1e-6);
                let cost = Duration::from_millis(cost_ms);
                budget.pay(cost);
                budget.rest(now, cost);
                last = cost.as_secs_f64();
                spent += last;
            }
        }
    }
}
