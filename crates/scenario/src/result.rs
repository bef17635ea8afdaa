//! Creates results of a scenario.

use demeter_outcome::{Estimate, EstimatePoint, RunResult};
use demeter_policy::ByteCount;
use demeter_policy::benefit::{Benefit, BenefitPoint};

use crate::Scenario;

impl Scenario {
    /// A result of the scenario on `lab`, `sim` or `here`, without measurements.
    pub fn empty_result(&self, on: &str) -> RunResult {
        RunResult {
            scenario: self.name.clone(),
            on: on.into(),
            seed: self.seed,
            duration_s: self.duration_s,
            shift_at_s: self.shift_at_s(),
            ..RunResult::default()
        }
    }
}

/// An agent's estimate of the benefit of fast memory, in a VM that has `fast` of it.
pub fn estimate(fast: ByteCount, benefit: &Benefit) -> Estimate {
    let point = |point: &BenefitPoint| {
        let slowdown = benefit.slowdown(point.fast);
        EstimatePoint {
            fast_bytes: point.fast.0,
            slowdown_min: slowdown.min,
            slowdown_max: slowdown.max,
        }
    };
    Estimate {
        fast_bytes: fast.0,
        points: benefit.points().iter().map(point).collect(),
    }
}
