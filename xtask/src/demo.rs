//! The demo: runs one scenario in the lab, and shows its table and page.

use std::fs;

use anyhow::Context;

use crate::{build, shell};

const RESULT: &str = "target/demo/result.json";
const PAGE: &str = "target/demo/report.html";

/// Builds, runs the demo scenario and prints the report's path.
pub fn demo() -> anyhow::Result<()> {
    build::build()?;
    fs::create_dir_all(shell::root().join("target/demo")).context("cannot make target/demo")?;
    let demeter = || shell::root().join("target/release/demeter");
    let run = format!("run scenarios/demo.toml --on lab --json {RESULT}");
    shell::run(shell::program(demeter(), &run))?;
    shell::run(shell::program(
        demeter(),
        &format!("report {RESULT} --html {PAGE}"),
    ))?;
    let page = shell::root().join(PAGE);
    let page = page.canonicalize().unwrap_or(page);
    println!("\nThe report: {}", page.display());
    Ok(())
}
