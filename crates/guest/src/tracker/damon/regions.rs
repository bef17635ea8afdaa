//! From DAMON's regions to samples.
//!
//! DAMON says of a region in how many of the last sampling intervals one of its pages, picked at
//! random, was found accessed. That share saturates: a page used twice in an interval counts as
//! much as one used a thousand times. And it is per page: a huge page is found accessed 512 times
//! as often as a small one of the same heat. Taking accesses to arrive independently, a share f
//! of touched intervals stands for -ln(1 - f) accesses per page and interval; times the number of
//! pages that is the region's accesses, in which regions of any size and page size compare. A
//! region yields samples evenly spaced over its length.
//!
//! Properties: a region's samples are proportional to its accesses up to one; samples lie inside
//! their region; there are never more than `max`; nothing accessed yields nothing.

use demeter_policy::{GuestVirtAddr, Pid, Sample, VirtRange};

/// Most samples for all regions together. DAMON looks at one page of a region at a time. Where
/// pages are small, a handful of looks that found an access is all that is known of even the
/// hottest region; each of them must not pass for many samples, or whoever weighs evidence by
/// their number takes chance for certainty and exchanges memory for ever.
const MAX_SAMPLES: usize = 48;

/// What DAMON found out about a range of addresses.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Sampling intervals in which it was found accessed.
    pub accesses: u32,
    /// Bytes that each of its page-table entries maps; not zero.
    pub page_bytes: u64,
}

/// Appends at most `max` samples for the regions, of `intervals` sampling intervals each, to
/// `out`.
pub fn samples(regions: &[Region], intervals: u32, max: usize, out: &mut Vec<Sample>) {
    let shares: Vec<f64> = regions
        .iter()
        .map(|region| accesses(region, intervals))
        .collect();
    let total: f64 = shares.iter().sum();
    let max = max.min(MAX_SAMPLES) as f64;
    let scale = if total > max { max / total } else { 1.0 };

    // Rounding the running sum carries what one region loses on to the next.
    let mut sum = 0.0;
    let mut given = 0;
    for (region, share) in regions.iter().zip(shares) {
        sum += share * scale;
        let due = (sum.min(max).round() as u64).saturating_sub(given);
        given += due;
        out.extend(spread(region, due));
    }
}

/// The accesses per sampling interval that would leave as many intervals untouched.
fn accesses(region: &Region, intervals: u32) -> f64 {
    let pages = region.range.len().0 as f64 / region.page_bytes.max(1) as f64;
    // One interval too few to be sure counts as half an interval untouched.
    let untouched = f64::from(intervals.saturating_sub(region.accesses)).max(0.5);
    let per_page = (f64::from(intervals.max(1)) / untouched).ln().max(0.0);
    pages * per_page
}

/// `count` samples in the middles of as many equal parts of a region.
fn spread(region: &Region, count: u64) -> impl Iterator<Item = Sample> {
    let (start, len) = (region.range.start().0, u128::from(region.range.len().0));
    let pid = region.pid;
    (0..count).map(move |part| {
        let offset = len * (2 * u128::from(part) + 1) / (2 * u128::from(count));
        Sample {
            pid,
            addr: GuestVirtAddr(start + offset as u64),
            weight: 1,
        }
    })
}

#[cfg(test)]
mod tests {
    use demeter_policy::{MIB, PAGE_SIZE};
    use proptest::prelude::*;

    use super::*;

    fn region(start: u64, len: u64, accesses: u32) -> Region {
        let range = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + len)).unwrap();
        Region {
            pid: Pid(1),
            range,
            accesses,
            page_bytes: 2 * MIB,
        }
    }

    fn samples_of(regions: &[Region], max: usize) -> Vec<Sample> {
        let mut out = Vec::new();
        samples(regions, 20, max, &mut out);
        out
    }

    #[test]
    fn a_hot_region_outweighs_a_lukewarm_one_by_more_than_its_share() {
        let regions = [
            region(0x10_0000, 64 * MIB, 15),
            region(64 << 30, 64 * MIB, 20),
        ];
        let found = samples_of(&regions, 10_000);
        let hot = found
            .iter()
            .filter(|sample| regions[1].range.contains(sample.addr))
            .count();
        let lukewarm = found.len() - hot;
        assert!(
            lukewarm > 0 && hot as f64 > 2.0 * lukewarm as f64,
            "{hot} to {lukewarm}"
        );
    }

    #[test]
    fn a_hot_region_of_small_pages_outweighs_a_lukewarm_one_of_huge_pages() {
        // 90 % of 400,000 updates a second in 100 MiB of small pages, seen every 5 ms, leave a
        // page touched in 7 % of the looks; 1/40 of them in as much memory of huge pages, in 63 %.
        let mut small = region(0x10_0000, 100 * MIB, 2);
        small.page_bytes = PAGE_SIZE;
        let regions = [small, region(64 << 30, 100 * MIB, 13)];
        let found = samples_of(&regions, 10_000);
        let hot = found
            .iter()
            .filter(|sample| regions[0].range.contains(sample.addr))
            .count();
        assert!(hot > 30 * (found.len() - hot), "{hot} of {}", found.len());
    }

    #[test]
    fn what_is_not_accessed_yields_nothing() {
        assert_eq!(samples_of(&[region(4096, 1 << 40, 0)], 100), []);
    }

    #[test]
    fn more_accesses_than_intervals_count_as_all() {
        let all = samples_of(&[region(4096, 8 * MIB, 20)], 1000).len();
        assert!(all > 0);
        assert_eq!(
            samples_of(&[region(4096, 8 * MIB, u32::MAX)], 1000).len(),
            all
        );
    }

    proptest! {
        #[test]
        fn samples_lie_inside_and_follow_heat_times_length(
            sizes in prop::collection::vec((1u64..1 << 40, 0u32..30), 0..60),
            max in 0usize..3000,
            intervals in 0u32..40,
        ) {
            let mut next = 4096;
            let regions: Vec<_> = sizes
                .into_iter()
                .map(|(len, accesses)| {
                    let region = region(next, len, accesses);
                    next += len;
                    region
                })
                .collect();
            let mut found = Vec::new();
            samples(&regions, intervals, max, &mut found);
            prop_assert!(found.len() <= max);

            let wanted: Vec<f64> = regions
                .iter()
                .map(|region| super::accesses(region, intervals))
                .collect();
            let total: f64 = wanted.iter().sum();
            let mut placed = 0;
            for (region, wanted) in regions.iter().zip(&wanted) {
                let count =
                    found.iter().filter(|sample| region.range.contains(sample.addr)).count();
                placed += count;
                if total > 0.0 {
                    let due = wanted / total * found.len() as f64;
                    prop_assert!((count as f64 - due).abs() <= 2.0, "{} for {}", count, due);
                }
            }
            prop_assert_eq!(placed, found.len());
        }
    }
}
