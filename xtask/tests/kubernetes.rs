//! Runs the test of the Kubernetes manifests, where Python has PyYAML.

use std::path::Path;
use std::process::Command;

#[test]
fn the_manifests_have_their_shape_and_the_hook_prepares_a_domain() {
    let python = |args: &[&str]| {
        let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("..");
        Command::new("python3")
            .args(args)
            .current_dir(root)
            .output()
    };
    if !python(&["-c", "import yaml"]).is_ok_and(|found| found.status.success()) {
        eprintln!("skipped: python3 with PyYAML is missing (apt install python3-yaml)");
        return;
    }
    let tested = python(&["packaging/kubernetes/test.py"]).unwrap();
    let said = String::from_utf8_lossy(&tested.stderr);
    assert!(tested.status.success(), "{said}");
}
