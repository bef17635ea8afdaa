//! The frame of a result.

use demeter_outcome::RunResult;

use crate::Scenario;

impl Scenario {
    /// What a result says of the scenario, run on `lab`, `sim` or `here`: all but what was measured.
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
