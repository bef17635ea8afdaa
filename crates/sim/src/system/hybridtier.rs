//! HybridTier: frequency and momentum of pages in two small filters instead of a counter for each.
//!
//! Song et al., ASPLOS 2025; numbers as in the authors' artifact, for pages of 4 KiB. It tracks by sampled
//! loads, classifies by two counting Bloom filters, and moves pages in batches.
//!
//! # Problem
//! A counter for each page takes memory and cache, and one that forgets slowly is late when other
//! pages become hot.
//!
//! # Approach
//! Each CPU takes 100,001 samples a second. The thread that reads them counts 100,000 of them at a time in
//! a filter that ages slowly (frequency) and in one a hundredth as large that ages soon (momentum). A
//! page that was sampled and has a frequency of 5 or a momentum of 3 is promoted. When less than 1.25 % of
//! fast memory is free, pages without momentum and below that frequency are demoted, in the order of
//! addresses, until 5 % is. Pages without momentum but of that frequency have a second chance: what was
//! not sampled again after 60 s is demoted, too.
//!
//! A counter saturates at 15. A huge page, and one that stands for `2^k`, is judged by the mean of its
//! pages of 4 KiB, and for its momentum only if that was sampled at all.
//!
//! Left out: that the limit falls to 3 and sampling stops when, after 50 million samples, little is
//! promoted any more; that too quick a demotion is followed by a second's rest; that both filters age when two
//! sweeps have found too few cold pages. Without the latter nothing is cold any more where all memory is in use.
//!
//! # Properties
//! - A filter never tells less than was counted, up to where counters saturate, since it last aged.
//! - Ageing halves what it tells.

use std::collections::BTreeMap;

use demeter_policy::{GuestVirtAddr, VirtRange};

use super::{Context, Managed, Manager};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::PageSize;
use crate::machine::sampler::{Record, Sampling};

/// Time between two samples of a CPU that does nothing but load.
const SAMPLE_PS: u64 = 1_000_000_000_000 / 100_001;

/// Samples that are counted at a time.
const BATCH: usize = 100_000;

/// A page is promoted that has so much of either.
const FREQUENCY: u32 = 5;
const MOMENTUM: u32 = 3;

/// Where a counter saturates.
const COUNT_MAX: u32 = 15;

/// What counters and limits of a page of 4 KiB are times in the model: a sample of a larger page counts
/// its part of that.
const UNIT: u32 = 512;

/// Samples after which frequency ages, for each page of fast memory; and those after which momentum does.
const FREQUENCY_SAMPLES_PER_PAGE: u64 = 160;
const MOMENTUM_SAMPLES: u64 = 1_100_000;

/// Hashes of a filter, and counters for each page of fast memory: at most 0.1 % of what is asked
/// for shall be there by mistake.
const HASHES: u64 = 4;
const COUNTERS_PER_PAGE: u64 = 21;

/// How many times smaller the filter of momentum is.
const MOMENTUM_PART: u64 = 100;

/// Shares of fast memory in 1/10,000: below the first pages are demoted, until the second is free.
const DEMOTE_BELOW: u64 = 125;
const DEMOTE_UNTIL: u64 = 500;

/// Real pages that have a second chance at a time, and how long.
const CHANCES: usize = 10_000;
const CHANCE_PS: u64 = 60_000_000_000_000;

/// Real pages that are moved by one call.
const PAGES_PER_CALL: usize = 1024;

/// A counting Bloom filter.
#[derive(Debug, Clone, Default)]
struct Filter {
    counters: Vec<u32>,
    counted: u64,
    /// It ages after so many.
    ages_after: u64,
}

impl Filter {
    /// A filter of so many counters.
    fn new(counters: u64, ages_after: u64) -> Self {
        Self {
            counters: vec![0; counters.max(HASHES) as usize],
            counted: 0,
            ages_after: ages_after.max(1),
        }
    }

    /// The counters of a page.
    fn places(&self, page: u64) -> [usize; HASHES as usize] {
        // SplitMix64.
        let mix = |n: u64| {
            let n = (n ^ n >> 30).wrapping_mul(0xbf58_476d_1ce4_e5b9);
            let n = (n ^ n >> 27).wrapping_mul(0x94d0_49bb_1331_11eb);
            n ^ n >> 31
        };
        let at = |i: usize| mix(page ^ (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15));
        std::array::from_fn(|i| (at(i) % self.counters.len() as u64) as usize)
    }

    /// Counts samples of a page, each with this weight; tells what it has now.
    fn add(&mut self, page: u64, samples: u32, weight: u32) -> u32 {
        for place in self.places(page) {
            let counter = &mut self.counters[place];
            let sum = counter.saturating_add(samples.saturating_mul(weight));
            *counter = sum.min(COUNT_MAX * UNIT);
        }
        self.counted += u64::from(samples);
        if self.counted >= self.ages_after {
            self.counters.iter_mut().for_each(|c| *c /= 2);
            self.counted /= 2;
        }
        self.of(page)
    }

    /// What a page has, or a little more.
    fn of(&self, page: u64) -> u32 {
        let counts = self.places(page).map(|place| self.counters[place]);
        counts.into_iter().min().unwrap_or(0)
    }
}

/// The library.
#[derive(Debug)]
pub(crate) struct HybridTier {
    load_ps: u64,
    frequency: Filter,
    momentum: Filter,
    waiting: Vec<GuestVirtAddr>,
    samples_seen: u64,
    /// Where the search for cold pages goes on.
    next: GuestVirtAddr,
    /// Pages that have a second chance, and the frequency that they had.
    chances: Vec<(GuestVirtAddr, u32)>,
    chances_since_ps: u64,
}

impl HybridTier {
    /// Nothing seen yet.
    pub(crate) fn new(managed: &Managed) -> Self {
        Self {
            load_ps: managed.load_ps,
            frequency: Filter::default(),
            momentum: Filter::default(),
            waiting: vec![],
            samples_seen: 0,
            next: GuestVirtAddr(0),
            chances: vec![],
            chances_since_ps: 0,
        }
    }

    /// Counts a batch of samples; tells what is hot and lies in slow memory.
    fn count(&mut self, guest: &Guest, actor: &mut Actor<'_>) -> Vec<GuestVirtAddr> {
        let mut pages = BTreeMap::new();
        for gva in self.waiting.drain(..) {
            if let Some((_, size)) = guest.tables.find(gva) {
                *pages.entry(guest.page_start(gva, size)).or_insert(0) += 1;
            }
        }
        let mut hot = vec![];
        for (at, samples) in pages {
            let Some((entry, size)) = guest.tables.find(at) else {
                continue;
            };
            let weight = match size {
                PageSize::Base => UNIT >> actor.k,
                _ => 1,
            };
            let frequency = self.frequency.add(at.0, samples, weight);
            let momentum = self.momentum.add(at.0, samples, weight);
            actor.charge(Cause::Classify, actor.costs.memtis_sample_ps);
            let has_momentum = frequency >= UNIT && momentum >= MOMENTUM * UNIT;
            let is_hot = frequency >= FREQUENCY * UNIT || has_momentum;
            if is_hot && guest.node_of(entry.index()) == TierId::Slow {
                hot.push(at);
            }
        }
        hot
    }

    /// Demotes until so much fast memory is free, or all of it was looked at.
    fn demote(&mut self, until: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        self.end_chances(guest, actor);
        let per_call = (PAGES_PER_CALL >> actor.k).max(1);
        let vmas = guest.vmas().to_vec();
        let later = vmas.iter().filter_map(|v| from(v, self.next));
        let earlier = vmas.iter().filter_map(|v| before(v, self.next));
        for range in later.chain(earlier).collect::<Vec<_>>() {
            let mut at = range.start();
            while at < range.end() {
                let end = GuestVirtAddr(range.end().0.min(at.0 + STRETCH_BYTES));
                let cold = self.cold(at..end, guest, actor);
                for batch in cold.chunks(per_call) {
                    guest.migrate_pages(batch, TierId::Slow, actor);
                }
                at = end;
                self.next = end;
                if guest.usable(TierId::Fast).0 >= until {
                    return;
                }
            }
        }
    }

    /// Cold pages of fast memory in a range; others may get a second chance.
    fn cold(
        &mut self,
        range: std::ops::Range<GuestVirtAddr>,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Vec<GuestVirtAddr> {
        let (mut cold, mut seen) = (vec![], 0);
        let middle = guest.first_slow_frame();
        guest.tables.for_each(range, |at, entry, size| {
            seen += match size {
                PageSize::Base => 1 << actor.k,
                _ => 1,
            };
            if entry.index() >= middle || self.momentum.of(at.0) >= UNIT {
                return;
            }
            let frequency = self.frequency.of(at.0);
            if frequency < FREQUENCY * UNIT {
                cold.push(at);
            } else if self.chances.len() < CHANCES >> actor.k {
                self.chances.push((at, frequency));
            }
        });
        actor.charge(Cause::Classify, seen * actor.costs.scan_entry_ps);
        cold
    }

    /// Demotes what had a second chance for long enough and was not sampled again.
    fn end_chances(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if actor.now_ps() < self.chances_since_ps + CHANCE_PS {
            return;
        }
        self.chances_since_ps = actor.now_ps();
        let chances = std::mem::take(&mut self.chances).into_iter();
        let unused = chances.filter(|&(at, then)| self.frequency.of(at.0) <= then);
        let unused: Vec<_> = unused.map(|(at, _)| at).collect();
        guest.migrate_pages(&unused, TierId::Slow, actor);
    }
}

/// Bytes of address space that are looked at before free memory is read again: 1,024 pages.
const STRETCH_BYTES: u64 = 1024 * 4096;

/// The part of a range from an address on, and that before it.
fn from(range: &VirtRange, at: GuestVirtAddr) -> Option<VirtRange> {
    VirtRange::new(range.start().max(at), range.end())
}
fn before(range: &VirtRange, at: GuestVirtAddr) -> Option<VirtRange> {
    VirtRange::new(range.start(), range.end().min(at))
}

impl Manager for HybridTier {
    fn sampling(&self, k: u32) -> Option<Sampling> {
        Some(Sampling {
            period: (SAMPLE_PS / self.load_ps.max(1)).max(1 << k),
            threshold_ps: self.load_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        let k = guest.page_bits() - 12;
        let frames = u64::from(guest.frames_of(TierId::Fast));
        let counters = frames * COUNTERS_PER_PAGE;
        let samples = (frames << k) * FREQUENCY_SAMPLES_PER_PAGE;
        self.frequency = Filter::new(counters, samples);
        self.momentum = Filter::new(counters / MOMENTUM_PART, MOMENTUM_SAMPLES);
        self.chances_since_ps = now_ps;
        super::NEVER_PS
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.waiting.extend(records.iter().map(|r| r.gva));
    }

    /// Everything is the work of one thread.
    fn worker_turn(&mut self, _began_ps: u64, ctx: &mut Context<'_>) -> bool {
        let Context { guest, actor, .. } = ctx;
        if self.waiting.len() < BATCH {
            return false;
        }
        self.samples_seen += self.waiting.len() as u64;
        let hot = self.count(guest, actor);
        let per_call = (PAGES_PER_CALL >> actor.k).max(1);
        for batch in hot.chunks(per_call) {
            if guest.usable(TierId::Fast).0 == 0
                || guest.migrate_pages(batch, TierId::Fast, actor) == 0
            {
                break;
            }
        }
        let page_bytes = guest.bytes(PageSize::Base);
        let fast = u64::from(guest.frames_of(TierId::Fast)) * page_bytes;
        if guest.usable(TierId::Fast).0 <= fast / 10_000 * DEMOTE_BELOW {
            self.demote(fast / 10_000 * DEMOTE_UNTIL, guest, actor);
        }
        false
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn a_filter_never_tells_less_than_was_counted(
            samples in prop::collection::vec((0u64..50, 1u32..4), 1..200), counters in 4u64..400,
        ) {
            let mut filter = Filter::new(counters, u64::MAX);
            let mut counts = BTreeMap::new();
            for (page, n) in samples {
                *counts.entry(page).or_insert(0) += n;
                let told = filter.add(page, n, UNIT);
                prop_assert!(told >= counts[&page].min(COUNT_MAX) * UNIT && told <= COUNT_MAX * UNIT);
            }
            let all: u32 = counts.values().sum();
            prop_assert!(counts.keys().all(|&page| filter.of(page) <= all * UNIT));
        }

        #[test]
        fn ageing_halves_what_a_filter_tells(pages in prop::collection::vec(0u64..20, 1..100)) {
            let mut filter = Filter::new(1000, pages.len() as u64 + 1);
            for &page in &pages {
                filter.add(page, 1, 1);
            }
            let before: Vec<u32> = (0..20).map(|page| filter.of(page)).collect();
            let touched = filter.places(1000);
            filter.add(1000, 1, 1);
            for (page, told) in before.into_iter().enumerate() {
                if filter.places(page as u64).iter().all(|place| !touched.contains(place)) {
                    prop_assert_eq!(filter.of(page as u64), told / 2);
                }
            }
        }
    }
}
