//! `demeter report`: a result file as a table, a page or a picture.

use std::path::PathBuf;

use anyhow::ensure;
use demeter_outcome::{RunResult, write_file};

use crate::output;

/// Arguments of `demeter report`.
#[derive(clap::Args)]
pub struct Args {
    /// The result file (JSON) that `demeter run --json` wrote
    result: PathBuf,
    /// Also write a self-contained page with pictures: over time, over the settings of its cases,
    /// of where CPU time went
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Also write the plot of throughput (or latency) over time as a picture; not of results with
    /// cases
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
}

/// Writes what was asked for and prints the table.
pub fn report(args: &Args) -> anyhow::Result<()> {
    let result = RunResult::load(&args.result)?;
    if let Some(file) = &args.html {
        write_file(file, demeter_report::html(&result).as_bytes())?;
    }
    if let Some(file) = &args.svg {
        let systems = &result.systems;
        let why = match &result.cases[..] {
            [] => "nothing in it was measured over time; --html FILE draws what it has",
            _ => "it has cases, and --svg draws a single run over time; --html FILE draws them all",
        };
        ensure!(
            systems.iter().any(|system| !system.series.is_empty()),
            "result file {}: {why}",
            args.result.display()
        );
        write_file(file, demeter_report::throughput_svg(&result).as_bytes())?;
    }
    output::print(demeter_report::table(&result))
}
