//! Tests with a real VM: a stock kernel boots, the agent moves the hot set, no data is lost. They check outcomes, never
//! times, since the machine may be slow or shared.

use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;

use demeter_guest::recording::{Reader, replay};
use demeter_lab::link::VmMessage;
use demeter_lab::{Error, Lab, Repetition};
use demeter_outcome::{RunResult, SystemResult};
use demeter_scenario::{Scenario, Settings, System, Thp, Workload};

/// A shipped scenario.
fn shipped(scenario: &str) -> Scenario {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
    Scenario::load(&folder.join(scenario)).unwrap()
}

fn run(scenario: &Scenario, keep_logs: Option<PathBuf>) -> RunResult {
    attempt(scenario, keep_logs).unwrap_or_else(|e| panic!("{e}"))
}

fn attempt(scenario: &Scenario, keep_logs: Option<PathBuf>) -> Result<RunResult, Error> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let lab = Lab {
        keep_logs,
        ..Lab::of_tree(&root).unwrap()
    };
    let stop = AtomicBool::new(false);
    let run = demeter_lab::run(
        scenario,
        Repetition::default(),
        &lab,
        &stop,
        &mut |system, report| {
            eprintln!("{system}: {report:?}");
        },
    );
    run.whole()
}

#[test]
fn memory_is_taken_given_and_taken_again_and_no_data_is_lost() {
    let result = run(&shipped("ci-balloon.toml"), None);
    let [system] = &result.systems[..] else {
        panic!("{result:?}")
    };
    assert_eq!(system.verify_errors, Some(0));
    let provisioning = system
        .provisioning
        .as_ref()
        .expect("memory was provisioned");
    assert_eq!(provisioning.pool_violations, Some(0));
    let (Some(inflated), Some(returned)) = (
        provisioning.bytes_inflated,
        provisioning.host_bytes_returned,
    ) else {
        panic!("{provisioning:?}")
    };
    // Each node was booted with the memory of both: 280 MiB.
    assert!(inflated >= 250 << 20, "{inflated}");
    assert!(
        returned as f64 >= 0.99 * inflated as f64,
        "{returned} of {inflated}"
    );
    assert_eq!(provisioning.resizes.len(), 2);
    for resize in &provisioning.resizes {
        assert!(resize.took_s.is_some(), "{resize:?}");
    }
}

#[test]
fn real_programs_run_side_by_side_and_each_has_its_figure() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let scenario = shipped("ci-program.toml");
    let lab = Lab::of_tree(&root).unwrap();
    let mut means = vec![];
    let stop = AtomicBool::new(false);
    let run = demeter_lab::run(
        &scenario,
        Repetition::default(),
        &lab,
        &stop,
        &mut |_, report| {
            if let VmMessage::Done { programs, .. } = report {
                means.clone_from(programs);
            }
        },
    );
    let result = run.whole().unwrap_or_else(|e| panic!("{e}"));
    assert!(result.systems[0].cpu_s["workload_user"] > 0.0, "{result:?}");
    let figures: Vec<_> = means
        .iter()
        .map(|f| (f.name.as_str(), f.unit.as_str()))
        .collect();
    assert_eq!(figures, [("graph", "Mops"), ("sweep", "runs/s")]);
    assert!(
        means.iter().all(|f| f.value.is_some_and(|v| v > 0.0)),
        "{means:?}"
    );
}

#[test]
fn the_agent_moves_the_hot_set_and_loses_no_data() {
    let logs = tempfile::tempdir().unwrap();
    let result = run(&shipped("ci.toml"), Some(logs.path().into()));
    let of = |system: System| -> &SystemResult {
        let name = system.to_string();
        result
            .systems
            .iter()
            .find(|s| s.name == name)
            .expect("the system ran")
    };
    for system in &result.systems {
        assert_eq!(system.verify_errors, Some(0), "{}", system.name);
        assert!(
            system.mean().is_some_and(|mops| mops > 0.0),
            "{}",
            system.name
        );
        assert!(!system.series.is_empty(), "{}", system.name);
    }
    let (none, demeter) = (of(System::None), of(System::Demeter));
    assert!(
        none.hot_in_fast_final.is_some_and(|share| share < 0.5),
        "none: {:?}",
        none.hot_in_fast_final
    );
    assert_eq!(
        (none.bytes_promoted, none.bytes_demoted),
        (Some(0), Some(0))
    );
    assert!(
        demeter.hot_in_fast_final >= Some(0.9),
        "demeter: {:?}",
        demeter.hot_in_fast_final
    );
    assert!(demeter.bytes_promoted.is_some_and(|bytes| bytes > 0));

    // The agent's decisions do not depend on the machine that runs its engine.
    let mut recording = Reader::open(&logs.path().join("ci-demeter-agent.rec")).unwrap();
    let replayed = replay(&mut recording, &mut |_| ()).unwrap();
    assert_eq!(replayed.divergence, None);
    assert!(replayed.is_ended, "the agent was stopped");
    let promoted = Some(replayed.figures.promoted.0);
    assert!(promoted >= demeter.bytes_promoted, "{replayed:?}");
}

#[test]
fn every_vcpu_is_sampled_and_a_rival_runs_as_it_was_set_up() {
    let mut scenario = shipped("ci.toml");
    scenario.systems = vec![System::Linux, System::Demeter];
    scenario.machine.vcpus = 2;
    let Workload::Gups(gups) = &mut scenario.workload else {
        panic!("{:?}", scenario.workload)
    };
    gups.threads = 2;
    scenario.settings = vec![Settings {
        thp: Some(Thp::Never),
        scan_size_mib: Some(64),
        ..Settings::new(System::Linux, "small pages")
    }];
    let result = run(&scenario, None);
    let [linux, demeter] = &result.systems[..] else {
        panic!("{result:?}")
    };
    assert_eq!(linux.settings.as_deref(), Some("small pages"));
    // kswapd demotes from the first page that does not fit, so that promotions find free memory.
    assert!(
        linux.bytes_promoted > Some(0) && linux.counters["pgdemote_kswapd"] > 0,
        "{linux:?}"
    );
    assert_eq!(linux.counters["thp_fault_alloc"], 0, "{linux:?}");
    assert!(demeter.hot_in_fast_final >= Some(0.9), "{demeter:?}");
    for system in &result.systems {
        assert_eq!(system.verify_errors, Some(0), "{}", system.name);
        assert!(system.metadata.host_noise.is_some(), "{}", system.name);
    }
}

/// Tests histories in the host, then agents in the guests. The emulator's virtualization crashes some guests, under any
/// system: at most twice.
#[test]
fn two_guests_share_a_host_with_agents_and_without() {
    let mut by_history = shipped("nested-shares.toml");
    by_history.systems = vec![System::HHistory];
    // As small as possible, since nested emulation populates memory slowly.
    by_history.machine.fast.usable_mib = 288;
    by_history.machine.slow.usable_mib = 720;
    let by_balloons = shipped("nested-balloon-shares.toml");
    for mut scenario in [by_history, by_balloons] {
        scenario.duration_s = 10;
        let Workload::Gups(gups) = &mut scenario.workload else {
            panic!("{:?}", scenario.workload)
        };
        gups.size_mib = 240;
        for vm in &mut scenario.provision.as_mut().unwrap().vms {
            vm.hot_mib = Some(150);
        }
        let result = attempt(&scenario, None).or_else(|_| attempt(&scenario, None));
        let result = result.unwrap_or_else(|e| panic!("{e}"));
        let [system] = &result.systems[..] else {
            panic!("{:?}", result.systems)
        };
        assert_eq!(system.verify_errors, Some(0), "{}", system.name);
        assert!(system.counters["kvm_exits"] > 0, "{system:?}");
        let names: Vec<&str> = system.workloads.iter().map(|w| &w.name[..]).collect();
        assert_eq!(names, ["three", "one"]);
        let fast_bytes = system.workloads.iter().map(|guest| {
            let last = guest.series.last().unwrap();
            last.fast_bytes.unwrap() as f64
        });
        let fast_bytes: Vec<f64> = fast_bytes.collect();
        assert!(fast_bytes.iter().all(|&bytes| bytes > 0.0));
        // Balloons divide memory before guests populate it; histories take longer than this run. Untouched memory of
        // the larger guest has no backing, so the ratio is less than three.
        if system.name != "h-history" {
            let ratio = fast_bytes[0] / fast_bytes[1];
            assert!((2.0..3.3).contains(&ratio), "{ratio}");
        }
        // The total equals the sum of both guests.
        let sum: f64 = system
            .workloads
            .iter()
            .filter_map(|w| w.speed.as_ref()?.mean)
            .sum();
        assert!(
            (sum / system.mean().unwrap() - 1.0).abs() < 0.1,
            "{system:?}"
        );
    }
}

/// Takes at least two minutes for each system: `cargo test -p demeter-lab --test vm -- --ignored a_host`, after `make`.
#[test]
#[ignore = "nested emulation: minutes, see its comment"]
fn a_host_has_its_guest_run_the_workload_whoever_tiers() {
    let mut scenario = shipped("nested.toml");
    scenario.duration_s = 10;
    scenario.settings = vec![];
    let result = run(&scenario, None);
    assert_eq!(result.systems.len(), scenario.systems.len());
    for system in &result.systems {
        assert_eq!(system.verify_errors, Some(0), "{}", system.name);
        assert!(system.counters["kvm_exits"] > 0, "{system:?}");
        if system.name == "oracle" {
            assert!(system.hot_in_fast_final >= Some(0.99), "{system:?}");
        }
    }
}

/// Takes at least a minute: `cargo test -p demeter-lab --test vm -- --ignored tenants`, after `make`. The machine
/// should be idle: a slow VM accesses so little that its memory counts as unused.
#[test]
#[ignore = "a minute on a quiet machine, see its comment"]
fn tenants_hold_fast_memory_by_weight_and_a_guarantee_is_not_undercut() {
    let mut scenario = shipped("tenants.toml");
    scenario.systems = vec![System::Demeter];
    scenario.duration_s = 30;
    let result = run(&scenario, None);
    let [demeter] = &result.systems[..] else {
        panic!("{result:?}")
    };
    let held = |name: &str| {
        let tenant = demeter.workloads.iter().find(|w| w.name == name).unwrap();
        let last = tenant.series.last().unwrap();
        last.fast_bytes.unwrap() as f64 / f64::from(1 << 20)
    };
    let [light, guaranteed, heavy] = ["light", "guaranteed", "heavy"].map(held);
    let told = format!("{light} {guaranteed} {heavy} MiB");
    assert!(guaranteed >= 80.0, "{told}");
    assert!((2.85..=3.15).contains(&(heavy / light)), "{told}");
}
