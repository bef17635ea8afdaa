//! Tests of `demeter dirty-log`: each error is one line.

use std::process::Command;

fn error(args: &[&str]) -> (Option<i32>, String) {
    let output = Command::new(env!("CARGO_BIN_EXE_demeter"))
        .arg("dirty-log")
        .args(args)
        .output()
        .unwrap();
    assert!(output.stdout.is_empty(), "{output:?}");
    (
        output.status.code(),
        String::from_utf8(output.stderr).unwrap(),
    )
}

#[test]
fn what_cannot_be_is_told_on_one_line() {
    for (args, said) in [
        (&["--slice-mib", "3"][..], "--slice-mib = 3"),
        (&["--vcpus", "0"], "--vcpus = 0"),
        (
            &["--protect", "get", "--clear-chunk-mib", "1"],
            "--protect manual",
        ),
        (&["--before-s", "nan"], "--before-s = NaN"),
    ] {
        let (code, error) = error(args);
        assert_eq!(code, Some(1), "{error}");
        assert_eq!(error.lines().count(), 1, "{error}");
        assert!(error.contains(said), "{error}");
    }
}

#[test]
fn options_that_exclude_each_other_are_refused() {
    for args in [
        &["--sweep", "--protect", "get"][..],
        &["--sweep", "--offers"],
        &["--protect", "sometimes"],
        &["--backing", "3m"],
    ] {
        let (code, error) = error(args);
        assert_eq!(code, Some(2), "{error}");
    }
}
