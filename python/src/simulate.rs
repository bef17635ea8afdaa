//! Runs the simulator without the interpreter's lock.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use demeter_scenario::{Point, System};
use demeter_sim::{PlannedRun, RunLimits, RunProgress, SimError, run_all, run_jobs};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::error::{Error, told};
use crate::scenario::Scenario;

/// Size of the event queue. Only a run's newest progress matters, so that further events are dropped.
const EVENTS_MAX: usize = 64;

/// Longest delay of Python's signals.
const PATIENCE: Duration = Duration::from_millis(100);

/// A flag that stops runs of other threads.
#[pyclass(frozen, module = "demeter._core")]
#[derive(Default)]
pub struct Stop(Arc<AtomicBool>);

#[pymethods]
impl Stop {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Stops the runs that have this flag.
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Progress for Python: the run, its finished share, and the number of finished runs, of all runs, and the remaining
/// seconds.
type Told = (String, f64, Option<(usize, usize, f64)>);

fn tell(events: &SyncSender<Told>, event: RunProgress<'_>) {
    // If the receiver is gone, it has failed or was interrupted, and the runs end soon.
    match event {
        RunProgress::Underway { job, share, .. } => {
            let _ = events.try_send((job.to_string(), share, None));
        }
        RunProgress::Done {
            job,
            done,
            of,
            left,
            ..
        } => {
            let all = (done, of, left.as_secs_f64());
            let _ = events.send((job.to_string(), 1.0, Some(all)));
        }
    }
}

/// Runs all cases and systems of a scenario with `repeat` seeds each, `jobs` at a time. Returns the result as JSON. The
/// calling thread calls `progress` with the values of [`Told`].
#[pyfunction]
#[pyo3(signature = (scenario, repeat, jobs, hours_max, progress))]
pub fn simulate(
    py: Python<'_>,
    scenario: &Scenario,
    repeat: NonZeroU32,
    jobs: Option<NonZeroUsize>,
    hours_max: f64,
    progress: Option<Py<PyAny>>,
) -> PyResult<String> {
    let stop = AtomicBool::new(false);
    let cores = || thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
    let limits = RunLimits {
        workers: jobs.unwrap_or_else(cores),
        hours_max,
        stop: &stop,
    };
    let (sender, events) = sync_channel(EVENTS_MAX);
    let hear = |told: Option<Told>| {
        Python::attach(|py| {
            py.check_signals()?;
            if let (Some(told), Some(progress)) = (told, &progress) {
                progress.call1(py, told)?;
            }
            Ok::<_, PyErr>(())
        })
    };
    let (point, stop) = (&scenario.point, &stop);
    let (ended, heard) = py.detach(move || {
        thread::scope(|scope| {
            let run = scope.spawn(move || {
                run_all(&point.scenario, repeat, limits, &|event| {
                    tell(&sender, event);
                })
            });
            let mut heard = Ok(());
            loop {
                let told = match events.recv_timeout(PATIENCE) {
                    Ok(told) => Some(told),
                    Err(RecvTimeoutError::Timeout) => None,
                    Err(RecvTimeoutError::Disconnected) => break,
                };
                if heard.is_ok() {
                    heard = hear(told);
                }
                if heard.is_err() {
                    stop.store(true, Ordering::Relaxed);
                }
            }
            (run.join(), heard)
        })
    });
    heard?;
    let ended = ended.map_err(|_| Error::new_err("the simulator panicked; please report it"))?;
    let result = ended.map_err(failed)?;
    serde_json::to_string(&result).map_err(told)
}

/// Runs one system of a scenario with one seed. Returns its result as JSON; the management of `none` is not yet
/// subtracted. The scenario is TOML from another process.
#[pyfunction]
pub fn simulate_one(
    py: Python<'_>,
    scenario: &str,
    system: &str,
    seed: u64,
    stop: &Stop,
) -> PyResult<String> {
    let scenario: demeter_scenario::Scenario = toml::from_str(scenario).map_err(told)?;
    scenario.check().map_err(told)?;
    let system: System = system.parse().map_err(told)?;
    let point = Point {
        settings: vec![],
        scenario,
    };
    let job = PlannedRun {
        point: &point,
        system,
        under: None,
        seed,
    };
    let limits = RunLimits {
        workers: NonZeroUsize::MIN,
        hours_max: f64::INFINITY,
        stop: &stop.0,
    };
    let results = py.detach(|| run_jobs(&[job], limits, &|_| ()));
    serde_json::to_string(&results.map_err(failed)?[0]).map_err(told)
}

fn failed(error: SimError) -> PyErr {
    match error {
        SimError::Interrupted => PyKeyboardInterrupt::new_err("interrupted"),
        other => told(other),
    }
}
