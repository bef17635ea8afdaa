//! sequential: each thread loads the words of its part of an array in order, again and again.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, Memory, load, region};
use crate::{Batch, Region};

const WORD: u64 = 8;
const ARRAY: usize = 0;

/// Estimated: an addition a word.
const WORD_PS: u64 = 300;

pub(crate) struct Sequential {
    bytes: u64,
    /// For each thread the bytes of its part and the next offset.
    parts: Vec<Part>,
}

struct Part {
    start: u64,
    end: u64,
    next: u64,
}

impl Sequential {
    pub(crate) fn new(app: &scenario::App) -> Self {
        let bytes = app.size_mib * MIB;
        let threads = u64::from(app.threads);
        let part_bytes = bytes / threads / WORD * WORD;
        let part = |thread| Part {
            start: thread * part_bytes,
            end: (thread + 1) * part_bytes,
            next: thread * part_bytes,
        };
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

    fn next(&mut self, memory: &Memory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let array = memory.base(ARRAY);
        let part = &mut self.parts[thread];
        let words = (out.room() as u64).min((part.end - part.next) / WORD);
        for word in 0..words {
            out.push(load(array + part.next + word * WORD));
        }
        out.ops += words as u32;
        part.next += words * WORD;
        if part.next == part.end {
            part.next = part.start;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        Vec::new()
    }

    fn compute_ps(&self) -> u64 {
        WORD_PS
    }
}
