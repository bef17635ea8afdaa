//! `demeter sweep`: runs a scenario over a grid of its parameters on the simulator.

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{Context, Result};
use demeter_outcome::write_file;
use demeter_report::RunRow;
use demeter_scenario::{Axis, Grid, System};
use demeter_sim::{Sweep, run_jobs};

use super::progress::{Progress, Work};
use super::systems;
use crate::output;
use crate::signals;

/// Arguments of `demeter sweep`.
#[derive(clap::Args)]
pub struct Args {
    /// Scenario file
    scenario: PathBuf,
    /// A key of the scenario and its values, such as workload.hot_mib=50,100. May be repeated: every
    /// combination runs
    #[arg(long = "set", value_name = "KEY=VALUE,...")]
    axes: Vec<Axis>,
    /// Run only this system (see `demeter systems`); may be repeated
    #[arg(long = "system", value_name = "NAME", value_parser = systems::parser())]
    systems: Vec<System>,
    /// Run each combination with N seeds, counted up from the scenario's
    #[arg(long, value_name = "N", default_value = "1")]
    seeds: NonZeroU32,
    /// Also write a table of all runs as CSV
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also write the table of all runs as a Parquet file
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
    /// Also write a result file, for `demeter report`; with several seeds it has the median run
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a self-contained page: lines or bars over one parameter, heat maps over two
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    work: Work,
}

/// Runs the grid, prints a table, and writes the requested files.
pub fn sweep(args: &Args) -> Result<()> {
    let grid = Grid::load(&args.scenario, args.axes.clone())?;
    let sweep = Sweep::new(&grid, args.systems.clone(), args.seeds)?;
    let jobs = sweep.jobs();
    let stop = signals::stop_flag()?;
    let progress = Progress::new();
    let results = run_jobs(&jobs, args.work.limits(&stop), &|event| {
        progress.show(event)
    })?;
    let result = sweep.result(&results);
    if let Some(path) = &args.json {
        result.save(path)?;
    }
    if let Some(path) = &args.html {
        write_file(path, demeter_report::html(&result).as_bytes())?;
    }
    let rows = jobs.iter().zip(results).map(|(job, result)| RunRow {
        settings: job.settings(),
        result,
    });
    let rows: Vec<RunRow> = rows.collect();
    if let Some(path) = &args.parquet {
        let table = demeter_report::parquet(&rows).context("cannot make a Parquet file")?;
        write_file(path, &table)?;
    }
    if let Some(path) = &args.csv {
        write_file(path, demeter_report::csv(&rows).as_bytes())?;
    }
    output::print(demeter_report::table(&result))
}
