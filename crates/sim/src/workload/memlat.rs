//! memlat: dependent loads through one random cycle of cache lines, as in the lab's program.

use demeter_policy::MIB;
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, LINE, ProgramMemory, load, region};
use super::scatter::Scatter;
use crate::{Batch, Region};

/// The load's latency hides the instructions of a hop.
const HOP_PS: u64 = 0;

const CHASED: usize = 0;

pub(crate) struct Memlat {
    lines: Scatter,
    /// Position in the cycle.
    at: u64,
}

impl Memlat {
    pub(crate) fn new(memlat: &scenario::Memlat, seed: u64) -> Self {
        Self {
            lines: Scatter::new(memlat.size_mib * MIB / LINE, seed),
            at: 0,
        }
    }
}

impl Generator for Memlat {
    fn regions(&self) -> Vec<Region> {
        vec![region("chased", self.lines.count() * LINE)]
    }

    fn threads(&self) -> u32 {
        1
    }

    fn next(&mut self, memory: &ProgramMemory, _thread: usize, _now_ns: u64, out: &mut Batch) {
        let chased = memory.base(CHASED);
        while out.room() > 0 {
            out.push(load(chased + self.lines.at(self.at) * LINE));
            out.ops += 1;
            self.at += 1;
            if self.at == self.lines.count() {
                self.at = 0;
            }
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        vec![Extent {
            region: CHASED,
            offset: 0,
            bytes: self.lines.count() * LINE,
        }]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        HOP_PS
    }
}
