//! `demeter sweep`: a scenario over a grid of its parameters, on the simulator.

use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use demeter_lab::stop_on_signals;
use demeter_report::CsvRow;
use demeter_scenario::{Axis, Grid, Point, System, plain};
use demeter_sim::{Job, run_jobs};

use crate::output;
use crate::progress::{Progress, Work};

/// Arguments of `demeter sweep`.
#[derive(clap::Args)]
pub struct Args {
    /// Scenario file
    scenario: PathBuf,
    /// A key of the scenario and its values, such as workload.hot_mib=50,100; may be given
    /// several times: every combination is run
    #[arg(long = "set", value_name = "KEY=VALUE,...")]
    axes: Vec<Axis>,
    /// Run only this system; may be given several times
    #[arg(long = "system", value_name = "NAME")]
    systems: Vec<System>,
    /// Seeds for each combination: the scenario's and those that follow it
    #[arg(long, value_name = "N", default_value_t = 1, value_parser = clap::value_parser!(u64).range(1..))]
    seeds: u64,
    /// Write the table to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    #[command(flatten)]
    work: Work,
}

/// Runs the grid and writes its table.
pub fn sweep(args: &Args) -> Result<()> {
    let points = Grid::load(&args.scenario, args.axes.clone())?.points()?;
    if points.iter().any(|point| !point.scenario.vary.is_empty()) {
        bail!(
            "{} has cases of its own ([[vary]]): demeter run --on sim runs them; take the tables \
             out to sweep over other values",
            args.scenario.display()
        );
    }
    let jobs = jobs(&points, &args.systems, args.seeds);
    let stop = stop_on_signals().context("cannot catch signals")?;
    let progress = Progress::new();
    let results = run_jobs(&jobs, args.work.limits(&stop), &|event| {
        progress.show(event)
    })?;
    let rows: Vec<CsvRow> = jobs
        .iter()
        .zip(results)
        .map(|(job, result)| {
            let settings = job.point.settings.iter();
            let mut settings: Vec<_> = settings
                .map(|(key, value)| (key.clone(), plain(value)))
                .collect();
            settings.push(("seed".into(), job.seed.to_string()));
            CsvRow { settings, result }
        })
        .collect();
    let table = demeter_report::csv(&rows);
    match &args.csv {
        Some(path) => Ok(demeter_report::write_file(path, table.as_bytes())?),
        None => output::print(table),
    }
}

/// Every run of the grid, in the order of the table.
fn jobs<'a>(points: &'a [Point], systems: &[System], seeds: u64) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for point in points {
        let systems = match systems {
            [] => &point.scenario.systems,
            chosen => chosen,
        };
        for &system in systems {
            for seed in (point.scenario.seed..).take(seeds as usize) {
                jobs.push(Job {
                    point,
                    system,
                    seed,
                });
            }
        }
    }
    jobs
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use super::*;

    #[test]
    fn every_point_runs_every_system_with_every_seed() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        let axis = "workload.hot_mib=10,20".parse().unwrap();
        let points = Grid::load(&path, vec![axis]).unwrap().points().unwrap();
        let jobs = jobs(&points, &[System::None, System::Demeter], 2);
        let texts: Vec<_> = jobs.iter().map(ToString::to_string).collect();
        let expected = ["10", "20"].into_iter().flat_map(|hot| {
            ["none", "none seed 2", "demeter", "demeter seed 2"]
                .map(|run| format!("workload.hot_mib={hot} {run}"))
        });
        assert_eq!(texts, expected.collect::<Vec<_>>());
    }
}
