//! Workloads of the simulated machine: access generators, and recorded traces.
//!
//! A generator computes its data structures instead of storing them, so a footprint of 144 GiB uses little memory. It
//! generates a batch of accesses in a few microseconds.

mod bfs;
mod btree;
mod cyclic_walk;
mod generator;
mod gups;
mod kronecker;
mod liblinear;
mod memlat;
mod memory;
mod mix;
mod pagerank;
mod popular;
mod replay;
mod scatter;
mod sequential;
mod several;
mod silo;
mod stencil;
#[cfg(test)]
mod tests;
mod tree;
mod xsbench;
mod zipf;

use demeter_policy::{GuestVirtAddr, MIB, VirtRange};
use demeter_scenario::{Workload as Kind, rng};

use self::generator::Generator;
use self::memory::ProgramMemory;
use crate::trace::Error;
use crate::{Batch, Program, Region};

/// Batches generated to measure an operation's length, since an operation may span several.
const TRIAL_BATCHES: usize = 16;

/// A workload of a scenario, as a program.
pub struct Workload {
    memory: ProgramMemory,
    // One virtual call per thousand accesses.
    generator: Box<dyn Generator>,
}

impl Workload {
    /// The program of a scenario, with random numbers from `seed`. Each of its accesses stands for `2^scale_bits` real
    /// ones.
    ///
    /// # Errors
    /// Only for a trace: when it is unreadable or damaged.
    pub fn new(kind: &Kind, seed: u64, scale_bits: u32) -> Result<Self, Error> {
        let generator: Box<dyn Generator> = match kind {
            Kind::Gups(gups) => Box::new(gups::Gups::new(gups, seed)),
            Kind::Zipf(zipf) => Box::new(popular::Popular::new(zipf, seed, scale_bits)),
            Kind::Memlat(memlat) => Box::new(memlat::Memlat::new(memlat, seed)),
            Kind::Sequential(app) => Box::new(sequential::Sequential::new(app, scale_bits)),
            Kind::Btree(app) => Box::new(btree::Btree::new(app, seed)),
            Kind::Silo(silo) => Box::new(silo::Silo::new(silo, seed)),
            Kind::Xsbench(app) => Box::new(xsbench::Xsbench::new(app, seed)),
            Kind::Bwaves(app) => Box::new(stencil::Stencil::new(app, scale_bits)),
            Kind::Graph500(app) => Box::new(bfs::Bfs::new(app, seed)),
            Kind::Pagerank(app) => Box::new(pagerank::Pagerank::new(app, seed, scale_bits)),
            Kind::Liblinear(app) => Box::new(liblinear::Liblinear::new(app, seed)),
            Kind::Mix(mix) => Box::new(mix::Mix::new(mix, seed, scale_bits)),
            Kind::Several(several) => Box::new(several::Several::new(several, seed, scale_bits)),
            Kind::Trace(trace) => Box::new(replay::Replay::open(&trace.file)?),
            Kind::Program(programs) => {
                let trace = programs.trace.as_ref().ok_or(Error::NotRecorded)?;
                Box::new(replay::Replay::open(trace)?)
            }
        };
        let memory = ProgramMemory::new(kind.cold_mib() * MIB, generator.regions());
        Ok(Self {
            memory: match kind.copies() {
                1 => memory,
                _ => memory.touched_in_turn(),
            },
            generator,
        })
    }
}

/// Mean accesses per operation, rounded up, measured on the program's first batches.
///
/// # Errors
/// As [`Workload::new`].
pub(crate) fn accesses_per_operation(kind: &Kind) -> Result<u64, Error> {
    if let Kind::Trace(_) | Kind::Program(_) = kind {
        // Each access is one, and the file is large.
        return Ok(1);
    }
    let mut program = Workload::new(kind, 0, 0)?;
    let mut batch = Batch::default();
    let (mut accesses, mut operations) = (0, 0);
    for _ in 0..TRIAL_BATCHES {
        batch.clear();
        program.next(0, 0, &mut batch);
        accesses += batch.accesses().len() as u64;
        operations += u64::from(batch.ops);
    }
    Ok(accesses.div_ceil(operations.max(1)))
}

impl Program for Workload {
    fn regions(&self) -> Vec<Region> {
        self.memory.regions().to_vec()
    }

    fn place(&mut self, bases: &[GuestVirtAddr]) {
        self.memory.place(bases);
    }

    fn threads(&self) -> usize {
        self.generator.threads() as usize
    }

    fn process_of(&self, thread: usize) -> u32 {
        self.generator.process_of(thread)
    }

    fn populate(&mut self, page_bytes: u64, out: &mut Batch) -> bool {
        self.memory.populate(page_bytes, out)
    }

    fn next(&mut self, thread: usize, now_ns: u64, out: &mut Batch) {
        self.generator.next(&self.memory, thread, now_ns, out);
    }

    fn hot(&self, now_ns: u64) -> Vec<VirtRange> {
        let hot = self.generator.hot(now_ns);
        let mut ranges: Vec<VirtRange> = hot
            .into_iter()
            .filter_map(|extent| self.memory.range(extent))
            .collect();
        ranges.sort_unstable_by_key(VirtRange::start);
        ranges
    }

    fn compute_ps(&self, thread: usize) -> u64 {
        self.generator.compute_ps(thread)
    }

    fn fault(&self) -> Option<String> {
        self.generator.fault()
    }
}
