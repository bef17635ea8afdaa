//! mix: parts of memory with different access patterns, at once or in turn.

use demeter_policy::ByteCount;
use demeter_scenario::{self as scenario, MixAccesses, MixPart};

use super::cyclic_walk::CyclicWalk;
use super::generator::Generator;
use super::memory::{Extent, LINE, ProgramMemory, load, region, store};
use super::rng::Rng;
use crate::machine::cost::PS_PER_NS;
use crate::{Batch, Region};

/// Estimated: a random number and index arithmetic.
const ACCESS_PS: u64 = 2_000;

pub(crate) struct Mix {
    accesses: MixAccesses,
    compute_ps: u64,
    /// Its process, and the first of its parts among all regions.
    process: u32,
    first_region: usize,
    threads: Vec<Thread>,
}

struct Thread {
    rng: Rng,
    /// For each swept part, the position in lines.
    sweeps: Vec<CyclicWalk>,
}

impl Mix {
    /// A mix as a whole program.
    pub(crate) fn new(mix: &scenario::Mix, seed: u64, scale_bits: u32) -> Self {
        Self::of_process(mix, 0, 0, seed, scale_bits)
    }

    /// A mix as one of several processes, whose first part is region `first_region`.
    pub(crate) fn of_process(
        mix: &scenario::Mix,
        process: u32,
        first_region: usize,
        seed: u64,
        scale_bits: u32,
    ) -> Self {
        let accesses = MixAccesses::new(mix);
        let threads = u64::from(mix.threads);
        let thread = |(n, rng)| {
            // Each thread sweeps its own piece.
            let sweep = |part: &MixPart| {
                let lines = part.bytes / LINE / threads;
                CyclicWalk::new(n * lines..(n + 1) * lines, LINE, scale_bits)
            };
            let sweeps = accesses.parts.iter().map(sweep).collect();
            Thread { rng, sweeps }
        };
        let rngs = Rng::for_threads(seed, mix.threads);
        let threads = (0..).zip(rngs).map(thread).collect();
        Self {
            accesses,
            compute_ps: ACCESS_PS + mix.compute_ns * PS_PER_NS,
            process,
            first_region,
            threads,
        }
    }
}

impl Generator for Mix {
    fn regions(&self) -> Vec<Region> {
        let part = |(n, part): (usize, &MixPart)| Region {
            start: ByteCount(part.bytes_at(0)),
            process: self.process,
            ..region(&format!("part {n}"), part.bytes)
        };
        self.accesses.parts.iter().enumerate().map(part).collect()
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, now_ns: u64, out: &mut Batch) {
        let Thread { rng, sweeps } = &mut self.threads[thread];
        let turn = self.accesses.turn(now_ns);
        while out.room() > 0 {
            let chosen = self.accesses.choose(turn, rng);
            let part = &self.accesses.parts[chosen];
            let base = memory.base(self.first_region + chosen);
            let hot_start = part.hot_start(now_ns);
            for _ in 0..out.room().min(MixAccesses::RUN) {
                let offset = if part.is_in_order {
                    let line = sweeps[chosen].item();
                    sweeps[chosen].advance();
                    line * LINE
                } else {
                    part.offset(hot_start, rng)
                };
                let access = if part.is_store(rng) { store } else { load };
                out.push(access(base + offset));
                out.ops += 1;
            }
        }
    }

    fn hot(&self, now_ns: u64) -> Vec<Extent> {
        let hot = |(n, part): (usize, &MixPart)| Extent {
            region: self.first_region + n,
            offset: part.hot_start(now_ns),
            bytes: part.hot_bytes,
        };
        let parts = self.accesses.parts.iter().enumerate();
        parts
            .filter(|(_, part)| part.hot_bytes > 0)
            .map(hot)
            .collect()
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        self.compute_ps
    }
}
