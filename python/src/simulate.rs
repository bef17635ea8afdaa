//! Runs on the simulator, without the interpreter's lock.

use std::num::{NonZeroU32, NonZeroUsize};
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, sync_channel};
use std::thread;
use std::time::Duration;

use demeter_scenario::{Point, System};
use demeter_sim::{Event, Job, Limits, SimError, run_all, run_jobs};
use pyo3::exceptions::PyKeyboardInterrupt;
use pyo3::prelude::*;

use crate::error::{Error, told};
use crate::scenario::Scenario;

/// What is not heard yet. Of a run under way only the newest is worth hearing, so that more is
/// dropped.
const EVENTS_MAX: usize = 64;

/// How long Python's signals may wait.
const PATIENCE: Duration = Duration::from_millis(100);

/// Ends runs of other threads.
#[pyclass(frozen, module = "demeter._core")]
#[derive(Default)]
pub struct Stop(Arc<AtomicBool>);

#[pymethods]
impl Stop {
    #[new]
    fn new() -> Self {
        Self::default()
    }

    /// Ends the runs that were given it.
    fn set(&self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What Python is told: the run, the share of it that is done, runs that are done, of how many, and
/// seconds left for the others.
type Told = (String, f64, Option<(usize, usize, f64)>);

fn tell(events: &SyncSender<Told>, event: Event<'_>) {
    // Nobody hears who has failed or was interrupted: the runs end soon.
    match event {
        Event::Underway { job, share, .. } => {
            let _ = events.try_send((job.to_string(), share, None));
        }
        Event::Done {
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

/// Runs all cases and systems of a scenario, `repeat` seeds each, `jobs` at a time; the result as
/// JSON. `progress` is called by the calling thread, with what [`Told`] says.
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
    let limits = Limits {
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

/// Runs one system of a scenario with one seed; its result as JSON, management not yet less that of
/// none. The scenario comes as TOML, from another process.
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
    let job = Job {
        point: &point,
        system,
        under: None,
        seed,
    };
    let limits = Limits {
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
