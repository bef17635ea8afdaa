//! Small cases of the scale suite: an agent's benefit at several sizes, and the absence of harm.
//!
//! Each takes seconds; `make test-long` runs the whole suite under all systems.

use std::path::Path;
use std::process::Command;

use demeter_outcome::{RunResult, SystemResult};

/// A case and its bounds.
struct Case {
    scenario: &'static str,
    duration_s: u64,
    expected: Expected,
}

/// Bounds under `demeter`: over the run, and over its last third.
enum Expected {
    /// At least these shares of the oracle.
    OfOracle(f64, f64),
    /// At least these multiples of the speed under `none`.
    OfNone(f64, f64),
    /// As fast as under `none`, with almost no moves.
    Still,
}

/// Maximum amount moved of memory with uniform accesses, MiB: one trial.
const STILL_MIB: u64 = 100;

use Expected::{OfNone, OfOracle, Still};

const CASES: [Case; 12] = [
    case("gups-256m", 30, OfOracle(0.85, 0.85)),
    case("gups-1g", 30, OfOracle(0.90, 0.95)),
    case("gups-4g", 30, OfOracle(0.90, 0.95)),
    case("gups-16g", 30, OfOracle(0.80, 0.90)),
    case("small-pages-4g", 30, OfOracle(0.90, 0.95)),
    case("small-pages-16g", 30, OfOracle(0.80, 0.90)),
    case("zipf-4g", 30, OfNone(1.2, 1.2)),
    case("zipf-64g", 30, OfNone(1.0, 1.05)),
    case("moves-30s", 60, OfNone(1.5, 1.5)),
    case("uniform-16g", 30, Still),
    case("sweep-16g", 30, Still),
    case("uniform-4g", 30, Still),
];

const fn case(scenario: &'static str, duration_s: u64, expected: Expected) -> Case {
    Case {
        scenario,
        duration_s,
        expected,
    }
}

/// A scenario that runs the case under only the necessary systems.
fn text(case: &Case) -> String {
    let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/scale");
    let file = folder.join(format!("{}.toml", case.scenario));
    let systems = match case.expected {
        OfOracle(..) => r#"["oracle", "demeter"]"#,
        OfNone(..) | Still => r#"["none", "demeter"]"#,
    };
    let duration_s = case.duration_s;
    format!("extends = {file:?}\nduration_s = {duration_s}\nsystems = {systems}\n")
}

/// The bound that a case misses, if any.
fn fault(case: &Case, yardstick: &SystemResult, ours: &SystemResult) -> Option<String> {
    let share = |of: fn(&SystemResult) -> Option<f64>| of(ours).unwrap() / of(yardstick).unwrap();
    let (mean, end) = (share(SystemResult::mean), share(SystemResult::steady));
    let moved_mib = ours.bytes_moved().unwrap() >> 20;
    let (least_mean, least_end) = match case.expected {
        OfOracle(mean, end) | OfNone(mean, end) => (mean, end),
        Still => (0.98, 0.99),
    };
    let moves = matches!(case.expected, Still) && moved_mib > STILL_MIB;
    (mean < least_mean || end < least_end || moves).then(|| {
        let name = case.scenario;
        format!(
            "{name}: {mean:.3}, {end:.3} of {}, {moved_mib} MiB moved",
            yardstick.name
        )
    })
}

#[test]
fn an_agent_gains_at_every_size_and_leaves_alone_what_it_cannot_help() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("result.json");
    let files = CASES.iter().map(|case| {
        let file = folder.path().join(format!("{}.toml", case.scenario));
        std::fs::write(&file, text(case)).unwrap();
        file
    });
    let output = Command::new(env!("CARGO_BIN_EXE_demeter"))
        .arg("run")
        .args(files)
        .args(["--on", "sim", "--json"])
        .arg(&json)
        .output()
        .unwrap();
    assert!(output.status.success(), "{output:?}");
    let result = RunResult::load(&json).unwrap();
    assert_eq!(result.cases.len(), CASES.len());
    let faults = CASES.iter().zip(&result.cases).filter_map(|(case, ran)| {
        let [yardstick, ours] = &ran.systems[..] else {
            panic!("{}: {} systems", case.scenario, ran.systems.len());
        };
        fault(case, yardstick, ours)
    });
    let faults: Vec<String> = faults.collect();
    assert!(faults.is_empty(), "{faults:#?}");
}
