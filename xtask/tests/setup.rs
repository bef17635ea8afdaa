//! Tests setup.sh on machines without some programs, simulated by folders of fake programs.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::Path;
use std::process::{Command, Output};

use tempfile::TempDir;

const SCRIPT: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/setup.sh");

/// A machine with only these programs: name and shell script.
fn machine(programs: &[(&str, &str)]) -> TempDir {
    let dir = tempfile::tempdir().unwrap();
    for (name, text) in programs {
        let path = dir.path().join(name);
        fs::write(&path, format!("#!/bin/sh\n{text}\n")).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o755)).unwrap();
    }
    dir
}

fn setup(machine: &TempDir, args: &[&str]) -> Output {
    let mut shell = Command::new("/bin/sh");
    shell
        .arg(SCRIPT)
        .args(args)
        .env_clear()
        .env("PATH", machine.path());
    shell.env("HERE", machine.path()).output().unwrap()
}

fn stderr(output: &Output) -> String {
    String::from_utf8(output.stderr.clone()).unwrap()
}

fn log(machine: &TempDir) -> String {
    fs::read_to_string(Path::new(machine.path()).join("log")).unwrap_or_default()
}

const ALL: [(&str, &str); 6] = [
    ("cc", ""),
    ("qemu-system-x86_64", ""),
    ("qemu-x86_64", ""),
    ("dpkg-deb", ""),
    ("xz", ""),
    ("make", ""),
];
const ROOT: (&str, &str) = ("id", "echo 0");
const LISTS: (&str, &str) = ("apt-cache", "echo linux-image-6.12-cloud-amd64");
const APT: (&str, &str) = ("apt-get", "echo \"$@\" >>$HERE/log");

#[test]
fn where_nothing_is_missing_nothing_is_done() {
    let machine = machine(&[&ALL[..], &[ROOT, LISTS, APT]].concat());
    let output = setup(&machine, &[]);
    assert!(output.status.success());
    assert_eq!(
        (stderr(&output), log(&machine)),
        (String::new(), String::new())
    );
}

#[test]
fn only_what_is_missing_is_installed() {
    let machine = machine(&[&ALL[..1], &ALL[2..], &[ROOT, LISTS, APT]].concat());
    assert!(setup(&machine, &[]).status.success());
    assert!(
        log(&machine).ends_with(" install qemu-system-x86\n"),
        "{}",
        log(&machine)
    );
    assert_eq!(log(&machine).lines().count(), 1);
}

#[test]
fn a_build_needs_no_emulator() {
    let machine = machine(&[("cc", ""), ROOT, LISTS, APT]);
    assert!(setup(&machine, &["compiler"]).status.success());
    assert_eq!(log(&machine), "");
}

#[test]
fn the_fuzz_engine_needs_a_compiler_of_its_own() {
    let machine = machine(&[("cc", ""), ROOT, LISTS, APT]);
    assert!(setup(&machine, &["fuzz"]).status.success());
    assert!(
        log(&machine).ends_with(" install g++\n"),
        "{}",
        log(&machine)
    );
}

#[test]
fn old_package_lists_are_renewed_once() {
    let apt = (
        "apt-get",
        "echo \"$@\" >>$HERE/log\ncase \"$*\" in *update) : >$HERE/new;; esac\n[ -e $HERE/new ]",
    );
    let machine = machine(&[&ALL[1..], &[ROOT, LISTS, apt]].concat());
    assert!(setup(&machine, &[]).status.success());
    let calls: Vec<_> = log(&machine)
        .lines()
        .map(|l| l.rsplit(' ').next().unwrap().to_owned())
        .collect();
    assert_eq!(calls, ["gcc", "update", "gcc"]);
}

#[test]
fn who_cannot_install_is_told_what_and_how() {
    let no_apt = machine(&[("cc", ""), ("dpkg-deb", "")]);
    let no_root = machine(&[
        ("cc", ""),
        ("dpkg-deb", ""),
        ("id", "echo 1000"),
        LISTS,
        APT,
    ]);
    let no_network = machine(&[
        ("cc", ""),
        ("dpkg-deb", ""),
        ROOT,
        LISTS,
        ("apt-get", "exit 100"),
    ]);
    for (machine, why, hint) in [
        (no_apt, "no apt-get here", "your package manager"),
        (
            no_root,
            "only root",
            "sudo apt-get install qemu-system-x86 qemu-user xz-utils make libelf1",
        ),
        (
            no_network,
            "network",
            "apt-get install qemu-system-x86 qemu-user xz-utils make libelf1",
        ),
    ] {
        let output = setup(&machine, &[]);
        assert_eq!(output.status.code(), Some(1));
        let said = stderr(&output);
        assert!(
            said.starts_with("error: missing: qemu-system-x86 qemu-user xz-utils make libelf1: "),
            "{said}"
        );
        assert!(said.contains(why) && said.contains(hint), "{said}");
        assert_eq!(said.lines().count(), 1, "{said}");
    }
}

#[test]
fn what_apt_said_is_shown_when_it_fails() {
    let apt = (
        "apt-get",
        "echo 'E: no candidate for gcc' >&2\necho 'E: no network'\nexit 100",
    );
    let machine = machine(&[&ALL[1..], &[ROOT, LISTS, apt]].concat());
    let output = setup(&machine, &[]);
    assert_eq!(output.status.code(), Some(1));
    let said = stderr(&output);
    let lines: Vec<_> = said.lines().collect();
    assert!(lines.contains(&"E: no network"), "{said}");
    assert!(lines.contains(&"E: no candidate for gcc"), "{said}");
    assert!(
        lines.last().unwrap().starts_with("error: missing: gcc"),
        "{said}"
    );
}
