//! Runs the test of the Kubernetes manifests, where Python has PyYAML.

use crate::shell;

/// Checks the manifests' shape and runs the hook on a domain. Prints "skipped" if PyYAML is missing.
pub fn test() -> anyhow::Result<()> {
    let python = |arguments| shell::program("python3", arguments);
    let mut yaml = python("-c");
    yaml.arg("import yaml");
    if !shell::succeeds(yaml) {
        eprintln!(
            "skipped: the Kubernetes manifests: python3 with PyYAML is missing (apt install python3-yaml)"
        );
        return Ok(());
    }
    shell::run(python("packaging/kubernetes/test.py"))
}
