//! A counting Bloom filter: page sample counts in less memory than one counter per page.
//!
//! It follows HybridTier's artifact, which adopted it from Caffeine and TinyLFU.
//!
//! # Problem
//! Counters for all pages of a large machine need much memory, and miss in caches.
//!
//! # Approach
//! A page has four counters, one in each quarter of one block. Pages may share counters. A sample increments all four;
//! the minimum is the page's count. After a number of samples, all counters and the number of samples are halved.
//!
//! # Properties
//! - Until counters saturate, the filter never returns less than the count since the last ageing.
//! - Ageing halves all results.

use demeter_scenario::rng::mix;

/// Counters per page.
const HASHES: usize = 4;

/// Number of 64-bit words in a block.
const BLOCK_WORDS: u64 = 8;

/// Counters per 100 pages for at most 0.1 % false positives: 4 / -ln(1 - 0.001^(1/4)).
const COUNTERS_PER_100_PAGES: u64 = 2043;

/// Parameters of a filter.
#[derive(Debug, Clone, Copy)]
pub(super) struct FilterConfig {
    /// Number of distinct pages.
    pub(super) pages: u64,
    /// Divisor of the memory size.
    pub(super) part: u64,
    /// Counters per word, and the saturation value.
    pub(super) per_word: u64,
    pub(super) count_max: u16,
    /// Number of samples between two ageings.
    pub(super) ages_after: u64,
    /// The simulator passes only one of `2^k` pages to the filter.
    pub(super) k: u32,
}

/// A counting Bloom filter.
#[derive(Debug, Clone, Default)]
pub(super) struct CountingFilter {
    counters: Vec<u16>,
    count_max: u16,
    /// Number of counters in a quarter of a block.
    quarter: u64,
    blocks: u64,
    counted: u64,
    ages_after: u64,
}

impl CountingFilter {
    /// An empty filter.
    pub(super) fn new(config: FilterConfig) -> Self {
        let words = config.pages * COUNTERS_PER_100_PAGES / 100 / config.per_word / config.part;
        let words = (words.next_power_of_two() >> config.k).max(BLOCK_WORDS);
        let (blocks, block) = (words / BLOCK_WORDS, BLOCK_WORDS * config.per_word);
        Self {
            counters: vec![0; (blocks * block) as usize],
            count_max: config.count_max,
            quarter: block / HASHES as u64,
            blocks,
            counted: 0,
            ages_after: (config.ages_after >> config.k).max(1),
        }
    }

    /// Indices of a page's counters.
    fn places(&self, page: u64) -> [usize; HASHES] {
        let hash = mix(page);
        let block = hash % self.blocks;
        std::array::from_fn(|i| {
            let quarter = block * HASHES as u64 + i as u64;
            let within = (hash >> (32 + 8 * i)) % self.quarter;
            (quarter * self.quarter + within) as usize
        })
    }

    /// Adds samples of a page; returns its new count.
    pub(super) fn add(&mut self, page: u64, samples: u64) -> u16 {
        let added = samples.min(self.count_max.into()) as u16;
        for place in self.places(page) {
            let counter = &mut self.counters[place];
            *counter = counter.saturating_add(added).min(self.count_max);
        }
        self.counted += samples;
        if self.counted >= self.ages_after {
            self.age();
        }
        self.of(page)
    }

    /// Bytes of the real filter, whose counters are narrower.
    pub(super) fn real_bytes(&self) -> u64 {
        self.blocks * BLOCK_WORDS * size_of::<u64>() as u64
    }

    /// A page's count, or more.
    pub(super) fn of(&self, page: u64) -> u16 {
        let counts = self.places(page).map(|place| self.counters[place]);
        counts.into_iter().min().unwrap_or(0)
    }

    /// Decrements a saturated page, so that the next sample is visible; returns its count.
    pub(super) fn make_room(&mut self, page: u64) -> u16 {
        if self.of(page) == self.count_max {
            for place in self.places(page) {
                self.counters[place] -= 1;
            }
        }
        self.of(page)
    }

    /// Halves all counters.
    pub(super) fn age(&mut self) {
        self.counters.iter_mut().for_each(|c| *c /= 2);
        self.counted /= 2;
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn filter(pages: u64, ages_after: u64) -> CountingFilter {
        CountingFilter::new(FilterConfig {
            pages,
            part: 1,
            per_word: 16,
            count_max: 15,
            ages_after,
            k: 0,
        })
    }

    proptest! {
        #[test]
        fn it_never_tells_less_than_was_counted(
            samples in prop::collection::vec((0u64..50, 1u64..4), 1..200), pages in 1u64..40,
        ) {
            let mut filter = filter(pages, u64::MAX);
            let mut counts = BTreeMap::new();
            for (page, n) in samples {
                *counts.entry(page).or_insert(0) += n;
                let told = u64::from(filter.add(page, n));
                prop_assert!((counts[&page].min(15)..=15).contains(&told));
            }
            let all: u64 = counts.values().sum();
            prop_assert!(counts.keys().all(|&page| u64::from(filter.of(page)) <= all));
        }

        #[test]
        fn ageing_halves_what_it_tells(pages in prop::collection::vec(0u64..20, 1..100)) {
            let mut filter = filter(1000, pages.len() as u64 + 1);
            for &page in &pages {
                filter.add(page, 1);
            }
            let before: Vec<u16> = (0..20).map(|page| filter.of(page)).collect();
            let touched = filter.places(1000);
            filter.add(1000, 1);
            for (page, told) in before.into_iter().enumerate() {
                if filter.places(page as u64).iter().all(|place| !touched.contains(place)) {
                    prop_assert_eq!(filter.of(page as u64), told / 2);
                }
            }
        }

        #[test]
        fn a_page_that_has_all_it_can_gets_room_for_one_sample(n in 1u64..40) {
            let mut filter = filter(1000, u64::MAX);
            let told = filter.add(1, n);
            prop_assert_eq!(filter.make_room(1), told.min(14));
            prop_assert_eq!(filter.add(1, 1), (told.min(14) + 1).min(15));
        }
    }
}
