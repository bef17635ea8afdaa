//! A counting Bloom filter: how often pages were sampled, in less memory than a counter for each.
//!
//! As in HybridTier's artifact, which has it from Caffeine and TinyLFU.
//!
//! # Problem
//! Counters for all pages of a large machine take memory, and are missed in caches.
//!
//! # Approach
//! A page has four counters, one in each quarter of one block; other pages may have the same. A sample raises
//! all four, and the least of them is what the page has. After so many samples all counters are halved, and so
//! is the number of samples counted.
//!
//! # Properties
//! - The filter never tells less than was counted since it last aged, up to where counters saturate.
//! - Ageing halves what it tells.

use demeter_scenario::rng::mix;

/// Counters of a page.
const HASHES: usize = 4;

/// 64-bit words of a block.
const BLOCK_WORDS: u64 = 8;

/// Counters for each page at which at most 0.1 % of what is asked for is there by mistake, in hundredths:
/// 4 / -ln(1 - 0.001^(1/4)).
const COUNTERS_PER_100_PAGES: u64 = 2043;

/// What a filter is made for.
#[derive(Debug, Clone, Copy)]
pub(super) struct FilterConfig {
    /// Pages that it tells apart.
    pub(super) pages: u64,
    /// It has so much less memory than they take.
    pub(super) part: u64,
    /// Counters of a word, and where one saturates.
    pub(super) per_word: u64,
    pub(super) count_max: u16,
    /// It ages after so many samples.
    pub(super) ages_after: u64,
    /// Only one of `2^k` pages is told to it.
    pub(super) k: u32,
}

/// The filter.
#[derive(Debug, Clone, Default)]
pub(super) struct CountingFilter {
    counters: Vec<u16>,
    count_max: u16,
    /// Counters of a quarter of a block.
    quarter: u64,
    blocks: u64,
    counted: u64,
    ages_after: u64,
}

impl CountingFilter {
    /// A filter in which nothing is counted.
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

    /// The counters of a page.
    fn places(&self, page: u64) -> [usize; HASHES] {
        let hash = mix(page);
        let block = hash % self.blocks;
        std::array::from_fn(|i| {
            let quarter = block * HASHES as u64 + i as u64;
            let within = (hash >> (32 + 8 * i)) % self.quarter;
            (quarter * self.quarter + within) as usize
        })
    }

    /// Counts samples of a page; tells what it has now.
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

    /// Bytes of a real one's counters, which are as narrow as their words say.
    pub(super) fn real_bytes(&self) -> u64 {
        self.blocks * BLOCK_WORDS * size_of::<u64>() as u64
    }

    /// What a page has, or more.
    pub(super) fn of(&self, page: u64) -> u16 {
        let counts = self.places(page).map(|place| self.counters[place]);
        counts.into_iter().min().unwrap_or(0)
    }

    /// Takes one off a page that has as much as it can, so that a sample will show; tells what it has then.
    pub(super) fn make_room(&mut self, page: u64) -> u16 {
        if self.of(page) == self.count_max {
            for place in self.places(page) {
                self.counters[place] -= 1;
            }
        }
        self.of(page)
    }

    /// Halves everything.
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
