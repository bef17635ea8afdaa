//! How much a group tells of its parts.
//!
//! # Problem
//! A block with two samples in a group with two hundred: is it as hot as the group, or as its own two samples say?
//!
//! # Approach
//! Credibility theory (Bühlmann and Straub, 1970) with counts: a part's rate is its group's times a factor that varies
//! from part to part (a gamma distribution of mean one). If it varies little, the best estimate is the group's rate;
//! if it varies much, the part's own. With a factor of variance `1/k` the estimate of a part with `c` events in an exposure
//! `x` is `(c + k) / (x + k / group's rate)`: the group counts as `k` events. `1/k` is measured over all groups of a level
//! together. It is the variance of the parts' counts beyond chance: with means `m`, the sum of `(c - m)^2 - m` by the
//! sum of `m^2`. As long as that may be chance itself, parts are taken to be alike.
//!
//! # Properties
//! - The estimate lies between the group's rate and the part's own.
//! - Without exposure it is the group's; with much of it, the part's own.
//! - Parts that differ by chance only are taken to be alike, but for one case in some thousands.

use super::{CELLS, FIRST, Heat, WINDOWS};
use crate::rule::CERTAINTY;

/// Blocks, and groups of 8, 64 and 512 blocks.
pub(super) const LEVELS: usize = 4;

/// A rate, and how sure it is.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct Estimate {
    /// Events a second.
    pub rate: f64,
    /// Events that it rests on: the rate is off by its square root's part of it, about.
    pub sure: f64,
}

/// For how many events a group counts in the estimate of its parts, by the parts' level.
#[derive(Debug, Clone, Copy, PartialEq)]
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
#[derive(Debug, Clone, Copy, Default)]
struct Spread {
    /// Variance of counts beyond chance.
    excess: f64,
    /// Variance of that, if all was chance.
    chance: f64,
    squares: f64,
}

impl Spread {
    #[inline]
    fn take(&mut self, events: f64, expected: f64) {
        let off = events - expected;
        self.excess += off * off - expected;
        self.chance += (1.0 + (expected + expected)) * expected;
        self.squares += expected * expected;
    }

    fn worth(&self) -> f64 {
        let certain = self.excess - CERTAINTY * self.chance.sqrt();
        match certain > 0.0 {
            true => self.squares / certain,
            false => f64::INFINITY,
        }
    }
}

impl Pools {
    /// Measures a window's counts.
    pub(super) fn of(heat: &Heat, window: usize) -> Self {
        let mut spreads = [Spread::default(); LEVELS];
        let whole = heat.per_block(window).rate;
        for chunk in &heat.chunks {
            let seen = |cell: usize| heat.seen(chunk, window, cell);
            let mut part = |level: usize, cell: usize, group_rate: f64| {
                let (events, exposure_s) = seen(cell);
                spreads[level].take(events, group_rate * exposure_s);
                if exposure_s > 0.0 {
                    events / exposure_s
                } else {
                    0.0
                }
            };
            let chunk_rate = part(3, FIRST[3], whole);
            if chunk_rate <= 0.0 {
                continue;
            }
            for large in 0..8 {
                let large_rate = part(2, FIRST[2] + large, chunk_rate);
                for small in large * 8..large * 8 + 8 {
                    if large_rate <= 0.0 {
                        break;
                    }
                    let small_rate = part(1, FIRST[1] + small, large_rate);
                    if small_rate > 0.0 {
                        for at in small * 8..small * 8 + 8 {
                            part(0, at, small_rate);
                        }
                    }
                }
            }
        }
        Self {
            worth: spreads.map(|spread| spread.worth()),
        }
    }

    /// The estimate of a part that has `events` in `exposure_s`, in a group with the estimate `group`.
    #[inline]
    pub(super) fn part(
        &self,
        level: usize,
        group: Estimate,
        events: f64,
        exposure_s: f64,
    ) -> Estimate {
        let worth = self.worth[level];
        if group.rate <= 0.0 || worth == f64::INFINITY {
            return group;
        }
        Estimate {
            rate: (events + worth) / (exposure_s + worth / group.rate),
            sure: (events + worth).min(group.sure),
        }
    }
}

const _: () = assert!(WINDOWS > 1 && CELLS == 585);
