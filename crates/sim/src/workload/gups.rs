//! gups: random 8-byte updates of an array with a hot set, as the lab's program of that name.
//!
//! An update is a load and a store of one word: of the hot set with probability `hot_weight`,
//! else of the rest. The hot set lies at the array's start, or with `reverse` at its end, and may
//! jump to the middle.

use demeter_policy::{BLOCK_SIZE, MIB};
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, Memory, load, region, store};
use super::rng::{Rng, bound};
use crate::{Batch, Region};

const WORD: u64 = 8;
const ARRAY: usize = 0;

/// Estimated: index arithmetic and two random numbers, six cycles beyond the accesses themselves.
const UPDATE_PS: u64 = 2_000;

pub(crate) struct Gups {
    bytes: u64,
    /// Where the hot set begins: before and after its jump.
    hot_starts: [u64; 2],
    hot_bytes: u64,
    /// Random numbers below this go to the hot set.
    hot_below: u64,
    shift_at_ns: u64,
    rngs: Vec<Rng>,
}

impl Gups {
    pub(crate) fn new(gups: &scenario::Gups, seed: u64) -> Self {
        let (bytes, hot_bytes) = (gups.size_mib * MIB, gups.hot_mib * MIB);
        let first = if gups.reverse { bytes - hot_bytes } else { 0 };
        let middle = (bytes - hot_bytes) / 2 / BLOCK_SIZE * BLOCK_SIZE;
        Self {
            bytes,
            hot_starts: [first, middle],
            hot_bytes,
            hot_below: bound(gups.hot_weight),
            shift_at_ns: gups.shift_at_s.map_or(u64::MAX, |s| s * 1_000_000_000),
            rngs: Rng::for_threads(seed, gups.threads),
        }
    }

    fn hot_start(&self, now_ns: u64) -> u64 {
        self.hot_starts[usize::from(now_ns >= self.shift_at_ns)]
    }
}

impl Generator for Gups {
    fn regions(&self) -> Vec<Region> {
        vec![region("array", self.bytes)]
    }

    fn threads(&self) -> u32 {
        self.rngs.len() as u32
    }

    fn next(&mut self, memory: &Memory, thread: usize, now_ns: u64, out: &mut Batch) {
        let array = memory.base(ARRAY);
        let hot_start = self.hot_start(now_ns);
        let hot_words = self.hot_bytes / WORD;
        let cold_words = (self.bytes - self.hot_bytes) / WORD;
        let rng = &mut self.rngs[thread];
        while out.room() >= 2 {
            let offset = if rng.next() < self.hot_below {
                hot_start + rng.below(hot_words) * WORD
            } else {
                let cold = rng.below(cold_words) * WORD;
                // The words behind the hot set follow those before it.
                if cold < hot_start {
                    cold
                } else {
                    cold + self.hot_bytes
                }
            };
            out.push(load(array + offset));
            out.push(store(array + offset));
            out.ops += 1;
        }
    }

    fn hot(&self, now_ns: u64) -> Vec<Extent> {
        vec![Extent {
            region: ARRAY,
            offset: self.hot_start(now_ns),
            bytes: self.hot_bytes,
        }]
    }

    fn compute_ps(&self) -> u64 {
        UPDATE_PS
    }
}
