//! Where an agent keeps what it has seen: the policy crate's ranges, the paper's, or a counter for
//! every block.

use std::collections::BTreeMap;

use demeter_policy::{
    Block, ClassifiedRange, Classifier, ClassifierConfig, GuestVirtAddr, Pid, RankedRange,
    VirtRange, rank,
};

use super::Halves;

/// Counts below this are forgotten.
const COUNT_MIN: f64 = 1.0 / 16.0;

/// Counters of blocks are halved after so many samples for each block. A single block gets few:
/// halved every epoch, as ranges are, its count would never be certain.
const COOL_SAMPLES_PER_BLOCK: u64 = 8;

/// The process of a guest.
pub(super) const PID: Pid = Pid(1);

/// Decayed samples by place.
#[derive(Debug)]
pub(crate) enum Heat {
    /// In ranges that split and merge.
    Ranges(Box<Classifier>),
    /// In ranges that are halved.
    Halves(Halves),
    /// Block by block.
    Blocks {
        /// The process's mappings.
        vmas: Vec<VirtRange>,
        /// Samples, halved now and then.
        counts: BTreeMap<Block, f64>,
        /// Samples until then.
        left: u64,
    },
}

impl Heat {
    /// Ranges over these mappings.
    pub(crate) fn ranges(config: ClassifierConfig, vmas: &[VirtRange]) -> Self {
        let mut classifier = Classifier::new(config);
        classifier.set_space(vmas);
        Self::Ranges(Box::new(classifier))
    }

    /// Ranges over all that a process may have.
    pub(crate) fn halves(config: &ClassifierConfig, vcpus: u32) -> Self {
        Self::Halves(Halves::new(config, vcpus))
    }

    /// Counters over these mappings.
    pub(crate) fn blocks(vmas: &[VirtRange]) -> Self {
        Self::Blocks {
            vmas: vmas.to_vec(),
            counts: BTreeMap::new(),
            left: cool_samples(vmas),
        }
    }

    /// Takes a sample.
    pub(crate) fn add(&mut self, addr: GuestVirtAddr) {
        match self {
            Self::Ranges(classifier) => classifier.add(addr, 1),
            Self::Halves(halves) => halves.add(addr),
            Self::Blocks { counts, left, .. } => {
                *counts.entry(Block::of(addr)).or_default() += 1.0;
                *left = left.saturating_sub(1);
            }
        }
    }

    /// Ends the epoch; tells whether there is reason to plan anew.
    pub(crate) fn end_epoch(&mut self) -> bool {
        match self {
            Self::Ranges(classifier) => classifier.end_epoch(),
            Self::Halves(halves) => return halves.end_epoch(),
            Self::Blocks { left: 1.., .. } => {}
            Self::Blocks { vmas, counts, left } => {
                *left = cool_samples(vmas);
                counts.values_mut().for_each(|c| *c /= 2.0);
                counts.retain(|_, c| *c >= COUNT_MIN);
            }
        }
        true
    }

    /// What is known, hottest first.
    pub(crate) fn ranking(&self) -> Vec<RankedRange> {
        match self {
            Self::Ranges(classifier) => rank([(PID, classifier.ranges().collect::<Vec<_>>())]),
            Self::Halves(halves) => rank([(PID, halves.ranges().collect::<Vec<_>>())]),
            Self::Blocks { vmas, counts, .. } => {
                let blocks = vmas.iter().flat_map(Block::all_of).map(|block| {
                    let end = GuestVirtAddr(Block(block.0 + 1).start().0);
                    ClassifiedRange {
                        range: VirtRange::new(block.start(), end).expect("a block is not empty"),
                        count: counts.get(&block).copied().unwrap_or(0.0),
                        born_epoch: 0,
                    }
                });
                rank([(PID, blocks.collect::<Vec<_>>())])
            }
        }
    }
}

/// Samples after which counters of these mappings' blocks are halved.
fn cool_samples(vmas: &[VirtRange]) -> u64 {
    let blocks = vmas.iter().flat_map(Block::all_of).count() as u64;
    blocks * COOL_SAMPLES_PER_BLOCK
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn both_kinds_find_the_hot_block() {
        let at = |block: u64| Block(block).start();
        let vmas = [VirtRange::new(at(1000), at(1256)).unwrap()];
        let ranges = Heat::ranges(ClassifierConfig::default(), &vmas);
        for mut heat in [ranges, Heat::blocks(&vmas)] {
            for _ in 0..4 {
                for i in 0..512 {
                    heat.add(at(1000 + i % 256));
                    heat.add(at(1100));
                }
                heat.end_epoch();
            }
            let ranking = heat.ranking();
            assert_eq!(ranking[0].range.start(), at(1100));
            let covered: u64 = ranking.iter().map(|r| r.range.len().0).sum();
            assert_eq!(covered, vmas[0].len().0);
        }
    }
}
