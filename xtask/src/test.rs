//! Runs all checks: style, documentation, licences, fuzz targets, tests.

use std::path::Path;
use std::time::Instant;

use anyhow::Context;

use crate::{build, fuzz, kubernetes, python, shell};

/// Runs all checks. Cargo's tests come last, so that their result is the last output.
pub fn test() -> anyhow::Result<()> {
    let start = Instant::now();
    shell::run(shell::cargo("fmt --all --check"))?;
    let lints = "clippy --locked --workspace --all-targets -- -D warnings";
    shell::run(shell::cargo(lints))?;
    let small =
        "clippy --locked --package demeter --no-default-features --all-targets -- -D warnings";
    shell::run(shell::cargo(small))?;
    let mut doc = shell::cargo("doc --locked --workspace --no-deps");
    doc.env("RUSTDOCFLAGS", "-D warnings");
    shell::run(doc)?;
    check_for_arm()?;
    if shell::succeeds(shell::cargo("deny --version")) {
        shell::run(shell::cargo("deny --locked check bans licenses sources"))?;
    } else {
        eprintln!("cargo-deny is not installed: licences are not checked here");
    }
    if shell::succeeds(shell::cargo("audit --version")) {
        shell::run(shell::cargo("audit"))?;
    } else {
        eprintln!("cargo-audit is not installed: advisories are not checked here");
    }
    // The VM test boots the release binaries.
    build::build()?;
    fuzz::fuzz(&fuzz::Args::SHORT)?;
    python::test()?;
    kubernetes::test()?;
    shell::run(shell::cargo(
        "test --locked --package demeter --no-default-features",
    ))?;
    eprintln!("checks took {} s; now the tests", start.elapsed().as_secs());
    shell::run(shell::cargo("test --locked --workspace"))
}

/// Checks that everything, including tests, compiles for Arm. It needs the target's standard library, but no linker.
fn check_for_arm() -> anyhow::Result<()> {
    const TARGET: &str = "aarch64-unknown-linux-gnu";
    let rustc = std::env::var_os("RUSTC").unwrap_or_else(|| "rustc".into());
    let mut libraries = shell::program(rustc, "--print target-libdir --target");
    let libraries = libraries.arg(TARGET).output();
    let libraries = libraries.context("cannot run rustc")?.stdout;
    let libraries = String::from_utf8_lossy(&libraries);
    if !Path::new(libraries.trim()).is_dir() {
        eprintln!(
            "skipped: no standard library for Arm here: rustup target add {TARGET}, or cargo xtask arm"
        );
        return Ok(());
    }
    let mut check = shell::cargo("check --locked --workspace --all-targets --target");
    check.arg(TARGET);
    shell::run(check)
}
