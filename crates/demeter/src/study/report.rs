//! `demeter report`: shows a result file as a table, a page or a picture.

use std::path::PathBuf;

use anyhow::ensure;
use demeter_outcome::{RunResult, write_file};

use crate::output;

/// Arguments of `demeter report`.
#[derive(clap::Args)]
pub struct Args {
    /// The result file (JSON) that `demeter run --json` wrote
    result: PathBuf,
    /// Also write a self-contained page with pictures: speed over time and over the settings of cases, and
    /// CPU time by cause
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    /// Also write a picture: throughput (or latency) over time. Cases that differ in one setting give a heat map of
    /// systems and cases. If the setting is a number and there is an oracle, they give each system's share of it
    #[arg(long, value_name = "FILE")]
    svg: Option<PathBuf>,
    /// Print the slowdown at each size of fast memory instead: as agents estimated it at the middle size, and
    /// as measured. The cases differ in machine.fast.usable_mib; in the largest, all memory should be fast
    #[arg(long)]
    predicted: bool,
}

/// Writes the requested files and prints the table.
pub fn report(args: &Args) -> anyhow::Result<()> {
    let result = RunResult::load(&args.result)?;
    if let Some(file) = &args.html {
        write_file(file, demeter_report::html(&result).as_bytes())?;
    }
    if let Some(file) = &args.svg {
        write_file(file, picture(args, &result)?.as_bytes())?;
    }
    if args.predicted {
        let table = demeter_report::part(&result, demeter_report::Part::Predicted);
        ensure!(
            !table.is_empty(),
            "result file {}: no agent estimated a slowdown, or its cases do not differ in \
             machine.fast.usable_mib; run scenarios/assess.toml",
            args.result.display()
        );
        return output::print(table);
    }
    output::print(demeter_report::table(&result))
}

/// The picture that fits the result.
fn picture(args: &Args, result: &RunResult) -> anyhow::Result<String> {
    let of_cases = demeter_report::maps_svg(result).or_else(|| demeter_report::shares_svg(result));
    if let Some(picture) = of_cases {
        return Ok(picture);
    }
    let why = match &result.cases[..] {
        [] => "nothing in it was measured over time",
        _ => "its cases differ in several settings at once, or in a number without an oracle",
    };
    ensure!(
        result
            .systems
            .iter()
            .any(|system| !system.series.is_empty()),
        "result file {}: {why}; --html FILE draws what it has",
        args.result.display()
    );
    Ok(demeter_report::throughput_svg(result))
}
