//! The agent on AMD's IBS, as the exact emulator has it and a stock kernel offers it. Outcomes only, never times.

use std::fs;
use std::path::Path;
use std::sync::atomic::AtomicBool;

use demeter_lab::{Lab, Repetition};
use demeter_outcome::SystemResult;
use demeter_scenario::{Scenario, System};

/// Runs the smallest scenario under the agent with further properties of the CPUs. Returns its result and its agent's log;
/// `None` with a word where the emulator is not built.
fn run(cpu_properties: &[&str]) -> Option<(SystemResult, String)> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let logs = tempfile::tempdir().unwrap();
    let lab = match Lab::of_tree(&root).unwrap().exact() {
        Ok(lab) => lab,
        Err(why) => {
            eprintln!("skipped: {why}");
            return None;
        }
    };
    let lab = Lab {
        cpu_properties: cpu_properties.iter().map(|it| (*it).to_owned()).collect(),
        keep_logs: Some(logs.path().into()),
        ..lab
    };
    let mut scenario = Scenario::load(&root.join("scenarios/ci.toml")).unwrap();
    scenario.systems = vec![System::Demeter];
    let stop = AtomicBool::new(false);
    let once = Repetition::default();
    let run = demeter_lab::run(&scenario, once, &lab, &stop, &mut |_, _| {});
    let mut result = run.whole().unwrap_or_else(|e| panic!("{e}"));
    let log = fs::read_to_string(logs.path().join("ci-demeter-agent.log")).unwrap();
    let system = result.systems.remove(0);
    assert_eq!(system.verify_errors, Some(0), "{log}");
    Some((system, log))
}

/// Whether the hot set came to be in fast memory.
fn assert_moved(system: &SystemResult, log: &str) {
    let hot = system.hot_in_fast_final;
    assert!(hot >= Some(0.9), "{hot:?}\n{log}");
}

#[test]
fn the_hot_set_is_found_by_samples_of_the_kernel() {
    let Some((system, log)) = run(&[]) else {
        return;
    };
    assert!(log.contains("tracker: perf"), "{log}");
    assert_moved(&system, &log);
}

#[test]
fn a_unit_that_loses_and_interrupts_without_need_does() {
    let Some((system, log)) = run(&["x-ibs-lose=50", "x-ibs-spurious=5"]) else {
        return;
    };
    assert!(log.contains("tracker: perf"), "{log}");
    assert_moved(&system, &log);
}

#[test]
fn without_addresses_another_tracker_is_taken() {
    let Some((system, log)) = run(&["x-ibs-addresses=off"]) else {
        return;
    };
    assert!(log.contains("gave no address"), "{log}");
    assert!(log.contains("tracker: lab"), "{log}");
    assert_moved(&system, &log);
}

#[test]
fn without_a_unit_another_tracker_is_taken() {
    let Some((system, log)) = run(&["ibs=off"]) else {
        return;
    };
    assert!(log.contains("tracker: lab"), "{log}");
    assert_moved(&system, &log);
}

#[test]
fn a_unit_that_falls_silent_is_replaced() {
    let Some((system, log)) = run(&["x-ibs-silent-after=100"]) else {
        return;
    };
    assert!(
        log.contains("tracker: perf") && log.contains("silent"),
        "{log}"
    );
    assert!(log.contains("tracker: lab"), "{log}");
    assert_moved(&system, &log);
}
