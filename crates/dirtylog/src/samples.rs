//! Samples the guest's speed over time, in a thread.

use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use serde::Serialize;

use crate::error::Error;
use crate::machine::Machine;

/// Time between two samples.
const LOOK_EVERY: Duration = Duration::from_millis(10);
/// Maximum number of samples; beyond it, pairs are merged.
const SAMPLES_MAX: usize = 4096;

/// The guest's progress between two readings.
#[derive(Debug, Clone, Copy, PartialEq, Serialize)]
pub struct Sample {
    /// End of the sample, milliseconds since the start of the measurement.
    pub until_ms: f64,
    /// Its length, milliseconds.
    pub for_ms: f64,
    /// Stores of all virtual CPUs.
    pub stores: u64,
    /// The longest wait of any virtual CPU between two stores that ended in this sample, microseconds.
    pub worst_wait_us: f64,
}

/// Samples a machine until dropped.
pub struct Sampler {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

struct Shared {
    machine: Arc<Machine>,
    begin: Instant,
    done: AtomicBool,
    state: Mutex<State>,
}

struct State {
    samples: Samples,
    /// Time and number of stores at the last reading.
    last: (Instant, u64),
}

impl Sampler {
    /// Starts sampling.
    pub fn start(machine: &Arc<Machine>, begin: Instant) -> Result<Self, Error> {
        let last = (Instant::now(), machine.stores().sum());
        machine.take_worst_wait_us();
        let shared = Arc::new(Shared {
            machine: Arc::clone(machine),
            begin,
            done: AtomicBool::new(false),
            state: Mutex::new(State {
                samples: Samples::default(),
                last,
            }),
        });
        let looks = Arc::clone(&shared);
        let thread = thread::Builder::new()
            .name("sampler".into())
            .spawn(move || {
                while !looks.done.load(Ordering::Relaxed) {
                    thread::sleep(LOOK_EVERY);
                    looks.look();
                }
            })
            .map_err(|source| Error::Call {
                what: "start a thread",
                source,
            })?;
        Ok(Self {
            shared,
            thread: Some(thread),
        })
    }

    /// Ends the present sample. Returns the time in milliseconds since the start.
    pub fn mark(&self) -> f64 {
        self.shared.look()
    }

    /// The longest wait in samples that ended after `from_ms`, up to `to_ms`.
    pub fn worst_wait_us(&self, from_ms: f64, to_ms: f64) -> f64 {
        let state = self.shared.state();
        let within = state.samples.kept.iter();
        let within = within.filter(|sample| sample.until_ms > from_ms && sample.until_ms <= to_ms);
        within
            .map(|sample| sample.worst_wait_us)
            .fold(0.0, f64::max)
    }

    /// Stops sampling and returns the samples.
    pub fn finish(self) -> Vec<Sample> {
        std::mem::take(&mut self.shared.state().samples.kept)
    }
}

impl Drop for Sampler {
    fn drop(&mut self) {
        self.shared.done.store(true, Ordering::Relaxed);
        if let Some(thread) = self.thread.take() {
            let _ = thread.join();
        }
    }
}

impl Shared {
    fn state(&self) -> std::sync::MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn look(&self) -> f64 {
        let mut state = self.state();
        let (now, stores) = (Instant::now(), self.machine.stores().sum::<u64>());
        let until_ms = ms(now - self.begin);
        let sample = Sample {
            until_ms,
            for_ms: ms(now - state.last.0),
            stores: stores.wrapping_sub(state.last.1),
            worst_wait_us: self.machine.take_worst_wait_us(),
        };
        state.last = (now, stores);
        state.samples.push(sample);
        until_ms
    }
}

/// A duration in milliseconds.
pub fn ms(duration: Duration) -> f64 {
    duration.as_secs_f64() * 1000.0
}

/// A bounded series.
#[derive(Default)]
struct Samples {
    kept: Vec<Sample>,
}

impl Samples {
    fn push(&mut self, sample: Sample) {
        if self.kept.len() >= SAMPLES_MAX {
            self.kept = self.kept.chunks(2).map(merged).collect();
        }
        self.kept.push(sample);
    }
}

/// Merges samples into one.
pub(crate) fn merged(samples: &[Sample]) -> Sample {
    Sample {
        until_ms: samples.last().map_or(0.0, |last| last.until_ms),
        for_ms: samples.iter().map(|sample| sample.for_ms).sum(),
        stores: samples.iter().map(|sample| sample.stores).sum(),
        worst_wait_us: samples
            .iter()
            .map(|sample| sample.worst_wait_us)
            .fold(0.0, f64::max),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_long_series_keeps_its_sums_and_its_worst() {
        let mut samples = Samples::default();
        let many = 3 * SAMPLES_MAX as u64;
        for at in 1..=many {
            samples.push(Sample {
                until_ms: at as f64,
                for_ms: 1.0,
                stores: at,
                worst_wait_us: if at == 1000 { 77.0 } else { 1.0 },
            });
        }
        let all = merged(&samples.kept);
        assert!(samples.kept.len() <= SAMPLES_MAX);
        assert_eq!(
            (all.stores, all.for_ms),
            (many * (many + 1) / 2, many as f64)
        );
        assert_eq!((all.worst_wait_us, all.until_ms), (77.0, many as f64));
        assert!(samples.kept.is_sorted_by(|a, b| a.until_ms < b.until_ms));
    }
}
