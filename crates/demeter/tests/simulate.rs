//! Tests of `demeter run --on sim`: from a scenario to a result file.

use std::io::{BufRead, BufReader};
use std::path::{Path, PathBuf};
use std::process::{Command, Output, Stdio};

use demeter_outcome::RunResult;

/// The smallest shipped scenario, at a scale that takes no time.
fn scenario(folder: &Path) -> PathBuf {
    scaled(folder, 6)
}

fn scaled(folder: &Path, bits: u32) -> PathBuf {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
    let path = folder.join("ci.toml");
    let text = format!("extends = {shipped:?}\nsim.scale_bits = {bits}\n");
    std::fs::write(&path, text).unwrap();
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
    assert_eq!(
        (none.hot_in_fast_final, none.mgmt_cpu_s),
        (Some(0.0), Some(0.0))
    );
    assert!(demeter.hot_in_fast_final > Some(0.9));
}

#[test]
fn tenants_are_for_the_lab() {
    let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/tenants.toml");
    let output = demeter(&[], &shipped);
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(
        !output.status.success() && said.lines().count() == 1,
        "{said}"
    );
    assert!(
        said.contains("workload.program.cgroup") && said.contains("--on lab"),
        "{said}"
    );
}

#[test]
fn seeds_are_repeated_and_cases_are_run() {
    let folder = tempfile::tempdir().unwrap();
    let path = scenario(folder.path());
    let text = std::fs::read_to_string(&path).unwrap();
    std::fs::write(&path, text + "[[vary]]\n\"sim.vms\" = [1, 2]\n").unwrap();
    let json = folder.path().join("result.json");
    let file = json.to_str().unwrap();
    let args = ["--system", "none", "--duration", "4", "--repeat", "3"];
    let output = demeter(&[&args[..], &["--json", file]].concat(), &path);
    assert!(output.status.success(), "{output:?}");
    let said = String::from_utf8(output.stderr).unwrap();
    assert!(said.contains("6/6  sim.vms=2 none"), "{said}");
    let result = RunResult::load(&json).unwrap();
    assert_eq!((result.systems.len(), result.cases.len()), (0, 2));
    assert!(
        result
            .cases
            .iter()
            .all(|case| case.systems[0].repeats.unwrap().runs == 3)
    );

    let sweep = Command::new(env!("CARGO_BIN_EXE_demeter"))
        .arg("sweep")
        .args([&path])
        .args(["--set", "seed=1,2"])
        .output()
        .unwrap();
    let said = String::from_utf8(sweep.stderr).unwrap();
    assert!(
        !sweep.status.success() && said.contains("ci.toml --on sim"),
        "{said}"
    );
}

#[test]
fn a_sweep_prints_a_table_and_writes_csv_where_it_is_asked_to() {
    let folder = tempfile::tempdir().unwrap();
    let csv = folder.path().join("runs.csv");
    let sweep = Command::new(env!("CARGO_BIN_EXE_demeter"))
        .arg("sweep")
        .arg(scenario(folder.path()))
        .args(["--set", "duration_s=4,5", "--system", "none", "--csv"])
        .arg(&csv)
        .output()
        .unwrap();
    let said = String::from_utf8(sweep.stdout).unwrap();
    assert!(
        sweep.status.success() && said.contains("\nduration s  system"),
        "{said}"
    );
    assert_eq!(std::fs::read_to_string(csv).unwrap().lines().count(), 3);
}

#[test]
fn ctrl_c_ends_a_long_run_and_leaves_nothing() {
    let folder = tempfile::tempdir().unwrap();
    let json = folder.path().join("result.json");
    let mut running = Command::new(env!("CARGO_BIN_EXE_demeter"))
        .arg("run")
        .arg(scaled(folder.path(), 0))
        .args(["--on", "sim", "--system", "none", "--duration", "200"])
        .arg("--json")
        .arg(&json)
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = BufReader::new(running.stderr.take().unwrap()).lines();
    let line = lines.next().unwrap().unwrap();
    assert!(line.starts_with("none: ") && line.contains('%'), "{line}");
    let kill = format!("kill -INT {}", running.id());
    let killed = Command::new("sh").args(["-c", &kill]).status().unwrap();
    assert!(killed.success());
    assert_eq!(running.wait().unwrap().code(), Some(130));
    assert!(!json.exists());
}
