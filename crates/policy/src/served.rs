//! Measures the share of accesses that the hottest memory of each size serves.
//!
//! # Problem
//! Blocks are ranked by counted samples. The blocks that rank first were partly lucky: counted with the same samples
//! they seem to serve more than they do. With few samples for each block even uniform memory seems to have a hot part.
//!
//! # Approach
//! Rank first and count afterwards. Each sample is counted at the place that its block had in an earlier ranking. Three
//! rankings, by heat over 4, 16 and 64 seconds, are measured side by side. A short time follows a hot set that moves. A
//! long one tells blocks of similar heat apart. For each size the best of the three counts.
//!
//! # Properties
//! - The share does not fall with size; all memory serves all accesses.
//! - Memory with uniform accesses is served in proportion to its size, however few samples there are, but for the
//!   error of a count.
//! - Three rankings are kept, of some hundred ranges for each process.

use crate::{Block, Pid, RankedRange, ResidencyMap};

/// Number of sizes between none and all memory. They lie closer together at the lower end, since hot sets are small.
pub const SIZES: usize = 64;

/// Windows of the heat by which blocks are ranked: 4, 16 and 64 seconds.
pub(crate) const RANKINGS: [usize; 3] = [1, 2, 3];

/// Time in which counts decay, seconds.
const DECAY_S: f64 = 30.0;

/// Time after which shares are known, seconds, however few samples there are. Fewer samples make a share less exact, but a
/// program with few samples has little to gain by it.
const KNOWN_AFTER_S: f64 = 5.0;

/// Size `at` of [`SIZES`] as a share of all memory.
pub(crate) fn size(at: usize) -> f64 {
    let root = at as f64 / SIZES as f64;
    root * root
}

/// The measurement of all rankings.
#[derive(Debug, Clone, Default)]
pub struct Served {
    rankings: [Ranking; RANKINGS.len()],
    next: usize,
    elapsed_s: f64,
}

/// One ranking, and the samples at its places.
#[derive(Debug, Clone)]
struct Ranking {
    /// By process and address.
    ranges: Vec<Ranked>,
    /// Samples between each two sizes.
    events: [f64; SIZES],
}

impl Default for Ranking {
    fn default() -> Self {
        Self {
            ranges: vec![],
            events: [0.0; SIZES],
        }
    }
}

/// A range and its place: shares of all memory.
#[derive(Debug, Clone, Copy)]
struct Ranked {
    pid: Pid,
    first: u64,
    end: u64,
    below: f64,
    len: f64,
}

impl Served {
    /// The number in [`RANKINGS`] of the next ranking, in turn.
    pub(crate) fn take_turn(&mut self) -> usize {
        self.next = (self.next + 1) % RANKINGS.len();
        self.next
    }

    /// Replaces a ranking: ranges of all processes, the hottest first.
    pub(crate) fn rank(&mut self, at: usize, ranking: &[RankedRange], residency: &ResidencyMap) {
        let resident = |range: &RankedRange| residency.placement(range.pid, &range.range).total().0;
        let bytes: Vec<_> = ranking.iter().map(resident).collect();
        let all: u64 = bytes.iter().sum();
        let ranges = &mut self.rankings[at].ranges;
        ranges.clear();
        let mut below = 0;
        for (range, &bytes) in ranking.iter().zip(&bytes).filter(|(_, bytes)| **bytes > 0) {
            let blocks = Block::numbers_of(&range.range);
            ranges.push(Ranked {
                pid: range.pid,
                first: blocks.start,
                end: blocks.end,
                below: below as f64 / all as f64,
                len: bytes as f64 / all as f64,
            });
            below += bytes;
        }
        ranges.sort_unstable_by_key(|range| (range.pid, range.first));
    }

    /// Counts samples of blocks, by process and address.
    pub(crate) fn add(&mut self, samples: &[(Pid, Block, u32)]) {
        for ranking in &mut self.rankings {
            if ranking.ranges.is_empty() {
                continue;
            }
            let mut ranges = ranking.ranges.iter().peekable();
            for &(pid, block, events) in samples {
                while ranges
                    .next_if(|r| (r.pid, r.end) <= (pid, block.0))
                    .is_some()
                {}
                let range = ranges.peek();
                let range = range.filter(|range| range.pid == pid && range.first <= block.0);
                // Memory without a place is served last.
                let place = range.map_or(1.0, |range| {
                    let part = (block.0 - range.first) as f64 + 0.5;
                    range.below + range.len * part / (range.end - range.first) as f64
                });
                let at = (place.max(0.0).sqrt() * SIZES as f64) as usize;
                ranking.events[at.min(SIZES - 1)] += f64::from(events);
            }
        }
    }

    /// Ends an epoch.
    pub(crate) fn end_epoch(&mut self, elapsed_s: f64) {
        let keeps = (-elapsed_s.max(0.0) / DECAY_S).exp();
        for ranking in &mut self.rankings {
            ranking
                .events
                .iter_mut()
                .for_each(|events| *events *= keeps);
        }
        self.elapsed_s += elapsed_s.max(0.0);
    }

    /// The share of accesses that each of the [`SIZES`] serves, from none on; `None` until a sample was
    /// counted and [`KNOWN_AFTER_S`] have passed.
    pub(crate) fn shares(&self) -> Option<[f64; SIZES + 1]> {
        let mut best: Option<[f64; SIZES + 1]> = None;
        for ranking in &self.rankings {
            let all: f64 = ranking.events.iter().sum();
            if all <= 0.0 || self.elapsed_s < KNOWN_AFTER_S {
                continue;
            }
            let best = best.get_or_insert([0.0; SIZES + 1]);
            let mut sum = 0.0;
            for (events, best) in ranking.events.iter().zip(&mut best[1..]) {
                sum += events;
                *best = best.max((sum / all).min(1.0));
            }
            best[SIZES] = 1.0;
        }
        best
    }

    /// Memory used, bytes, without the allocator's overhead.
    pub(crate) fn state_bytes(&self) -> usize {
        let ranges = self.rankings.iter().map(|ranking| ranking.ranges.len());
        size_of::<Self>() + ranges.sum::<usize>() * size_of::<Ranked>()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::working_set::tests::memory;

    /// A ranking of these parts, in this order: blocks of each, and the samples that come later, when shares are known.
    fn seen(parts: &[(u64, u32)]) -> Served {
        let falling = parts.iter().zip((1..).map(|at| 1e6 / f64::from(at)));
        let placed: Vec<_> = falling
            .map(|(&(blocks, _), heat)| (0, blocks, heat * blocks as f64))
            .collect();
        let (ranking, residency) = memory(&placed);
        let mut served = Served::default();
        (0..RANKINGS.len()).for_each(|at| served.rank(at, &ranking, &residency));
        for (range, &(_, samples)) in ranking.iter().zip(parts) {
            let blocks = Block::numbers_of(&range.range);
            let len = (blocks.end - blocks.start) as u32;
            for (at, block) in (0..).zip(blocks) {
                let whole = samples / len + u32::from(at < samples % len);
                served.add(&[(range.pid, Block(block), whole)]);
            }
        }
        served.elapsed_s = KNOWN_AFTER_S;
        served
    }

    /// The share that this part of memory serves.
    fn at(served: &Served, part: f64) -> f64 {
        let at = (part.sqrt() * SIZES as f64).round() as usize;
        served.shares().unwrap()[at]
    }

    #[test]
    fn later_samples_count_and_not_those_that_made_the_ranking() {
        // The blocks that rank first were lucky: later samples are even.
        let even = seen(&[(25, 1000), (75, 3000)]);
        for part in [0.1, 0.25, 0.5, 0.9] {
            assert!((at(&even, part) - part).abs() < 0.03, "{part}");
        }
        let hot = seen(&[(10, 9000), (90, 1000)]);
        assert!((at(&hot, 0.1) - 0.9).abs() < 0.05);
        assert_eq!(at(&hot, 1.0), 1.0);
    }

    #[test]
    fn few_samples_count_after_some_time() {
        let mut few = seen(&[(10, 3)]);
        assert!(few.shares().is_some());
        few.elapsed_s = KNOWN_AFTER_S / 2.0;
        assert_eq!(few.shares(), None);
        assert_eq!(Served::default().shares(), None);
    }

    #[test]
    fn memory_that_is_not_ranked_is_served_last() {
        let mut served = seen(&[(10, 1000)]);
        served.add(&[(Pid(99), Block(0), 1000)]);
        let shares = served.shares().unwrap();
        assert!(shares[SIZES - 1] <= 0.5 && shares[SIZES] == 1.0);
    }

    proptest! {
        #[test]
        fn shares_rise_to_all(parts in prop::collection::vec((1u64..50, 0u32..5000), 1..20)) {
            let mut served = seen(&parts);
            served.end_epoch(DECAY_S);
            let Some(shares) = served.shares() else { return Ok(()) };
            prop_assert_eq!((shares[0], shares[SIZES]), (0.0, 1.0));
            prop_assert!(shares.windows(2).all(|pair| pair[0] <= pair[1]));
        }
    }
}
