//! Throughput of a guest over time.

use demeter_outcome::Point;

use crate::machine::cost::PS_PER_S;

/// Length of an interval.
const INTERVAL_PS: u64 = PS_PER_S / 4;
/// A guest starves in an interval if it does less than this share of its full speed.
const STARVED_BELOW: f64 = 0.01;

/// Amount of work in each interval.
#[derive(Debug, Default)]
pub(super) struct Throughput {
    done: Vec<f64>,
}

impl Throughput {
    /// Adds `done` work, spread evenly from `from_ps` to `to_ps`.
    pub fn add(&mut self, from_ps: u64, to_ps: u64, done: u64) {
        let last = usize::try_from(to_ps.saturating_sub(1) / INTERVAL_PS).unwrap_or(usize::MAX);
        if self.done.len() <= last {
            self.done.resize(last + 1, 0.0);
        }
        let length_ps = to_ps.saturating_sub(from_ps).max(1) as f64;
        let mut at_ps = from_ps;
        while at_ps < to_ps {
            let interval = at_ps / INTERVAL_PS;
            let end_ps = to_ps.min((interval + 1) * INTERVAL_PS);
            self.done[interval as usize] += done as f64 * (end_ps - at_ps) as f64 / length_ps;
            at_ps = end_ps;
        }
    }

    /// Speeds in millions a second, up to `until_ps`. An incomplete interval counts only if it is the only one.
    pub fn series(&self, until_ps: u64) -> Vec<Point> {
        let whole = usize::try_from(until_ps / INTERVAL_PS).unwrap_or(usize::MAX);
        let point = |(n, done): (u64, &f64), length_ps: u64| Point {
            t_s: (n * INTERVAL_PS + length_ps) as f64 / PS_PER_S as f64,
            speed: Some(done / (length_ps as f64 / PS_PER_S as f64) / 1e6),
            ..Point::default()
        };
        if whole == 0 {
            let first = self.done.first().filter(|_| until_ps > 0);
            return first
                .map(|done| point((0, done), until_ps))
                .into_iter()
                .collect();
        }
        let intervals = (0u64..).zip(&self.done).take(whole);
        intervals
            .map(|interval| point(interval, INTERVAL_PS))
            .collect()
    }

    /// Milliseconds for which the guest starved between two times. The full speed is in millions a second.
    pub fn starved_ms(&self, from_ps: u64, until_ps: u64, full_mops: f64) -> u64 {
        let series = self.series(until_ps);
        let points = (0u64..).zip(&series);
        let starved = points.filter(|(n, point)| {
            n * INTERVAL_PS >= from_ps
                && point
                    .speed
                    .is_some_and(|speed| speed < STARVED_BELOW * full_mops)
        });
        starved.count() as u64 * (INTERVAL_PS / 1_000_000_000)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// The series preserves the total amount of work, for any spans.
        #[test]
        fn all_is_told(spans in proptest::collection::vec((0u64..2 * PS_PER_S, 1u64..PS_PER_S, 0u64..1000), 1..20)) {
            let mut throughput = Throughput::default();
            for &(from, length, done) in &spans {
                throughput.add(from, from + length, done);
            }
            let sum: f64 = throughput.done.iter().sum();
            let added: u64 = spans.iter().map(|(_, _, done)| done).sum();
            prop_assert!((sum - added as f64).abs() < 1e-6 * added as f64 + 1e-6);
        }
    }

    #[test]
    fn a_guest_starves_while_it_does_next_to_nothing() {
        let mut throughput = Throughput::default();
        throughput.add(0, PS_PER_S, 1_000_000);
        throughput.add(PS_PER_S, 3 * PS_PER_S, 100);
        throughput.add(3 * PS_PER_S, 4 * PS_PER_S, 500_000);
        assert_eq!(throughput.starved_ms(0, 4 * PS_PER_S, 1.0), 2000);
        assert_eq!(throughput.starved_ms(2 * PS_PER_S, 4 * PS_PER_S, 1.0), 1000);
        let series = throughput.series(PS_PER_S / 2 + 5);
        assert_eq!((series.len(), series[1].speed), (2, Some(1.0)));
    }
}
