//! Puts the edge between two neighbouring ranges where the samples say it is.
//!
//! # Problem
//! A split is decided by few samples, so its edges may be off by some granules; what is off is too
//! small for another split, and hot granules on the wrong side are never promoted.
//!
//! # Approach
//! Take the densities of both ranges as given. An edge elsewhere makes the samples more or less
//! likely (Poisson): handing `n` granules with `w` samples from a range of density `a` to one of
//! density `b` gains `w ln(b/a) − n (b − a)` nats. The best edge within a bounded number of
//! entries is taken if it gains enough not to be chance.
//!
//! # Properties
//! - No edge among those looked at is more likely than the one that is returned.
//! - Both ranges keep at least one granule.

use super::histogram::Entry;
use super::to_samples;

/// An edge is moved when that makes the samples `e^3` times as likely.
const GAIN_MIN: f64 = 3.0;

/// Entries that are looked at on each side of the edge.
pub(super) const REACH: usize = 64;

/// One side of an edge.
#[derive(Debug, Clone, Copy)]
pub(super) struct Side {
    /// The granule at the far end of the range: its first, or one past its last.
    pub far: u32,
    /// Samples per granule.
    pub density: f64,
}

/// The granule at which the right range should begin instead of `edge`; `None` to leave it.
/// `entries` are the histogram's, the first `before` of them lie left of the edge.
pub(super) fn better(
    entries: &[Entry],
    before: usize,
    edge: u32,
    left: Side,
    right: Side,
) -> Option<u32> {
    let per_sample = (right.density / left.density).ln();
    let per_granule = right.density - left.density;
    let mut best = (GAIN_MIN, None);
    let mut offer = |at: u32, gain: f64| {
        if gain >= best.0 && left.far < at && at < right.far {
            best = (gain, Some(at));
        }
    };

    // Leftwards the right range takes granules over; a cut is best just before or after an entry.
    let mut taken = 0.0;
    let gain = |at: u32, taken: f64| taken * per_sample - f64::from(edge - at) * per_granule;
    let reach = &entries[before.saturating_sub(REACH)..before];
    let own = reach.partition_point(|e| e.granule() < left.far);
    for e in reach[own..].iter().rev() {
        offer(e.granule() + 1, gain(e.granule() + 1, taken));
        taken += to_samples(e.weight());
        offer(e.granule(), gain(e.granule(), taken));
    }
    if own > 0 || before <= REACH {
        offer(
            left.far + 1,
            gain(left.far + 1, taken_after(reach, own, left.far + 1)),
        );
    }

    // Rightwards the left range does.
    let mut taken = 0.0;
    let gain = |at: u32, taken: f64| f64::from(at - edge) * per_granule - taken * per_sample;
    let reach = &entries[before..entries.len().min(before + REACH)];
    let own = reach.partition_point(|e| e.granule() < right.far);
    for e in &reach[..own] {
        offer(e.granule(), gain(e.granule(), taken));
        taken += to_samples(e.weight());
        offer(e.granule() + 1, gain(e.granule() + 1, taken));
    }
    if own < REACH {
        let last = right.far - 1;
        let sum: u64 = reach[..own]
            .iter()
            .filter(|e| e.granule() < last)
            .map(|e| e.weight())
            .sum();
        offer(last, gain(last, to_samples(sum)));
    }
    best.1
}

/// Samples in the entries from `own` on that lie at `from` or after it.
fn taken_after(reach: &[Entry], own: usize, from: u32) -> f64 {
    to_samples(
        reach[own..]
            .iter()
            .filter(|e| e.granule() >= from)
            .map(|e| e.weight())
            .sum(),
    )
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::histogram::FRACTION_BITS;
    use super::*;

    fn log_likelihood(granules: &[u32], edge: usize, a: f64, b: f64) -> f64 {
        let of = |w: u32, d: f64| f64::from(w) * d.ln() - d;
        let (left, right) = granules.split_at(edge);
        left.iter().map(|&w| of(w, a)).sum::<f64>() + right.iter().map(|&w| of(w, b)).sum::<f64>()
    }

    proptest! {
        #[test]
        fn no_edge_is_more_likely(
            granules in prop::collection::vec(prop_oneof![2 => Just(0u32), 1 => 1u32..20], 2..60),
            at in 1usize..59,
            densities in (0.01f64..20.0, 0.01f64..20.0),
        ) {
            let edge = 1 + at % (granules.len() - 1);
            let (a, b) = densities;
            let entries: Vec<_> = granules.iter().enumerate().filter(|(_, w)| **w > 0)
                .map(|(i, &w)| Entry::new(100 + i as u32, w << FRACTION_BITS)).collect();
            let before = entries.partition_point(|e| e.granule() < 100 + edge as u32);
            let left = Side { far: 100, density: a };
            let right = Side { far: 100 + granules.len() as u32, density: b };
            let old = log_likelihood(&granules, edge, a, b);
            let most = (1..granules.len()).map(|e| log_likelihood(&granules, e, a, b)).fold(f64::MIN, f64::max);
            match better(&entries, before, 100 + edge as u32, left, right) {
                Some(at) => {
                    let new = log_likelihood(&granules, at as usize - 100, a, b);
                    prop_assert!((new - most).abs() < 1e-6, "{new}, best {most}");
                    prop_assert!(new - old >= GAIN_MIN - 1e-6);
                }
                None => prop_assert!(most - old < GAIN_MIN + 1e-6, "missed {}", most - old),
            }
        }
    }
}
