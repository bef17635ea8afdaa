//! btree: lookups of uniformly random keys in one large index.
//!
//! All leaves are equally hot. The hot part is the inner nodes, which a bulk load builds last.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory, region};
use super::rng::Rng;
use super::tree::{LOADS_MAX, Tree};
use crate::{Batch, Region};

const INDEX: usize = 0;

/// Estimated: seven levels of a binary search over 15 keys.
const LOOKUP_PS: u64 = 40_000;

pub(crate) struct Btree {
    tree: Tree,
    rngs: Vec<Rng>,
}

impl Btree {
    pub(crate) fn new(app: &scenario::App, seed: u64) -> Self {
        Self {
            tree: Tree::of_bytes(app.size_mib * MIB),
            rngs: Rng::for_threads(seed, app.threads),
        }
    }
}

impl Generator for Btree {
    fn regions(&self) -> Vec<Region> {
        vec![region("index", self.tree.bytes())]
    }

    fn threads(&self) -> u32 {
        self.rngs.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let rng = &mut self.rngs[thread];
        while out.room() >= LOADS_MAX {
            let key = rng.below(self.tree.keys());
            self.tree.lookup(memory.base(INDEX), key, out);
            out.ops += 1;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        vec![Extent {
            region: INDEX,
            offset: self.tree.leaf_bytes(),
            bytes: self.tree.bytes() - self.tree.leaf_bytes(),
        }]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        LOOKUP_PS
    }
}
