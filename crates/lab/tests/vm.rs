//! One real VM: a stock kernel boots, the agent moves the hot set, no data is lost. Outcomes
//! only, never times: this machine may be slow or shared.

use std::path::Path;
use std::sync::atomic::AtomicBool;

use demeter_lab::Lab;
use demeter_report::SystemResult;
use demeter_scenario::{Scenario, System};

#[test]
fn the_agent_moves_the_hot_set_and_loses_no_data() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let scenario = Scenario::load(&root.join("scenarios/ci.toml")).unwrap();
    // An emulated CPU needs optimised programs: `make test` has built them.
    let lab = Lab {
        programs: root.join("target/release"),
        ..Lab::from_env().unwrap()
    };
    let run = demeter_lab::run(
        &scenario,
        &lab,
        &AtomicBool::new(false),
        &mut |system, report| {
            eprintln!("{system}: {report:?}");
        },
    );
    let result = run.whole().unwrap_or_else(|e| panic!("{e}"));
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
