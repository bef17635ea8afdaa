//! Latencies of single operations.
//!
//! # Problem
//! At scale `k`, a simulated operation stands for `2^k` successive real ones. It has the accesses of one real
//! operation, but the clock advances by the time of all. Interruptions, too, are as frequent as for all of them
//! together.
//!
//! # Approach
//! Time is split by the number of real operations that it affects. Time of accesses, and of faults on scaled pages,
//! affects each real operation. An interruption affects one of them, with its whole length. A simulated operation thus
//! adds `2^k` latencies to a histogram. The histogram has `2^7` buckets per octave, so it is bounded, and its error is
//! at most 1/128.
//!
//! # Properties
//! - An operation adds `2^k` latencies, whose sum is its time.
//! - A percentile equals that of the sorted latencies, with an error below 1/128.

use demeter_outcome::Tail;

/// log2 of the buckets per octave.
const OCTAVE_BITS: u32 = 7;

/// Number of buckets to cover all 64-bit numbers.
const BUCKETS: usize = (64 - OCTAVE_BITS as usize + 1) << OCTAVE_BITS;

/// Count and total time of interruptions.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Interruptions {
    pub(crate) times: u64,
    pub(crate) ps: u64,
}

impl Interruptions {
    /// The difference to an earlier state.
    fn since(&self, before: &Self) -> Self {
        Self {
            times: self.times - before.times,
            ps: self.ps - before.ps,
        }
    }
}

/// The current operation of a thread.
#[derive(Debug, Clone, Default)]
pub(crate) struct Operation {
    /// Time that affects each real operation.
    own_ps: u64,
    /// Time that affects a single real operation.
    once_ps: u64,
    /// Interruptions, each of which affects a different real operation.
    often: Interruptions,
    /// The clock at the last check plus known later time.
    expected_ps: u64,
    /// The virtual CPU's interruptions at the last check.
    seen: Interruptions,
}

impl Operation {
    /// An operation that begins now.
    pub(crate) fn new(clock_ps: u64, seen: Interruptions) -> Self {
        Self {
            expected_ps: clock_ps,
            seen,
            ..Self::default()
        }
    }

    /// Adds `ps` to each real operation; the clock advances by `clock_ps`.
    pub(crate) fn spend(&mut self, ps: u64, clock_ps: u64) {
        self.own_ps += ps;
        self.expected_ps += clock_ps;
    }

    /// Records a clock advance by computation, which [`Self::end`] attributes.
    pub(crate) fn compute(&mut self, clock_ps: u64) {
        self.expected_ps += clock_ps;
    }

    /// Detects interruptions: the clock is ahead of the expected time.
    pub(crate) fn look(&mut self, clock_ps: u64, interruptions: Interruptions) {
        let late_ps = clock_ps.saturating_sub(self.expected_ps);
        let often = interruptions.since(&self.seen);
        self.often.times += often.times;
        self.often.ps += often.ps;
        self.once_ps += late_ps.saturating_sub(often.ps);
        self.expected_ps = clock_ps;
        self.seen = interruptions;
    }

    /// Ends the operation after `compute_ps` of computation; the next one begins.
    pub(crate) fn end(&mut self, compute_ps: u64, k: u32, latencies: &mut Latencies) {
        let all = 1 << k;
        let hit = self.often.times.min(all);
        let each_ps = self.often.ps.checked_div(hit).unwrap_or(0);
        let once = u64::from(self.once_ps > 0);
        let own_ps = self.own_ps + compute_ps;
        // A single interruption goes to an operation without any other interruption, if there is one.
        let (hit, free) = if hit < all {
            latencies.add(own_ps + self.once_ps, once);
            (hit, all - hit - once)
        } else {
            latencies.add(own_ps + each_ps + self.once_ps, once);
            (hit - once, 0)
        };
        latencies.add(own_ps + each_ps, hit);
        latencies.add(own_ps, free);
        (self.own_ps, self.once_ps) = (0, 0);
        self.often = Interruptions::default();
    }
}

/// A histogram of latencies in picoseconds.
#[derive(Debug, Clone, Default)]
pub(crate) struct Latencies {
    /// Empty until the first latency.
    counts: Vec<u64>,
    count: u64,
    sum_ps: u128,
}

impl Latencies {
    fn add(&mut self, ps: u64, times: u64) {
        self.counts.resize(BUCKETS, 0);
        self.counts[bucket(ps)] += times;
        self.count += times;
        self.sum_ps += u128::from(ps) * u128::from(times);
    }

    /// Adds another histogram.
    pub(crate) fn add_all(&mut self, other: &Self) {
        self.counts.resize(BUCKETS, 0);
        for (sum, &count) in self.counts.iter_mut().zip(&other.counts) {
            *sum += count;
        }
        self.count += other.count;
        self.sum_ps += other.sum_ps;
    }

    /// The latency at a permille, as the middle of a bucket.
    fn permille(&self, permille: u64) -> f64 {
        let below = (u128::from(self.count) * u128::from(permille)).div_ceil(1000);
        let mut seen = 0u128;
        let found = self.counts.iter().position(|&count| {
            seen += u128::from(count);
            seen >= below.max(1)
        });
        found.map_or(0.0, middle_ps)
    }

    /// Tail latencies for people; none if the histogram is empty.
    pub(crate) fn tail(&self) -> Option<Tail> {
        let ns = |permille| self.permille(permille) / 1e3;
        (self.count > 0).then(|| Tail {
            mean_ns: self.sum_ps as f64 / self.count as f64 / 1e3,
            p50_ns: ns(500),
            p90_ns: ns(900),
            p99_ns: ns(990),
            p999_ns: ns(999),
        })
    }
}

/// The bucket of a number. Buckets grow by octaves; numbers below two octaves have one each.
fn bucket(ps: u64) -> usize {
    let octave = (63 - (ps | 1).leading_zeros()).saturating_sub(OCTAVE_BITS);
    ((octave as usize) << OCTAVE_BITS) + (ps >> octave) as usize
}

fn middle_ps(bucket: usize) -> f64 {
    let octave = (bucket >> OCTAVE_BITS).saturating_sub(1);
    let first = (bucket - (octave << OCTAVE_BITS)) as f64;
    let width = 2f64.powi(octave as i32);
    first * width + (width - 1.0) / 2.0
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn percentiles_are_those_of_the_sorted_list(
            list in prop::collection::vec((0u32..60, any::<u64>()), 1..200), parted in any::<bool>(),
        ) {
            let mut list: Vec<u64> = list.iter().map(|&(bits, n)| n >> (4 + bits)).collect();
            let mut latencies = Latencies::default();
            if parted {
                for part in list.chunks(7) {
                    let mut other = Latencies::default();
                    part.iter().for_each(|&ps| other.add(ps, 1));
                    latencies.add_all(&other);
                }
            } else {
                list.iter().for_each(|&ps| latencies.add(ps, 1));
            }
            list.sort_unstable();
            for permille in [1, 500, 900, 990, 999, 1000] {
                let rank = (list.len() * permille as usize).div_ceil(1000).max(1);
                let (exact, told) = (list[rank - 1] as f64, latencies.permille(permille));
                prop_assert!((told - exact).abs() <= exact / 128.0, "{permille}: {told} {exact}");
            }
            let mean = list.iter().map(|&ps| ps as f64).sum::<f64>() / list.len() as f64;
            let told = latencies.tail().unwrap().mean_ns * 1e3;
            prop_assert!((told - mean).abs() <= mean * 1e-9);
        }

        /// Each of `steps` has a kind and its time for one real operation.
        #[test]
        fn an_operation_adds_as_many_latencies_as_it_stands_for_and_all_of_its_time(
            k in 0u32..7, steps in prop::collection::vec((0u32..4, 0u64..1 << 30), 0..20),
        ) {
            let mut latencies = Latencies::default();
            let (mut clock_ps, mut seen) = (5, Interruptions::default());
            let mut operation = Operation::new(clock_ps, seen);
            let compute_ps = 1000;
            for (what, ps) in steps {
                match what {
                    0 => {
                        clock_ps += ps << k;
                        operation.spend(ps, ps << k);
                    }
                    // An unreported tick.
                    1 => clock_ps += ps,
                    2 => {
                        clock_ps += ps * 3;
                        seen.times += 3;
                        seen.ps += ps * 3;
                    }
                    _ => operation.look(clock_ps, seen),
                }
            }
            operation.look(clock_ps, seen);
            operation.end(compute_ps, k, &mut latencies);
            operation.compute(compute_ps << k);
            clock_ps += compute_ps << k;
            prop_assert_eq!(latencies.count, 1 << k);
            let lost = u128::from(clock_ps - 5) - latencies.sum_ps;
            prop_assert!(lost < 1 << k, "{lost}");
            // The next operation starts with nothing left over.
            operation.look(clock_ps, seen);
            operation.end(0, k, &mut latencies);
            prop_assert_eq!(latencies.count, 2 << k);
            prop_assert!(u128::from(clock_ps - 5) - latencies.sum_ps < 1 << k);
        }
    }

    #[test]
    fn an_interruption_falls_on_one_of_many() {
        let mut latencies = Latencies::default();
        let mut operation = Operation::new(0, Interruptions::default());
        operation.spend(10_000, 10_000 << 6);
        operation.look((10_000 << 6) + 3_000_000, Interruptions::default());
        operation.end(0, 6, &mut latencies);
        let tail = latencies.tail().unwrap();
        assert!((tail.p90_ns - 10.0).abs() < 0.1, "{tail:?}");
        assert!((tail.p99_ns - 3010.0).abs() < 20.0, "{tail:?}");
    }
}
