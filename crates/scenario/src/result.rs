//! Creates results of a scenario.

use demeter_outcome::RunResult;

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
