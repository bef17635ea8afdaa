//! Compares the linear model of direct segments with the full simulation.

use std::collections::BTreeMap;
use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::atomic::AtomicBool;

use demeter_outcome::{Figure, SystemResult};
use demeter_scenario::Scenario;
use demeter_sim::linear::{Counters, Runs};
use demeter_sim::{RunLimits, run_all};

/// Maximum difference of the two.
const WITHIN: f64 = 0.1;

fn counters(system: &SystemResult) -> Counters {
    let work = ["compute", "walk", "cache", "fast", "slow"];
    let work_s: f64 = work.iter().map(|cause| system.cpu_s[*cause]).sum();
    Counters {
        time: work_s * 1e9,
        walks: system.counters["tlb_misses"] as f64,
        walk_time: system.counters["walk_ns"] as f64,
    }
}

#[test]
fn the_linear_model_agrees_with_the_full_one() {
    let scenario: Scenario = toml::from_str(
        r#"
        name = "linear"
        duration_s = 1
        systems = ["none"]
        [machine]
        vcpus = 1
        fast = { usable_mib = 20480, latency_ns = 85, bandwidth_gbps = 40 }
        slow = { usable_mib = 16, latency_ns = 85, bandwidth_gbps = 40 }
        [workload]
        kind = "gups"
        size_mib = 16384
        hot_mib = 8192
        hot_weight = 0.5
        [sim]
        cpu = "sandy-bridge"
        scale_bits = 6
        translation = { mode = "native" }
        [[vary]]
        workload = [
            { kind = "gups", size_mib = 16384, hot_mib = 8192, hot_weight = 0.5 },
            { kind = "zipf", size_mib = 16384, store_share = 0.1 },
        ]
        "sim.translation.mode" = ["native", "virtualized", "direct-segment", "vmm-direct", "guest-direct", "dual-direct"]
        "#,
    )
    .unwrap();
    scenario.check().unwrap();
    let stop = AtomicBool::new(false);
    let limits = RunLimits {
        workers: std::thread::available_parallelism().unwrap_or(NonZeroUsize::MIN),
        hours_max: 1.0,
        stop: &stop,
    };
    let result = run_all(&scenario, NonZeroU32::MIN, limits, &|_| ()).unwrap();
    let overhead = Figure::try_from("walk_overhead".to_owned()).unwrap();
    let mut apart = vec![];
    for workload in ["gups", "zipf"] {
        let cases = result.cases.iter().filter(|case| {
            case.settings
                .contains(&("workload".into(), workload.into()))
        });
        let modes: BTreeMap<&str, &SystemResult> = cases
            .map(|case| {
                let mode = case.settings.iter().find(|(key, _)| key.ends_with("mode"));
                (mode.unwrap().1.as_str(), &case.systems[0])
            })
            .collect();
        let runs = Runs {
            native: counters(modes["native"]),
            virtualized: counters(modes["virtualized"]),
            segment_share: 1.0,
            // The model's Sandy Bridge has 2.2 GHz.
            check_time: 0.455,
        };
        let predicted = runs.predict().unwrap();
        for (mode, predicted) in [
            ("vmm-direct", predicted.vmm_direct),
            ("guest-direct", predicted.guest_direct),
            ("direct-segment", predicted.direct_segment),
            ("dual-direct", predicted.dual_direct),
        ] {
            // If no walk remains, the simulation reports no overhead.
            let full = overhead.of(modes[mode]).unwrap_or(0.0);
            if (predicted - full).abs() > WITHIN * full {
                apart.push(format!(
                    "{workload} {mode}: {predicted:.4}, in full {full:.4}"
                ));
            }
        }
    }
    assert!(apart.is_empty(), "{apart:#?}");
}
