//! Limits and progress messages of simulated runs.

use std::num::NonZeroUsize;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::thread;
use std::time::{Duration, Instant};

use demeter_outcome::SystemResult;
use demeter_sim::{RunLimits, RunProgress};

use crate::output;

/// Interval of progress messages in long runs.
const PATIENCE: Duration = Duration::from_secs(2);

/// Options of commands with many simulated runs.
#[derive(Debug, clap::Args)]
pub struct Work {
    /// Simulate N runs at a time [default: one per core]
    #[arg(long, value_name = "N")]
    jobs: Option<NonZeroUsize>,
    /// Stop after the first simulated run if all would take more than H hours
    #[arg(long, value_name = "H", default_value_t = 8.0)]
    hours_max: f64,
}

impl Work {
    /// The limits; `stop` ends all runs.
    pub fn limits<'a>(&self, stop: &'a AtomicBool) -> RunLimits<'a> {
        let cores = || thread::available_parallelism().unwrap_or(NonZeroUsize::MIN);
        RunLimits {
            workers: self.jobs.unwrap_or_else(cores),
            hours_max: self.hours_max,
            stop,
        }
    }
}

/// Prints a line for each finished run, the progress of long runs, and the estimated total time.
pub struct Progress {
    last: Mutex<Instant>,
}

impl Progress {
    /// A progress without any output yet.
    pub fn new() -> Self {
        Self {
            last: Mutex::new(Instant::now()),
        }
    }

    /// Prints an event, if it is worth a line.
    pub fn show(&self, event: RunProgress<'_>) {
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        match event {
            RunProgress::Underway {
                job,
                share,
                since,
                of,
                left,
            } => {
                if since < PATIENCE || last.elapsed() < PATIENCE {
                    return;
                }
                let all = match of {
                    1 => String::new(),
                    of => format!(" of all {of} runs"),
                };
                let left = left.map_or(String::new(), |left| {
                    format!("  (about {} left{all})", spoken(left))
                });
                output::say(format_args!(
                    "{job}: {:.0} % after {}{left}",
                    share * 100.0,
                    spoken(since)
                ));
            }
            RunProgress::Done {
                job,
                result,
                done,
                of,
                left,
            } => {
                let left = match done < of {
                    true => format!("  (about {} left)", spoken(left)),
                    false => String::new(),
                };
                output::say(format_args!(
                    "{done}/{of}  {job}: {}{left}",
                    figures(result)
                ));
            }
        }
        *last = Instant::now();
    }
}

/// The main figures.
fn figures(result: &SystemResult) -> String {
    let mut text = match (result.elapsed_s, &result.speed) {
        (Some(s), _) => format!("done after {s:.1} s"),
        (_, Some(speed)) if speed.unit.is_time() => {
            format!("mean {:.1} {}", speed.mean.unwrap_or(0.0), speed.unit)
        }
        (_, Some(speed)) => format!("mean {:.3} {}", speed.mean.unwrap_or(0.0), speed.unit),
        _ => "done".into(),
    };
    if let Some(share) = result.hot_in_fast_final {
        text.push_str(&format!(", hot set {:.0} % fast", share * 100.0));
    }
    text
}

/// A duration in words.
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
    use demeter_outcome::{Speed, Unit};

    use super::*;

    #[test]
    fn times_are_spoken() {
        let spoken = |s| spoken(Duration::from_secs_f64(s));
        assert_eq!(spoken(0.25), "250 ms");
        assert_eq!(spoken(600.0), "10 min");
        assert_eq!(spoken(4.0 * 86_400.0), "4.0 days");
    }

    #[test]
    fn the_time_that_work_took_comes_first() {
        let mut result = SystemResult {
            speed: Some(Speed::new(Unit::MOPS, 2.0, None)),
            hot_in_fast_final: Some(0.5),
            ..SystemResult::default()
        };
        assert_eq!(figures(&result), "mean 2.000 Mops, hot set 50 % fast");
        result.elapsed_s = Some(12.0);
        assert_eq!(figures(&result), "done after 12.0 s, hot set 50 % fast");
        result.hot_in_fast_final = None;
        assert_eq!(figures(&result), "done after 12.0 s");
    }
}
