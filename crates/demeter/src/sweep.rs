//! `demeter sweep`: a scenario over a grid of its parameters, on the simulator.

use std::num::NonZeroUsize;
use std::path::PathBuf;
use std::sync::Mutex;
use std::thread;
use std::time::{Duration, Instant};

use anyhow::{Result, bail};
use demeter_report::{CsvRow, SystemResult};
use demeter_scenario::{Axis, Grid, Point, System, plain};

use crate::output;

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
    #[arg(long, value_name = "N", default_value_t = 1)]
    seeds: u64,
    /// Write the table to this file instead of standard output
    #[arg(long, value_name = "FILE")]
    csv: Option<PathBuf>,
    /// Runs at a time; by default as many as there are cores
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Refuse, after the first run, what would take longer than this
    #[arg(long, value_name = "H", default_value_t = 8.0)]
    hours_max: f64,
}

/// One run of the grid.
struct Run<'a> {
    point: &'a Point,
    system: System,
    seed: u64,
}

/// Runs the grid and writes its table.
pub fn sweep(args: &Args) -> Result<()> {
    let points = Grid::load(&args.scenario, args.axes.clone())?.points()?;
    let runs = runs(&points, &args.systems, args.seeds);
    let results = run_all(&runs, args.jobs, args.hours_max, &|run| {
        Ok(demeter_sim::run(&run.point.scenario, run.system, run.seed)?)
    })?;
    let rows: Vec<CsvRow> = runs
        .iter()
        .zip(results)
        .map(|(run, result)| {
            let settings = run.point.settings.iter();
            let mut settings: Vec<_> = settings
                .map(|(key, value)| (key.clone(), plain(value)))
                .collect();
            settings.push(("seed".into(), run.seed.to_string()));
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
fn runs<'a>(points: &'a [Point], systems: &[System], seeds: u64) -> Vec<Run<'a>> {
    let mut runs = Vec::new();
    for point in points {
        let systems = match systems {
            [] => &point.scenario.systems,
            chosen => chosen,
        };
        for &system in systems {
            for seed in (point.scenario.seed..).take(seeds as usize) {
                runs.push(Run {
                    point,
                    system,
                    seed,
                });
            }
        }
    }
    runs
}

/// All results, in the order of `runs`. The first run is the pilot: its time says how long all
/// will take, before the others begin.
fn run_all(
    runs: &[Run],
    jobs: Option<NonZeroUsize>,
    hours_max: f64,
    run: &(impl Fn(&Run) -> Result<SystemResult> + Sync),
) -> Result<Vec<SystemResult>> {
    let Some((pilot, others)) = runs.split_first() else {
        bail!("nothing to run: --seeds must be at least 1");
    };
    let cores = || thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let jobs = jobs.unwrap_or_else(cores).get().min(runs.len());

    let start = Instant::now();
    let first = run(pilot)?;
    let each = start.elapsed();
    let estimate = each.mul_f64(others.len() as f64 / jobs as f64);
    eprintln!(
        "{} runs, {jobs} at a time; the first took {}, the others will take about {}",
        runs.len(),
        spoken(each),
        spoken(estimate)
    );
    if estimate.as_secs_f64() > hours_max * 3600.0 {
        bail!(
            "this sweep would take about {}, more than --hours-max {hours_max}: sweep fewer \
             values, shorten duration_s, or allow more hours",
            spoken(estimate)
        );
    }

    let work = Mutex::new(Work {
        queue: others.iter().enumerate(),
        done: vec![None; others.len()],
        count: 1,
        error: None,
    });
    thread::scope(|scope| {
        for _ in 0..jobs {
            scope.spawn(|| worker(&work, runs.len(), start, run));
        }
    });
    let work = work
        .into_inner()
        .unwrap_or_else(|poisoned| poisoned.into_inner());
    match work.error {
        Some(error) => Err(error),
        None => Ok([first]
            .into_iter()
            .chain(work.done.into_iter().flatten())
            .collect()),
    }
}

/// What the workers share.
struct Work<'a> {
    queue: std::iter::Enumerate<std::slice::Iter<'a, Run<'a>>>,
    done: Vec<Option<SystemResult>>,
    count: usize,
    error: Option<anyhow::Error>,
}

/// Takes runs until there are none, or one failed.
fn worker(
    work: &Mutex<Work>,
    total: usize,
    start: Instant,
    run: &impl Fn(&Run) -> Result<SystemResult>,
) {
    let lock = || work.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    loop {
        let Some((index, next)) = lock().take() else {
            return;
        };
        let result = run(next);
        let mut work = lock();
        match result {
            Ok(result) => {
                work.count += 1;
                let left = start
                    .elapsed()
                    .mul_f64((total - work.count) as f64 / work.count as f64);
                eprintln!(
                    "{}/{total}  {} {} seed {}: {}  ({} left)",
                    work.count,
                    next.point,
                    next.system,
                    next.seed,
                    figure(&result),
                    spoken(left)
                );
                work.done[index] = Some(result);
            }
            Err(error) => {
                let what = format!("{} {} seed {}", next.point, next.system, next.seed);
                work.error.get_or_insert(error.context(what));
            }
        }
    }
}

impl<'a> Work<'a> {
    /// The next run, unless one failed already.
    fn take(&mut self) -> Option<(usize, &'a Run<'a>)> {
        match self.error {
            Some(_) => None,
            None => self.queue.next(),
        }
    }
}

/// The figure that tells most.
fn figure(result: &SystemResult) -> String {
    match (result.mean_mops, result.mean_latency_ns) {
        (Some(mops), _) => format!("{mops:.3} Mops"),
        (None, Some(ns)) => format!("{ns:.1} ns"),
        (None, None) => "done".into(),
    }
}

/// A time as a person says it.
fn spoken(time: Duration) -> String {
    let s = time.as_secs_f64();
    match s {
        s if s < 1.0 => format!("{:.0} ms", s * 1e3),
        s if s < 120.0 => format!("{s:.1} s"),
        s if s < 7200.0 => format!("{:.0} min", s / 60.0),
        s if s < 172_800.0 => format!("{:.1} h", s / 3600.0),
        s => format!("{:.1} days", s / 86_400.0),
    }
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use anyhow::anyhow;

    use super::*;

    fn points() -> Vec<Point> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        let axis = "workload.hot_mib=10,20,30".parse().unwrap();
        Grid::load(&path, vec![axis]).unwrap().points().unwrap()
    }

    fn result(run: &Run) -> SystemResult {
        SystemResult {
            name: format!("{} {} {}", run.point, run.system, run.seed),
            ..SystemResult::default()
        }
    }

    #[test]
    fn results_come_in_the_order_of_the_runs_whatever_the_threads() {
        let points = points();
        let runs = runs(&points, &[System::None, System::Demeter], 4);
        assert_eq!(runs.len(), 3 * 2 * 4);
        let expected: Vec<_> = runs.iter().map(result).collect();
        for jobs in [1, 7] {
            let got = run_all(&runs, NonZeroUsize::new(jobs), 1.0, &|run| Ok(result(run)));
            assert_eq!(got.unwrap(), expected);
        }
    }

    #[test]
    fn a_failed_run_is_named_and_ends_the_sweep() {
        let points = points();
        let runs = runs(&points, &[System::None], 50);
        let started = std::sync::atomic::AtomicUsize::new(0);
        let error = run_all(&runs, NonZeroUsize::new(1), 1.0, &|run| match started
            .fetch_add(1, std::sync::atomic::Ordering::Relaxed)
        {
            3 => Err(anyhow!("no memory")),
            _ => Ok(result(run)),
        });
        let said = format!("{:#}", error.unwrap_err());
        assert!(said.contains("hot_mib=10 none seed 4: no memory"), "{said}");
        assert_eq!(started.into_inner(), 4);
    }

    #[test]
    fn what_would_take_too_long_is_refused_after_the_pilot() {
        let points = points();
        let runs = runs(&points, &[System::None], 2);
        let started = std::sync::atomic::AtomicUsize::new(0);
        let refused = run_all(&runs, None, 0.0, &|run| {
            started.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            Ok(result(run))
        });
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("--hours-max 0"), "{said}");
        assert_eq!(started.into_inner(), 1);
    }

    #[test]
    fn times_are_spoken() {
        let spoken = |s| spoken(Duration::from_secs_f64(s));
        assert_eq!(spoken(0.25), "250 ms");
        assert_eq!(spoken(600.0), "10 min");
        assert_eq!(spoken(4.0 * 86_400.0), "4.0 days");
    }
}
