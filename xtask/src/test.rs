//! All that must hold: style, documentation, licences, fuzz targets, tests.

use std::time::Instant;

use crate::{build, fuzz, python, shell};

/// Runs all checks; cargo's own test runner comes last, so that its verdict is the last word.
pub fn test() -> anyhow::Result<()> {
    let start = Instant::now();
    shell::run(shell::cargo("fmt --all --check"))?;
    let lints = "clippy --locked --workspace --all-targets -- -D warnings";
    shell::run(shell::cargo(lints))?;
    let mut doc = shell::cargo("doc --locked --workspace --no-deps");
    doc.env("RUSTDOCFLAGS", "-D warnings");
    shell::run(doc)?;
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
    eprintln!("checks took {} s; now the tests", start.elapsed().as_secs());
    shell::run(shell::cargo("test --locked --workspace"))
}
