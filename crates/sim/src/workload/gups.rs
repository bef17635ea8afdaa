//! gups: random 8-byte updates of an array with a hot set, as in the lab's program of that name.
//!
//! An update is a load and a store of one word, in the hot set with probability `hot_weight`, otherwise in the rest.
//! The hot set lies at the start of the array, or with `reverse` at its end. It may jump to the middle, or change its
//! size in phases while it keeps its end of the array. With `scattered`, the array's blocks of 2 MiB are then shuffled.
//!
//! Each copy is a process with an array and threads of its own. Threads take the copies in turn.

use demeter_policy::{BLOCK_SIZE, MIB};
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, load, region, store};
use super::rng::{Rng, bound};
use super::scatter::Scatter;
use crate::machine::cost::PS_PER_NS;
use crate::{Batch, Region};

const WORD: u64 = 8;

/// Estimated: index arithmetic and two random numbers, six cycles besides the accesses.
const UPDATE_PS: u64 = 2_000;

pub(crate) struct Gups {
    bytes: u64,
    /// The hot sets in order of time, with their start times; the first starts at 0.
    hot_sets: Vec<HotSet>,
    /// Random numbers below this select the hot set.
    hot_below: u64,
    /// The position of each block, if blocks are shuffled, by copy.
    blocks: Vec<Option<Scatter>>,
    compute_ps: u64,
    /// By thread.
    rngs: Vec<Rng>,
}

#[derive(Debug, Clone, Copy)]
struct HotSet {
    since_ns: u64,
    start: u64,
    bytes: u64,
}

impl Gups {
    pub(crate) fn new(gups: &scenario::Gups, seed: u64) -> Self {
        let bytes = gups.size_mib * MIB;
        let at_its_end = |since_s: u64, hot_mib: u64| {
            let hot_bytes = hot_mib * MIB;
            HotSet {
                since_ns: since_s * 1_000_000_000,
                start: if gups.reverse { bytes - hot_bytes } else { 0 },
                bytes: hot_bytes,
            }
        };
        let first = at_its_end(0, gups.hot_mib);
        let jump = gups.shift_at_s.map(|since_s| HotSet {
            since_ns: since_s * 1_000_000_000,
            start: (bytes - first.bytes) / 2 / BLOCK_SIZE * BLOCK_SIZE,
            ..first
        });
        let copies = || (0..gups.copies).map(|copy| (copy, seed.wrapping_add(copy.into())));
        let by_copy: Vec<Vec<Rng>> = copies()
            .map(|(_, seed)| Rng::for_threads(seed, gups.threads))
            .collect();
        let threads = 0..gups.threads as usize;
        let rngs = threads.flat_map(|thread| by_copy.iter().map(move |rngs| rngs[thread].clone()));
        let rngs = rngs.collect();
        let phases = gups.phases.iter();
        let phases = phases.map(|phase| at_its_end(phase.at_s, phase.hot_mib));
        Self {
            bytes,
            hot_sets: std::iter::once(first).chain(jump).chain(phases).collect(),
            hot_below: bound(gups.hot_weight),
            blocks: copies()
                .map(|(_, seed)| {
                    gups.scattered
                        .then(|| Scatter::new(bytes / BLOCK_SIZE, seed))
                })
                .collect(),
            compute_ps: UPDATE_PS + gups.compute_ns * PS_PER_NS,
            rngs,
        }
    }

    fn copy_of(&self, thread: usize) -> usize {
        thread % self.blocks.len()
    }

    fn hot_set(&self, now_ns: u64) -> HotSet {
        let begun = self.hot_sets.partition_point(|hot| hot.since_ns <= now_ns);
        self.hot_sets[begun.saturating_sub(1)]
    }
}

impl Generator for Gups {
    fn regions(&self) -> Vec<Region> {
        let array = |copy| Region {
            process: copy,
            ..region("array", self.bytes)
        };
        (0..self.blocks.len() as u32).map(array).collect()
    }

    fn threads(&self) -> u32 {
        self.rngs.len() as u32
    }

    fn process_of(&self, thread: usize) -> u32 {
        self.copy_of(thread) as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, now_ns: u64, out: &mut Batch) {
        let copy = self.copy_of(thread);
        let (array, blocks) = (memory.base(copy), &self.blocks[copy]);
        let hot = self.hot_set(now_ns);
        let hot_words = hot.bytes / WORD;
        let cold_words = (self.bytes - hot.bytes) / WORD;
        let rng = &mut self.rngs[thread];
        while out.room() >= 2 {
            let offset = if rng.next() < self.hot_below {
                hot.start + rng.below(hot_words) * WORD
            } else {
                let cold = rng.below(cold_words) * WORD;
                // The cold words are numbered across the gap of the hot set.
                if cold < hot.start {
                    cold
                } else {
                    cold + hot.bytes
                }
            };
            let at = array + placed(blocks, offset);
            out.push(load(at));
            out.push(store(at));
            out.ops += 1;
        }
    }

    fn hot(&self, now_ns: u64) -> Vec<Extent> {
        let hot = self.hot_set(now_ns);
        let of_copy = |(region, blocks): (usize, &Option<Scatter>)| {
            let extent = |offset, bytes| Extent {
                region,
                offset,
                bytes,
            };
            let Some(blocks) = blocks else {
                return vec![extent(hot.start, hot.bytes)];
            };
            let hot = hot.start / BLOCK_SIZE..(hot.start + hot.bytes) / BLOCK_SIZE;
            let mut hot: Vec<u64> = hot.map(|block| blocks.at(block)).collect();
            hot.sort_unstable();
            let hot = hot.into_iter();
            hot.map(|block| extent(block * BLOCK_SIZE, BLOCK_SIZE))
                .collect::<Vec<_>>()
        };
        self.blocks.iter().enumerate().flat_map(of_copy).collect()
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        self.compute_ps
    }
}

/// The shuffled position of a byte offset.
#[inline]
fn placed(blocks: &Option<Scatter>, offset: u64) -> u64 {
    let Some(blocks) = blocks else {
        return offset;
    };
    blocks.at(offset / BLOCK_SIZE) * BLOCK_SIZE + offset % BLOCK_SIZE
}
