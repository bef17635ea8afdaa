//! The scale at which a scenario takes some seconds.

use demeter_scenario::Scenario;

use super::cpus::cores_of;
use super::vms_of;
use crate::error::SimError;
use crate::workload::accesses_per_operation;

/// Target number of simulated accesses if the scenario sets no scale; some seconds of computation.
const ACCESSES_WANTED: u64 = 1 << 25;

/// Assumed time between two accesses of a thread, to choose the scale.
const ACCESS_NS: u64 = 100;

/// Largest automatic scale: a 2 MiB block keeps 8 pages.
const SCALE_MAX: u32 = 6;

/// The scale at which a scenario takes some seconds.
pub(super) fn scale_for(scenario: &Scenario) -> Result<u32, SimError> {
    let cores = u64::from(cores_of(scenario));
    let mut accesses = scenario.duration_s * 1_000_000_000 / ACCESS_NS * cores;
    if let Some(operations) = scenario.sim.operations {
        let vms = scenario.vms();
        let each = vms
            .iter()
            .map(|(_, vm)| accesses_per_operation(&vm.workload));
        let each = each.collect::<Result<Vec<u64>, _>>();
        let each = each.map_err(|e| SimError::Workload(e.to_string()))?;
        let all = operations.saturating_mul(vms_of(scenario).into());
        accesses = accesses.min(all.saturating_mul(each.into_iter().max().unwrap_or(1)));
    }
    let scale = (0..SCALE_MAX).find(|k| accesses >> k <= ACCESSES_WANTED);
    Ok(scale.unwrap_or(SCALE_MAX))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_scale_follows_from_the_work_when_that_is_fixed() {
        let scale = |operations: &str| {
            let text = format!(
                "name = \"x\"\nduration_s = 600\nsystems = []\n\
                 machine = {{ vcpus = 4, fast = {{ usable_mib = 100, latency_ns = 80, \
                 bandwidth_gbps = 50 }}, slow = {{ usable_mib = 100, latency_ns = 250, \
                 bandwidth_gbps = 20 }} }}\n\
                 workload = {{ kind = \"silo\", size_mib = 80, mix = \"tpcc\" }}\n\
                 [sim]\n{operations}"
            );
            scale_for(&toml::from_str(&text).unwrap()).unwrap()
        };
        assert_eq!(scale(""), SCALE_MAX);
        // A transaction makes about a hundred accesses.
        assert_eq!(scale("operations = 100_000"), 0);
        let few = scale("operations = 2_000_000");
        assert!((1..SCALE_MAX).contains(&few), "{few}");
    }
}
