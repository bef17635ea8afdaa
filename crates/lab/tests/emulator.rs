//! The agent on AMD's IBS, which our emulator has and a stock kernel offers. Outcomes only, never times. Without that emulator
//! the tests are ignored.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{panic, thread};

use demeter_lab::{Lab, Repetition};
use demeter_outcome::SystemResult;
use demeter_scenario::{Clock, Scenario, System};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let is_built = match lab() {
        Ok(_) => true,
        Err(why) => {
            eprintln!("skipped: {why}");
            false
        }
    };
    let tests: [(&str, fn()); 6] = [
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
        (
            "a_run_by_the_models_clock_is_the_same_on_a_busy_host",
            a_run_by_the_models_clock_is_the_same_on_a_busy_host,
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

/// A run of the agent in the smallest scenario.
struct Run {
    system: SystemResult,
    /// The agent's log.
    log: String,
}

/// Runs the smallest scenario under the agent with further properties of the CPUs. Its clock is the model's: a busy host
/// changes nothing.
fn run(cpu_properties: &[&str]) -> Run {
    let logs = tempfile::tempdir().unwrap();
    let lab = Lab {
        cpu_properties: cpu_properties.iter().map(|it| (*it).to_owned()).collect(),
        keep_logs: Some(logs.path().into()),
        ..lab().unwrap()
    };
    let mut scenario = ci();
    scenario.systems = vec![System::Demeter];
    let stop = AtomicBool::new(false);
    let once = Repetition::default();
    let run = demeter_lab::run(&scenario, once, &lab, &stop, &mut |_, _| {});
    let mut result = run.whole().unwrap_or_else(|e| panic!("{e}"));
    let log = fs::read_to_string(logs.path().join("ci-demeter-agent.log")).unwrap();
    let system = result.systems.remove(0);
    assert_eq!(system.verify_errors, Some(0), "{log}");
    Run { system, log }
}

impl Run {
    fn says(&self, what: &str) {
        assert!(self.log.contains(what), "{what} is not in: {}", self.log);
    }
}

fn ci() -> Scenario {
    let mut scenario = Scenario::load(&root().join("scenarios/ci.toml")).unwrap();
    scenario.lab.clock = Clock::Model;
    // The limit counts the host's seconds.
    scenario.lab.timeout_s = 1200;
    scenario
}

/// Whether the hot set came to be in fast memory.
fn assert_moved(Run { system, log }: &Run) {
    let hot = system.hot_in_fast_final;
    assert!(hot >= Some(0.9), "{hot:?}\n{log}");
}

fn the_hot_set_is_found_by_samples_of_the_kernel() {
    let run = run(&[]);
    run.says("tracker: perf");
    assert_moved(&run);
}

fn a_unit_that_loses_and_interrupts_without_need_does() {
    let run = run(&["x-ibs-lose=50", "x-ibs-spurious=5"]);
    run.says("tracker: perf");
    assert_moved(&run);
}

fn without_addresses_another_tracker_is_taken() {
    let run = run(&["x-ibs-addresses=off"]);
    run.says("gave no address");
    run.says("tracker: lab");
    assert_moved(&run);
}

fn without_a_unit_another_tracker_is_taken() {
    let run = run(&["ibs=off"]);
    run.says("tracker: lab");
    assert_moved(&run);
}

fn a_unit_that_falls_silent_is_replaced() {
    let run = run(&["x-ibs-silent-after=100"]);
    run.says("tracker: perf");
    run.says("silent");
    run.says("tracker: lab");
    assert_moved(&run);
}

/// A busy core each: with the host's clock the guest would be half as fast.
fn a_run_by_the_models_clock_is_the_same_on_a_busy_host() {
    let quiet = run(&[]).system;
    let stop = AtomicBool::new(false);
    let loaded = thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |it| it.get()) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let run = panic::catch_unwind(|| run(&[]).system);
        stop.store(true, Ordering::Relaxed);
        run.unwrap_or_else(|panic| panic::resume_unwind(panic))
    });
    // All of it: speed in each second, CPU time, counters of the kernel.
    assert_eq!(quiet, loaded);
}
