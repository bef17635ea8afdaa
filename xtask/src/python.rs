//! Builds the Python package in an environment of its own, and tests it.

use std::path::{Path, PathBuf};
use std::process::Command;

use crate::shell;

/// Versions and PyPI hashes of the tools besides Rust.
const TOOLS: &str = "python/tools.lock";

/// Builds the package and runs its tests with the built command. Prints "skipped" if Python or its tools are missing.
pub fn test() -> anyhow::Result<()> {
    let environment = shell::root().join("target/python");
    let python = environment.join("bin/python");
    if let Err(why) = make(&environment, &python) {
        eprintln!("skipped: the Python package: {why}");
        return Ok(());
    }
    // Without optimization, for a fast build.
    let mut install = shell::program(
        &python,
        "-m pip install --quiet --no-build-isolation --no-deps --force-reinstall \
         --config-settings=build-args=--profile=dev ./python",
    );
    // Set by the cargo that runs this program.
    install.env_remove("CARGO_ENCODED_RUSTFLAGS");
    let path = std::env::var("PATH").unwrap_or_default();
    let path = format!("{}:{path}", environment.join("bin").display());
    install.env("PATH", path);
    shell::run(install)?;
    let mut types = shell::program(&python, "-m mypy lib tests");
    types.current_dir(shell::root().join("python"));
    shell::run(types)?;
    let mut tests = shell::program(
        &python,
        "-m pytest --quiet -p no:cacheprovider python/tests",
    );
    tests.env("DEMETER", shell::root().join("target/release/demeter"));
    shell::run(tests)
}

/// Creates the environment with its tools, or returns the reason for its absence.
fn make(environment: &PathBuf, python: &Path) -> Result<(), &'static str> {
    if !python.exists() {
        let mut venv = Command::new("python3");
        venv.args(["-m", "venv"]).arg(environment);
        if !shell::succeeds(venv) {
            return Err("there is no python3 with venv here (apt install python3-venv)");
        }
    }
    let tools = format!("-m pip install --quiet --require-hashes --requirement {TOOLS}");
    match shell::succeeds(shell::program(python, &tools)) {
        true => Ok(()),
        false => {
            Err("cannot install the tools of python/tools.lock from PyPI (is there a network?)")
        }
    }
}
