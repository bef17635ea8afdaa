//! memlat: a random pointer chase.

use serde::{Deserialize, Serialize};

use super::Parameters;
use crate::fault::at_least_one;

/// Parameters of memlat.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Memlat {
    /// Size of the region, MiB.
    pub size_mib: u64,
    /// Idle memory that is touched first and so takes the fast tier, MiB.
    pub cold_mib: u64,
}

impl Parameters for Memlat {
    fn size_mib(&self) -> u64 {
        self.size_mib
    }

    fn cold_mib(&self) -> u64 {
        self.cold_mib
    }

    fn is_real(&self) -> bool {
        true
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        at_least_one("workload.size_mib", self.size_mib)
    }
}
