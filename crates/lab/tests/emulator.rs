//! The agent on AMD's IBS and on Intel's PEBS, which our emulator has and a stock kernel offers. The clock is the model's,
//! so a busy host changes no outcome. Without that emulator the tests are ignored.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::{panic, thread};

use demeter_guest::recording::{Reader, RecordedEvent};
use demeter_lab::{Lab, Repetition};
use demeter_outcome::SystemResult;
use demeter_policy::engine::Input;
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Pid, VirtRange};
use demeter_scenario::{Clock, SamplingUnit, Scenario, System, Workload};
use libtest_mimic::{Arguments, Trial};

fn main() {
    let is_built = match lab() {
        Ok(_) => true,
        Err(why) => {
            eprintln!("skipped: {why}");
            false
        }
    };
    let tests: [(&str, fn()); 14] = [
        (
            "the_hot_set_is_found_by_samples_of_the_kernel",
            the_hot_set_is_found_by_samples_of_the_kernel,
        ),
        (
            "samples_lie_where_the_emulator_counted_loads",
            samples_lie_where_the_emulator_counted_loads,
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
            "the_hot_set_is_found_by_records_of_pebs",
            the_hot_set_is_found_by_records_of_pebs,
        ),
        (
            "a_cpu_with_an_auxiliary_event_records_loads",
            a_cpu_with_an_auxiliary_event_records_loads,
        ),
        (
            "records_lie_where_the_emulator_counted_loads",
            records_lie_where_the_emulator_counted_loads,
        ),
        (
            "without_adaptive_records_another_tracker_is_taken",
            without_adaptive_records_another_tracker_is_taken,
        ),
        (
            "counters_without_pebs_leave_another_tracker",
            counters_without_pebs_leave_another_tracker,
        ),
        (
            "pebs_that_falls_silent_is_replaced",
            pebs_that_falls_silent_is_replaced,
        ),
        (
            "a_run_by_the_models_clock_is_the_same_on_a_busy_host",
            a_run_by_the_models_clock_is_the_same_on_a_busy_host,
        ),
        (
            "a_run_on_pebs_is_the_same_on_a_busy_host",
            a_run_on_pebs_is_the_same_on_a_busy_host,
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

/// A run of the agent.
struct Run {
    system: SystemResult,
    /// The agent's log.
    log: String,
    /// The emulator's own counts of loads, by block.
    loads: BTreeMap<u64, u64>,
    /// The agent's recording, by process.
    processes: BTreeMap<Pid, Process>,
}

#[derive(Default)]
struct Process {
    /// All that was ever mapped.
    mapped: Vec<VirtRange>,
    samples: Vec<GuestVirtAddr>,
}

/// Runs the smallest scenario with further properties of the CPUs.
fn run(cpu_properties: &[&str]) -> Run {
    run_scenario(&ci(), cpu_properties)
}

/// Runs a scenario under the agent. Its clock is the model's: a busy host changes nothing.
fn run_scenario(scenario: &Scenario, cpu_properties: &[&str]) -> Run {
    let logs = tempfile::tempdir().unwrap();
    let lab = Lab {
        cpu_properties: cpu_properties.iter().map(|it| (*it).to_owned()).collect(),
        keep_logs: Some(logs.path().into()),
        ..lab().unwrap()
    };
    let stop = AtomicBool::new(false);
    let once = Repetition::default();
    let run = demeter_lab::run(scenario, once, &lab, &stop, &mut |_, _| {});
    let mut result = run.whole().unwrap_or_else(|e| panic!("{e}"));
    let kept = |name: &str| logs.path().join(format!("ci-demeter-{name}"));
    let log = fs::read_to_string(kept("agent.log")).unwrap();
    let system = result.systems.remove(0);
    assert_eq!(system.verify_errors, Some(0), "{log}");
    Run {
        system,
        log,
        loads: loads(&fs::read_to_string(kept("loads.csv")).unwrap()),
        processes: processes(&kept("agent.rec")),
    }
}

fn loads(csv: &str) -> BTreeMap<u64, u64> {
    let lines = csv.lines().skip(1).map(|line| {
        let (block, count) = line.split_once(',').unwrap();
        (block.parse().unwrap(), count.parse().unwrap())
    });
    lines.collect()
}

fn processes(recording: &Path) -> BTreeMap<Pid, Process> {
    let mut processes = BTreeMap::<Pid, Process>::new();
    let mut recording = Reader::open(recording).unwrap();
    while let Some(event) = recording.next_event().unwrap() {
        match event {
            RecordedEvent::Input(Input::Space { pid, vmas }) => {
                processes.entry(pid).or_default().mapped.extend(vmas);
            }
            RecordedEvent::Input(Input::Sample(sample)) => {
                let process = processes.entry(sample.pid).or_default();
                process.samples.push(sample.addr);
            }
            _ => {}
        }
    }
    processes
}

impl Run {
    fn says(&self, what: &str) {
        assert!(self.log.contains(what), "{what} is not in: {}", self.log);
    }

    /// The agent has the tracker that it keeps so long after the first line with `after`. The guest's clock does not depend
    /// on the host.
    fn settles(&self, after: &str, within_s: f64) {
        let at_s = |what: &str| {
            let lines = self.log.lines().filter(|line| line.contains(what));
            lines.filter_map(time_s).collect::<Vec<_>>()
        };
        let began_s = at_s(after).first().copied();
        // A new tracker looks after the programs anew.
        let settled_s = at_s("looking after ").last().copied();
        let (Some(began_s), Some(settled_s)) = (began_s, settled_s) else {
            panic!("no time of {after:?} or of the tracker: {}", self.log)
        };
        let took_s = settled_s - began_s;
        assert!(
            (0.0..=within_s).contains(&took_s),
            "{took_s} s: {}",
            self.log
        );
    }
}

/// Seconds since the hour at the start of a log's line: `2026-01-01T00:01:02.5Z  INFO ...`.
fn time_s(line: &str) -> Option<f64> {
    let (time, _) = line.split_once("Z ")?;
    let mut parts = time.rsplit(':');
    let (seconds, minutes): (f64, f64) = (parts.next()?.parse().ok()?, parts.next()?.parse().ok()?);
    Some(minutes * 60.0 + seconds)
}

fn ci() -> Scenario {
    let mut scenario = Scenario::load(&root().join("scenarios/ci.toml")).unwrap();
    scenario.systems = vec![System::Demeter];
    scenario.lab.clock = Clock::Model;
    // The limit counts the host's seconds.
    scenario.lab.timeout_s = 1200;
    scenario
}

/// The scenario `ci` on Intel's CPUs, as the paper samples: each 4,093rd load of 64 ns or more.
fn ci_on_pebs() -> Scenario {
    let mut scenario = ci();
    scenario.lab.unit = SamplingUnit::Pebs;
    scenario.agent.sample_period = Some(4093);
    scenario.agent.latency_threshold_ns = 64;
    scenario
}

/// Whether the hot set came to be in fast memory.
fn assert_moved(Run { system, log, .. }: &Run) {
    let hot = system.hot_in_fast_final;
    assert!(hot >= Some(0.9), "{hot:?}\n{log}");
}

fn the_hot_set_is_found_by_samples_of_the_kernel() {
    let run = run(&[]);
    run.says("tracker: perf");
    assert_moved(&run);
}

fn samples_lie_where_the_emulator_counted_loads() {
    assert_samples_lie_where_loads_were_counted(ci());
}

/// Two processes on one CPU: all samples are of their process and of user memory, and are spread over its array as its
/// loads are.
fn assert_samples_lie_where_loads_were_counted(mut scenario: Scenario) {
    let Workload::Gups(gups) = &mut scenario.workload else {
        panic!("{scenario:?}")
    };
    (gups.copies, gups.size_mib, gups.hot_mib) = (2, 90, 12);
    let run = run_scenario(&scenario, &[]);
    let programs: Vec<_> = run
        .processes
        .values()
        .filter_map(|it| Some((it, array(it)?)))
        .collect();
    assert_eq!(programs.len(), 2, "{}", run.log);
    for (own, other) in [(0, 1), (1, 0)] {
        let (process, array) = &programs[own];
        let (others, others_array) = &programs[other];
        assert!(
            !array.contains(others_array.start()),
            "they cannot be told apart"
        );
        for &at in &process.samples {
            assert!(at.0 < 1 << 47, "the kernel's: {at:?}");
            let is_mapped = process.mapped.iter().any(|it| it.contains(at));
            let is_others = others.mapped.iter().any(|it| it.contains(at));
            assert!(is_mapped || !is_others, "the other process's: {at:?}");
        }
        let (statistic, bound) = kolmogorov_smirnov(process, *array, &run.loads);
        eprintln!(
            "{} samples: {statistic:.4}, bound {bound:.4}",
            process.samples.len()
        );
        assert!(statistic <= bound, "{statistic} > {bound}");
    }
}

/// A program's array: its largest mapping.
fn array(process: &Process) -> Option<VirtRange> {
    let largest = process.mapped.iter().max_by_key(|it| it.len())?;
    (largest.len().0 >= 90 << 20).then_some(*largest)
}

/// The largest difference between the distributions of samples and of counted loads over the blocks of `array`. The bound is
/// that of two samples of one distribution at a level of 0.1 %.
fn kolmogorov_smirnov(
    process: &Process,
    array: VirtRange,
    loads: &BTreeMap<u64, u64>,
) -> (f64, f64) {
    /// The square root of `ln(2 / 0.001) / 2`.
    const AT_LEVEL: f64 = 1.95;
    /// Counts are kept modulo this.
    const BLOCKS: u64 = 65536;
    let block_of = |at: GuestVirtAddr| at.0 / BLOCK_SIZE;
    let mut sampled = BTreeMap::<u64, u64>::new();
    for &at in process.samples.iter().filter(|&&at| array.contains(at)) {
        *sampled.entry(block_of(at)).or_default() += 1;
    }
    // Other mappings share the first and the last block.
    let blocks = || block_of(array.start()) + 1..block_of(array.end());
    let sample = |block| sampled.get(&block).copied().unwrap_or(0) as f64;
    let load = |block| loads.get(&(block % BLOCKS)).copied().unwrap_or(0) as f64;
    let (samples, all_loads): (f64, f64) = (blocks().map(sample).sum(), blocks().map(load).sum());
    assert!(samples >= 500.0, "{samples} samples");
    let (mut below, mut statistic) = (0.0, 0.0f64);
    for block in blocks() {
        below += sample(block) / samples - load(block) / all_loads;
        statistic = statistic.max(below.abs());
    }
    let bound = AT_LEVEL * (1.0 / samples + 1.0 / all_loads).sqrt();
    (statistic, bound)
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
    run.settles("", 10.0);
    assert_moved(&run);
}

fn without_a_unit_another_tracker_is_taken() {
    let run = run(&["ibs=off"]);
    run.says("tracker: lab");
    run.settles("", 10.0);
    assert_moved(&run);
}

fn a_unit_that_falls_silent_is_replaced() {
    // The agent's test of the unit takes some thousand samples, and each second of the program a thousand.
    let run = run(&["x-ibs-silent-after=10000"]);
    run.says("tracker: perf");
    run.says("silent");
    run.says("tracker: lab");
    // The silence is reported when it has lasted 3 s and an epoch.
    run.settles("silent:", 6.0);
    assert_moved(&run);
}

fn the_hot_set_is_found_by_records_of_pebs() {
    let run = run_scenario(&ci_on_pebs(), &[]);
    run.says("tracker: perf");
    assert_moved(&run);
}

/// Sapphire Rapids' model. Its kernel wants another event as the leader of the group.
fn a_cpu_with_an_auxiliary_event_records_loads() {
    let run = run_scenario(&ci_on_pebs(), &["model=143"]);
    run.says("tracker: perf");
    assert_moved(&run);
}

/// The kernel drains records of one process before the next one runs.
fn records_lie_where_the_emulator_counted_loads() {
    assert_samples_lie_where_loads_were_counted(ci_on_pebs());
}

/// As in guests of KVM since Linux 6.9.
fn without_adaptive_records_another_tracker_is_taken() {
    let run = run_scenario(&ci_on_pebs(), &["x-pebs-adaptive=off"]);
    run.says("gave no address");
    run.says("tracker: lab");
    run.settles("", 10.0);
    assert_moved(&run);
}

/// As in guests with a mediated virtual PMU.
fn counters_without_pebs_leave_another_tracker() {
    let run = run_scenario(&ci_on_pebs(), &["x-pebs-ds=off"]);
    run.says("tracker: lab");
    run.settles("", 10.0);
    assert_moved(&run);
}

fn pebs_that_falls_silent_is_replaced() {
    let run = run_scenario(&ci_on_pebs(), &["x-pebs-silent-after=1000"]);
    run.says("tracker: perf");
    run.says("silent");
    run.says("tracker: lab");
    run.settles("silent:", 6.0);
    assert_moved(&run);
}

fn a_run_by_the_models_clock_is_the_same_on_a_busy_host() {
    assert_the_same_on_a_busy_host(&ci());
}

fn a_run_on_pebs_is_the_same_on_a_busy_host() {
    assert_the_same_on_a_busy_host(&ci_on_pebs());
}

/// A busy core each: with the host's clock the guest would be half as fast.
fn assert_the_same_on_a_busy_host(scenario: &Scenario) {
    let quiet = run_scenario(scenario, &[]).system;
    let stop = AtomicBool::new(false);
    let loaded = thread::scope(|scope| {
        for _ in 0..thread::available_parallelism().map_or(1, |it| it.get()) {
            scope.spawn(|| {
                while !stop.load(Ordering::Relaxed) {
                    std::hint::spin_loop();
                }
            });
        }
        let run = panic::catch_unwind(|| run_scenario(scenario, &[]).system);
        stop.store(true, Ordering::Relaxed);
        run.unwrap_or_else(|panic| panic::resume_unwind(panic))
    });
    // All of it: speed in each second, CPU time, counters of the kernel.
    assert_eq!(quiet, loaded);
}
