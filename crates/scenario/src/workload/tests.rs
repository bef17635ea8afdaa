//! Tests of every kind, as files spell it.

use crate::Scenario;

/// A scenario with this workload, if it is valid.
pub(crate) fn checked(workload: &str) -> Result<Scenario, String> {
    checked_with(workload, "")
}

/// A scenario with this workload and further tables, if it is valid.
pub(crate) fn checked_with(workload: &str, tables: &str) -> Result<Scenario, String> {
    let text = format!(
        "name = \"x\"\nduration_s = 9\nsystems = [\"none\"]\n\
         machine = {{ vcpus = 1, fast = {{ usable_mib = 100, latency_ns = 80, \
         bandwidth_gbps = 50 }}, slow = {{ usable_mib = 100, latency_ns = 250, \
         bandwidth_gbps = 20 }} }}\nworkload = {{ {workload} }}\n{tables}"
    );
    let scenario: Scenario = toml::from_str(&text).map_err(|e| e.message().to_owned())?;
    scenario.check().map_err(|e| e.to_string())?;
    Ok(scenario)
}

#[test]
fn every_kind_is_spelt_as_it_calls_itself() {
    for kind in [
        "sequential",
        "btree",
        "xsbench",
        "bwaves",
        "graph500",
        "pagerank",
        "liblinear",
    ] {
        let scenario = checked(&format!("kind = \"{kind}\", size_mib = 80, cold_mib = 20"));
        let scenario = scenario.unwrap();
        assert_eq!(scenario.workload.kind(), kind);
        assert_eq!(scenario.footprint_mib(), 100);
        assert!(!scenario.workload.is_real());
    }
    let silo = checked("kind = \"silo\", size_mib = 80, mix = \"ycsb\", drift_s = 3").unwrap();
    assert_eq!(silo.workload.kind(), "silo");
    let gups = "kind = \"gups\", size_mib = 80, hot_mib = 8, hot_weight = 0.9, scattered = true";
    let scattered = checked(&format!("{gups}, compute_ns = 4000")).unwrap();
    assert_eq!(
        scattered.workload.simulated_only(),
        Some("workload.scattered")
    );
    let odd = checked(&gups.replace("8,", "7,")).unwrap_err();
    assert!(odd.contains("workload.scattered: 7 MiB"), "{odd}");
    let trace = checked("kind = \"trace\", file = \"x.trace\"").unwrap();
    assert_eq!((trace.workload.kind(), trace.footprint_mib()), ("trace", 0));
}
