//! `demeter run --on sim`: from a scenario to a result file.

use std::path::{Path, PathBuf};
use std::process::{Command, Output};

use demeter_report::RunResult;

/// The smallest scenario that we ship, whose last table is `sim`, at a scale that takes no time.
fn scenario(folder: &Path) -> PathBuf {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
    let text = std::fs::read_to_string(shipped).unwrap();
    let path = folder.join("ci.toml");
    std::fs::write(&path, text + "scale_bits = 6\n").unwrap();
    path
}

fn demeter(args: &[&str], scenario: &Path) -> Output {
    Command::new(env!("CARGO_BIN_EXE_demeter"))
        .arg("run")
        .arg(scenario)
        .args(["--on", "sim"])
        .args(args)
        .output()
        .unwrap()
}

#[test]
fn a_scenario_of_the_lab_runs_on_the_simulator_the_same_each_time() {
    let folder = tempfile::tempdir().unwrap();
    let run = |file: &str| {
        let path = folder.path().join(file);
        let json = path.to_str().unwrap();
        let systems = ["--system", "none", "--system", "demeter"];
        let args = [&systems[..], &["--duration", "4", "--json", json]].concat();
        let output = demeter(&args, &scenario(folder.path()));
        assert!(output.status.success(), "{output:?}");
        RunResult::load(&path).unwrap()
    };
    let (one, two) = (run("one.json"), run("two.json"));
    assert_eq!(one, two);
    assert_eq!(one.on, "sim");
    let [none, demeter] = &one.systems[..] else {
        panic!("{} systems", one.systems.len());
    };
    assert_eq!((none.hot_in_fast_final, none.mgmt_cpu_s), (0.0, Some(0.0)));
    assert!(demeter.hot_in_fast_final > 0.9);
}

#[test]
fn what_has_no_model_is_refused_in_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let output = demeter(&["--system", "damon"], &scenario(folder.path()));
    assert!(!output.status.success());
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        said.contains("no model of damon") && said.contains("--on lab"),
        "{said}"
    );
    assert_eq!(said.trim().lines().count(), 1, "{said}");
}
