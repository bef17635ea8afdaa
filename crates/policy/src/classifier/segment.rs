//! Finds the part of a range that stands out.
//!
//! # Problem
//! Given where an epoch's samples fell in a range, say which contiguous part is much hotter (or
//! much colder) than the range as a whole, wherever it begins and ends.
//!
//! # Approach
//! Every granule scores its weight less a bar (one and a half times the mean for a hot part, the
//! mean's half less its weight for a cold one). The contiguous part with the largest sum is the
//! candidate: the maximum-sum subarray, one pass over the entries, gaps counted as a whole.
//!
//! # Properties
//! - The candidate is the best one: no other contiguous part has a larger sum.
//! - It lies inside the range, is not empty and is not the whole range.

use super::histogram::Entry;

/// A contiguous part of a range, in granules, `[start, end)`, and the weight in it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Segment {
    pub start: u32,
    pub end: u32,
    pub weight: u64,
}

/// Which side of the mean to look at.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Side {
    Hot,
    Cold,
}

/// Bars are kept with this many binary digits behind the point.
const BAR_BITS: u32 = 16;

/// The part of `[start, end)` that stands out most on `side`; `entries` are those of the range
/// and `weight` is their sum. `None` when nothing does.
pub(super) fn standing_out(
    entries: &[Entry],
    start: u32,
    end: u32,
    weight: u64,
    side: Side,
) -> Option<Segment> {
    let len = u128::from(end - start);
    let (num, den) = match side {
        Side::Hot => (3, 2),
        Side::Cold => (1, 2),
    };
    let bar = ((u128::from(weight) << BAR_BITS) * num / (len * den)) as i128;
    let sign = if side == Side::Hot { 1 } else { -1 };

    let mut best: Option<(i128, Segment)> = None;
    let mut open = Segment {
        start,
        end: start,
        weight: 0,
    };
    let mut sum = 0i128;
    let mut extend = |to: u32, weight: u64| {
        let granules = i128::from(to - open.end);
        if sum <= 0 {
            open = Segment {
                start: open.end,
                end: open.end,
                weight: 0,
            };
            sum = 0;
        }
        sum += sign * ((i128::from(weight) << BAR_BITS) - bar * granules);
        open.end = to;
        open.weight += weight;
        if sum > 0 && best.is_none_or(|(score, _)| sum > score) {
            best = Some((sum, open));
        }
    };
    let mut at = start;
    for e in entries {
        if e.granule() > at {
            extend(e.granule(), 0);
        }
        at = e.granule() + 1;
        extend(at, e.weight());
    }
    if end > at {
        extend(end, 0);
    }
    best.map(|(_, segment)| segment)
        .filter(|s| (s.start, s.end) != (start, end))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn dense(entries: &[Entry], start: u32, end: u32) -> Vec<u64> {
        let mut granules = vec![0; (end - start) as usize];
        for e in entries {
            granules[(e.granule() - start) as usize] += e.weight();
        }
        granules
    }

    /// Twice the score times the length: an integer, computed the slow way.
    fn score(granules: &[u64], total: u64, range_len: usize, side: Side) -> i128 {
        let (weight, n) = (granules.iter().sum::<u64>() as i128, granules.len() as i128);
        let (total, len) = (total as i128, range_len as i128);
        match side {
            Side::Hot => 2 * weight * len - 3 * total * n,
            Side::Cold => total * n - 2 * weight * len,
        }
    }

    proptest! {
        #[test]
        fn no_other_part_is_better(
            start in 0u32..1000,
            granules in prop::collection::vec(prop_oneof![3 => Just(0u32), 1 => 1u32..64], 1..40),
            hot in any::<bool>(),
        ) {
            let side = if hot { Side::Hot } else { Side::Cold };
            let end = start + granules.len() as u32;
            let entries: Vec<_> = granules.iter().enumerate().filter(|(_, w)| **w > 0)
                .map(|(i, &w)| Entry::new(start + i as u32, w)).collect();
            let total: u64 = granules.iter().map(|&w| u64::from(w)).sum();
            let dense = dense(&entries, start, end);
            let best = (0..dense.len())
                .flat_map(|a| (a + 1..=dense.len()).map(move |b| (a, b)))
                .map(|(a, b)| score(&dense[a..b], total, dense.len(), side))
                .max().unwrap();
            match standing_out(&entries, start, end, total, side) {
                Some(s) => {
                    prop_assert!(start <= s.start && s.start < s.end && s.end <= end);
                    prop_assert!((s.start, s.end) != (start, end));
                    let part = &dense[(s.start - start) as usize..(s.end - start) as usize];
                    prop_assert_eq!(part.iter().sum::<u64>(), s.weight);
                    // The bar is rounded down to 2^-16, which may prefer a near tie.
                    let got = score(part, total, dense.len(), side);
                    let slack = (2 * dense.len() * dense.len()) as i128 / (1 << 15) + 2;
                    prop_assert!(best - got <= slack, "best {best}, got {got}");
                }
                None => prop_assert!(best <= 0 || dense.len() == 1 || total == 0, "missed {best}"),
            }
        }
    }

    #[test]
    fn a_hot_spot_in_the_middle_is_cut_out_at_once() {
        let entries: Vec<_> = (0..100).map(|i| Entry::new(500 + i % 4, 16)).collect();
        let mut entries = entries;
        entries.sort_by_key(|e| e.granule());
        let merged: Vec<_> = (500..504).map(|b| Entry::new(b, 25 * 16)).collect();
        let s = standing_out(&merged, 0, 1 << 20, 1600, Side::Hot).unwrap();
        assert_eq!((s.start, s.end, s.weight), (500, 504, 1600));
    }
}
