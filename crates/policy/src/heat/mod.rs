//! The heat of a process's blocks: their access rates over short and long times.
//!
//! # Problem
//! An epoch has some thousand samples, or some thousand looks at accessed bits. Memory has up to half a million blocks
//! of 2 MiB. What is each block's heat, and how certain is it? A single block has too few events; a neighbourhood may
//! mix hot and cold.
//!
//! # Approach
//! Evidence about a block is a number of *events* in an *exposure*: samples in elapsed time, or accesses found in
//! observed time. Where only one of `n` samples is taken, a second is an exposure of `1/n` seconds. Both are kept for five *windows* that decay in 1, 4, 16, 64 and 256 seconds. Each block has them, and
//! so has each group of 8, 64 and 512 blocks. A block's rate is estimated from the largest group down: a group's rate
//! is the expected rate of its parts. It counts for many events if the parts of groups are alike, and for none if they
//! differ ([`pool`]).
//!
//! Nothing is decayed explicitly: new events weigh more. The difference of parts is measured in a few chunks at a time,
//! in turn. So an epoch's cost depends on the number of samples, not on the size of memory.
//!
//! # Properties
//! - Blocks of equal rate in equal neighbourhoods have equal estimates. Of two blocks in one group, the one with more
//!   events in the same exposure never has the lower estimate.
//! - If all blocks are alike, all estimates are nearly equal; a single hot block among cold ones keeps its own.
//! - A group's events are the sum of its blocks'.
//! - Without events all rates are zero.
//! - At most 47 bytes for each block of a chunk with any evidence.

mod cells;
mod chunk;
mod pool;
mod ranges;

use serde::{Deserialize, Serialize};

use crate::residency::CHUNK_BLOCKS;
use crate::saved::{NotAState, check, finite};
use crate::{Block, VirtRange};
use cells::{Cells, FIRST, Mapped, path};
pub(crate) use chunk::ChunkHeat;
pub use pool::Estimate;
use pool::{LEVELS, Pools, Spread, spreads_of};

/// Number of windows.
pub const WINDOWS: usize = 5;

/// The shortest window, seconds: two epochs.
const SHORTEST_S: f64 = 1.0;

/// Ratio of each window's length to the one before.
pub(crate) const RATIO: f64 = 4.0;

/// Weights are scaled down before they approach the largest `f32`.
const WEIGHT_MAX: f64 = 1e15;

/// Maximum exposure of an observation: four looks of 80 ms at a block of small pages, each at one of 512 pages.
const WATCHED_MAX_S: f64 = 4.0 * 0.08 / 512.0;

/// Number of events in a window below which a process is idle.
const COLD_EVENTS: f64 = 1.0 / 64.0;

/// Events and exposure in 1 GiB of addresses.
#[derive(Debug, Clone, Serialize, Deserialize)]
struct Chunk {
    number: u64,
    events: Cells,
    /// Exposure in seconds, if it differs between blocks. Without it, each mapped block is always exposed.
    exposure: Option<Cells>,
    #[serde(skip)]
    mapped: Mapped,
    /// Measurements from this chunk's last turn.
    measured: Box<[Measured; WINDOWS]>,
}

/// Measurements over all parts of a chunk.
#[derive(Debug, Clone, Copy, Default, Serialize, Deserialize)]
struct Measured {
    /// Differences between parts, by level.
    spreads: [Spread; LEVELS],
    /// Events per second of all parts, with individual exposures.
    #[serde(deserialize_with = "finite")]
    watched_rate: f64,
}

/// The heat of one process. See the module's text.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Heat {
    chunks: Vec<Chunk>,
    #[serde(skip)]
    space: Vec<VirtRange>,
    /// Weight of a new event in each window.
    #[serde(deserialize_with = "finite")]
    weight: [f64; WINDOWS],
    /// Length of each window's memory so far, seconds.
    #[serde(deserialize_with = "finite")]
    span_s: [f64; WINDOWS],
    /// Length of each window's memory, seconds; a second in which only a part of the samples was taken counts for less.
    #[serde(deserialize_with = "finite")]
    sampled_s: [f64; WINDOWS],
    /// The thinning `n`: each n-th sample is taken.
    #[serde(skip)]
    thinning: u32,
    /// Sums over all chunks: events, and exposure if it differs between blocks.
    #[serde(deserialize_with = "finite")]
    events: [f64; WINDOWS],
    #[serde(deserialize_with = "finite")]
    exposure: [f64; WINDOWS],
    /// Events per second over all chunks, with individual exposures.
    #[serde(deserialize_with = "finite")]
    watched_rate: [f64; WINDOWS],
    #[serde(skip)]
    mapped_blocks: u64,
    pools: [Pools; WINDOWS],
}

impl Default for Heat {
    fn default() -> Self {
        Self {
            chunks: vec![],
            space: vec![],
            weight: [1.0; WINDOWS],
            span_s: [0.0; WINDOWS],
            sampled_s: [0.0; WINDOWS],
            thinning: 1,
            events: [0.0; WINDOWS],
            exposure: [0.0; WINDOWS],
            watched_rate: [0.0; WINDOWS],
            mapped_blocks: 0,
            pools: [Pools::default(); WINDOWS],
        }
    }
}

/// The windows that are due in an epoch: always the shortest, the others in turn.
pub fn windows_due(epoch: u32) -> impl Iterator<Item = usize> {
    let longer = 1 + epoch as usize % (WINDOWS - 1);
    [0, longer].into_iter()
}

/// The `most` of `n` things that are due in an epoch for a window, in turn.
pub(crate) fn in_turn(
    window: usize,
    epoch: u32,
    n: usize,
    most: usize,
) -> impl Iterator<Item = usize> {
    let turn = match window {
        0 => epoch as usize,
        _ => epoch as usize / (WINDOWS - 1),
    };
    let most = most.min(n);
    let first = turn.wrapping_mul(most);
    (first..first + most).map(move |at| at % n)
}

/// The length of a window, seconds.
pub(crate) fn window_s(window: usize) -> f64 {
    SHORTEST_S * RATIO.powi(window as i32)
}

impl Heat {
    /// Saved heat of a process with these mappings (sorted, disjoint).
    ///
    /// # Errors
    /// A part of it is impossible.
    pub(crate) fn restored(mut self, space: &[VirtRange]) -> Result<Self, NotAState> {
        let are_weights = self.weight.iter().all(|weight| *weight >= 1.0);
        check("the weight of an event", are_weights)?;
        let mut worths = self.pools.iter().flat_map(|pools| &pools.worth);
        check("a group's worth", worths.all(|worth| *worth >= 0.0))?;
        let is_number = |chunk: &Chunk| chunk.number < u64::MAX / CHUNK_BLOCKS as u64;
        let are_ordered = self.chunks.is_sorted_by(|a, b| a.number < b.number);
        let are_chunks = are_ordered && self.chunks.iter().all(is_number);
        check("the order of chunks", are_chunks)?;
        self.thinning = 1;
        self.map(space);
        for chunk in &self.chunks {
            let mut arrays = [Some(&chunk.events), chunk.exposure.as_ref()].into_iter();
            let is_mapped = chunk.mapped != Mapped::default()
                && arrays.all(|cells| cells.is_none_or(|cells| cells.fit(&chunk.mapped)));
            check("heat of unmapped memory", is_mapped)?;
        }
        Ok(self)
    }

    /// Sets the mappings (sorted, disjoint). Blocks that stay keep their heat.
    pub fn set_space(&mut self, space: &[VirtRange]) {
        self.map(space);
        for chunk in &mut self.chunks {
            chunk.forget_unmapped();
        }
        self.chunks
            .retain(|chunk| chunk.mapped != Mapped::default());
        self.sum_up();
    }

    fn map(&mut self, space: &[VirtRange]) {
        self.space = space.to_vec();
        self.mapped_blocks = 0;
        let mut end = 0;
        for vma in space {
            let blocks = Block::numbers_of(vma);
            self.mapped_blocks += blocks.end.saturating_sub(blocks.start.max(end));
            end = end.max(blocks.end);
        }
        for chunk in &mut self.chunks {
            chunk.map(space);
        }
    }

    /// Adds `events` samples of a block; ignored if it is not mapped.
    #[inline]
    pub fn add(&mut self, block: Block, events: u32) {
        self.take(block, f64::from(events), None);
    }

    /// Adds an observation of a block: `events` in `exposure_s` seconds.
    ///
    /// An exposure above `WATCHED_MAX_S` is reduced to that, and the events with it. Cold blocks have long exposures
    /// and hot ones short ones, so that cold blocks would otherwise decide the rate of their group.
    pub fn observe(&mut self, block: Block, events: u32, exposure_s: f64) {
        let watched_s = exposure_s.clamp(f64::MIN_POSITIVE, WATCHED_MAX_S);
        let events = f64::from(events) * watched_s / exposure_s.max(f64::MIN_POSITIVE);
        self.take(block, events, Some(watched_s));
    }

    fn take(&mut self, block: Block, events: f64, exposure_s: Option<f64>) {
        let number = block.0 / CHUNK_BLOCKS as u64;
        let at = (block.0 % CHUNK_BLOCKS as u64) as usize;
        let chunk = match self.find(number) {
            Ok(chunk) => &mut self.chunks[chunk],
            Err(place) => {
                let chunk = Chunk::new(number, &self.space);
                if !chunk.mapped.contains(at) {
                    return;
                }
                self.chunks.insert(place, chunk);
                &mut self.chunks[place]
            }
        };
        if !chunk.mapped.contains(at) {
            return;
        }
        let add = |cells: &mut Cells, sums: &mut [f64; WINDOWS], number: f64| {
            let weighed = self.weight.map(|weight| (number * weight) as f32);
            for cell in path(at) {
                for (sum, weighed) in cells[cell].iter_mut().zip(weighed) {
                    *sum += weighed;
                }
            }
            for (sum, weighed) in sums.iter_mut().zip(weighed) {
                *sum += f64::from(weighed);
            }
        };
        add(&mut chunk.events, &mut self.events, events);
        if let Some(exposure_s) = exposure_s {
            let exposure = chunk.exposure.get_or_insert_default();
            add(exposure, &mut self.exposure, exposure_s);
        }
    }

    /// From now on each n-th sample is taken; `n` is `thinning`.
    pub fn set_thinning(&mut self, thinning: u32) {
        self.thinning = thinning.max(1);
    }

    /// Ends an epoch of `elapsed_s` seconds. For the windows that are due, measures the differences between parts
    /// again, in at most `chunks_max` chunks.
    pub fn end_epoch(&mut self, epoch: u32, elapsed_s: f64, chunks_max: usize) {
        self.pass_time(elapsed_s);
        for window in 0..WINDOWS {
            for at in in_turn(0, epoch, self.chunks.len(), chunks_max) {
                let watched_rate = self.watched_rate_of(&self.chunks[at], window);
                self.chunks[at].measured[window].watched_rate = watched_rate;
            }
            let rates = self.chunks.iter().map(|c| c.measured[window].watched_rate);
            self.watched_rate[window] = rates.sum();
        }
        for window in windows_due(epoch) {
            for at in in_turn(window, epoch, self.chunks.len(), chunks_max) {
                let spreads = spreads_of(self, &self.chunks[at], window);
                self.chunks[at].measured[window].spreads = spreads;
            }
            let spreads = self.chunks.iter().map(|c| &c.measured[window].spreads);
            self.pools[window] = Pools::of(spreads);
        }
    }

    /// Ends an epoch of `elapsed_s` seconds without evidence: only time passes.
    pub fn pass_time(&mut self, elapsed_s: f64) {
        let elapsed_s = elapsed_s.max(0.0);
        let sampled_s = elapsed_s / f64::from(self.thinning);
        for window in 0..WINDOWS {
            let growth = 1.0 + elapsed_s / window_s(window);
            self.weight[window] *= growth;
            self.span_s[window] = (self.span_s[window] + elapsed_s) / growth;
            self.sampled_s[window] = (self.sampled_s[window] + sampled_s) / growth;
            if self.weight[window] > WEIGHT_MAX {
                self.scale_down(window);
            }
        }
    }

    /// Number of chunks of 1 GiB with any evidence.
    pub fn chunks(&self) -> usize {
        self.chunks.len()
    }

    /// Length of a window's memory, seconds: about its length, but at most the elapsed time.
    pub fn span_s(&self, window: usize) -> f64 {
        self.span_s[window]
    }

    /// Events per second in all of the process's memory.
    pub fn rate(&self, window: usize) -> f64 {
        self.whole(window).rate
    }

    /// Whether nothing was accessed lately. Of memory that is looked at now and then, the last events say nothing about
    /// that, but those of the longest window do.
    pub fn is_cold(&self) -> bool {
        let window = match self.exposure[0] > 0.0 {
            true => WINDOWS - 1,
            false => 0,
        };
        self.events[window] < self.weight[window] * COLD_EVENTS
    }

    /// Memory used, bytes, without the allocator's overhead.
    pub fn state_bytes(&self) -> usize {
        let one = |chunk: &Chunk| {
            let arrays = 1 + usize::from(chunk.exposure.is_some());
            let cells = arrays * Cells::BYTES;
            size_of::<Chunk>() + cells + size_of_val(&*chunk.measured)
        };
        self.chunks.iter().map(one).sum()
    }

    /// The expected heat of a block without evidence, from its process.
    fn per_block(&self, window: usize) -> Estimate {
        let whole = self.whole(window);
        Estimate {
            rate: whole.rate / (self.mapped_blocks.max(1)) as f64,
            ..whole
        }
    }

    fn whole(&self, window: usize) -> Estimate {
        let events = self.events[window] / self.weight[window];
        let rate = match self.exposure[window] > 0.0 {
            true => self.watched_rate[window],
            false if self.sampled_s[window] > 0.0 => events / self.sampled_s[window],
            false => 0.0,
        };
        Estimate { rate, sure: events }
    }

    /// Events per second in a chunk with different exposures. It is a sum over the smallest groups, so that blocks with
    /// long exposures do not outweigh the others.
    fn watched_rate_of(&self, chunk: &Chunk, window: usize) -> f64 {
        let rate = |group: usize| {
            let (events, exposure_s) = self.seen(chunk, window, 1, group);
            match exposure_s > 0.0 {
                true => events / exposure_s * f64::from(chunk.mapped.count(1, group)),
                false => 0.0,
            }
        };
        match chunk.exposure {
            Some(_) => (0..CHUNK_BLOCKS / 8).map(rate).sum(),
            None => 0.0,
        }
    }

    /// Events of a group at a level, and the total exposure of its blocks in seconds.
    #[inline]
    fn seen(&self, chunk: &Chunk, window: usize, level: usize, group: usize) -> (f64, f64) {
        let cell = FIRST[level] + group;
        let events = f64::from(chunk.events[cell][window]) / self.weight[window];
        let exposure_s = match &chunk.exposure {
            Some(exposure) => f64::from(exposure[cell][window]) / self.weight[window],
            None => self.unwatched_s(window, f64::from(chunk.mapped.count(level, group))),
        };
        (events, exposure_s)
    }

    /// Exposure of `blocks` without individual exposures, seconds.
    fn unwatched_s(&self, window: usize, blocks: f64) -> f64 {
        match self.exposure[window] > 0.0 {
            true => 0.0,
            false => self.sampled_s[window] * blocks,
        }
    }

    /// Exposure of a group in a chunk without evidence, seconds.
    fn unseen_s(&self, window: usize, level: usize) -> f64 {
        self.unwatched_s(window, (1u32 << (3 * level)) as f64)
    }

    /// The index of a chunk, or the one where it would be inserted.
    #[inline]
    fn find(&self, number: u64) -> Result<usize, usize> {
        let is_it = |at: &usize| self.chunks.get(*at).is_some_and(|c| c.number == number);
        // Where each chunk of a mapping has evidence, its distance from the first tells its index.
        let first = self.chunks.first().map_or(0, |chunk| chunk.number);
        let guess = usize::try_from(number.wrapping_sub(first)).ok();
        match guess.filter(is_it) {
            Some(at) => Ok(at),
            None => self.chunks.binary_search_by_key(&number, |c| c.number),
        }
    }

    fn scale_down(&mut self, window: usize) {
        let by = 1.0 / self.weight[window];
        for chunk in &mut self.chunks {
            let arrays = [Some(&mut chunk.events), chunk.exposure.as_mut()];
            for cell in arrays.into_iter().flatten().flat_map(|a| a.iter_mut()) {
                cell[window] = (f64::from(cell[window]) * by) as f32;
            }
        }
        self.weight[window] = 1.0;
        self.sum_up();
    }

    fn sum_up(&mut self) {
        for window in 0..WINDOWS {
            let of = |cells: &Cells| f64::from(cells[FIRST[3]][window]);
            self.events[window] = self.chunks.iter().map(|c| of(&c.events)).sum();
            let exposures = self.chunks.iter().filter_map(|c| c.exposure.as_ref());
            self.exposure[window] = exposures.map(of).sum();
        }
    }
}

impl Chunk {
    fn new(number: u64, space: &[VirtRange]) -> Self {
        let mut chunk = Self {
            number,
            events: Cells::default(),
            exposure: None,
            mapped: Mapped::default(),
            measured: Box::default(),
        };
        chunk.map(space);
        chunk
    }

    /// Sets the mapped blocks.
    fn map(&mut self, space: &[VirtRange]) {
        self.mapped = Mapped::default();
        let first = self.number * CHUNK_BLOCKS as u64;
        let end = first + CHUNK_BLOCKS as u64;
        let from = space.partition_point(|vma| Block::numbers_of(vma).end <= first);
        for vma in &space[from..] {
            let blocks = Block::numbers_of(vma);
            if blocks.start >= end {
                break;
            }
            for block in blocks.start.max(first)..blocks.end.min(end) {
                self.mapped.insert((block - first) as usize);
            }
        }
    }

    /// Clears what lies in unmapped memory.
    fn forget_unmapped(&mut self) {
        let mapped = &self.mapped;
        let arrays = [Some(&mut self.events), self.exposure.as_mut()];
        for cells in arrays.into_iter().flatten() {
            for at in (0..CHUNK_BLOCKS).filter(|&at| !mapped.contains(at)) {
                let lost = std::mem::take(&mut cells[at]);
                for cell in &path(at)[1..] {
                    for (sum, lost) in cells[*cell].iter_mut().zip(lost) {
                        *sum = (*sum - lost).max(0.0);
                    }
                }
            }
        }
    }
}

#[cfg(test)]
mod tests;
