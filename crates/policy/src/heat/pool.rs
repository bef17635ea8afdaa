//! Estimates a part's rate from its own events and its group's rate.
//!
//! # Problem
//! A block has two samples, in a group with two hundred: is it as hot as the group, or as its own two samples say?
//!
//! # Approach
//! Credibility theory (Bühlmann and Straub, 1970) with counts: a part's rate is its group's times a factor that varies
//! from part to part (a gamma distribution of mean one). If it varies little, the best estimate is the group's rate; if
//! it varies much, the part's own. With a factor of variance `1/k` the estimate of a part with `c` events in an
//! exposure `x` is `(c + k) / (x + k / group's rate)`: the group counts as `k` events. `1/k` is measured over all
//! groups of a level together. It is the variance of the parts' counts beyond chance: with means `m`, the sum of `(c -
//! m)^2 - m` divided by the sum of `m^2`. As long as this may be chance itself, parts are assumed to be alike.
//!
//! # Properties
//! - The estimate lies between the group's rate and the part's own.
//! - Without exposure it is the group's; with much exposure, the part's own.
//! - Parts that differ only by chance are assumed to be alike, except for one case in some thousands.

use serde::{Deserialize, Serialize};

use super::cells::CELLS;
use super::{Chunk, Heat, WINDOWS};
use crate::saved::finite;
use crate::significance::CERTAINTY;

/// Blocks, and groups of 8, 64 and 512 blocks.
pub(super) const LEVELS: usize = 4;

/// A rate and its certainty.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// Events per second.
    pub rate: f64,
    /// Number of events behind it; the relative error is about one divided by its square root.
    pub sure: f64,
}

/// Number of events that a group counts for in the estimate of its parts, by the parts' level.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Pools {
    pub(super) worth: [f64; LEVELS],
}

impl Default for Pools {
    /// All parts are alike.
    fn default() -> Self {
        Self {
            worth: [f64::INFINITY; LEVELS],
        }
    }
}

/// Sums over the parts of groups.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Spread {
    /// Variance of counts beyond chance.
    #[serde(deserialize_with = "finite")]
    pub(super) excess: f64,
    /// Expected variance of `excess`, if all differences were chance.
    #[serde(deserialize_with = "finite")]
    pub(super) chance: f64,
    #[serde(deserialize_with = "finite")]
    pub(super) squares: f64,
}

impl Spread {
    #[inline]
    fn take(&mut self, events: f64, expected: f64) {
        let off = events - expected;
        self.excess += off * off - expected;
        self.chance += (1.0 + (expected + expected)) * expected;
        self.squares += expected * expected;
    }

    fn add(&mut self, other: &Self) {
        self.excess += other.excess;
        self.chance += other.chance;
        self.squares += other.squares;
    }

    fn worth(&self) -> f64 {
        let certain = self.excess - CERTAINTY * self.chance.sqrt();
        match certain > 0.0 && self.squares > 0.0 {
            true => self.squares / certain,
            false => f64::INFINITY,
        }
    }
}

/// Differences between the parts of a chunk in a window, by the parts' level.
pub(super) fn spreads_of(heat: &Heat, chunk: &Chunk, window: usize) -> [Spread; LEVELS] {
    let mut spreads = [Spread::default(); LEVELS];
    let mut part = |level: usize, group: usize, group_rate: f64| {
        let (events, exposure_s) = heat.seen(chunk, window, level, group);
        spreads[level].take(events, group_rate * exposure_s);
        match exposure_s > 0.0 {
            true => events / exposure_s,
            false => 0.0,
        }
    };
    let chunk_rate = part(3, 0, heat.per_block(window).rate);
    for large in (0..8).take_while(|_| chunk_rate > 0.0) {
        let large_rate = part(2, large, chunk_rate);
        for small in (large * 8..large * 8 + 8).take_while(|_| large_rate > 0.0) {
            let small_rate = part(1, small, large_rate);
            for at in (small * 8..small * 8 + 8).take_while(|_| small_rate > 0.0) {
                part(0, at, small_rate);
            }
        }
    }
    spreads
}

impl Pools {
    /// Computes the pools from the differences in all chunks.
    pub(super) fn of<'a>(chunks: impl Iterator<Item = &'a [Spread; LEVELS]>) -> Self {
        let mut sums = [Spread::default(); LEVELS];
        for spreads in chunks {
            for (sum, spread) in sums.iter_mut().zip(spreads) {
                sum.add(spread);
            }
        }
        Self {
            worth: sums.map(|spread| spread.worth()),
        }
    }

    /// Whether all parts at a level have their group's estimate.
    #[inline]
    pub(super) fn are_alike(&self, level: usize, group: Estimate) -> bool {
        group.rate <= 0.0 || self.worth[level] == f64::INFINITY
    }

    /// The estimate of a part with `events` in `exposure_s`, in a group with the estimate `group`.
    #[inline]
    pub(super) fn part(
        &self,
        level: usize,
        group: Estimate,
        events: f64,
        exposure_s: f64,
    ) -> Estimate {
        if self.are_alike(level, group) {
            return group;
        }
        let worth = self.worth[level];
        Estimate {
            rate: (events + worth) / (exposure_s + worth / group.rate),
            sure: (events + worth).min(group.sure),
        }
    }
}

const _: () = assert!(WINDOWS > 1 && CELLS == 585);
