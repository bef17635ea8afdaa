//! Tests the QEMU plugins: they compile without warnings, and their own tests in C pass.

use std::path::{Path, PathBuf};
use std::process::Command;

/// The interface versions that make a difference for our code.
const APIS: [&str; 3] = [
    "-DQEMU_PLUGIN_API=1",
    "-DQEMU_PLUGIN_API=2",
    "-DQEMU_PLUGIN_API=7",
];

fn plugin_dir() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("plugin")
}

fn compile(source: &str, flags: &[&str], output: &Path) {
    let result = Command::new("cc")
        .args(["-O2", "-Wall", "-Wextra", "-Werror"])
        .args(flags)
        .arg(plugin_dir().join(source))
        .arg("-o")
        .arg(output)
        .output()
        .expect("a C compiler is needed: apt install gcc");
    assert!(
        result.status.success(),
        "{}",
        String::from_utf8_lossy(&result.stderr)
    );
}

#[test]
fn the_plugins_build_without_a_warning() {
    let dir = tempfile::tempdir().unwrap();
    for source in ["demeter_lab.c", "demeter_trace.c"] {
        for api in APIS {
            let flags = ["-shared", "-fPIC", api];
            compile(source, &flags, &dir.path().join("plugin.so"));
        }
    }
}

#[test]
fn the_plugins_own_tests_hold() {
    let dir = tempfile::tempdir().unwrap();
    let program = dir.path().join("plugin_test");
    for api in APIS {
        let flags = [
            api,
            "-g",
            "-fsanitize=address,undefined",
            "-fno-sanitize-recover",
        ];
        compile("plugin_test.c", &flags, &program);
        let result = Command::new(&program)
            .arg(dir.path().join("shared"))
            .output()
            .unwrap();
        assert!(
            result.status.success(),
            "{api}: {}",
            String::from_utf8_lossy(&result.stderr)
        );
    }
}
