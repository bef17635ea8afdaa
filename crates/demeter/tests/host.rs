//! Tests of `demeter host`: each error is one line.

use std::path::Path;
use std::process::{Command, Output};

fn demeter(args: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_demeter"))
        .args(args)
        .output()
        .unwrap()
}

fn error(args: &[&str]) -> String {
    let output = demeter(args);
    assert_eq!(output.status.code(), Some(1), "{output:?}");
    assert!(output.stdout.is_empty());
    let said = String::from_utf8(output.stderr).unwrap();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

fn run(folder: &Path, config: &str) -> String {
    let path = folder.join("host.toml");
    std::fs::write(&path, config).unwrap();
    error(&["host", "--config", path.to_str().unwrap()])
}

#[test]
fn a_bad_configuration_is_told_on_one_line() {
    let folder = tempfile::tempdir().unwrap();
    let run = |text: &str| run(folder.path(), text);
    let said = run("pool = { fast_mib = 1, slow_mib = 1, medium_mib = 1 }");
    assert!(said.contains("medium_mib"), "{said}");
    let pool = "pool = { fast_mib = 100, slow_mib = 100 }\n";
    let vm = "[vm.a]\nqmp = \"/q\"\nagent = \"/a\"\nfast = { memdev = \"f\", size_mib = 101 }\n\
              slow = { memdev = \"s\", size_mib = 16 }\n";
    let said = run(&format!("{pool}{vm}"));
    assert!(
        said.contains("add up to 101") && said.contains("100"),
        "{said}"
    );
    let said = error(&["host", "--config", "/nonexistent/host.toml"]);
    assert!(said.contains("/nonexistent/host.toml"), "{said}");
    let said = error(&["host", "run", "--config", "/nonexistent/host.toml"]);
    assert!(said.contains("/nonexistent/host.toml"), "{said}");
}

#[test]
fn a_controller_that_is_not_there_is_told_on_one_line() {
    let socket = ["--socket", "/nonexistent/host.sock"];
    for args in [
        &["host", "status"][..],
        &["host", "set", "db", "--fast-mib", "1"],
        &["host", "policy", "wss"],
        &["host", "watch"],
    ] {
        let said = error(&[args, &socket].concat());
        assert!(said.contains("demeter host --config FILE"), "{said}");
    }
    let said = error(&["host", "xml", "db", "--libvirt", "/nonexistent/sock"]);
    assert!(said.contains("does libvirtd"), "{said}");
    let said = error(&["top"]);
    assert!(said.contains("needs a terminal"), "{said}");
}

#[test]
fn a_damaged_state_file_stops_the_controller() {
    let folder = tempfile::tempdir().unwrap();
    let path = |name: &str| folder.path().join(name).display().to_string();
    std::fs::write(path("state.json"), "{\"version\": 1, \"vms\"").unwrap();
    let config = format!(
        "socket = {:?}\nstate = {:?}\npool = {{ fast_mib = 100, slow_mib = 100 }}\n\
         [vm.a]\nqmp = \"/q\"\nagent = \"/a\"\nfast = {{ memdev = \"f\", size_mib = 1 }}\n\
         slow = {{ memdev = \"s\", size_mib = 16 }}\n",
        path("host.sock"),
        path("state.json")
    );
    let said = run(folder.path(), &config);
    assert!(said.contains("state.json is damaged"), "{said}");
    assert!(!Path::new(&path("host.sock")).exists());
}
