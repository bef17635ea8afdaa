//! Zipf distribution: the element of rank r (from 1) has a probability proportional to r^-theta.
//!
//! **Problem.** Every few accesses need a draw from up to 2^40 elements, within nanoseconds, and reproducible on every
//! machine.
//!
//! **Approach.** The ranks are divided into some hundred buckets. The first 64 ranks have one each; each later bucket
//! has a sixteenth of the length before it. A table of bounds gives each bucket its share of the random numbers. A
//! second table, indexed by the upper bits of the number, gives the start of the search. Within a bucket all ranks are
//! equally likely.
//!
//! **Properties.** Ranks stay in `0..count`. Shares follow the law within 7 % at the edge of a bucket, and much closer
//! over several buckets. Equal random numbers give equal ranks.

use super::rng::{mix, scale};

/// Number of ranks with their own bucket.
const SINGLES: u64 = 64;
/// Length of a later bucket: its first rank divided by this.
const STEP: u64 = 16;
/// Bits of a random number that index the guide table.
const GUIDE_BITS: u32 = 12;

/// Zipf's law over `0..count`, rank 0 the most popular.
#[derive(Debug, Clone)]
pub(crate) struct Zipf {
    /// First rank of each bucket, and the count as last entry.
    starts: Vec<u64>,
    /// Random numbers below a bound fall into its bucket or an earlier one.
    bounds: Vec<u64>,
    /// For each value of the upper bits, the first possible bucket.
    guide: Vec<u16>,
}

impl Zipf {
    /// The law with exponent `theta` over `count` elements, at least one.
    pub(crate) fn new(count: u64, theta: f64) -> Self {
        let mut starts = vec![0];
        let mut masses = Vec::new();
        let mut start = 0;
        while start < count {
            let length = if start < SINGLES { 1 } else { start / STEP };
            let end = (start + length).min(count);
            masses.push(mass(start, end, theta));
            starts.push(end);
            start = end;
        }
        let total: f64 = masses.iter().sum();
        let mut below = 0.0;
        let mut bounds: Vec<u64> = masses
            .iter()
            .map(|mass| {
                below += mass / total;
                super::rng::bound(below)
            })
            .collect();
        // Rounding must not leave a random number without a bucket.
        if let Some(last) = bounds.last_mut() {
            *last = u64::MAX;
        }
        let guide = (0..1u64 << GUIDE_BITS)
            .map(|high| {
                let lowest = high << (64 - GUIDE_BITS);
                bounds.partition_point(|&bound| bound <= lowest) as u16
            })
            .collect();
        Self {
            starts,
            bounds,
            guide,
        }
    }

    /// The rank for a random number.
    #[inline]
    pub(crate) fn rank(&self, random: u64) -> u64 {
        let mut bucket = usize::from(self.guide[(random >> (64 - GUIDE_BITS)) as usize]);
        let last = self.bounds.len() - 1;
        while bucket < last && self.bounds[bucket] <= random {
            bucket += 1;
        }
        let start = self.starts[bucket];
        start + scale(mix(random), self.starts[bucket + 1] - start)
    }
}

/// Unnormalised mass of the ranks `start..end` (from 0): exact for one rank, the integral for more.
fn mass(start: u64, end: u64, theta: f64) -> f64 {
    if end - start == 1 {
        return (end as f64).powf(-theta);
    }
    let (from, to) = (start as f64 + 0.5, end as f64 + 0.5);
    if (theta - 1.0).abs() < 1e-9 {
        (to / from).ln()
    } else {
        (to.powf(1.0 - theta) - from.powf(1.0 - theta)) / (1.0 - theta)
    }
}

#[cfg(test)]
mod tests {
    use super::super::rng::Rng;
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn shares_are_those_of_the_law() {
        for theta in [0.0, 0.6, 0.99, 1.0, 1.2] {
            let (count, draws) = (5_000u64, 400_000);
            let zipf = Zipf::new(count, theta);
            let weight = |rank: u64| ((rank + 1) as f64).powf(-theta);
            let total: f64 = (0..count).map(weight).sum();
            let mut hits = vec![0u32; count as usize];
            let mut rng = Rng::new(7, 0);
            for _ in 0..draws {
                hits[zipf.rank(rng.next()) as usize] += 1;
            }
            for ranks in [0..1, 1..2, 10..11, 0..64, 64..200, 100..1000, 1000..5000] {
                let expected: f64 = ranks.clone().map(weight).sum::<f64>() / total;
                let expected = expected * f64::from(draws);
                let got: u32 = hits[ranks.start as usize..ranks.end as usize].iter().sum();
                let error = (f64::from(got) - expected).abs();
                assert!(
                    error < 0.03 * expected + 5.0 * expected.sqrt(),
                    "theta {theta}, ranks {ranks:?}: {got}, expected {expected:.0}"
                );
            }
        }
    }

    proptest! {
        #[test]
        fn ranks_stay_below_the_count(
            count in prop_oneof![1u64..200, 1u64..1 << 40], theta in 0.0..1.5f64, random: u64,
        ) {
            let zipf = Zipf::new(count, theta);
            for random in [0, random, u64::MAX] {
                prop_assert!(zipf.rank(random) < count);
            }
        }
    }
}
