//! The value of a sample on a machine.

use crate::ByLevel;

/// CPUs of a machine for each thread that moves, and the maximum number of such threads. More would take memory bandwidth
/// and CPUs that programs need.
const CPUS_PER_MOVER: u32 = 8;
const MOVERS_MAX: u32 = 4;

/// The facts about a machine that determine the value of a sample.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Gain {
    /// Loads that one sample represents; `None` if the tracker does not know.
    pub loads_per_sample: Option<u32>,
    /// Upper bound of a program's assumed share of time that it waits for memory.
    pub waits: f64,
    /// Latency of a load from each tier when idle, nanoseconds.
    pub latency_ns: ByLevel<u32>,
    /// CPUs that programs run on.
    pub cpus: u32,
}

impl Gain {
    /// The number of threads that move a batch together.
    pub(super) fn movers(&self) -> usize {
        (self.cpus / CPUS_PER_MOVER).clamp(1, MOVERS_MAX) as usize
    }

    /// Extra cost of an event in each tier compared with the first, seconds: its loads times the difference of
    /// latencies. It is below zero in a tier that is faster than the first one now.
    ///
    /// At `events_per_s` all events together cost no more than the time that a program saves if it waits for the
    /// slowest memory for `waits` of its time.
    pub(crate) fn event_s(&self, latency_ns: &ByLevel<f64>, events_per_s: f64) -> ByLevel<f64> {
        let first_ns = latency_ns.0[0];
        let slowest_ns = latency_ns.0.into_iter().fold(1.0, f64::max);
        ByLevel(latency_ns.0.map(|ns| {
            // A tier without a latency does not exist.
            let more_ns = if ns > 0.0 { ns - first_ns } else { 0.0 };
            let time_saved = self.waits * f64::from(self.cpus) * more_ns.abs() / slowest_ns;
            let most_s = time_saved / events_per_s.max(f64::MIN_POSITIVE);
            let known_s = self
                .loads_per_sample
                .map(|loads| f64::from(loads) * more_ns.abs() * 1e-9);
            known_s
                .map_or(most_s, |known_s| known_s.min(most_s))
                .copysign(more_ns)
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn large_machines_have_more_movers_but_few() {
        let movers = |cpus| {
            let gain = Gain {
                loads_per_sample: None,
                waits: 1.0,
                latency_ns: ByLevel::default(),
                cpus,
            };
            gain.movers()
        };
        let all = [0, 1, 8, 15, 16, 31, 32, 64, u32::MAX].map(movers);
        assert_eq!(all, [1, 1, 1, 1, 2, 3, 4, 4, 4]);
    }
}
