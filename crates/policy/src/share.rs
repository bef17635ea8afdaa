//! Divides fast memory between groups of processes, by weights and guarantees.
//!
//! # Problem
//! Several groups together want more fast memory than there is. Each has a weight and a guarantee. Memory that a group
//! does not want must go to the others.
//!
//! # Approach
//! A level rises from zero. At each level a group gets the level times its weight, but no less than its guarantee and
//! no more than it wants. Bisection finds the level at which all of the memory is used. If the wanted guarantees exceed
//! the memory, each is reduced by the same factor.
//!
//! # Properties
//! - No group gets more than it wants. While any group wants more, only a few bytes of rounding remain.
//! - A group that wants its guarantee gets it, if all wanted guarantees fit.
//! - Groups that get neither all they want nor exactly their guarantee get memory in the ratio of their weights.
//! - No number overflows.

use serde::{Deserialize, Serialize};

use crate::{BLOCK_SIZE, ByteCount};

/// A group's share of fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
pub struct Share {
    /// The group: processes with equal numbers share it.
    pub group: u32,
    /// Its guarantee, of which it gets no more than it uses.
    pub guarantee: ByteCount,
    /// Its part of the rest, relative to the other groups' weights; at least 1.
    pub weight: u32,
}

impl Share {
    /// The largest weight.
    pub const WEIGHT_MAX: u32 = 10_000;
    /// The largest guarantee, MiB: 16 TiB.
    pub const GUARANTEE_MAX_MIB: u64 = 1 << 24;

    /// The share of all processes without one.
    pub const OTHERS: Self = Self {
        group: u32::MAX,
        guarantee: ByteCount(0),
        weight: 1,
    };
}

/// Precision of the level, as a power of two of a byte's parts. With any weight a step is less than a byte.
const LEVEL_BITS: u32 = 40;

/// Divides `capacity` bytes between groups, given their shares and the bytes that they want.
pub fn divide(capacity: u64, groups: &[(Share, u64)]) -> Vec<u64> {
    let sum = |each: &[u64]| each.iter().map(|&bytes| u128::from(bytes)).sum::<u128>();
    let wanted: Vec<u64> = groups.iter().map(|&(_, wants)| wants).collect();
    if sum(&wanted) <= capacity.into() {
        return wanted;
    }
    let kept = groups
        .iter()
        .map(|(share, wants)| share.guarantee.0.min(*wants));
    let kept: Vec<u64> = kept.collect();
    let guaranteed = sum(&kept);
    if guaranteed > capacity.into() {
        let cut = |&bytes: &u64| (u128::from(bytes) * u128::from(capacity) / guaranteed) as u64;
        return kept.iter().map(cut).collect();
    }
    let at = |level: u128| -> Vec<u64> {
        let each = groups.iter().zip(&kept).map(|((share, wants), &kept)| {
            let part = level.saturating_mul(share.weight.max(1).into()) >> LEVEL_BITS;
            part.clamp(kept.into(), (*wants).into()) as u64
        });
        each.collect()
    };
    // At this level a group of weight 1 would get all memory.
    let (mut low, mut high) = (0, (u128::from(capacity) + 1) << LEVEL_BITS);
    while high - low > 1 {
        let middle = low + (high - low) / 2;
        if sum(&at(middle)) <= capacity.into() {
            low = middle;
        } else {
            high = middle;
        }
    }
    let mut given = at(low);
    // A few bytes remain from rounding.
    let mut left = capacity - sum(&given) as u64;
    for (bytes, (_, wants)) in given.iter_mut().zip(groups) {
        let more = left.min(wants - *bytes);
        *bytes += more;
        left -= more;
    }
    given
}

/// Divides memory in whole blocks, so that a group may hold almost a block less than its part. Guarantees must still be
/// met, so their parts are increased by a block where that fits.
pub(crate) fn divide_blocks(capacity: u64, groups: &[(Share, u64)]) -> Vec<u64> {
    let mut groups = groups.to_vec();
    let has_guarantee = |(share, _): &&(Share, u64)| share.guarantee.0 > 0;
    let kept = |(share, wants): &(Share, u64)| {
        u128::from(share.guarantee.0.min(*wants)) + u128::from(BLOCK_SIZE)
    };
    let all_kept: u128 = groups.iter().filter(has_guarantee).map(kept).sum();
    if all_kept <= capacity.into() {
        for group in groups.iter_mut().filter(|group| has_guarantee(&&**group)) {
            group.0.guarantee.0 = group.0.guarantee.0.saturating_add(BLOCK_SIZE);
        }
    }
    divide(capacity, &groups)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn share(guarantee: u64, weight: u32) -> Share {
        Share {
            group: 0,
            guarantee: ByteCount(guarantee),
            weight,
        }
    }

    #[test]
    fn weights_guarantees_and_what_nobody_wants() {
        let three_to_one = [(share(0, 3), 1000), (share(0, 1), 1000)];
        assert_eq!(divide(400, &three_to_one), [300, 100]);
        // The second has its guarantee, the first the rest.
        assert_eq!(
            divide(400, &[(share(0, 3), 1000), (share(200, 1), 1000)]),
            [200, 200]
        );
        // The second gets the memory that the first does not want, and an unused guarantee.
        assert_eq!(
            divide(400, &[(share(300, 3), 50), (share(0, 1), 1000)]),
            [50, 350]
        );
        assert_eq!(divide(4000, &three_to_one), [1000, 1000]);
        // The guarantees exceed the memory.
        assert_eq!(
            divide(90, &[(share(100, 1), 500), (share(200, 9), 500)]),
            [30, 60]
        );
        assert!(divide(7, &[]).is_empty());
    }

    fn groups() -> impl Strategy<Value = Vec<(Share, u64)>> {
        let bytes = || prop_oneof![0..1000u64, 0..1u64 << 40, Just(u64::MAX)];
        let group = (bytes(), prop_oneof![1..10u32, any::<u32>()], bytes());
        prop::collection::vec(group.prop_map(|(g, w, wants)| (share(g, w), wants)), 0..8)
    }

    proptest! {
        #[test]
        fn nobody_gets_more_than_it_wants_and_nothing_is_left(
            groups in groups(), capacity in prop_oneof![0..3000u64, any::<u64>()],
        ) {
            let given = divide(capacity, &groups);
            let sum: u128 = given.iter().map(|&b| u128::from(b)).sum();
            let wanted: u128 = groups.iter().map(|&(_, b)| u128::from(b)).sum();
            for (&bytes, &(_, wants)) in given.iter().zip(&groups) {
                prop_assert!(bytes <= wants);
            }
            // Reduced guarantees are rounded down.
            let rest = wanted.min(capacity.into()) - sum;
            prop_assert!(rest < groups.len().max(1) as u128, "{} left", rest);
        }

        #[test]
        fn a_guarantee_is_never_undercut(groups in groups(), capacity in any::<u64>()) {
            let used = groups.iter().map(|(share, wants)| share.guarantee.0.min(*wants));
            let used: Vec<u64> = used.collect();
            let fits = used.iter().map(|&b| u128::from(b)).sum::<u128>() <= capacity.into();
            for (bytes, used) in divide(capacity, &groups).into_iter().zip(used) {
                prop_assert!(bytes >= used || !fits);
            }
        }

        #[test]
        fn those_between_get_by_weight(
            groups in groups(), capacity in 1 << 20..1u64 << 40,
        ) {
            let given = divide(capacity, &groups);
            let between: Vec<_> = given.iter().zip(&groups)
                .filter(|(bytes, (share, wants))| (share.guarantee.0.min(*wants).saturating_add(8)..wants.saturating_sub(8)).contains(bytes))
                .map(|(&bytes, (share, _))| (u128::from(bytes), u128::from(share.weight)))
                .collect();
            for pair in between.windows(2) {
                let ((a, of_a), (b, of_b)) = (pair[0], pair[1]);
                // Within a few bytes of rounding.
                prop_assert!((a * of_b).abs_diff(b * of_a) <= 16 * of_a.max(of_b), "{pair:?}");
            }
        }
    }
}
