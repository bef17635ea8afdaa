//! Memtis: a histogram of page samples in the guest's kernel.
//!
//! # Problem
//! Choose the pages that are hot enough for fast memory. Only samples are known, their total number varies, and pages
//! have two sizes.
//!
//! # Approach
//! A page's count is its number of samples per 4 KiB, times 512. A sample thus counts 512 on a base page and 1 on a
//! huge page. Pages are sorted by the logarithm of their counts into 16 bins. The top bins that fit into fast memory
//! are hot. The threshold bin is recomputed after a number of samples, and all counts are halved after more.
//!
//! A kernel thread reads samples, and reduces the sampling rate if its cost is too high. Another thread migrates pages
//! every half second: hot ones up, and the coldest ones down to free memory. A limit on a program's fast memory
//! triggers demotion; the authors' scripts set one for each program. A program without a limit is never demoted, and
//! its hot pages are promoted while memory is free.
//!
//! Its authors set `transparent_hugepage/defrag` to `always` (`scripts/run_bench.sh` of their artifact). A fault that
//! finds no huge page in the fast node then takes one of the slow node. The model does so with `thp = "always"`. Not
//! modelled: splitting huge pages of which only a part is hot.
//!
//! # Properties
//! - The histogram counts every sampled page exactly once.
//! - The hot bins fit into the capacity, and the next bin would not.
//! - Halving preserves the order of pages.

use std::collections::VecDeque;

use demeter_policy::{ByteCount, GuestVirtAddr, Tier};

use super::{Context, Manager, Needs};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;
use crate::machine::sampler::{Record, Sampling};

/// Number of bins of the histogram.
const BINS: usize = 16;

/// Weight of a sample on a page of 4 KiB.
const BASE_WEIGHT: u32 = 512;

/// Share of fast memory, in 1/1000, kept free of hot pages.
const SPARE_MILLI: u64 = 30;

/// Samples between updates of the threshold bin, and between halvings.
const ADAPT_SAMPLES: u64 = 100_000;
const COOL_SAMPLES: u64 = 2_000_000;

/// Sampling periods: minimum, maximum and step.
const PERIOD_MIN: f64 = 199.0;
const PERIOD_MAX: f64 = 19_997.0;
const PERIOD_STEPS: u32 = 30;

/// Interval between checks of sampling cost, and the allowed cost in 1/1000 of a CPU.
const COST_PERIOD_PS: u64 = 15_000_000_000_000;
const COST_MILLI: std::ops::RangeInclusive<u64> = 25..=35;

/// Time between two turns of the migration thread.
const MOVE_PERIOD_PS: u64 = 500_000_000_000;

/// Bytes migrated in one batch.
const BATCH_BYTES: u64 = 16 << 20;

/// Sample counts of pages.
#[derive(Debug, Clone, Default)]
struct Histogram {
    /// By base page. If a sampled page begins there: its count and its size in base pages. Elsewhere the size is 0.
    pages: Vec<(u32, u32)>,
    /// Number of base pages by the logarithm of their page's count.
    bins: [u64; BINS],
}

impl Histogram {
    /// An empty histogram for `pages` base pages.
    fn new(pages: usize) -> Self {
        Self {
            pages: vec![(0, 0); pages],
            bins: [0; BINS],
        }
    }

    fn bin_of(count: u32) -> usize {
        (count.saturating_add(1).ilog2() as usize).min(BINS - 1)
    }

    /// The bin of the page that begins at base page `first`.
    fn bin(&self, first: usize) -> usize {
        self.pages.get(first).map_or(0, |&(c, _)| Self::bin_of(c))
    }

    /// Adds to the count of the page of `size` base pages that begins at base page `first`.
    fn add(&mut self, first: usize, size: u32, weight: u32) {
        if let Some((count, known)) = self.pages.get_mut(first) {
            self.bins[Self::bin_of(*count)] -= u64::from(*known);
            *known = size;
            *count = count.saturating_add(weight);
            self.bins[Self::bin_of(*count)] += u64::from(size);
        }
    }

    /// Halves all counts.
    fn halve(&mut self) {
        self.bins = [0; BINS];
        for (count, size) in &mut self.pages {
            *count /= 2;
            self.bins[Self::bin_of(*count)] += u64::from(*size);
        }
    }

    /// The lowest hot bin: it and all higher bins together fit into the capacity. Pages that were never sampled are not
    /// hot.
    fn border(&self, capacity: u64) -> usize {
        let mut left = capacity;
        let fits = |&bin: &usize| {
            let fits = self.bins[bin] <= left;
            left -= if fits { self.bins[bin] } else { 0 };
            fits
        };
        (1..BINS).rev().take_while(fits).last().unwrap_or(BINS)
    }
}

/// The kernel part of Memtis.
#[derive(Debug)]
pub(crate) struct Memtis {
    /// Latency threshold of samples: only loads that miss all caches count.
    threshold_ps: u64,
    /// Whether the program has a limit on fast memory.
    is_limited: bool,
    period_step: u32,
    /// Start of memory; none before the first sample.
    base: Option<GuestVirtAddr>,
    histogram: Histogram,
    /// The lowest hot bin.
    border: usize,
    /// Number of samples so far.
    samples_seen: u64,
    waiting: Vec<GuestVirtAddr>,
    /// Cost of sampling since the last check, and time of the next check.
    spent_ps: u64,
    look_due_ps: u64,
    next_move_ps: u64,
    up: VecDeque<GuestVirtAddr>,
    down: VecDeque<GuestVirtAddr>,
}

impl Memtis {
    /// A state without samples; loads of at least `threshold_ps` come from memory.
    pub(crate) fn new(threshold_ps: u64, is_limited: bool) -> Self {
        Self {
            threshold_ps,
            is_limited,
            period_step: 0,
            base: None,
            histogram: Histogram::default(),
            border: BINS,
            samples_seen: 0,
            waiting: vec![],
            spent_ps: 0,
            look_due_ps: 0,
            next_move_ps: 0,
            up: VecDeque::new(),
            down: VecDeque::new(),
        }
    }

    /// Adapts the sampling period to its cost; returns whether it changed.
    fn adapt_period(&mut self, now_ps: u64) -> bool {
        if now_ps < self.look_due_ps {
            return false;
        }
        let since_ps = now_ps - self.look_due_ps + COST_PERIOD_PS;
        let milli = std::mem::take(&mut self.spent_ps) * 1000 / since_ps;
        self.look_due_ps = now_ps + COST_PERIOD_PS;
        let before = self.period_step;
        if milli > *COST_MILLI.end() {
            self.period_step = (before + 1).min(PERIOD_STEPS - 1);
        } else if milli < *COST_MILLI.start() {
            self.period_step = before.saturating_sub(1);
        }
        self.period_step != before
    }

    /// Lists hot pages of the slow node, and cold pages of the fast node, coldest first. The kernel maintains such
    /// lists anyway.
    fn look(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        let Some(base) = self.base else {
            return;
        };
        let (page_bits, middle) = (guest.page_bits(), guest.first_slow_frame());
        let (mut cold, mut pages) = (vec![], 0);
        for vma in guest.vmas().to_vec() {
            let range = vma.start()..vma.end();
            guest.tables.for_each(range, |at, entry, _| {
                pages += 1;
                let bin = self.histogram.bin(((at.0 - base.0) >> page_bits) as usize);
                match (entry.index() >= middle, bin >= self.border) {
                    (true, true) => self.up.push_back(at),
                    (false, false) => cold.push((bin, at)),
                    _ => {}
                }
            });
        }
        actor.charge_page(Cause::Classify, pages * actor.costs.memtis_page_ps);
        cold.sort_unstable();
        self.down = cold.into_iter().map(|(_, at)| at).collect();
    }

    /// Promotes a batch while memory is free; if none is, demotes a batch.
    fn move_on(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        let room = guest.usable(Tier::Fast).0;
        let batch = take_batch(&mut self.up, guest, BATCH_BYTES.min(room));
        if !batch.is_empty() {
            guest.migrate_pages(&batch, Tier::Fast, actor);
            return;
        }
        let batch = match self.is_limited {
            true => take_batch(&mut self.down, guest, BATCH_BYTES),
            false => vec![],
        };
        if guest.migrate_pages(&batch, Tier::Slow, actor) == 0 {
            // No page can be demoted, or the slow node is full.
            self.up.clear();
        }
    }
}

impl Manager for Memtis {
    fn needs(&self) -> Needs {
        Needs {
            huge_in_slow: true,
            ..Needs::default()
        }
    }

    /// A period is at least the `2^k` loads that a simulated load stands for.
    fn sampling(&self, k: u32) -> Option<Sampling> {
        let part = f64::from(self.period_step) / f64::from(PERIOD_STEPS - 1);
        let period = PERIOD_MIN * (PERIOD_MAX / PERIOD_MIN).powf(part);
        Some(Sampling {
            period: (period.round() as u64).max(1 << k),
            threshold_ps: self.threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.look_due_ps = now_ps + COST_PERIOD_PS;
        self.next_move_ps = now_ps + MOVE_PERIOD_PS;
        self.next_move_ps
    }

    /// Turn of the migration thread: one batch of moves or, after the last batch, a new scan. If a thread of the
    /// program needs the same virtual CPU, they alternate.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let began_ps = actor.now_ps();
        if self.up.is_empty() {
            self.look(guest, actor);
            self.next_move_ps += MOVE_PERIOD_PS;
        } else {
            self.move_on(guest, actor);
        }
        let now_ps = actor.now_ps();
        if self.up.is_empty() {
            self.next_move_ps = self.next_move_ps.max(now_ps);
            return self.next_move_ps;
        }
        now_ps
            + if actor.is_alone() {
                0
            } else {
                now_ps - began_ps
            }
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.waiting.extend(records.iter().map(|r| r.gva));
    }

    /// The sampling thread counts its samples.
    fn worker_turn(&mut self, began_ps: u64, ctx: &mut Context<'_>) -> bool {
        let Context { guest, actor, .. } = ctx;
        let base = *self.base.get_or_insert_with(|| {
            let (base, pages) = extent(guest);
            self.histogram = Histogram::new(pages);
            base
        });
        let (page_bits, before) = (guest.page_bits(), self.samples_seen);
        for gva in self.waiting.drain(..) {
            let Some((_, size)) = guest.tables.find(gva) else {
                continue;
            };
            let weight = match size {
                PageSize::Base => BASE_WEIGHT >> actor.k,
                _ => 1,
            };
            let first = guest.page_start(gva, size);
            let page = (first.0 - base.0) >> page_bits;
            let pages = (guest.bytes(size) >> page_bits) as u32;
            self.histogram.add(page as usize, pages, weight.max(1));
            self.samples_seen += 1;
            actor.charge(Cause::Classify, actor.costs.memtis_sample_ps);
        }
        let passed = |every: u64| before / every < self.samples_seen / every;
        if passed(COOL_SAMPLES) {
            self.histogram.halve();
            let pages = self.histogram.pages.len() as u64;
            actor.charge_page(Cause::Classify, pages * actor.costs.scan_entry_ps);
        }
        if passed(ADAPT_SAMPLES) || passed(COOL_SAMPLES) {
            let fast = u64::from(guest.frames_of(Tier::Fast));
            self.border = self.histogram.border(fast * (1000 - SPARE_MILLI) / 1000);
        }
        self.spent_ps += actor.now_ps() - began_ps;
        self.adapt_period(actor.now_ps())
    }

    /// A count for each page of any size; the lists are the kernel's own.
    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        ByteCount(guest.mapped_pages() * size_of::<(u32, u32)>() as u64)
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

/// Removes pages from the front of a list, up to `bytes`.
fn take_batch(list: &mut VecDeque<GuestVirtAddr>, guest: &Guest, bytes: u64) -> Vec<GuestVirtAddr> {
    let mut left = bytes;
    let mut batch = vec![];
    while let Some(&at) = list.front() {
        let size = guest.tables.find(at).map_or(0, |(_, s)| guest.bytes(s));
        if size > left {
            break;
        }
        left -= size;
        batch.extend(list.pop_front());
    }
    batch
}

/// Start of a process's memory, and the number of base pages up to its end.
fn extent(guest: &Guest) -> (GuestVirtAddr, usize) {
    let (Some(first), Some(last)) = (guest.limits().first(), guest.limits().last()) else {
        return (GuestVirtAddr(0), 0);
    };
    let base = first.start();
    let pages = (last.end().0 - base.0) >> guest.page_bits();
    (base, pages as usize + 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn histogram(sizes: &[u32], samples: &[(prop::sample::Index, u32)]) -> Histogram {
        let mut histogram = Histogram::new(sizes.len());
        for (page, weight) in samples {
            let page = page.index(sizes.len());
            histogram.add(page, sizes[page], *weight);
        }
        histogram
    }

    prop_compose! {
        fn histograms()(
            sizes in prop::collection::vec(prop_oneof![Just(0u32), Just(1), Just(64)], 1..200),
            samples in prop::collection::vec((any::<prop::sample::Index>(), 1u32..5000), 0..300),
        ) -> Histogram {
            histogram(&sizes, &samples)
        }
    }

    proptest! {
        #[test]
        fn every_page_is_counted_once(mut h in histograms(), halvings in 0u32..4) {
            (0..halvings).for_each(|_| h.halve());
            let mut bins = [0; BINS];
            for &(count, size) in &h.pages {
                bins[Histogram::bin_of(count)] += u64::from(size);
            }
            prop_assert_eq!(bins, h.bins);
        }

        #[test]
        fn the_hot_bins_fit_and_no_more_would(h in histograms(), capacity in 0u64..8000) {
            let border = h.border(capacity);
            prop_assert!(border > 0);
            let hot: u64 = h.bins[border..].iter().sum();
            prop_assert!(hot <= capacity);
            if border > 1 {
                prop_assert!(hot + h.bins[border - 1] > capacity);
            }
        }

        #[test]
        fn halving_keeps_the_order(h in histograms()) {
            let mut halved = h.clone();
            halved.halve();
            let pairs: Vec<_> = h.pages.iter().zip(&halved.pages).collect();
            for (a, b) in pairs.iter().zip(pairs.iter().skip(1)) {
                if a.0.0 <= b.0.0 {
                    prop_assert!(a.1.0 <= b.1.0);
                }
            }
        }

        /// For any cost of sampling, the period stays within its bounds and follows the cost.
        #[test]
        fn the_period_follows_the_cost(milli in prop::collection::vec(0u64..1000, 1..80)) {
            let mut memtis = Memtis::new(0, true);
            memtis.look_due_ps = COST_PERIOD_PS;
            for (i, milli) in milli.into_iter().enumerate() {
                let before = memtis.sampling(0).unwrap().period;
                memtis.spent_ps = COST_PERIOD_PS / 1000 * milli;
                memtis.adapt_period((i as u64 + 1) * COST_PERIOD_PS);
                let after = memtis.sampling(0).unwrap().period;
                prop_assert!((199..=19_997).contains(&after));
                prop_assert!(milli <= 35 || after > before || after == 19_997);
                prop_assert!(milli >= 25 || after < before || after == 199);
                prop_assert!(!COST_MILLI.contains(&milli) || after == before);
            }
        }
    }
}
