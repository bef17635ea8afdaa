//! zipf: loads and stores of pages with Zipf popularity.

use serde::{Deserialize, Serialize};

use super::{COMPUTE_MAX_NS, Parameters, app, one};
use crate::fault::within;

/// Parameters of zipf.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Zipf {
    /// Memory that is accessed, MiB.
    pub size_mib: u64,
    /// Idle memory that is touched first, MiB.
    #[serde(default)]
    pub cold_mib: u64,
    /// Threads.
    #[serde(default = "one")]
    pub threads: u32,
    /// The exponent.
    #[serde(default = "default_theta")]
    pub theta: f64,
    /// Share of the accesses that are stores, 0 to 1.
    #[serde(default)]
    pub store_share: f64,
    /// Whether an operation accesses a whole page, line by line, instead of a word.
    #[serde(default)]
    pub whole_pages: bool,
    /// Computation between two operations, nanoseconds, as in gups.
    #[serde(default)]
    pub compute_ns: u64,
}

fn default_theta() -> f64 {
    0.99
}

impl Parameters for Zipf {
    fn size_mib(&self) -> u64 {
        self.size_mib
    }

    fn cold_mib(&self) -> u64 {
        self.cold_mib
    }

    fn tells_hot_set(&self) -> bool {
        false
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        within("workload.theta", self.theta, 0.0..=1.5)?;
        within("workload.store_share", self.store_share, 0.0..=1.0)?;
        within("workload.compute_ns", self.compute_ns, 0..=COMPUTE_MAX_NS)?;
        app::check(self.size_mib, self.threads)
    }
}
