//! The heat of the blocks of one chunk: estimates from what was counted there.

use super::pool::LEVELS;
use super::{CHUNK_BLOCKS, Chunk, Estimate, Heat, RATIO, WINDOWS};
use crate::Block;

/// The heat of 512 blocks, with or without evidence.
#[derive(Debug, Clone, Copy)]
pub(crate) struct ChunkHeat<'a> {
    heat: &'a Heat,
    chunk: Option<&'a Chunk>,
}

impl Heat {
    /// The heat of the chunk that contains a block.
    pub(crate) fn of_chunk(&self, block: Block) -> ChunkHeat<'_> {
        let chunk = self.find(block.0 / CHUNK_BLOCKS as u64).ok();
        ChunkHeat {
            heat: self,
            chunk: chunk.map(|at| &self.chunks[at]),
        }
    }

    /// The estimate of a block's rate.
    pub fn estimate(&self, window: usize, block: Block) -> Estimate {
        let at = (block.0 % CHUNK_BLOCKS as u64) as usize;
        let mut estimate = self.per_block(window);
        let chunk = self.of_chunk(block);
        for level in (0..LEVELS).rev() {
            estimate = chunk.part(window, level, estimate, at >> (3 * level));
        }
        estimate
    }
}

impl<'a> ChunkHeat<'a> {
    /// The heat of the process.
    pub(crate) fn whole(&self) -> &'a Heat {
        self.heat
    }

    /// The estimate of a group at a level, in a larger group with the estimate `of`.
    #[inline(always)]
    fn part(&self, window: usize, level: usize, of: Estimate, group: usize) -> Estimate {
        let pools = &self.heat.pools[window];
        if pools.are_alike(level, of) {
            return of;
        }
        let (events, exposure_s) = match self.chunk {
            Some(chunk) => self.heat.seen(chunk, window, level, group),
            None => (0.0, self.heat.unseen_s(window, level)),
        };
        pools.part(level, of, events, exposure_s)
    }

    /// The estimates of a block in the first `windows` windows; the others are zero.
    pub(crate) fn first_estimates(&self, windows: usize, at: usize) -> [Estimate; WINDOWS] {
        let mut estimates = [Estimate::default(); WINDOWS];
        for (window, estimate) in estimates.iter_mut().enumerate().take(windows) {
            *estimate = self.heat.per_block(window);
        }
        for level in (0..LEVELS).rev() {
            for (window, estimate) in estimates.iter_mut().enumerate().take(windows) {
                *estimate = self.part(window, level, *estimate, at >> (3 * level));
            }
        }
        estimates
    }

    /// The estimates of all blocks.
    pub(crate) fn estimates(&self, window: usize, out: &mut [Estimate; CHUNK_BLOCKS]) {
        let whole = self.mean(window);
        for large in 0..8 {
            let of_large = self.part(window, 2, whole, large);
            for small in large * 8..large * 8 + 8 {
                let of_small = self.part(window, 1, of_large, small);
                let first = small * 8;
                for (at, estimate) in out[first..first + 8].iter_mut().enumerate() {
                    *estimate = self.part(window, 0, of_small, first + at);
                }
            }
        }
    }

    /// The estimate of a block that is known by its chunk only.
    pub(crate) fn mean(&self, window: usize) -> Estimate {
        self.part(window, LEVELS - 1, self.heat.per_block(window), 0)
    }

    /// Rates of all blocks in longer windows, each weighted with a quarter of the one before.
    pub(crate) fn longer_rates(&self, window: usize, out: &mut [f64; CHUNK_BLOCKS]) {
        out.fill(0.0);
        let Some(chunk) = self.chunk else { return };
        let (mut share, mut factors) = (1.0, [0.0; WINDOWS]);
        for (longer, factor) in factors.iter_mut().enumerate().skip(window + 1) {
            share /= RATIO;
            let sampled_s = self.heat.sampled_s[longer].max(f64::MIN_POSITIVE);
            *factor = share / self.heat.weight[longer] / sampled_s;
        }
        for (rate, events) in out.iter_mut().zip(chunk.events.iter()) {
            // The factors of shorter windows are zero.
            let terms = events.iter().zip(factors);
            *rate = terms.fold(0.0, |rate, (events, factor)| {
                rate + f64::from(*events) * factor
            });
        }
    }
}
