//! A worker pool that executes many runs in parallel.
//!
//! # Approach
//! Workers take runs in order. The total time is estimated from the progress of all runs. All runs end at their next
//! progress report if the estimate after the first run is too long, a run fails, or the caller stops.
//!
//! # Properties
//! - Results come in job order and do not depend on the number of workers.
//! - After a failure no run starts.
//! - For runs of equal length the estimate is exact.

use std::fmt;
use std::num::NonZeroUsize;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use demeter_outcome::SystemResult;
use demeter_scenario::{Place, Point, Settings, System};

use crate::error::SimError;
use crate::progress::OnProgress;
use crate::run::{run, run_under};

/// One run: a scenario under one system with one seed.
#[derive(Debug, Clone, Copy)]
pub struct PlannedRun<'a> {
    /// The scenario, with the settings of this point.
    pub point: &'a Point,
    /// The system.
    pub system: System,
    /// The settings of the system, if the scenario lists any.
    pub under: Option<&'a Settings>,
    /// The workload's seed.
    pub seed: u64,
}

impl PlannedRun<'_> {
    /// Identifies the run among those of its system: its point's settings and its seed.
    pub fn settings(&self) -> Vec<(String, String)> {
        let mut settings = self.point.texts();
        settings.push(("seed".into(), self.seed.to_string()));
        settings
    }
}

impl fmt::Display for PlannedRun<'_> {
    /// Formats the settings, the system, and the seed unless it is the scenario's own.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if !self.point.settings.is_empty() {
            write!(f, "{} ", self.point)?;
        }
        write!(f, "{}", self.system)?;
        if let Some(under) = self.under {
            write!(f, " ({})", under.name)?;
        }
        if self.seed != self.point.scenario.seed {
            write!(f, " seed {}", self.seed)?;
        }
        Ok(())
    }
}

/// Limits of a set of runs.
#[derive(Debug, Clone, Copy)]
pub struct RunLimits<'a> {
    /// Runs at a time.
    pub workers: NonZeroUsize,
    /// Longest estimated time, in hours. The check happens after the first run.
    pub hours_max: f64,
    /// Once it is set, all runs end soon.
    pub stop: &'a AtomicBool,
}

/// Progress of a set of runs.
#[derive(Debug)]
pub enum RunProgress<'a> {
    /// A run reported progress.
    Underway {
        /// The run.
        job: PlannedRun<'a>,
        /// Share of its timed phase or of its work, 0 to 1.
        share: f64,
        /// Time since it started.
        since: Duration,
        /// Number of runs.
        of: usize,
        /// Estimated time for the remaining work; none until something is done.
        left: Option<Duration>,
    },
    /// A run is done. [`run_all`](crate::run_all) later adjusts results by figures that follow from several runs.
    Done {
        /// The run.
        job: PlannedRun<'a>,
        /// Its result.
        result: &'a SystemResult,
        /// Number of completed runs.
        done: usize,
        /// Number of runs.
        of: usize,
        /// Estimated time for the remaining runs.
        left: Duration,
    },
}

/// Runs all jobs and returns their results in order. Several threads report progress to `tell`.
///
/// # Errors
/// The first error of a run, [`SimError::Interrupted`] when `limits.stop` was set, or [`SimError::TooLong`].
pub fn run_jobs(
    jobs: &[PlannedRun<'_>],
    limits: RunLimits<'_>,
    tell: &(dyn Fn(RunProgress<'_>) + Sync),
) -> Result<Vec<SystemResult>, SimError> {
    run_jobs_by(
        jobs,
        limits,
        tell,
        &|job: PlannedRun<'_>, watch: &OnProgress<'_>| {
            let scenario = &job.point.scenario;
            match job.under {
                Some(settings) => run_under(scenario, settings, job.seed, watch),
                None => run(scenario, job.system, job.seed, watch),
            }
        },
    )
}

fn run_jobs_by(
    jobs: &[PlannedRun<'_>],
    limits: RunLimits<'_>,
    tell: &(dyn Fn(RunProgress<'_>) + Sync),
    run: &(dyn Fn(PlannedRun<'_>, &OnProgress<'_>) -> Result<SystemResult, SimError> + Sync),
) -> Result<Vec<SystemResult>, SimError> {
    if jobs
        .iter()
        .any(|job| !job.point.scenario.machine.place.is_guest() || !job.system.runs_on(Place::Sim))
    {
        return Err(SimError::NoModelOf("a host with a guest (machine.place)"));
    }
    if jobs
        .iter()
        .any(|job| job.point.scenario.workload.has_cgroups())
    {
        return Err(SimError::NoModelOf("cgroups (workload.program.cgroup)"));
    }
    let is_idle = |job: &PlannedRun<'_>| {
        let mut vms = job.point.scenario.vms().into_iter();
        vms.any(|(_, vm)| vm.workload.is_idle_at_times())
    };
    if jobs.iter().any(is_idle) {
        return Err(SimError::NoModelOf(
            "a program that is idle for a while (phases.hot_mib = 0)",
        ));
    }
    let pool = Pool {
        jobs,
        limits,
        start: Instant::now(),
        work: Mutex::new(Work {
            next: 0,
            results: vec![None; jobs.len()],
            shares: vec![0.0; jobs.len()],
            done: 0,
            error: None,
        }),
        halt: AtomicBool::new(false),
    };
    thread::scope(|scope| {
        for _ in 0..limits.workers.get().min(jobs.len()) {
            scope.spawn(|| pool.run(tell, run));
        }
    });
    let work = pool
        .work
        .into_inner()
        .unwrap_or_else(PoisonError::into_inner);
    match work.error {
        Some(error) => Err(error),
        None => Ok(work.results.into_iter().flatten().collect()),
    }
}

/// State shared by workers.
struct Pool<'a> {
    jobs: &'a [PlannedRun<'a>],
    limits: RunLimits<'a>,
    start: Instant,
    work: Mutex<Work>,
    /// Set with `Work::error`, to end other runs.
    halt: AtomicBool,
}

struct Work {
    next: usize,
    results: Vec<Option<SystemResult>>,
    /// Progress of each run, 0 to 1.
    shares: Vec<f64>,
    done: usize,
    error: Option<SimError>,
}

impl Pool<'_> {
    fn lock(&self) -> MutexGuard<'_, Work> {
        self.work.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Executes runs until none is left or one fails.
    fn run(
        &self,
        tell: &(dyn Fn(RunProgress<'_>) + Sync),
        run: &(dyn Fn(PlannedRun<'_>, &OnProgress<'_>) -> Result<SystemResult, SimError> + Sync),
    ) {
        while let Some((index, job)) = self.take() {
            let began = Instant::now();
            let watch = |share: f64| {
                let left = self.come_to(index, share);
                tell(RunProgress::Underway {
                    job,
                    share,
                    since: began.elapsed(),
                    of: self.jobs.len(),
                    left,
                });
                self.may_go_on()
            };
            let result = self.may_go_on().and_then(|()| run(job, &watch));
            match result {
                Ok(result) => self.finish(index, job, result, tell),
                Err(SimError::Interrupted) => self.fail(SimError::Interrupted),
                Err(source) => self.fail(SimError::Run {
                    job: job.to_string(),
                    source: Box::new(source),
                }),
            }
        }
    }

    fn take(&self) -> Option<(usize, PlannedRun<'_>)> {
        let mut work = self.lock();
        let job = self.jobs.get(work.next)?;
        work.next += 1;
        work.error.is_none().then_some((work.next - 1, *job))
    }

    fn may_go_on(&self) -> Result<(), SimError> {
        let stop = [self.limits.stop, &self.halt];
        match stop.iter().any(|stop| stop.load(Ordering::Relaxed)) {
            true => Err(SimError::Interrupted),
            false => Ok(()),
        }
    }

    /// Keeps only the first failure, as others may follow from it.
    fn fail(&self, error: SimError) {
        self.lock().error.get_or_insert(error);
        self.halt.store(true, Ordering::Relaxed);
    }

    fn finish(
        &self,
        index: usize,
        job: PlannedRun<'_>,
        result: SystemResult,
        tell: &(dyn Fn(RunProgress<'_>) + Sync),
    ) {
        let mut work = self.lock();
        work.done += 1;
        work.shares[index] = 1.0;
        let (done, of) = (work.done, self.jobs.len());
        let left = self.left(&work).unwrap_or(Duration::MAX);
        tell(RunProgress::Done {
            job,
            result: &result,
            done,
            of,
            left,
        });
        work.results[index] = Some(result);
        drop(work);
        if done == 1 && left.as_secs_f64() > self.limits.hours_max * 3600.0 {
            self.fail(SimError::TooLong {
                runs: of,
                hours: left.as_secs_f64() / 3600.0,
                hours_max: self.limits.hours_max,
            });
        }
    }

    /// Records a run's progress; returns the estimated time for the remaining work.
    fn come_to(&self, index: usize, share: f64) -> Option<Duration> {
        let mut work = self.lock();
        work.shares[index] = share;
        self.left(&work)
    }

    fn left(&self, work: &Work) -> Option<Duration> {
        left(self.start.elapsed(), &work.shares, self.limits.workers)
    }
}

/// Estimates the time for the remaining work from the progress so far. All workers share the work, but at most one
/// works on a run. None until something is done.
fn left(elapsed: Duration, shares: &[f64], workers: NonZeroUsize) -> Option<Duration> {
    let workers = workers.get().min(shares.len()) as f64;
    let done: f64 = shares.iter().sum();
    let each = elapsed.as_secs_f64() * workers / done;
    let together = (shares.len() as f64 - done) / workers;
    let longest = shares
        .iter()
        .fold(0.0, |longest: f64, share| longest.max(1.0 - share));
    Duration::try_from_secs_f64(each * together.max(longest)).ok()
}

#[cfg(test)]
mod tests {
    use std::path::Path;
    use std::sync::atomic::AtomicUsize;

    use demeter_scenario::Grid;
    use proptest::prelude::*;

    use super::*;

    fn points() -> Vec<Point> {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/gups.toml");
        let axis = "workload.hot_mib=10,20,30".parse().unwrap();
        Grid::load(&path, vec![axis]).unwrap().points().unwrap()
    }

    fn jobs(points: &[Point]) -> Vec<PlannedRun<'_>> {
        let jobs = points.iter().flat_map(|point| {
            (1..=4).map(move |seed| PlannedRun {
                point,
                system: System::None,
                under: None,
                seed,
            })
        });
        jobs.collect()
    }

    fn limits(workers: usize, stop: &AtomicBool) -> RunLimits<'_> {
        RunLimits {
            workers: NonZeroUsize::new(workers).unwrap(),
            hours_max: 1.0,
            stop,
        }
    }

    fn named(job: PlannedRun<'_>) -> SystemResult {
        SystemResult {
            name: job.to_string(),
            ..SystemResult::default()
        }
    }

    proptest! {
        /// Runs of ten seconds with all workers busy; the newest runs are in progress.
        #[test]
        fn of_equal_runs_the_estimate_is_exact(
            workers in 1usize..5,
            rounds in 1usize..10,
            done in 0usize..10,
            share in 0.01f64..0.99,
        ) {
            let done = done.min(rounds - 1);
            let of = |round: usize| match round.cmp(&done) {
                std::cmp::Ordering::Less => 1.0,
                std::cmp::Ordering::Equal => share,
                std::cmp::Ordering::Greater => 0.0,
            };
            let shares: Vec<f64> = (0..rounds * workers).map(|run| of(run / workers)).collect();
            let now = |rounds: f64| Duration::from_secs_f64(10.0 * rounds);
            let workers = NonZeroUsize::new(workers).unwrap();
            let estimate = left(now(done as f64 + share), &shares, workers).unwrap();
            let truth = now(rounds as f64 - done as f64 - share);
            prop_assert!((estimate.as_secs_f64() - truth.as_secs_f64()).abs() < 1e-3);
        }

        #[test]
        fn results_come_in_the_order_of_the_jobs(workers in 1usize..20, count in 0usize..12) {
            let points = points();
            let jobs = &jobs(&points)[..count];
            let stop = AtomicBool::new(false);
            let counts = Mutex::new(vec![]);
            let tell = |event: RunProgress<'_>| {
                if let RunProgress::Done { done, of, .. } = event {
                    counts.lock().unwrap().push((done, of));
                }
            };
            let got = run_jobs_by(jobs, limits(workers, &stop), &tell, &|job, _| Ok(named(job)));
            let expected: Vec<_> = jobs.iter().map(|job| named(*job)).collect();
            prop_assert_eq!(got.unwrap(), expected);
            let expected: Vec<_> = (1..=count).map(|done| (done, count)).collect();
            prop_assert_eq!(counts.into_inner().unwrap(), expected);
        }

        #[test]
        fn after_a_failure_no_run_begins(failing in 0usize..12) {
            let points = points();
            let stop = AtomicBool::new(false);
            let begun = AtomicUsize::new(0);
            let run = |_: PlannedRun<'_>, _: &OnProgress<'_>| {
                if begun.fetch_add(1, Ordering::SeqCst) == failing {
                    return Err(SimError::Stuck);
                }
                Ok(SystemResult::default())
            };
            let ended = run_jobs_by(&jobs(&points), limits(1, &stop), &|_| (), &run);
            let said = ended.unwrap_err();
            prop_assert!(matches!(said, SimError::Run { .. }), "{said}");
            prop_assert_eq!(begun.into_inner(), failing + 1);
        }
    }

    #[test]
    fn the_last_run_takes_one_worker() {
        let two = NonZeroUsize::new(2).unwrap();
        let ten = Duration::from_secs(10);
        assert_eq!(left(ten, &[0.0, 0.0, 0.0], two), None);
        assert_eq!(left(ten, &[1.0, 1.0, 0.0], two), Some(ten));
        assert_eq!(left(ten, &[1.0], two), Some(Duration::ZERO));
    }

    #[test]
    fn a_failed_run_is_named() {
        let points = points();
        let stop = AtomicBool::new(false);
        let run = |job: PlannedRun<'_>, _: &OnProgress<'_>| match job.seed {
            4 => Err(SimError::Stuck),
            _ => Ok(named(job)),
        };
        let error = run_jobs_by(&jobs(&points), limits(1, &stop), &|_| (), &run).unwrap_err();
        assert_eq!(error.to_string(), "workload.hot_mib=10 none seed 4");
    }

    #[test]
    fn a_run_under_way_ends_when_it_is_told_to_stop() {
        let points = points();
        let stop = AtomicBool::new(false);
        let begun = AtomicUsize::new(0);
        let tell = |event: RunProgress<'_>| {
            if matches!(event, RunProgress::Underway { share, .. } if share >= 0.5) {
                stop.store(true, Ordering::Relaxed);
            }
        };
        let run = |job: PlannedRun<'_>, watch: &OnProgress<'_>| {
            begun.fetch_add(1, Ordering::Relaxed);
            (0..10).try_for_each(|tenth| watch(f64::from(tenth) / 10.0))?;
            Ok(named(job))
        };
        let ended = run_jobs_by(&jobs(&points), limits(1, &stop), &tell, &run);
        assert!(matches!(ended, Err(SimError::Interrupted)));
        assert_eq!(begun.into_inner(), 1);
    }

    #[test]
    fn what_would_take_too_long_is_refused_after_the_first_run() {
        let points = points();
        let stop = AtomicBool::new(false);
        let begun = AtomicUsize::new(0);
        let limits = RunLimits {
            hours_max: 0.0,
            ..limits(1, &stop)
        };
        let refused = run_jobs_by(&jobs(&points), limits, &|_| (), &|job, _| {
            begun.fetch_add(1, Ordering::Relaxed);
            Ok(named(job))
        });
        let said = refused.unwrap_err().to_string();
        assert!(said.contains("--hours-max 0"), "{said}");
        assert_eq!(begun.into_inner(), 1);
    }
}
