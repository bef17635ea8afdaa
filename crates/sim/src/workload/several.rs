//! several: processes in one guest, each a mix with its own threads.

use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, ProgramMemory};
use super::mix::Mix;
use super::rng::mix;
use crate::{Batch, Region};

pub(crate) struct Several {
    processes: Vec<Mix>,
    /// By thread: its process, and its number within the process.
    threads: Vec<(usize, usize)>,
}

impl Several {
    pub(crate) fn new(several: &scenario::Several, seed: u64, scale_bits: u32) -> Self {
        let (mut processes, mut threads) = (vec![], vec![]);
        let (mut first_region, mut seed) = (0, seed);
        for (process, of) in (0..).zip(&several.processes) {
            processes.push(Mix::of_process(of, process, first_region, seed, scale_bits));
            threads.extend((0..of.threads as usize).map(|thread| (process as usize, thread)));
            first_region += of.parts.len();
            seed = mix(seed);
        }
        Self { processes, threads }
    }
}

impl Generator for Several {
    fn regions(&self) -> Vec<Region> {
        self.processes.iter().flat_map(Generator::regions).collect()
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn process_of(&self, thread: usize) -> u32 {
        self.threads[thread].0 as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, now_ns: u64, out: &mut Batch) {
        let (process, thread) = self.threads[thread];
        self.processes[process].next(memory, thread, now_ns, out);
    }

    fn hot(&self, now_ns: u64) -> Vec<Extent> {
        let hot = self
            .processes
            .iter()
            .flat_map(|process| process.hot(now_ns));
        hot.collect()
    }

    fn compute_ps(&self, thread: usize) -> u64 {
        let (process, thread) = self.threads[thread];
        self.processes[process].compute_ps(thread)
    }
}
