//! `demeter compare`: compares two result files of one scenario.

use std::path::PathBuf;

use demeter_outcome::RunResult;

use crate::output;

/// Arguments of `demeter compare`.
#[derive(clap::Args)]
pub struct Args {
    /// A result file, for example of the simulator
    first: PathBuf,
    /// The result file to compare it with, for example of the lab
    second: PathBuf,
}

/// Prints the comparison.
pub fn compare(args: &Args) -> anyhow::Result<()> {
    let (first, second) = (
        RunResult::load(&args.first)?,
        RunResult::load(&args.second)?,
    );
    output::print(demeter_report::compare(&first, &second)?)
}
