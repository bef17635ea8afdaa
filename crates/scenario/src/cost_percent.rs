//! Changed costs of the simulator, to see which results depend on them.

use serde::{Deserialize, Serialize};

use crate::fault::within;

/// A tenth and ten times a cost: more than any source is wrong by.
const PERCENT_MIN: u32 = 10;
const PERCENT_MAX: u32 = 1000;

/// Costs of the simulator in percent of the model's, to see which results depend on them: 200 doubles a cost. Each key stands
/// for all costs of its kind. Bandwidths and latencies have keys of their own, in `machine` and `sim`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct CostPercent {
    /// Latency that a loaded tier has beyond its idle latency.
    pub loaded_latency: u32,
    /// Copying the bytes of a page.
    pub copy: u32,
    /// Moving or collapsing a page, without the copy.
    pub migrate: u32,
    /// Flushes of TLBs, and interrupts to other CPUs for them.
    pub shootdown: u32,
    /// Page faults, exits to the hypervisor and their locks.
    pub fault: u32,
    /// Page walks.
    pub walk: u32,
    /// Records of the sampling unit, and their evaluation.
    pub sample: u32,
    /// Interrupts, timer ticks and context switches.
    pub interrupt: u32,
    /// DAMON's looks, regions and passes.
    pub damon: u32,
    /// Looking at pages: scans of page tables, reclaim, lists, lookups of places.
    pub scan: u32,
}

impl Default for CostPercent {
    fn default() -> Self {
        Self {
            loaded_latency: 100,
            copy: 100,
            migrate: 100,
            shootdown: 100,
            fault: 100,
            walk: 100,
            sample: 100,
            interrupt: 100,
            damon: 100,
            scan: 100,
        }
    }
}

impl CostPercent {
    pub(crate) fn is_default(&self) -> bool {
        *self == Self::default()
    }

    pub(crate) fn check(&self) -> Result<(), String> {
        for (key, percent) in [
            ("loaded_latency", self.loaded_latency),
            ("copy", self.copy),
            ("migrate", self.migrate),
            ("shootdown", self.shootdown),
            ("fault", self.fault),
            ("walk", self.walk),
            ("sample", self.sample),
            ("interrupt", self.interrupt),
            ("damon", self.damon),
            ("scan", self.scan),
        ] {
            let key = format!("sim.cost_percent.{key}");
            within(&key, percent, PERCENT_MIN..=PERCENT_MAX)?;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use crate::workload::tests::checked_with;

    #[test]
    fn a_cost_beyond_any_doubt_is_refused() {
        let with = |costs: &str| {
            let sim = format!("[sim.cost_percent]\n{costs}");
            checked_with("kind = \"btree\", size_mib = 80", &sim)
        };
        assert_eq!(with("copy = 50").unwrap().sim.cost_percent.copy, 50);
        let said = with("walk = 1001").unwrap_err();
        assert!(said.contains("sim.cost_percent.walk"), "{said}");
        assert!(with("walk = 0").is_err() && with("walks = 100").is_err());
    }
}
