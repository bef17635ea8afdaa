//! The time that is lost while a pair of blocks is not exchanged, and whether it has reached the cost of the exchange.

use super::Rule;
use super::unit::Unit;
use crate::significance::CERTAINTY;
use crate::{Level, Spread};

impl Rule {
    /// The extra cost of an event in memory below a tier, of which there are `bytes`, compared with that tier, seconds.
    pub(super) fn extra_s(&self, level: Level, spread: &Spread, bytes: u64) -> f64 {
        let extra = |slower: Level| {
            let part = spread.bytes.get(slower).0 as f64 / bytes.max(1) as f64;
            part * (self.load.event_s.get(slower) - self.load.event_s.get(level))
        };
        level.slower().map(extra).sum()
    }

    /// The loss of a pair over a window that chance does not explain, seconds; zero unless it recurs.
    pub(super) fn certain_loss_s(&self, window: usize, hot: &Unit<'_>, cold: &Unit<'_>) -> f64 {
        let (of_hot, hot_variance) = hot.events_by(hot.estimate, window, hot.bytes);
        let (of_cold, cold_variance) = cold.events_by(cold.estimate, window, hot.bytes);
        let (difference, variance) = (of_hot - of_cold, hot_variance + cold_variance);
        let certain = difference - CERTAINTY * variance.sqrt();
        match certain > 0.0 && recurs(window, hot, Some(cold), (difference, variance)) {
            true => certain * hot.event_s,
            false => 0.0,
        }
    }

    /// Whether the loss of a pair over a window has reached the cost of its exchange, and recurs in each shorter window.
    pub(super) fn pays(&self, window: usize, hot: &Unit<'_>, cold: Option<&Unit<'_>>) -> bool {
        let bytes = hot.bytes;
        let demotion_s = cold.map_or(0.0, |_| self.demotion_s(bytes));
        self.reaches(window, hot, cold, self.promotion_s(bytes) + demotion_s)
    }

    /// Whether the loss of a unit over a window, less that of its partner, has reached a cost, and recurs in each shorter
    /// window.
    pub(super) fn reaches(
        &self,
        window: usize,
        hot: &Unit<'_>,
        cold: Option<&Unit<'_>>,
        cost_s: f64,
    ) -> bool {
        let bytes = hot.bytes;
        let (of_hot, hot_variance) = hot.events_by(hot.estimate, window, bytes);
        let (of_cold, cold_variance) = cold.map_or((0.0, 0.0), |cold| {
            cold.events_by(cold.estimate, window, bytes)
        });
        let difference = of_hot - of_cold;
        let enough = of_cold + cost_s / hot.event_s;
        // Square roots of counts differ by chance by the same, however few they are.
        let chance = CERTAINTY
            * root_deviation(of_hot, hot_variance).hypot(root_deviation(enough, cold_variance));
        let reaches = hot.event_s > 0.0 && of_hot.sqrt() - enough.sqrt() > chance;
        reaches
            && recurs(
                window,
                hot,
                cold,
                (difference, hot_variance + cold_variance),
            )
    }
}

/// Whether each shorter window shows the difference of a pair, within chance. `difference` is that of its events over
/// the window, with its variance.
fn recurs(
    window: usize,
    hot: &Unit<'_>,
    cold: Option<&Unit<'_>>,
    (difference, variance): (f64, f64),
) -> bool {
    let hot_estimates = hot.shorter(window);
    let cold = cold.map(|cold| (cold, cold.shorter(window)));
    (0..window).all(|shorter| {
        let part = hot.span_s(shorter) / hot.span_s(window).max(f64::MIN_POSITIVE);
        let (of_hot, hot_variance) = hot.events_by(hot_estimates[shorter], shorter, hot.bytes);
        let (of_cold, cold_variance) = cold.map_or((0.0, 0.0), |(cold, estimates)| {
            cold.events_by(estimates[shorter], shorter, hot.bytes)
        });
        let chance = CERTAINTY * (variance * part + hot_variance + cold_variance).sqrt();
        of_hot - of_cold >= difference * part - chance
    })
}

/// The standard deviation of the square root of a count with such a variance.
fn root_deviation(count: f64, variance: f64) -> f64 {
    (variance / (4.0 * count).max(f64::MIN_POSITIVE)).sqrt()
}
