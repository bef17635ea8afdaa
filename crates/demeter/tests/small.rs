//! The command without the feature `study`, as the package `demeter` has it: it says where the rest is.

#![cfg(not(feature = "study"))]

use std::process::Command;

fn error(words: &str) -> String {
    let output = Command::new(env!("CARGO_BIN_EXE_demeter"))
        .args(words.split(' '))
        .env_remove("RUST_LOG")
        .output()
        .unwrap();
    assert_eq!(output.status.code(), Some(1), "{words}");
    String::from_utf8(output.stderr).unwrap()
}

#[test]
fn a_study_command_is_refused_in_one_line() {
    assert_eq!(
        error("run scenarios/ci.toml --on sim"),
        "error: demeter run is not in this package; install demeter-lab\n"
    );
    for command in ["heat", "assess"] {
        assert_eq!(
            error(&format!("guest {command} --scenario scenarios/ci.toml")),
            "error: --scenario needs the simulator, which is not in this package; install demeter-lab\n"
        );
    }
    // Before anything is observed.
    for command in ["guest assess --svg a.svg", "host assess --svg a.svg"] {
        assert_eq!(
            error(command),
            "error: --svg needs the pictures of demeter report, which are not in this package; install demeter-lab\n"
        );
    }
}
