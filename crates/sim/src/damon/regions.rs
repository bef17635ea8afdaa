//! Regions of a kdamond: initial layout, merging and splitting.
//!
//! # Problem
//! Memory has too many pages to sample each. Adjacent pages are often accessed alike.
//!
//! # Approach
//! One page represents its region. After each aggregation, adjacent regions with similar access counts are merged, up
//! to a maximum size. Then each region is split randomly into two (or three) parts, unless there are more than half the
//! maximum number of regions. If the parts differ, the next merge keeps them apart.
//!
//! # Properties
//! - Regions are sorted and cover exactly the monitored range.
//! - Their number never exceeds the maximum, if it did not at first.
//! - Regions whose counts differ by more than a tenth of the highest count stay separate, unless there are too many
//!   regions.

use std::ops::Range;

use demeter_scenario::rng::Rng;

use crate::machine::radix::Address;

/// Divisor of the highest access count: the largest difference between regions that merge.
const ALIKE_DIVISOR: u32 = 10;

/// A range of addresses with its access count.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region<A> {
    pub(crate) range: Range<A>,
    /// Samples of this aggregation that found it accessed.
    pub(crate) accesses: u32,
    /// Number of aggregations with a stable count.
    pub(crate) age: u64,
    /// Samples of the last aggregation that found it accessed.
    pub(super) accesses_before: u32,
    /// The sampled address of this interval.
    pub(super) sampled: A,
}

impl<A: Address> Region<A> {
    /// One of which nothing is known.
    pub(crate) fn new(range: Range<A>) -> Self {
        Self {
            sampled: range.start,
            range,
            accesses: 0,
            age: 0,
            accesses_before: 0,
        }
    }

    /// Its size.
    pub(crate) fn bytes(&self) -> u64 {
        self.range.end.number() - self.range.start.number()
    }

    /// Splits the region after `bytes` and returns the rest.
    pub(crate) fn split_off(&mut self, bytes: u64) -> Self {
        let middle = A::of(self.range.start.number() + bytes);
        let rest = Self {
            range: middle..self.range.end,
            sampled: middle,
            ..*self
        };
        self.range.end = middle;
        rest
    }

    /// Merges the next region into this one, weighted by size.
    fn join(&mut self, next: &Self) {
        let (a, b) = (u128::from(self.bytes()), u128::from(next.bytes()));
        let mean = |x: u64, y: u64| ((u128::from(x) * a + u128::from(y) * b) / (a + b)) as u64;
        self.accesses = mean(self.accesses.into(), next.accesses.into()) as u32;
        self.age = mean(self.age, next.age);
        self.range.end = next.range.end;
    }
}

/// Number of regions, and their minimum size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) least: u64,
    pub(crate) most: u64,
    pub(crate) page_bytes: u64,
}

/// Creates the minimum number of regions, of equal size. The last one takes the remainder.
pub(super) fn lay_out<A: Address>(watched: &Range<A>, bounds: &Bounds) -> Vec<Region<A>> {
    let (start, end) = (watched.start.number(), watched.end.number());
    let bytes = end.saturating_sub(start);
    let size = (bytes / bounds.least.max(1)).max(bounds.page_bytes);
    let pieces = bytes / size;
    if pieces == 0 {
        return vec![];
    }
    let size = bytes / pieces / bounds.page_bytes * bounds.page_bytes;
    let piece = |i: u64| {
        let piece_end = if i + 1 == pieces {
            end
        } else {
            start + (i + 1) * size
        };
        Region::new(A::of(start + i * size)..A::of(piece_end))
    };
    (0..pieces).map(piece).collect()
}

/// Ends an aggregation of `looks` samples: updates ages, and merges similar neighbours.
pub(super) fn merge<A: Address>(regions: &mut Vec<Region<A>>, looks: u32, bounds: &Bounds) {
    let bytes: u64 = regions.iter().map(Region::bytes).sum();
    let size_max = (bytes / bounds.least.max(1)).max(bounds.page_bytes);
    let most_found = regions.iter().map(|r| r.accesses).max().unwrap_or(0);
    let mut alike = most_found / ALIKE_DIVISOR;
    loop {
        merge_once(regions, alike, size_max);
        let next = (alike * 2).max(1);
        if regions.len() as u64 <= bounds.most || next / 2 >= looks {
            return;
        }
        alike = next;
    }
}

fn merge_once<A: Address>(regions: &mut Vec<Region<A>>, alike: u32, size_max: u64) {
    let mut joined: Vec<Region<A>> = Vec::with_capacity(regions.len());
    for mut region in regions.drain(..) {
        let changed = region.accesses.abs_diff(region.accesses_before) > alike
            || (region.accesses == 0) != (region.accesses_before == 0);
        region.age = if changed { 0 } else { region.age + 1 };
        match joined.last_mut() {
            Some(last)
                if last.range.end.number() == region.range.start.number()
                    && last.accesses.abs_diff(region.accesses) <= alike
                    && last.bytes() + region.bytes() <= size_max =>
            {
                last.join(&region);
            }
            _ => joined.push(region),
        }
    }
    *regions = joined;
}

/// Starts an aggregation: resets counts, and splits regions if there are few enough. `before` holds the number of
/// regions at the last split.
pub(super) fn split<A: Address>(
    regions: &mut Vec<Region<A>>,
    before: &mut usize,
    bounds: &Bounds,
    rng: &mut Rng,
) {
    for region in regions.iter_mut() {
        region.accesses_before = std::mem::take(&mut region.accesses);
    }
    let count = regions.len();
    if count as u64 > bounds.most / 2 {
        return;
    }
    // An unchanged count may mean that the middle of regions differs, so split into three.
    let is_stuck = *before == count && (count as u64) < bounds.most / 3;
    *before = count;
    let mut all = Vec::with_capacity(count * 3);
    for mut region in regions.drain(..) {
        let mut rest = vec![];
        for _ in 0..if is_stuck { 2 } else { 1 } {
            let bytes = region.bytes();
            let part = (1 + rng.below(9)) * bytes / 10 / bounds.page_bytes * bounds.page_bytes;
            if bytes > 2 * bounds.page_bytes && (1..bytes).contains(&part) {
                rest.push(region.split_off(part));
            }
        }
        all.push(region);
        all.extend(rest.into_iter().rev());
    }
    *regions = all;
}

#[cfg(test)]
mod tests {
    use demeter_policy::GuestVirtAddr;
    use demeter_scenario::rng::Rng;
    use proptest::prelude::*;

    use super::*;

    const PAGE: u64 = 4096;
    const BASE: u64 = 1 << 30;

    fn watched(pages: u64) -> Range<GuestVirtAddr> {
        GuestVirtAddr(BASE)..GuestVirtAddr(BASE + pages * PAGE)
    }

    fn bounds(least: u64, most: u64) -> Bounds {
        Bounds {
            least,
            most,
            page_bytes: PAGE,
        }
    }

    proptest! {
        #[test]
        fn regions_cover_what_is_watched_and_are_never_too_many(
            pages in 1u64..5000, least in 3u64..60, more in 0u64..200, seed: u64,
            found in prop::collection::vec(0u32..=20, 1..40),
        ) {
            let bounds = bounds(least, least + more);
            let (watched, mut rng, mut before) = (watched(pages), Rng::new(seed, 0), 0);
            let mut regions = lay_out(&watched, &bounds);
            let mut found = found.iter().cycle();
            for _ in 0..20 {
                prop_assert_eq!(regions.first().unwrap().range.start, watched.start);
                prop_assert_eq!(regions.last().unwrap().range.end, watched.end);
                prop_assert!(regions.windows(2).all(|w| w[0].range.end == w[1].range.start));
                prop_assert!(regions.iter().all(|r| r.bytes() >= PAGE && r.bytes() % PAGE == 0));
                let first = least.max(1) + 1;
                prop_assert!(regions.len() as u64 <= bounds.most.max(first) * 3 / 2);
                for region in &mut regions {
                    region.accesses = *found.next().unwrap();
                }
                merge(&mut regions, 20, &bounds);
                split(&mut regions, &mut before, &bounds, &mut rng);
            }
        }
    }

    #[test]
    fn a_hot_part_is_cut_out_and_alike_neighbours_are_joined() {
        let bounds = bounds(10, 200);
        let hot = BASE + 1000 * PAGE..BASE + 1100 * PAGE;
        // A region is found accessed in proportion to its hot part.
        let look = |regions: &mut Vec<Region<GuestVirtAddr>>| {
            for region in regions {
                let (start, end) = (region.range.start.0, region.range.end.0);
                let inside = end.min(hot.end).saturating_sub(start.max(hot.start));
                region.accesses = (20 * inside / region.bytes()) as u32;
            }
        };
        let mut regions = lay_out(&watched(5000), &bounds);
        assert_eq!(regions.len(), 10);
        let (mut rng, mut before) = (Rng::new(1, 0), 0);
        for _ in 0..60 {
            look(&mut regions);
            merge(&mut regions, 20, &bounds);
            split(&mut regions, &mut before, &bounds, &mut rng);
        }
        look(&mut regions);
        merge(&mut regions, 20, &bounds);
        let is_hot = |r: &&Region<GuestVirtAddr>| r.accesses >= 10;
        let hot_bytes: u64 = regions.iter().filter(is_hot).map(Region::bytes).sum();
        let pages = hot_bytes / PAGE;
        assert!((90..=110).contains(&pages), "{pages} of 100 pages");
        // Most of the cold memory has merged into a few regions.
        assert!(regions.len() < 40, "{} regions", regions.len());
    }

    #[test]
    fn a_region_ages_while_nothing_changes() {
        let bounds = bounds(3, 6);
        let (mut regions, mut before) = (lay_out(&watched(30), &bounds), 0);
        let mut rng = Rng::new(1, 0);
        let mut ages = vec![];
        for accesses in [5, 5, 5, 20, 20, 0] {
            regions.iter_mut().for_each(|r| r.accesses = accesses);
            merge(&mut regions, 20, &bounds);
            ages.push(regions[0].age);
            split(&mut regions, &mut before, &bounds, &mut rng);
        }
        assert_eq!(ages, [0, 1, 2, 0, 1, 0]);
    }
}
