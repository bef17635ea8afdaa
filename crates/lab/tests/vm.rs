//! One real VM: a stock kernel boots, the agent moves the hot set, no data is lost. Outcomes
//! only, never times: this machine may be slow or shared.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use demeter_lab::Lab;
use demeter_lab::link::Report;
use demeter_report::{RunResult, SystemResult};
use demeter_scenario::{Scenario, System};

fn run(scenario: &str) -> RunResult {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let scenario = Scenario::load(&root.join("scenarios").join(scenario)).unwrap();
    // An emulated CPU needs optimised programs: `make test` has built them.
    let lab = Lab {
        programs: root.join("target/release"),
        ..Lab::from_env().unwrap()
    };
    let stop = AtomicBool::new(false);
    let run = demeter_lab::run(&scenario, &lab, &stop, &mut |system, report| {
        eprintln!("{system}: {report:?}");
    });
    run.whole().unwrap_or_else(|e| panic!("{e}"))
}

#[test]
fn memory_is_taken_given_and_taken_again_and_no_data_is_lost() {
    let result = run("ci-balloon.toml");
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
    let scenario = Scenario::load(&root.join("scenarios/ci-program.toml")).unwrap();
    let lab = Lab {
        programs: root.join("target/release"),
        ..Lab::from_env().unwrap()
    };
    let mut means = vec![];
    let stop = AtomicBool::new(false);
    let run = demeter_lab::run(&scenario, &lab, &stop, &mut |_, report| {
        if let Report::Done { programs, .. } = report {
            means.clone_from(programs);
        }
    });
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
    let result = run("ci.toml");
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
            system.mean_mops.is_some_and(|mops| mops > 0.0),
            "{}",
            system.name
        );
        assert!(!system.series.is_empty(), "{}", system.name);
    }
    let (none, demeter) = (of(System::None), of(System::Demeter));
    assert!(
        none.hot_in_fast_final < 0.5,
        "none: {}",
        none.hot_in_fast_final
    );
    assert_eq!(
        (none.bytes_promoted, none.bytes_demoted),
        (Some(0), Some(0))
    );
    assert!(
        demeter.hot_in_fast_final >= 0.9,
        "demeter: {}",
        demeter.hot_in_fast_final
    );
    assert!(demeter.bytes_promoted.is_some_and(|bytes| bytes > 0));
}
