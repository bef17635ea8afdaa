//! `demeter probe`: what works on this machine.

use std::path::Path;

use crate::output;

/// Says which node is fast, which trackers work here, and what stands in Demeter's way.
///
/// Changes nothing. The exit code is 1 where Demeter cannot work.
#[derive(clap::Args)]
pub struct Args {
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Prints the report; the gravest problem, if Demeter cannot work, is the error.
pub fn probe(args: &Args) -> anyhow::Result<()> {
    let report = demeter_guest::probe::probe(Path::new("/"));
    if args.json {
        output::print(serde_json::to_string_pretty(&report)? + "\n")?;
    } else {
        output::print(report.to_string())?;
    }
    match report.advice.iter().find(|advice| advice.blocks) {
        Some(problem) => anyhow::bail!("{}; {}", problem.what, problem.mend),
        None => Ok(()),
    }
}
