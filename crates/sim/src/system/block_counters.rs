//! Access counters per block: the simplest classification, as a baseline for the windows and groups of the product's
//! heat.

use std::collections::BTreeMap;

use demeter_policy::engine::{Classify, Strategy};
use demeter_policy::{
    Block, ClassifiedRange, GuestVirtAddr, Pid, Plan, Situation, VirtRange, plan,
};

/// Lower counts are dropped.
const COUNT_MIN: f64 = 1.0 / 16.0;

/// Number of samples per block between two halvings. One block alone gets few samples: if halved in every epoch, its
/// count would never be reliable.
const COOL_SAMPLES_PER_BLOCK: u64 = 8;

/// Counters of blocks, with the planner that a host uses for its guests' histories.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Blocks;

impl Strategy for Blocks {
    type Classifier = BlockCounters;

    fn classifier(&self) -> BlockCounters {
        BlockCounters::default()
    }

    fn plan(&mut self, situation: &Situation<'_>, _heats: &[(Pid, &BlockCounters)]) -> Plan {
        plan(situation)
    }
}

/// Decayed samples by block.
#[derive(Debug, Clone, Default)]
pub(crate) struct BlockCounters {
    vmas: Vec<VirtRange>,
    counts: BTreeMap<Block, f64>,
    /// Samples until the next halving.
    left: u64,
}

impl BlockCounters {
    fn blocks(&self) -> impl Iterator<Item = Block> {
        self.vmas.iter().flat_map(Block::all_of)
    }

    fn cool_samples(&self) -> u64 {
        self.blocks().count() as u64 * COOL_SAMPLES_PER_BLOCK
    }
}

impl Classify for BlockCounters {
    fn set_space(&mut self, vmas: &[VirtRange]) {
        self.vmas = vmas.to_vec();
        self.left = self.cool_samples();
        let maps = |b: &Block| vmas.iter().any(|v| Block::numbers_of(v).contains(&b.0));
        self.counts.retain(|b, _| maps(b));
    }

    fn add(&mut self, addr: GuestVirtAddr, samples: u32) {
        *self.counts.entry(Block::of(addr)).or_default() += f64::from(samples);
        self.left = self.left.saturating_sub(samples.into());
    }

    fn end_epoch(&mut self, _epoch: u32, _elapsed_s: f64, _chunks_max: usize) -> bool {
        if self.left == 0 {
            self.left = self.cool_samples();
            self.counts.values_mut().for_each(|c| *c /= 2.0);
            self.counts.retain(|_, c| *c >= COUNT_MIN);
        }
        true
    }

    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange> {
        self.blocks().filter_map(|block| {
            Some(ClassifiedRange {
                range: VirtRange::new(block.start(), Block(block.0 + 1).start())?,
                count: self.counts.get(&block).copied().unwrap_or(0.0),
                born_epoch: 0,
            })
        })
    }

    fn state_bytes(&self) -> usize {
        self.counts.len() * size_of::<(Block, f64)>()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_hot_block_counts_most_and_counts_fade() {
        let at = |block: u64| Block(block).start();
        let mut counters = BlockCounters::default();
        counters.set_space(&[VirtRange::new(at(1000), at(1256)).unwrap()]);
        let epoch = |counters: &mut BlockCounters, hot: u64| {
            for i in 0..512 {
                counters.add(at(1000 + i % 256), 1);
                counters.add(at(hot), 1);
            }
            counters.end_epoch(0, 0.5, usize::MAX);
        };
        let hottest = |counters: &BlockCounters| {
            let ranges = counters.ranges();
            let hottest = ranges.max_by(|a, b| a.count.total_cmp(&b.count)).unwrap();
            Block::of(hottest.range.start()).0
        };
        (0..4).for_each(|_| epoch(&mut counters, 1100));
        assert_eq!(hottest(&counters), 1100);
        assert_eq!(counters.ranges().count(), 256);
        // Another block gets far more samples; with halving it soon overtakes the first.
        (0..6).for_each(|_| epoch(&mut counters, 1200));
        assert_eq!(hottest(&counters), 1200);
    }
}
