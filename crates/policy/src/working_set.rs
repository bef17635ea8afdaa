//! Estimates the working set, and its share in fast memory.
//!
//! # Problem
//! A host that divides fast memory between VMs needs each VM's working set. The hottest ranges with some share of the
//! accesses would do if that share were known. But a threshold of 90 % includes all memory if the hot part gets 89 %.
//!
//! # Approach
//! Compare each range with the whole. A range belongs to the working set if its bytes are sampled at least half as
//! often as the average resident byte. Hot memory is far above the average, and raises it; memory with uniform accesses
//! is all near the average.
//!
//! # Properties
//! - The working set is no larger than resident memory, in each tier.
//! - Uniformly accessed memory belongs to it; memory that is never sampled does not.
//! - Memory with a hundredth of the others' density does not belong to it, however large it is.

use crate::{ByteCount, RankedRange, ResidencyMap, TierBytes};

/// Minimum density of a range in the working set, relative to the average.
const DENSITY_MIN: f64 = 0.5;

/// The working set, and its share in fast memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct WorkingSet {
    /// The working set by tier.
    pub placement: TierBytes,
    /// Samples in fast memory per thousand, if there were any.
    pub fast_hit_permille: Option<u16>,
}

/// Estimates the working set from all ranges.
pub fn working_set(ranking: &[RankedRange], residency: &ResidencyMap) -> WorkingSet {
    let resident: Vec<(f64, TierBytes)> = ranking
        .iter()
        .map(|r| (r.count, residency.placement(r.pid, &r.range)))
        .filter(|(_, placement)| placement.total().0 > 0)
        .collect();
    let count: f64 = resident.iter().map(|(count, _)| count).sum();
    let bytes: u64 = resident.iter().map(|(_, p)| p.total().0).sum();
    // Also if nothing is resident.
    if count.is_nan() || count <= 0.0 {
        return WorkingSet::default();
    }
    let density_min = DENSITY_MIN * count / bytes as f64;
    let mut placement = TierBytes::default();
    let mut hits = 0.0;
    for (count, p) in &resident {
        let size = p.total().0 as f64;
        hits += count * p.fast.0 as f64 / size;
        if count / size >= density_min {
            placement.fast = ByteCount(placement.fast.0 + p.fast.0);
            placement.slow = ByteCount(placement.slow.0 + p.slow.0);
        }
    }
    WorkingSet {
        placement,
        fast_hit_permille: Some((hits / count * 1000.0).round() as u16),
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{BLOCK_SIZE, Block, GuestVirtAddr, Pid, VirtRange};

    /// Adjacent ranges, each with (blocks in fast memory, blocks in slow memory, samples).
    pub(crate) fn memory(parts: &[(u64, u64, f64)]) -> (Vec<RankedRange>, ResidencyMap) {
        let mut residency = ResidencyMap::default();
        let mut ranking = vec![];
        let mut next = 0;
        for &(fast, slow, count) in parts {
            let first = next;
            for _ in 0..fast + slow {
                let mut placement = TierBytes::default();
                let tier = if next < first + fast {
                    &mut placement.fast
                } else {
                    &mut placement.slow
                };
                tier.0 = BLOCK_SIZE;
                residency.set(Pid(1), Block(next), placement);
                next += 1;
            }
            let at = |block: u64| GuestVirtAddr(block * BLOCK_SIZE);
            let Some(range) = VirtRange::new(at(first), at(next)) else {
                continue;
            };
            ranking.push(RankedRange {
                pid: Pid(1),
                range,
                count,
                born_epoch: 0,
            });
        }
        (ranking, residency)
    }

    fn of(parts: &[(u64, u64, f64)]) -> (u64, u64, Option<u16>) {
        let (ranking, residency) = memory(parts);
        let set = working_set(&ranking, &residency);
        let blocks = |bytes: ByteCount| bytes.0 / BLOCK_SIZE;
        let placement = set.placement;
        (
            blocks(placement.fast),
            blocks(placement.slow),
            set.fast_hit_permille,
        )
    }

    #[test]
    fn a_hot_eighth_is_the_working_set() {
        assert_eq!(
            of(&[(20, 30, 900.0), (30, 320, 100.0)]),
            (20, 30, Some(369))
        );
        // A classifier that has found only one half of the hot part so far.
        assert_eq!(
            of(&[(0, 25, 450.0), (0, 25, 440.0), (100, 250, 110.0)]).1,
            50
        );
    }

    #[test]
    fn without_samples_nothing_is_known() {
        assert_eq!(of(&[(5, 5, 0.0)]), (0, 0, None));
        assert_eq!(of(&[]), (0, 0, None));
        // Sampled, but its place is unknown.
        let (ranking, _) = memory(&[(5, 5, 3.0)]);
        assert_eq!(
            working_set(&ranking, &ResidencyMap::default()),
            WorkingSet::default()
        );
    }

    proptest! {
        #[test]
        fn no_larger_than_what_is_resident(
            parts in prop::collection::vec((0..50u64, 0..50u64, 0.0..1e6f64), 0..20)
        ) {
            let (fast, slow, hit) = of(&parts);
            prop_assert!(fast <= parts.iter().map(|p| p.0).sum());
            prop_assert!(slow <= parts.iter().map(|p| p.1).sum());
            prop_assert!(hit.is_none_or(|hit| hit <= 1000));
        }

        #[test]
        fn evenly_used_memory_is_all_in_it(
            sizes in prop::collection::vec((0..50u64, 0..50u64), 1..20),
            density in 1.0..1e3f64,
            noise in prop::collection::vec(0.8..1.2f64, 20),
        ) {
            let parts: Vec<_> = sizes
                .iter()
                .zip(noise)
                .map(|(&(fast, slow), noise)| (fast, slow, (fast + slow) as f64 * density * noise))
                .collect();
            let (fast, slow, _) = of(&parts);
            prop_assert_eq!(fast, sizes.iter().map(|s| s.0).sum::<u64>());
            prop_assert_eq!(slow, sizes.iter().map(|s| s.1).sum::<u64>());
        }

        #[test]
        fn cold_memory_is_not_however_large(
            hot in 1..50u64,
            cold in 1..2000u64,
            idle in 0..2000u64,
            density in 1.0..1e3f64,
        ) {
            let cold_count = cold as f64 * density / 100.0;
            // If cold memory gets most of the samples, it is the memory in use.
            prop_assume!(cold_count < hot as f64 * density);
            let parts = [(hot, 0, hot as f64 * density), (cold, 0, cold_count), (idle, 0, 0.0)];
            let (fast, _, _) = of(&parts);
            let half = 0.5 * (hot as f64 + cold as f64 / 100.0) / (hot + cold + idle) as f64;
            // Exactly there, rounding decides.
            prop_assume!((half - 0.01).abs() > 1e-9);
            prop_assert_eq!(fast, hot + if half < 0.01 { cold } else { 0 });
        }
    }
}
