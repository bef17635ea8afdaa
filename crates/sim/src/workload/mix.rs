//! mix: parts of memory that are used in different ways, at once or in turn.
//!
//! A thread stays in a part for a run of accesses before it chooses again, as a program does, so
//! that sweeps are streams also where something else is used beside them.

use demeter_policy::MIB;
use demeter_scenario::{self as scenario, Pattern};

use super::generator::Generator;
use super::memory::{Extent, LINE, Memory, load, region, store};
use super::rng::{Rng, bound};
use super::sweep::Sweep;
use crate::{Batch, Region};

/// Accesses in a part before the next one is chosen: a page's worth of lines.
const RUN: usize = 64;

/// Estimated: a random number and index arithmetic.
const ACCESS_PS: u64 = 2_000;

const NS_PER_S: u64 = 1_000_000_000;

pub(crate) struct Mix {
    parts: Vec<Part>,
    turns_ns: Option<u64>,
    threads: Vec<Thread>,
}

struct Part {
    bytes: u64,
    /// Random numbers below this, and not below the previous part's, choose it.
    below: u64,
    is_sweep: bool,
    stores_below: u64,
    hot_bytes: u64,
    hot_below: u64,
    moves_ns: Option<u64>,
}

struct Thread {
    rng: Rng,
    /// Where it is in each part that is swept, in lines.
    sweeps: Vec<Sweep>,
}

impl Mix {
    pub(crate) fn new(mix: &scenario::Mix, seed: u64, scale_bits: u32) -> Self {
        let shares: f64 = mix.parts.iter().map(|part| part.share).sum();
        let mut share = 0.0;
        let part = |part: &scenario::Part| {
            share += part.share / shares;
            Part {
                bytes: part.size_mib * MIB,
                below: bound(share.min(1.0)),
                is_sweep: part.pattern == Pattern::Sweep,
                stores_below: bound(part.stores),
                hot_bytes: part.hot_mib * MIB,
                hot_below: bound(part.hot_weight),
                moves_ns: part.moves_s.map(|s| s * NS_PER_S),
            }
        };
        let parts: Vec<Part> = mix.parts.iter().map(part).collect();
        let threads = u64::from(mix.threads);
        let thread = |(n, rng)| {
            // Each thread sweeps its own piece.
            let sweep = |part: &Part| {
                let lines = part.bytes / LINE / threads;
                Sweep::new(n * lines..(n + 1) * lines, LINE, scale_bits)
            };
            let sweeps = parts.iter().map(sweep).collect();
            Thread { rng, sweeps }
        };
        let rngs = Rng::for_threads(seed, mix.threads);
        let threads = (0..).zip(rngs).map(thread).collect();
        Self {
            parts,
            turns_ns: mix.turns_s.map(|s| s * NS_PER_S),
            threads,
        }
    }
}

impl Part {
    /// Where its hot set begins.
    fn hot_start(&self, now_ns: u64) -> u64 {
        let Some(moves_ns) = self.moves_ns else {
            return self.bytes - self.hot_bytes;
        };
        let places = self.bytes / self.hot_bytes;
        let moved = now_ns / moves_ns;
        // From its end on, downwards.
        (places - 1 - moved % places) * self.hot_bytes
    }

    /// The offset of an access at random.
    fn offset(&self, hot_start: u64, rng: &mut Rng) -> u64 {
        if self.hot_bytes > 0 && rng.next() < self.hot_below {
            return hot_start + rng.below(self.hot_bytes / LINE) * LINE;
        }
        let cold = rng.below((self.bytes - self.hot_bytes) / LINE) * LINE;
        // What lies behind the hot set follows what lies before it.
        cold + if cold < hot_start { 0 } else { self.hot_bytes }
    }
}

impl Generator for Mix {
    fn regions(&self) -> Vec<Region> {
        let part = |(n, part): (usize, &Part)| region(&format!("part {n}"), part.bytes);
        self.parts.iter().enumerate().map(part).collect()
    }

    fn threads(&self) -> u32 {
        self.threads.len() as u32
    }

    fn next(&mut self, memory: &Memory, thread: usize, now_ns: u64, out: &mut Batch) {
        let Thread { rng, sweeps } = &mut self.threads[thread];
        let turn = self
            .turns_ns
            .map(|ns| (now_ns / ns) as usize % self.parts.len());
        while out.room() > 0 {
            let chosen = turn.unwrap_or_else(|| {
                let random = rng.next();
                let chosen = self.parts.iter().position(|part| random < part.below);
                chosen.unwrap_or(self.parts.len() - 1)
            });
            let part = &self.parts[chosen];
            let (base, hot_start) = (memory.base(chosen), part.hot_start(now_ns));
            for _ in 0..out.room().min(RUN) {
                let offset = if part.is_sweep {
                    let line = sweeps[chosen].item();
                    sweeps[chosen].advance();
                    line * LINE
                } else {
                    part.offset(hot_start, rng)
                };
                let is_store = part.stores_below > 0 && rng.next() < part.stores_below;
                let access = if is_store { store } else { load };
                out.push(access(base + offset));
                out.ops += 1;
            }
        }
    }

    fn hot(&self, now_ns: u64) -> Vec<Extent> {
        let hot = |(region, part): (usize, &Part)| Extent {
            region,
            offset: part.hot_start(now_ns),
            bytes: part.hot_bytes,
        };
        let parts = self.parts.iter().enumerate();
        parts
            .filter(|(_, part)| part.hot_bytes > 0)
            .map(hot)
            .collect()
    }

    fn compute_ps(&self) -> u64 {
        ACCESS_PS
    }
}
