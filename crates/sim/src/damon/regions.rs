//! The regions of a kdamond: how they are laid out, merged and split.
//!
//! # Problem
//! Memory has too many pages to look at each. Pages beside each other are often used alike.
//!
//! # Approach
//! One page stands for its region. After each aggregation neighbours that were found accessed about as
//! often become one, up to a size; then each region is split in two (or three) at random, as long as there
//! are no more than half of the most. If the parts differ, the next merge leaves them apart.
//!
//! # Properties
//! - Regions are sorted and cover just what is watched.
//! - There are never more than the most, if they were no more at first.
//! - What differs by more than a tenth of the most that was found stays apart while there is room.

use std::ops::Range;

use demeter_scenario::rng::Rng;

use crate::machine::radix::Address;

/// Most parts of the most accesses found by which neighbours that become one may differ.
const ALIKE_PARTS: u32 = 10;

/// What DAMON knows of a range of addresses.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Region<A> {
    pub(crate) range: Range<A>,
    /// Looks of this aggregation that found it accessed.
    pub(crate) accesses: u32,
    /// Aggregations for which that has been so.
    pub(crate) age: u64,
    /// Looks of the last aggregation that found it accessed.
    pub(super) accesses_before: u32,
    /// The address that stands for it in this look.
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

    /// Its length.
    pub(crate) fn bytes(&self) -> u64 {
        self.range.end.number() - self.range.start.number()
    }

    /// Cuts it after so many bytes; returns the rest.
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

    /// Takes the next one in: what is known of both is weighed by their sizes.
    fn join(&mut self, next: &Self) {
        let (a, b) = (u128::from(self.bytes()), u128::from(next.bytes()));
        let mean = |x: u64, y: u64| ((u128::from(x) * a + u128::from(y) * b) / (a + b)) as u64;
        self.accesses = mean(self.accesses.into(), next.accesses.into()) as u32;
        self.age = mean(self.age, next.age);
        self.range.end = next.range.end;
    }
}

/// How many regions there may be, and their smallest size.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Bounds {
    pub(crate) least: u64,
    pub(crate) most: u64,
    pub(crate) page_bytes: u64,
}

/// Lays regions of equal size out, as many as are the least; the last one takes what is left over.
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

/// Ends an aggregation of so many looks: sees which regions have changed, and joins neighbours that are
/// alike.
pub(super) fn merge<A: Address>(regions: &mut Vec<Region<A>>, looks: u32, bounds: &Bounds) {
    let bytes: u64 = regions.iter().map(Region::bytes).sum();
    let size_max = (bytes / bounds.least.max(1)).max(bounds.page_bytes);
    let most_found = regions.iter().map(|r| r.accesses).max().unwrap_or(0);
    let mut alike = most_found / ALIKE_PARTS;
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

/// Begins an aggregation: counts from nothing, and splits regions, if there are few enough. `before` is how
/// many there were when this was last done.
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
    // That nothing has changed may be since the middle differs.
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
        // As often found as a part of it is hot.
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
        // Most of the cold memory is in a few regions again.
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
