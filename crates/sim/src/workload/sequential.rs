//! sequential: each thread loads the words of its part of an array in order, in a loop.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::cyclic_walk::CyclicWalk;
use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, load, region};
use crate::{Batch, Region};

const WORD: u64 = 8;
const ARRAY: usize = 0;

/// Estimated: an addition per word.
const WORD_PS: u64 = 300;

pub(crate) struct Sequential {
    bytes: u64,
    /// Word position in each thread's part.
    parts: Vec<CyclicWalk>,
}

impl Sequential {
    pub(crate) fn new(app: &scenario::App, scale_bits: u32) -> Self {
        let bytes = app.size_mib * MIB;
        let threads = u64::from(app.threads);
        let words = bytes / threads / WORD;
        let part = |thread| CyclicWalk::new(thread * words..(thread + 1) * words, WORD, scale_bits);
        Self {
            bytes,
            parts: (0..threads).map(part).collect(),
        }
    }
}

impl Generator for Sequential {
    fn regions(&self) -> Vec<Region> {
        vec![region("array", self.bytes)]
    }

    fn threads(&self) -> u32 {
        self.parts.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let array = memory.base(ARRAY);
        let part = &mut self.parts[thread];
        while out.room() > 0 {
            out.push(load(array + part.item() * WORD));
            out.ops += 1;
            part.advance();
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        Vec::new()
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        WORD_PS
    }
}
