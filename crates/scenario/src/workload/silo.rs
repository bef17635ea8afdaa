//! silo: transactions on an in-memory store.

use serde::{Deserialize, Serialize};

use super::{Parameters, app, one};
use crate::fault::{at_least_one, refuse_if, within};

/// Parameters of silo.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct Silo {
    /// Memory of records and index, MiB.
    pub size_mib: u64,
    /// Idle memory that is touched first, MiB.
    #[serde(default)]
    pub cold_mib: u64,
    /// Threads.
    #[serde(default = "one")]
    pub threads: u32,
    /// Kind of transactions.
    pub mix: SiloMix,
    /// With `ycsb`: time after which other keys become popular, seconds.
    #[serde(default)]
    pub drift_s: Option<u64>,
    /// With `ycsb`: the exponent of popularity, 0.99 by default. With 0 all keys are equally popular, as in Silo's own
    /// YCSB.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub theta: Option<f64>,
}

/// Silo's transactions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
pub enum SiloMix {
    /// Reads and updates of single records by popularity.
    Ycsb,
    /// Orders that are inserted, and read while they are recent.
    Tpcc,
}

impl Parameters for Silo {
    fn size_mib(&self) -> u64 {
        self.size_mib
    }

    fn cold_mib(&self) -> u64 {
        self.cold_mib
    }

    fn check(&self, _duration_s: u64) -> Result<(), String> {
        if let Some(drift_s) = self.drift_s {
            at_least_one("workload.drift_s", drift_s)?;
            refuse_if(self.mix == SiloMix::Tpcc, || {
                "workload.drift_s: only mix = \"ycsb\" has it; orders move by themselves".into()
            })?;
        }
        if let Some(theta) = self.theta {
            within("workload.theta", theta, 0.0..=1.5)?;
            refuse_if(self.mix == SiloMix::Tpcc, || {
                "workload.theta: only mix = \"ycsb\" has it; recent orders are popular".into()
            })?;
        }
        app::check(self.size_mib, self.threads)
    }
}
