//! `demeter sweep`: a scenario over a grid of its parameters, on the simulator.

use std::num::NonZeroU32;
use std::path::PathBuf;

use anyhow::{Context, Result, bail};
use demeter_outcome::{Case, RunResult, SystemResult, together, write_file};
use demeter_report::RunRow;
use demeter_scenario::{Axis, Grid, Point, System};
use demeter_sim::{Job, run_jobs};

use crate::output;
use crate::progress::{Progress, Work};
use crate::signals;
use crate::systems;

/// Arguments of `demeter sweep`.
#[derive(clap::Args)]
pub struct Args {
    /// Scenario file
    scenario: PathBuf,
    /// A key of the scenario and its values, such as workload.hot_mib=50,100; may be given
    /// several times: every combination is run
    #[arg(long = "set", value_name = "KEY=VALUE,...")]
    axes: Vec<Axis>,
    /// Run only this system (see demeter systems); may be given several times
    #[arg(long = "system", value_name = "NAME", value_parser = systems::parser())]
    systems: Vec<System>,
    /// Seeds for each combination: the scenario's and those that follow it
    #[arg(long, value_name = "N", default_value = "1")]
    seeds: NonZeroU32,
    /// Write the table to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Also write the table as a Parquet file
    #[arg(long, value_name = "FILE")]
    parquet: Option<PathBuf>,
    /// Also write a result file, for demeter report; of several seeds it has the run in the middle
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
    /// Also write a self-contained page: lines or bars over one parameter, heat maps over two
    #[arg(long, value_name = "FILE")]
    html: Option<PathBuf>,
    #[command(flatten)]
    work: Work,
}

/// Runs the grid and writes its table.
pub fn sweep(args: &Args) -> Result<()> {
    let points = Grid::load(&args.scenario, args.axes.clone())?.points()?;
    if points.iter().any(|point| !point.scenario.vary.is_empty()) {
        bail!(
            "scenario {0} has cases of its own ([[vary]]): run them with demeter run {0} --on sim, \
             or take the tables out to sweep over other values",
            args.scenario.display()
        );
    }
    let jobs = jobs(&points, &args.systems, args.seeds);
    let stop = signals::stop_flag()?;
    let progress = Progress::new();
    let results = run_jobs(&jobs, args.work.limits(&stop), &|event| {
        progress.show(event)
    })?;
    if let Some(first) = points
        .first()
        .filter(|_| args.json.is_some() || args.html.is_some())
    {
        let result = result(first, &jobs, args.seeds, &results);
        if let Some(path) = &args.json {
            result.save(path)?;
        }
        if let Some(path) = &args.html {
            write_file(path, demeter_report::html(&result).as_bytes())?;
        }
    }
    let rows: Vec<RunRow> = jobs
        .iter()
        .zip(results)
        .map(|(job, result)| {
            let mut settings = job.point.texts();
            settings.push(("seed".into(), job.seed.to_string()));
            RunRow { settings, result }
        })
        .collect();
    if let Some(path) = &args.parquet {
        let table = demeter_report::parquet(&rows).context("cannot make a Parquet file")?;
        write_file(path, &table)?;
    }
    let table = demeter_report::csv(&rows);
    match &args.csv {
        Some(path) => Ok(write_file(path, table.as_bytes())?),
        None => output::print(table),
    }
}

/// The runs as one result: a case for each point of the grid; of a grid without axes, no cases.
fn result(
    base: &Point,
    jobs: &[Job<'_>],
    seeds: NonZeroU32,
    results: &[SystemResult],
) -> RunResult {
    let runs: Vec<_> = jobs.iter().zip(results).collect();
    let points = runs.chunk_by(|a, b| std::ptr::eq(a.0.point, b.0.point));
    let case = |runs: &[(&Job<'_>, &SystemResult)]| Case {
        group: 0,
        settings: runs[0].0.point.texts(),
        systems: together(runs.iter().map(|(_, result)| (*result).clone()), seeds),
    };
    let mut result = RunResult {
        cases: points.map(case).collect(),
        ..base.scenario.empty_result("sim")
    };
    if base.settings.is_empty() {
        result.systems = result
            .cases
            .drain(..)
            .flat_map(|case| case.systems)
            .collect();
    }
    result
}

/// Every run of the grid, in the order of the table.
fn jobs<'a>(points: &'a [Point], systems: &[System], seeds: NonZeroU32) -> Vec<Job<'a>> {
    let mut jobs = Vec::new();
    for point in points {
        let systems = match systems {
            [] => &point.scenario.systems,
            chosen => chosen,
        };
        for &system in systems {
            for seed in (point.scenario.seed..).take(seeds.get() as usize) {
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

    use demeter_outcome::{Speed, Unit};

    use super::*;

    fn seeds(count: u32) -> NonZeroU32 {
        NonZeroU32::new(count).unwrap()
    }

    fn points(axes: &[&str]) -> Vec<Point> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        let axes = axes.iter().map(|axis| axis.parse().unwrap()).collect();
        Grid::load(&path, axes).unwrap().points().unwrap()
    }

    #[test]
    fn a_case_has_the_middle_of_its_runs_less_what_none_takes() {
        let points = points(&["workload.hot_mib=10,20"]);
        let jobs = jobs(&points, &[System::None, System::Demeter], seeds(3));
        // In each case 1, 2, 3 seconds of none, then 4, 5, 6 of demeter.
        let run = |(index, job): (usize, &Job<'_>)| SystemResult {
            name: job.system.to_string(),
            speed: Some(Speed::new(Unit::MOPS, (index % 6) as f64 + 1.0, None)),
            mgmt_cpu_s: Some((index % 6) as f64 + 1.0),
            ..SystemResult::default()
        };
        let results: Vec<_> = jobs.iter().enumerate().map(run).collect();
        let found = result(&points[0], &jobs, seeds(3), &results);
        found.check().unwrap();
        assert!(found.systems.is_empty());
        assert_eq!(found.cases.len(), 2);
        for (case, hot_mib) in found.cases.iter().zip(["10", "20"]) {
            assert_eq!(
                case.settings,
                [("workload.hot_mib".to_owned(), hot_mib.to_owned())]
            );
            let figures: Vec<_> = case
                .systems
                .iter()
                .map(|s| (s.name.as_str(), s.mean(), s.mgmt_cpu_s))
                .collect();
            let expected = [
                ("none", Some(2.0), Some(0.0)),
                ("demeter", Some(5.0), Some(3.0)),
            ];
            assert_eq!(figures, expected);
            let repeats = case.systems[1].repeats.unwrap();
            assert_eq!((repeats.runs, repeats.min, repeats.max), (3, 4.0, 6.0));
        }
    }

    #[test]
    fn without_axes_there_are_no_cases() {
        let points = points(&[]);
        let jobs = jobs(&points, &[System::None], seeds(1));
        let found = result(&points[0], &jobs, seeds(1), &[SystemResult::default()]);
        assert_eq!((found.systems.len(), found.cases.len()), (1, 0));
    }

    #[test]
    fn every_point_runs_every_system_with_every_seed() {
        let points = points(&["workload.hot_mib=10,20"]);
        let jobs = jobs(&points, &[System::None, System::Demeter], seeds(2));
        let texts: Vec<_> = jobs.iter().map(ToString::to_string).collect();
        let expected = ["10", "20"].into_iter().flat_map(|hot| {
            ["none", "none seed 2", "demeter", "demeter seed 2"]
                .map(|run| format!("workload.hot_mib={hot} {run}"))
        });
        assert_eq!(texts, expected.collect::<Vec<_>>());
    }
}
