//! Tests of `demeter report` and of common behaviour of all commands.

use std::fs;
use std::path::Path;
use std::process::{Command, Output, Stdio};

const EXAMPLE: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../outcome/tests/example.json");

fn demeter() -> Command {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demeter"));
    command.env_remove("RUST_LOG");
    command
}

fn run(args: &[&str]) -> Output {
    demeter().args(args).output().unwrap()
}

fn stderr(output: &Output) -> &str {
    std::str::from_utf8(&output.stderr).unwrap()
}

#[test]
fn a_result_becomes_a_table_a_page_and_a_picture() {
    let dir = tempfile::tempdir().unwrap();
    let file = |name: &str| {
        dir.path()
            .join(name)
            .into_os_string()
            .into_string()
            .unwrap()
    };
    let (page, picture) = (file("page.html"), file("picture.svg"));
    let output = run(&["report", EXAMPLE, "--html", &page, "--svg", &picture]);
    assert!(output.status.success(), "{}", stderr(&output));
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("\ndemeter ")
    );
    assert!(
        fs::read_to_string(page)
            .unwrap()
            .starts_with("<!doctype html>")
    );
    assert!(fs::read_to_string(picture).unwrap().starts_with("<svg"));
}

#[test]
fn without_being_asked_it_writes_no_file() {
    let dir = tempfile::tempdir().unwrap();
    fs::copy(EXAMPLE, dir.path().join("r.json")).unwrap();
    let output = demeter()
        .args(["report", "r.json"])
        .current_dir(&dir)
        .output()
        .unwrap();
    assert!(output.status.success());
    assert_eq!(fs::read_dir(&dir).unwrap().count(), 1);
}

#[test]
fn a_failure_is_one_line_that_names_the_thing() {
    let dir = tempfile::tempdir().unwrap();
    let broken = dir.path().join("broken.json");
    fs::write(&broken, "{\n\n").unwrap();
    let broken = broken.to_str().unwrap();
    let result = r#"{"schema":1,"scenario":"x","on":"sim","seed":1,"duration_s":1,"systems":[]"#;
    let timeless = dir.path().join("timeless.json");
    fs::write(&timeless, format!("{result}}}")).unwrap();
    let cases = dir.path().join("cases.json");
    let case = r#","cases":[{"settings":[["sim.vms","1"]],"systems":[]}]}"#;
    fs::write(&cases, format!("{result}{case}")).unwrap();
    let picture = dir.path().join("picture.svg");
    let picture = picture.to_str().unwrap();
    let of_timeless = ["report", timeless.to_str().unwrap(), "--svg", picture];
    let of_cases = ["report", cases.to_str().unwrap(), "--svg", picture];
    let into_nowhere = ["report", EXAMPLE, "--html", "/nowhere/page.html"];
    for (args, named) in [
        (
            &["report", "/nowhere/r.json"][..],
            "/nowhere/r.json: No such file",
        ),
        (&["report", broken], "broken.json: not JSON"),
        (&into_nowhere, "/nowhere/page.html: No such file"),
        (
            &of_timeless,
            "timeless.json: nothing in it was measured over time",
        ),
        (
            &of_cases,
            "cases.json: its cases differ in several settings at once, or in a number without an oracle; --html FILE",
        ),
    ] {
        let output = run(args);
        assert_eq!(output.status.code(), Some(1));
        assert!(output.stdout.is_empty());
        let said = stderr(&output);
        assert!(
            said.starts_with("error: ") && said.contains(named),
            "{said}"
        );
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn results_are_compared_case_by_case() {
    let dir = tempfile::tempdir().unwrap();
    let result = |file: &str, cases: &[u32]| {
        let case = |vms: &u32| {
            format!(
                r#"{{"settings":[["sim.vms","{vms}"]],"systems":[{{"name":"demeter",
                "hot_in_fast_final":1.0,"kswapd_scanned":0,"t90_s":4.0,"series":[]}}]}}"#
            )
        };
        let cases: Vec<_> = cases.iter().map(case).collect();
        let text = format!(
            r#"{{"schema":1,"scenario":"x","on":"sim","seed":1,"duration_s":1,"systems":[],
            "cases":[{}]}}"#,
            cases.join(",")
        );
        let path = dir.path().join(file);
        fs::write(&path, text).unwrap();
        path.into_os_string().into_string().unwrap()
    };
    let (a, b, c) = (
        result("a.json", &[1, 2]),
        result("b.json", &[2, 3]),
        result("c.json", &[4]),
    );
    let output = run(&["compare", &a, &b]);
    assert!(output.status.success(), "{}", stderr(&output));
    let said = String::from_utf8(output.stdout).unwrap();
    assert!(said.contains("\nvms 2  demeter  t90, s"), "{said}");
    let left_out = "only the first result has vms 1; only the second result has vms 3.\n";
    assert!(said.ends_with(left_out), "{said}");

    let output = run(&["compare", &a, &c]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    assert!(said.contains("no case in common"), "{said}");
    assert_eq!(said.lines().count(), 1, "{said}");
}

#[test]
fn wrong_usage_ends_with_two() {
    assert_eq!(run(&["report"]).status.code(), Some(2));
    assert_eq!(run(&["plough"]).status.code(), Some(2));
    let output = demeter()
        .args(["report", EXAMPLE])
        .env("RUST_LOG", "=x=")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).starts_with("error: RUST_LOG"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn a_reader_that_went_away_is_no_failure() {
    let (reader, writer) = std::io::pipe().unwrap();
    drop(reader);
    let mut command = demeter();
    command
        .args(["report", EXAMPLE])
        .stdout(writer)
        .stderr(Stdio::piped());
    let output = command.spawn().unwrap().wait_with_output().unwrap();
    assert!(output.status.success());
    assert_eq!(stderr(&output), "");
}

#[test]
fn a_full_disk_behind_stdout_is_told() {
    let full = fs::OpenOptions::new()
        .write(true)
        .open("/dev/full")
        .unwrap();
    let output = demeter()
        .args(["report", EXAMPLE])
        .stdout(full)
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1));
    assert!(
        stderr(&output).contains("standard output: No space left"),
        "{}",
        stderr(&output)
    );
}

#[test]
fn packagers_get_completions_and_manual_pages() {
    let output = run(&["completions", "bash"]);
    assert!(
        String::from_utf8(output.stdout)
            .unwrap()
            .contains("_demeter")
    );
    assert!(
        String::from_utf8(run(&["man"]).stdout)
            .unwrap()
            .contains(".TH demeter")
    );
    let dir = tempfile::tempdir().unwrap();
    let pages = dir.path().join("man");
    assert!(run(&["man", pages.to_str().unwrap()]).status.success());
    assert!(Path::new(&pages).join("demeter-report.1").is_file());
}
