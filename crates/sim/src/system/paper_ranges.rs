//! Range splitting and ranked exchange, as in the Demeter paper and its authors' kernel. The product's policy differs,
//! see "Where it differs from the paper" in `docs/src/how.md`.
//!
//! # Problem
//! Find the hot part of an address space of 64 TiB, and move it to fast memory without ever allocating free memory.
//!
//! # Approach
//! One range covers the address space. Each epoch, all counts are halved. Then a range is split in the middle if it has
//! enough samples per virtual CPU, and exceeds a neighbour by `alpha` times that number. Each half starts with half of
//! the count, so later samples must distinguish them. Ranges are ranked by samples per byte, younger ones first among
//! equals. After a split, fast memory is assigned from the hottest range down, as long as whole ranges fit. The part of
//! these ranges in slow memory is exchanged for as much of the coldest ranges. Memory without an exchange partner
//! stays.
//!
//! # Properties
//! - The ranges cover the address space exactly. None is smaller than the granularity, and their number stays below the
//!   maximum.
//! - Promotions and demotions of an exchange have equal size to within a block.
//!
//! # Left out
//! Their kernel exchanges nothing until some range is as small as 2 MiB. Thread stacks ensure that there, but the model
//! has none. Their kernel counts a range's pages anew at each scan, without clearing the last count.

use std::collections::BTreeMap;

use demeter_policy::engine::{Classify, LookUps, Strategy};
use demeter_policy::{
    ByteCount, ClassifiedRange, GuestVirtAddr, MIB, Pid, Plan, RankedRange, Relocation,
    ResidencyMap, Situation, TierBytes, Tuning, VirtRange,
};

/// End of the scanned address space: 64 TiB.
const SPACE_END: u64 = 1 << 46;

/// Conditions for splitting a range.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Split {
    /// log2 of the smallest range size.
    pub(crate) granule_bits: u32,
    /// Samples per virtual CPU required to split.
    pub(crate) tau_split: u32,
    /// Required excess over a neighbour, as a multiple of that number.
    pub(crate) alpha: f64,
    /// Maximum number of ranges.
    pub(crate) max_ranges: usize,
}

impl Split {
    pub(crate) fn of(tuning: &Tuning) -> Self {
        Self {
            granule_bits: (tuning.granularity_mib * MIB).ilog2(),
            tau_split: tuning.tau_split,
            alpha: tuning.alpha,
            max_ranges: tuning.max_ranges,
        }
    }
}

#[cfg(test)]
impl Default for Split {
    fn default() -> Self {
        Self::of(&Tuning::default())
    }
}

/// The strategy of the paper's kernel.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Paper {
    pub(crate) split: Split,
    /// Number of virtual CPUs.
    pub(crate) vcpus: u32,
    /// Fast memory available to the process.
    pub(crate) capacity: ByteCount,
}

impl Strategy for Paper {
    type Classifier = PaperRanges;

    const CLASSIFIES_APART: bool = true;

    fn classifier(&self) -> PaperRanges {
        PaperRanges::new(&self.split, self.vcpus)
    }

    /// After a split, if the hottest range fits, it looks up all pages.
    fn look_ups(&self, has_news: bool, hottest: Option<&RankedRange>) -> LookUps {
        let fits = |r: &RankedRange| r.range.len() <= self.capacity && r.count > 0.0;
        match has_news && hottest.is_some_and(fits) {
            true => LookUps::All,
            false => LookUps::NoPlan,
        }
    }

    fn plan(&mut self, situation: &Situation<'_>, _heats: &[(Pid, &PaperRanges)]) -> Plan {
        let Situation {
            ranking,
            residency,
            room,
            epoch,
            ..
        } = *situation;
        Plan {
            level: room.level(),
            ..exchange(ranking, residency, self.capacity, epoch)
        }
    }
}

/// A range, identified by its start.
#[derive(Debug, Clone, Copy)]
struct Leaf {
    end: u64,
    samples: u64,
    born_epoch: u32,
}

/// The ranges of an address space.
#[derive(Debug, Clone)]
pub(crate) struct PaperRanges {
    leaves: BTreeMap<u64, Leaf>,
    /// Samples below which a range is not split.
    least: u64,
    /// Required excess over a neighbour, in samples.
    more: u64,
    granule: u64,
    leaves_max: usize,
    epoch: u32,
}

impl PaperRanges {
    /// A single range.
    fn new(config: &Split, vcpus: u32) -> Self {
        let least = u64::from(config.tau_split) * u64::from(vcpus);
        let root = Leaf {
            end: SPACE_END,
            samples: 0,
            born_epoch: 0,
        };
        Self {
            leaves: BTreeMap::from([(0, root)]),
            least,
            more: (least as f64 * config.alpha) as u64,
            granule: 1 << config.granule_bits,
            leaves_max: config.max_ranges,
            epoch: 0,
        }
    }

    fn cut(&mut self, start: u64, leaf: Leaf) {
        if self.leaves.len() >= self.leaves_max {
            return;
        }
        let middle = (start + (leaf.end - start) / 2) & !(self.granule - 1);
        let half = |end| Leaf {
            end,
            samples: leaf.samples / 2,
            born_epoch: self.epoch,
        };
        let both = [(start, half(middle)), (middle, half(leaf.end))];
        self.leaves.extend(both);
    }
}

impl Classify for PaperRanges {
    /// Ignored: the ranges cover any possible mapping.
    fn set_space(&mut self, _vmas: &[VirtRange]) {}

    /// Adds samples; an address beyond the space is ignored.
    fn add(&mut self, addr: GuestVirtAddr, samples: u32) {
        if let Some((_, leaf)) = self.leaves.range_mut(..=addr.0).next_back()
            && addr.0 < leaf.end
        {
            leaf.samples += u64::from(samples);
        }
    }

    /// Ages counts and splits ranges; returns whether any was split.
    fn end_epoch(&mut self, _epoch: u32, _elapsed_s: f64, _chunks_max: usize) -> bool {
        self.epoch += 1;
        self.leaves.values_mut().for_each(|l| l.samples /= 2);
        let leaves: Vec<(u64, Leaf)> = self.leaves.iter().map(|(&s, &l)| (s, l)).collect();
        for (i, &(start, leaf)) in leaves.iter().enumerate() {
            let before = i.checked_sub(1).map(|i| leaves[i].1.samples);
            let after = leaves.get(i + 1).map(|(_, l)| l.samples);
            let mut beside = before.into_iter().chain(after).peekable();
            let stands_out =
                beside.peek().is_none() || beside.any(|samples| leaf.samples > samples + self.more);
            let is_small = leaf.end - start < 2 * self.granule;
            if leaf.samples >= self.least && stands_out && !is_small {
                self.cut(start, leaf);
            }
        }
        self.leaves.len() > leaves.len()
    }

    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange> {
        self.leaves.iter().filter_map(|(&start, leaf)| {
            Some(ClassifiedRange {
                range: VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(leaf.end))?,
                count: leaf.samples as f64,
                born_epoch: leaf.born_epoch,
            })
        })
    }

    fn state_bytes(&self) -> usize {
        self.leaves.len() * size_of::<(u64, Leaf)>()
    }
}

/// The exchange that puts the hottest ranges into fast memory; empty while the hottest range exceeds it. `ranking` is
/// hottest first; `capacity` is the process's fast memory.
fn exchange(
    ranking: &[RankedRange],
    residency: &ResidencyMap,
    capacity: ByteCount,
    epoch: u32,
) -> Plan {
    let mut left = capacity.0;
    let belongs = |range: &&RankedRange| {
        let resident = residency.placement(range.pid, &range.range).total().0;
        let fits = range.range.len() <= capacity && resident <= left && range.count > 0.0;
        left = left.saturating_sub(resident);
        fits
    };
    let (hot, cold) = ranking.split_at(ranking.iter().take_while(belongs).count());
    let leaving = |range: &RankedRange, bytes_of: fn(TierBytes) -> ByteCount| -> Vec<Relocation> {
        let movable = residency.movable(range.pid, &range.range, epoch);
        let relocations = movable.map(|(block, placement)| Relocation {
            pid: range.pid,
            block,
            bytes: bytes_of(placement),
        });
        relocations.filter(|r| r.bytes.0 > 0).collect()
    };
    let bytes = |all: &[Relocation]| all.iter().map(|r| r.bytes.0).sum::<u64>();
    let mut promotions: Vec<_> = hot.iter().flat_map(|r| leaving(r, |p| p.slow)).collect();
    let mut unpaired = bytes(&promotions);
    let pair = |demotion: &Relocation| {
        let fits = demotion.bytes.0 <= unpaired;
        unpaired -= if fits { demotion.bytes.0 } else { 0 };
        fits
    };
    let coldest = cold.iter().rev().flat_map(|r| leaving(r, |p| p.fast));
    let demotions = coldest.take_while(pair).collect();
    while let Some(last) = promotions.pop_if(|last| last.bytes.0 <= unpaired) {
        unpaired -= last.bytes.0;
    }
    Plan {
        promotions,
        demotions,
        ..Plan::default()
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::{BLOCK_SIZE, Block, MIB, Pid, rank};
    use proptest::prelude::*;

    use super::*;

    const PID: Pid = Pid(1);

    const GIB: u64 = 1 << 30;

    fn at(block: u64) -> GuestVirtAddr {
        Block(block).start()
    }

    #[test]
    fn a_hot_gib_is_found_in_64_tib_by_halving() {
        let mut ranges = PaperRanges::new(&Split::default(), 4);
        let mut epochs = 0;
        while ranges.end_epoch(0, 0.5, usize::MAX) || epochs < 4 {
            epochs += 1;
            for i in 0..2000 {
                ranges.add(GuestVirtAddr(40 * GIB + i * 7919 * 4096 % GIB), 1);
                ranges.add(GuestVirtAddr(32 * GIB + i % 20 * GIB / 2), 1);
            }
        }
        // 16 splits lead from 64 TiB to 1 GiB.
        assert!((16..30).contains(&epochs), "{epochs}");
        let ranking = rank([(PID, ranges.ranges().collect::<Vec<_>>())]);
        let hot = VirtRange::new(GuestVirtAddr(40 * GIB), GuestVirtAddr(41 * GIB)).unwrap();
        assert!(hot.intersection(&ranking[0].range) == Some(ranking[0].range));
    }

    proptest! {
        #[test]
        fn ranges_cover_the_space_once_and_stay_within_bounds(
            samples in prop::collection::vec((0u64..SPACE_END, 1u32..400), 1..40),
            max_ranges in 1usize..64,
            epochs in 1usize..60,
        ) {
            let config = Split { max_ranges, ..Split::default() };
            let mut ranges = PaperRanges::new(&config, 1);
            for _ in 0..epochs {
                for &(addr, times) in &samples {
                    ranges.add(GuestVirtAddr(addr), times);
                }
                ranges.end_epoch(0, 0.5, usize::MAX);
            }
            let mut end = 0;
            for classified in ranges.ranges() {
                prop_assert_eq!(classified.range.start().0, end);
                prop_assert!(classified.range.len().0 >= 1 << config.granule_bits);
                end = classified.range.end().0;
            }
            prop_assert_eq!(end, SPACE_END);
            prop_assert!(ranges.ranges().count() <= max_ranges);
        }

        #[test]
        fn exchanges_are_balanced_and_go_from_slow_hot_to_fast_cold(
            places in prop::collection::vec((0u64..=512, 0u64..=512), 1..200),
            cuts in prop::collection::vec(1u64..200, 0..6),
            counts in prop::collection::vec(0u32..100, 8),
            capacity_mib in 0u64..400,
        ) {
            let mut residency = ResidencyMap::default();
            let blocks = places.len() as u64;
            for (block, &(fast, pages)) in (0..).zip(&places) {
                let fast = ByteCount(fast.min(pages) * 4096);
                let slow = ByteCount(pages * 4096 - fast.0);
                residency.set(PID, Block(block), TierBytes { fast, slow });
            }
            let mut edges: Vec<u64> = cuts.into_iter().filter(|&c| c < blocks).collect();
            edges.extend([0, blocks]);
            edges.sort_unstable();
            edges.dedup();
            let ranges = edges.windows(2).zip(&counts).map(|(e, &count)| ClassifiedRange {
                range: VirtRange::new(at(e[0]), at(e[1])).unwrap(),
                count: count.into(),
                born_epoch: 0,
            });
            let ranking = rank([(PID, ranges.collect::<Vec<_>>())]);
            let capacity = ByteCount(capacity_mib * MIB);
            let plan = exchange(&ranking, &residency, capacity, 1);
            let bytes = |all: &[Relocation]| all.iter().map(|r| r.bytes.0).sum::<u64>();
            let (up, down) = (bytes(&plan.promotions), bytes(&plan.demotions));
            prop_assert!(up.abs_diff(down) <= BLOCK_SIZE, "{} {}", up, down);
            prop_assert!(up <= capacity.0);
            let density = |r: &Relocation| {
                let holds = |range: &&RankedRange| range.range.contains(r.block.start());
                ranking.iter().find(holds).unwrap().density()
            };
            let coldest = plan.promotions.iter().map(density).fold(f64::MAX, f64::min);
            let hottest = plan.demotions.iter().map(density).fold(0.0, f64::max);
            prop_assert!(hottest <= coldest);
        }
    }
}
