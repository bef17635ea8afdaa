//! Applications that the simulator models.

use serde::{Deserialize, Serialize};

use super::{Parameters, THREADS_MAX, one};
use crate::fault::{refuse_if, within};

/// Smallest application, MiB; a smaller model has too few objects.
const SIZE_MIN_MIB: u64 = 16;

/// Parameters of an application; its data structures grow to fill the size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct App {
    /// Memory of all its data structures, MiB.
    pub size_mib: u64,
    /// Idle memory that is touched first and so takes the fast tier, MiB, such as input files in the page cache.
    #[serde(default)]
    pub cold_mib: u64,
    /// Threads.
    #[serde(default = "one")]
    pub threads: u32,
}

impl Parameters for App {
    fn size_mib(&self) -> u64 {
        self.size_mib
    }

    fn cold_mib(&self) -> u64 {
        self.cold_mib
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        check(self.size_mib, self.threads)
    }
}

/// Checks common to all applications.
pub(super) fn check(size_mib: u64, threads: u32) -> Result<(), String> {
    refuse_if(size_mib < SIZE_MIN_MIB, || {
        format!("workload.size_mib = {size_mib}: must be at least {SIZE_MIN_MIB}")
    })?;
    within("workload.threads", threads, 1..=THREADS_MAX)
}
