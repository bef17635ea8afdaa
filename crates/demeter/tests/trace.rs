//! Tests of `demeter trace`: complete files are described, damaged ones reported with the offset.

use std::fs;
use std::path::Path;
use std::process::{Command, Output};

fn demeter(folder: &Path, args: &[&str]) -> Output {
    let mut command = Command::new(env!("CARGO_BIN_EXE_demeter"));
    command.arg("trace").args(args).current_dir(folder);
    command.output().unwrap()
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).unwrap()
}

/// A folder with lackey's output of two loads, a store and a modification.
fn folder() -> tempfile::TempDir {
    let folder = tempfile::tempdir().unwrap();
    let lines = "==7== Lackey\nI  04001000,3\n L 1ffeffe7e8,8\n S 04222c80,4\n M 04222c84,4\n";
    fs::write(folder.path().join("lackey"), lines).unwrap();
    folder
}

fn names(folder: &Path) -> Vec<String> {
    let entries = fs::read_dir(folder).unwrap();
    let mut names: Vec<String> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn lackeys_output_becomes_a_trace() {
    let folder = folder();
    let gzip = Command::new("gzip")
        .arg("-k")
        .arg(folder.path().join("lackey"))
        .status();
    assert!(gzip.unwrap().success());
    for input in ["lackey", "lackey.gz"] {
        let output = demeter(folder.path(), &["convert", "--from", "lackey", input, "t"]);
        assert!(output.status.success(), "{}", text(&output.stderr));
        let output = demeter(folder.path(), &["info", "t"]);
        let said = text(&output.stdout);
        for line in [
            "threads       1",
            "loads         2",
            "stores        2",
            "regions       2",
        ] {
            assert!(said.contains(line), "{said}");
        }
    }
}

#[test]
fn a_cut_trace_is_told_with_the_offset() {
    let folder = folder();
    demeter(
        folder.path(),
        &["convert", "--from", "lackey", "lackey", "t"],
    );
    let whole = fs::read(folder.path().join("t")).unwrap();
    fs::write(folder.path().join("t"), &whole[..whole.len() - 1]).unwrap();
    let output = demeter(folder.path(), &["info", "t"]);
    assert_eq!(output.status.code(), Some(1));
    let said = text(&output.stderr);
    let expected = format!("error: t at byte {}: the file ends early", whole.len() - 1);
    assert!(
        said.starts_with(&expected) && said.lines().count() == 1,
        "{said}"
    );
}

#[test]
fn a_failed_conversion_leaves_nothing_behind() {
    let folder = folder();
    let before = names(folder.path());
    // A text is no sequence of whole records.
    let output = demeter(
        folder.path(),
        &["convert", "--from", "champsim", "lackey", "t"],
    );
    assert_eq!(output.status.code(), Some(1));
    assert_eq!(names(folder.path()), before);
    // A decompressor that fails at the end fails the conversion.
    fs::write(folder.path().join("cut.gz"), b"\x1f\x8b\x08\x00\x00\x00").unwrap();
    let output = demeter(
        folder.path(),
        &["convert", "--from", "lackey", "cut.gz", "t"],
    );
    let said = text(&output.stderr);
    assert!(said.contains("error: gzip could not decompress"), "{said}");
    assert!(!folder.path().join("t").exists());
}
