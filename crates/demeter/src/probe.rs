//! `demeter probe`: checks this machine.

use std::fmt::Display;
use std::path::Path;

use serde::Serialize;

use crate::output;

/// Shows the fast nodes, the trackers that work here, and the problems that Demeter has on this machine.
///
/// Changes nothing. The exit code is 1 if Demeter cannot work.
#[derive(clap::Args)]
pub struct Args {
    /// Check this machine as a host of VMs without an agent (`manage = "history"`)
    #[arg(long)]
    host: bool,
    /// Print JSON instead of text
    #[arg(long)]
    json: bool,
}

/// Prints the report. If Demeter cannot work, the gravest problem is the error.
pub fn probe(args: &Args) -> anyhow::Result<()> {
    let root = Path::new("/");
    let advice = if args.host {
        let report = demeter_host::probe::probe(root);
        print(&report, args.json)?;
        report.advice
    } else {
        let report = demeter_guest::probe::probe(root);
        print(&report, args.json)?;
        report.advice
    };
    match advice.into_iter().find(|advice| advice.blocks) {
        Some(gravest) => anyhow::bail!("{}; {}", gravest.what, gravest.hint),
        None => Ok(()),
    }
}

fn print(report: &(impl Display + Serialize), json: bool) -> anyhow::Result<()> {
    match json {
        true => output::print(serde_json::to_string_pretty(report)? + "\n"),
        false => output::print(report.to_string()),
    }
}
