//! The value of a sample on a machine.

use crate::ByLevel;

/// The facts about a machine that determine the value of a sample.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Gain {
    /// Loads that one sample represents; `None` if the tracker does not know.
    pub loads_per_sample: Option<u32>,
    /// Upper bound of a program's assumed share of time that it waits for memory.
    pub waits: f64,
    /// Measured latency of a load from each tier, nanoseconds.
    pub latency_ns: ByLevel<u32>,
    /// CPUs that programs run on.
    pub cpus: u32,
}

impl Gain {
    /// Extra cost of an event in each tier compared with the fastest, seconds: its loads times the difference of
    /// latencies.
    ///
    /// At `events_per_s` all events together cost no more than the time that a program saves if it waits for the
    /// slowest memory for `waits` of its time.
    pub(crate) fn event_s(&self, events_per_s: f64) -> ByLevel<f64> {
        let fastest = self.latency_ns.0[0];
        let slowest = self.latency_ns.0.into_iter().fold(1, u32::max);
        ByLevel::from_fn(|level| {
            let more_ns = f64::from(self.latency_ns.get(level).saturating_sub(fastest));
            let time_saved = self.waits * f64::from(self.cpus) * more_ns / f64::from(slowest);
            let most_s = time_saved / events_per_s.max(f64::MIN_POSITIVE);
            let known_s = self
                .loads_per_sample
                .map(|loads| f64::from(loads) * more_ns * 1e-9);
            known_s.map_or(most_s, |known_s| known_s.min(most_s))
        })
    }
}
