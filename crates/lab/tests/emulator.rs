//! The agent on AMD's IBS, which our emulator has and a stock kernel offers. Outcomes only, never times. Without that emulator
//! the tests are ignored.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use demeter_lab::{Lab, Repetition};
use demeter_outcome::SystemResult;
use demeter_scenario::{Scenario, System};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let is_built = match lab() {
        Ok(_) => true,
        Err(why) => {
            eprintln!("skipped: {why}");
            false
        }
    };
    let tests: [(&str, fn()); 5] = [
        (
            "the_hot_set_is_found_by_samples_of_the_kernel",
            the_hot_set_is_found_by_samples_of_the_kernel,
        ),
        (
            "a_unit_that_loses_and_interrupts_without_need_does",
            a_unit_that_loses_and_interrupts_without_need_does,
        ),
        (
            "without_addresses_another_tracker_is_taken",
            without_addresses_another_tracker_is_taken,
        ),
        (
            "without_a_unit_another_tracker_is_taken",
            without_a_unit_another_tracker_is_taken,
        ),
        (
            "a_unit_that_falls_silent_is_replaced",
            a_unit_that_falls_silent_is_replaced,
        ),
    ];
    let trials = tests.map(|(name, test)| {
        let run = move || {
            test();
            Ok(())
        };
        Trial::test(name, run).with_ignored_flag(!is_built)
    });
    libtest_mimic::run(&Arguments::from_args(), trials.into()).exit();
}

/// The lab of this source tree with our own emulator.
fn lab() -> Result<Lab, demeter_lab::Error> {
    Lab::of_tree(&root())?.exact()
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

/// Runs the smallest scenario under the agent with further properties of the CPUs. Returns its result and its agent's log.
fn run(cpu_properties: &[&str]) -> (SystemResult, String) {
    let logs = tempfile::tempdir().unwrap();
    let lab = Lab {
        cpu_properties: cpu_properties.iter().map(|it| (*it).to_owned()).collect(),
        keep_logs: Some(logs.path().into()),
        ..lab().unwrap()
    };
    let mut scenario = Scenario::load(&root().join("scenarios/ci.toml")).unwrap();
    scenario.systems = vec![System::Demeter];
    let stop = AtomicBool::new(false);
    let once = Repetition::default();
    let run = demeter_lab::run(&scenario, once, &lab, &stop, &mut |_, _| {});
    let mut result = run.whole().unwrap_or_else(|e| panic!("{e}"));
    let log = fs::read_to_string(logs.path().join("ci-demeter-agent.log")).unwrap();
    let system = result.systems.remove(0);
    assert_eq!(system.verify_errors, Some(0), "{log}");
    (system, log)
}

/// Whether the hot set came to be in fast memory.
fn assert_moved(system: &SystemResult, log: &str) {
    let hot = system.hot_in_fast_final;
    assert!(hot >= Some(0.9), "{hot:?}\n{log}");
}

fn the_hot_set_is_found_by_samples_of_the_kernel() {
    let (system, log) = run(&[]);
    assert!(log.contains("tracker: perf"), "{log}");
    assert_moved(&system, &log);
}

fn a_unit_that_loses_and_interrupts_without_need_does() {
    let (system, log) = run(&["x-ibs-lose=50", "x-ibs-spurious=5"]);
    assert!(log.contains("tracker: perf"), "{log}");
    assert_moved(&system, &log);
}

fn without_addresses_another_tracker_is_taken() {
    let (system, log) = run(&["x-ibs-addresses=off"]);
    assert!(log.contains("gave no address"), "{log}");
    assert!(log.contains("tracker: lab"), "{log}");
    assert_moved(&system, &log);
}

fn without_a_unit_another_tracker_is_taken() {
    let (system, log) = run(&["ibs=off"]);
    assert!(log.contains("tracker: lab"), "{log}");
    assert_moved(&system, &log);
}

fn a_unit_that_falls_silent_is_replaced() {
    let (system, log) = run(&["x-ibs-silent-after=100"]);
    assert!(
        log.contains("tracker: perf") && log.contains("silent"),
        "{log}"
    );
    assert!(log.contains("tracker: lab"), "{log}");
    assert_moved(&system, &log);
}
