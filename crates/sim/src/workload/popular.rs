//! zipf: loads and stores of words, or of whole pages, by Zipf's law. Popular pages are scattered.
//!
//! Popularity belongs to a simulated page as a whole: all its real pages are equally popular.

use demeter_policy::{MIB, PAGE_SIZE};
use demeter_scenario as scenario;

use super::generator::Generator;
use super::memory::{Extent, LINE, ProgramMemory, load, region, store};
use super::rng::{Rng, bound};
use super::scatter::Scatter;
use super::zipf::Zipf;
use crate::machine::cost::PS_PER_NS;
use crate::{Batch, Region};

const WORD: u64 = 8;
const ARRAY: usize = 0;

/// Estimated, as for gups.
const ACCESS_PS: u64 = 2_000;

pub(crate) struct Popular {
    page_bytes: u64,
    pages: Scatter,
    law: Zipf,
    /// Random numbers below this select a store.
    store_below: u64,
    whole_pages: bool,
    compute_ps: u64,
    rngs: Vec<Rng>,
}

impl Popular {
    pub(crate) fn new(zipf: &scenario::Zipf, seed: u64, scale_bits: u32) -> Self {
        let page_bytes = PAGE_SIZE << scale_bits;
        let pages = (zipf.size_mib * MIB / page_bytes).max(1);
        Self {
            page_bytes,
            pages: Scatter::new(pages, seed),
            law: Zipf::new(pages, zipf.theta),
            store_below: bound(zipf.store_share),
            whole_pages: zipf.whole_pages,
            compute_ps: ACCESS_PS + zipf.compute_ns * PS_PER_NS,
            rngs: Rng::for_threads(seed, zipf.threads),
        }
    }
}

impl Generator for Popular {
    fn regions(&self) -> Vec<Region> {
        vec![region("array", self.pages.count() * self.page_bytes)]
    }

    fn threads(&self) -> u32 {
        self.rngs.len() as u32
    }

    fn next(&mut self, memory: &ProgramMemory, thread: usize, _now_ns: u64, out: &mut Batch) {
        let array = memory.base(ARRAY);
        let rng = &mut self.rngs[thread];
        // Bytes per operation, and the step between its accesses.
        let (bytes, step) = match self.whole_pages {
            true => (PAGE_SIZE, LINE),
            false => (WORD, WORD),
        };
        while out.room() as u64 >= bytes / step {
            let page = self.pages.at(self.law.rank(rng.next()));
            let piece = rng.below(self.page_bytes / bytes);
            let start = array + page * self.page_bytes + piece * bytes;
            let access = match rng.next() < self.store_below {
                true => store,
                false => load,
            };
            for at in (start..start + bytes).step_by(step as usize) {
                out.push(access(at));
            }
            out.ops += 1;
        }
    }

    fn hot(&self, _now_ns: u64) -> Vec<Extent> {
        vec![]
    }

    fn compute_ps(&self, _thread: usize) -> u64 {
        self.compute_ps
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::GuestVirtAddr;

    use super::*;

    /// 64 MiB of pages that stand for four real ones each.
    fn popular(store_share: f64, whole_pages: bool) -> (Popular, ProgramMemory) {
        let zipf = scenario::Zipf {
            size_mib: 64,
            cold_mib: 0,
            threads: 1,
            theta: 0.99,
            store_share,
            whole_pages,
            compute_ns: 0,
        };
        let popular = Popular::new(&zipf, 1, 2);
        let mut memory = ProgramMemory::new(0, popular.regions());
        memory.place(&[GuestVirtAddr(0)]);
        (popular, memory)
    }

    #[test]
    fn few_pages_take_most_accesses_and_lie_apart() {
        let (mut popular, memory) = popular(0.25, false);
        let mut hits = vec![0u32; 64 * 64];
        let (mut batch, mut stores) = (Batch::default(), 0);
        for _ in 0..100 {
            batch.clear();
            popular.next(&memory, 0, 0, &mut batch);
            for access in batch.accesses() {
                hits[(access.gva().0 >> 14) as usize] += 1;
                stores += u32::from(access.is_store());
            }
        }
        let mut ranked: Vec<_> = hits.iter().copied().zip(0i64..).collect();
        ranked.sort_unstable_by(|a, b| b.cmp(a));
        let all: u32 = hits.iter().sum();
        let top: u32 = ranked[..410].iter().map(|r| r.0).sum();
        // A tenth of the pages get three quarters: ln 410 of ln 4096.
        assert!((0.65..0.8).contains(&(f64::from(top) / f64::from(all))));
        assert!((0.24..0.26).contains(&(f64::from(stores) / f64::from(all))));
        let near = ranked[..64]
            .windows(2)
            .filter(|w| w[0].1.abs_diff(w[1].1) < 64);
        assert!(near.count() < 10);
    }

    #[test]
    fn a_whole_page_is_taken_line_by_line() {
        let (mut popular, memory) = popular(0.5, true);
        let mut batch = Batch::default();
        popular.next(&memory, 0, 0, &mut batch);
        let lines = (PAGE_SIZE / LINE) as usize;
        assert_eq!(batch.accesses().len(), batch.ops as usize * lines);
        for page in batch.accesses().chunks(lines) {
            let first = page[0];
            assert!(first.gva().0.is_multiple_of(PAGE_SIZE));
            for (at, access) in (first.gva().0..).step_by(LINE as usize).zip(page) {
                assert_eq!(access.gva().0, at);
                assert_eq!(access.is_store(), first.is_store());
            }
        }
    }
}
