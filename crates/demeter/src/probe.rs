//! `demeter probe`: what works on this machine.

use std::path::Path;
use std::process::ExitCode;

use anyhow::Context;

/// Arguments of `demeter probe`.
#[derive(Debug, clap::Args)]
pub struct Args {
    /// Print JSON instead of text.
    #[arg(long)]
    json: bool,
}

/// Prints the report; the exit code says whether Demeter can work here.
pub fn run(args: &Args) -> anyhow::Result<ExitCode> {
    let report = demeter_guest::probe::probe(Path::new("/"));
    if args.json {
        let json = serde_json::to_string_pretty(&report).context("cannot write the report")?;
        println!("{json}");
    } else {
        print!("{report}");
    }
    let blocked = report.advice.iter().any(|advice| advice.blocks);
    Ok(if blocked { ExitCode::FAILURE } else { ExitCode::SUCCESS })
}
