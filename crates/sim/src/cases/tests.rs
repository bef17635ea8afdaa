use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;

use demeter_outcome::Repeats;

use super::*;

fn scenario(sim: &str) -> Scenario {
    let text = format!(
        r#"
        name = "test"
        duration_s = 2
        systems = ["none", "linux"]
        machine = {{ vcpus = 1, fast = {{ usable_mib = 32, latency_ns = 80, bandwidth_gbps = 50 }},
                     slow = {{ usable_mib = 128, latency_ns = 250, bandwidth_gbps = 20 }} }}
        workload = {{ kind = "gups", size_mib = 128, hot_mib = 16, hot_weight = 0.9, reverse = true }}
        {sim}
        "#
    );
    let scenario: Scenario = toml::from_str(&text).unwrap();
    scenario.check().unwrap();
    scenario
}

fn result_of(scenario: &Scenario, repeats: u32, workers: usize) -> RunResult {
    let stop = AtomicBool::new(false);
    let limits = RunLimits {
        workers: NonZeroUsize::new(workers).unwrap(),
        hours_max: 1.0,
        stop: &stop,
    };
    let repeats = NonZeroU32::new(repeats).unwrap();
    run_all(scenario, repeats, limits, &|_| ()).unwrap()
}

const CASES: &str = r#"
    sim = { scale_bits = 6 }
    [[vary]]
    "sim.vms" = [1, 2]
    [[vary]]
    duration_s = [1]
    [[published]]
    figure = "mean_mops"
    system = "none"
    over = "linux"
    case = { "sim.vms" = "2" }
    value = 0.5
    within = 0.2
    source = "a paper"
    [[published]]
    figure = "mean_mops"
    system = "demeter"
    case = { "sim.vms" = "1" }
    value = 7.0
    within = 0.2
    source = "a paper"
"#;

#[test]
fn what_comes_out_does_not_depend_on_how_many_run_at_a_time() {
    let scenario = scenario(CASES);
    let (one, three) = (result_of(&scenario, 2, 1), result_of(&scenario, 2, 3));
    let hashes = |result: &RunResult| -> Vec<u64> {
        let systems = result.cases.iter().flat_map(|case| &case.systems);
        systems
            .map(|s| s.metadata.event_log_hash.unwrap())
            .collect()
    };
    assert_eq!(hashes(&one), hashes(&three));
    assert_eq!(one, three);
}

#[test]
fn cases_come_in_order_with_what_was_published_about_them() {
    let result = result_of(&scenario(CASES), 1, 2);
    assert!(result.systems.is_empty());
    result.check().unwrap();
    let cases: Vec<_> = result
        .cases
        .iter()
        .map(|case| {
            let (key, value) = &case.settings[0];
            (case.group, format!("{key}={value}"), case.systems.len())
        })
        .collect();
    let case = |group, settings: &str| (group, settings.to_string(), 2);
    assert_eq!(
        cases,
        [
            case(0, "sim.vms=1"),
            case(0, "sim.vms=2"),
            case(1, "duration_s=1")
        ]
    );
    assert_eq!(result.cases[2].systems[0].series.len(), 1);
    // In the third case, Linux has no time to start tiering.
    for case in &result.cases[..2] {
        assert_eq!(case.systems[0].mgmt_cpu_s, Some(0.0));
        assert!(case.systems[1].mgmt_cpu_s > Some(0.0));
    }
    let two = &result.cases[1].systems;
    let ratio = two[0].mean().unwrap() / two[1].mean().unwrap();
    assert_eq!(result.published[0].ours, Some(ratio));
    // This system was not run.
    assert_eq!(result.published[1].ours, None);
}

#[test]
fn without_cases_there_are_systems() {
    let result = result_of(&scenario("sim = { scale_bits = 6 }"), 3, 2);
    assert!(result.cases.is_empty());
    let names: Vec<_> = result.systems.iter().map(|s| s.name.as_str()).collect();
    assert_eq!(names, ["none", "linux"]);
    for system in &result.systems {
        let Repeats { runs, min, max } = system.repeats.unwrap();
        let mean = system.mean().unwrap();
        assert!(runs == 3 && min < max, "{min} {max}");
        assert!((min..=max).contains(&mean), "{min} {mean} {max}");
    }
}

#[test]
fn a_system_runs_under_each_of_its_settings_and_the_best_is_shown() {
    let text = r#"
        sim = { scale_bits = 6 }
        [[settings]]
        system = "linux"
        name = "large watermarks"
        watermark_scale_factor = 1000
        [[settings]]
        system = "linux"
        name = "as it is"
    "#;
    let found = result_of(&scenario(text), 2, 2);
    let [none, linux] = &found.systems[..] else {
        panic!("{} systems", found.systems.len());
    };
    assert_eq!((&none.settings, none.other_settings.len()), (&None, 0));
    let [other] = &linux.other_settings[..] else {
        panic!("{} other settings", linux.other_settings.len());
    };
    let mut names = [linux, other].map(|s| s.settings.clone().unwrap());
    names.sort_unstable();
    assert_eq!(names, ["as it is", "large watermarks"]);
    // The settings make a difference.
    assert!(linux.mean() > other.mean());
    assert_eq!(linux.repeats.unwrap().runs, 2);
}
