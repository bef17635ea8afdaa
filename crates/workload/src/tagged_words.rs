//! Content of gups's words, and their assignment to threads.
//!
//! A word has 8 bytes. The upper half is a tag, computed from its index and the seed. The lower half counts its
//! updates, wrapping. A page that was lost, zeroed or swapped shows as wrong tags. A stale copy shows as missing
//! updates.

use std::ops::Range;

use super::rng::{Rng, scale};

/// Bytes in a word.
pub(crate) const WORD_BYTES: u64 = 8;

const COUNTER_MASK: u64 = 0xffff_ffff;

/// The word at `index` before any update.
#[inline]
pub(crate) fn fresh(index: u64, seed: u64) -> u64 {
    // Only one multiplication, as this runs for every word when memory is populated under emulation.
    (index ^ seed).wrapping_mul(0x9e37_79b9_7f4a_7c15) & !COUNTER_MASK
}

/// The word after one more update: the tag is kept, the counter wraps.
#[inline]
pub(crate) fn updated(word: u64) -> u64 {
    (word & !COUNTER_MASK) | (word.wrapping_add(1) & COUNTER_MASK)
}

/// The result of verifying words.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Check {
    /// Number of words checked.
    pub(crate) words: u64,
    wrong: u64,
    updates: u32,
}

impl Check {
    /// Adds one word.
    #[inline]
    pub(crate) fn add(&mut self, index: u64, seed: u64, word: u64) {
        self.words += 1;
        self.wrong += u64::from((word ^ fresh(index, seed)) & !COUNTER_MASK != 0);
        self.updates = self.updates.wrapping_add((word & COUNTER_MASK) as u32);
    }

    /// Number of wrong words, plus one if the counters do not add up to `updates` (modulo 2^32).
    pub(crate) fn errors(&self, updates: u64) -> u64 {
        self.wrong + u64::from(self.updates != updates as u32)
    }
}

/// The words of one of several threads: those whose index is `thread` modulo `threads`. Each word has one writer, and
/// each thread reaches all parts of the hot set.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct ThreadWords {
    thread: u64,
    threads: u64,
    /// Owned words in the hot set, as positions among the owned words.
    hot: Range<u64>,
    /// Total number of owned words.
    owned: u64,
}

impl ThreadWords {
    /// The words of `thread` of `threads`, in an array of `words` words with the hot set `hot` (indices of words).
    pub(crate) fn new(thread: u64, threads: u64, words: u64, hot: &Range<u64>) -> Self {
        // Number of indices below `end` that the thread owns.
        let below = |end: u64| (end + threads - 1 - thread) / threads;
        Self {
            thread,
            threads,
            hot: below(hot.start)..below(hot.end),
            owned: below(words),
        }
    }

    /// Number of owned words in the hot set.
    pub(crate) fn hot_words(&self) -> u64 {
        self.hot.end - self.hot.start
    }

    /// Picks an owned word. It is in the hot set if the low half of a random number is below `hot_below`, otherwise
    /// outside. The hot set must contain an owned word. If no owned word lies outside, every word is hot.
    #[inline]
    pub(crate) fn pick(&self, rng: &mut Rng, hot_below: u64) -> u64 {
        let random = rng.next();
        let hot_words = self.hot_words();
        let cold_words = self.owned - hot_words;
        let position = if random & 0xffff_ffff < hot_below || cold_words == 0 {
            self.hot.start + scale(random, hot_words)
        } else {
            let cold = scale(random, cold_words);
            if cold < self.hot.start {
                cold
            } else {
                cold + hot_words
            }
        };
        self.thread + position * self.threads
    }
}

/// The bound for [`ThreadWords::pick`] that sends the share `weight` (0 to 1) to the hot set.
pub(crate) fn hot_below(weight: f64) -> u64 {
    (weight * 2f64.powi(32)).round() as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, prop_assert_eq, prop_assert_ne, prop_assume, proptest};
    use std::collections::HashSet;

    proptest! {
        #[test]
        fn an_update_counts_and_keeps_the_tag(index: u64, seed: u64, times in 1u32..50, near_wrap: bool) {
            let start = if near_wrap { u32::MAX - 10 } else { 0 };
            let mut word = fresh(index, seed) | u64::from(start);
            for _ in 0..times {
                word = updated(word);
            }
            let mut check = Check::default();
            check.add(index, seed, word);
            prop_assert_eq!(check.errors(u64::from(start) + u64::from(times)), 0);
            prop_assert_eq!(check.errors(u64::from(start) + u64::from(times) + 1), 1);
        }

        #[test]
        fn a_word_in_anothers_place_is_wrong(a in 0u64..1 << 30, b in 0u64..1 << 30, seed: u64) {
            prop_assume!(a != b);
            let mut check = Check::default();
            check.add(a, seed, fresh(b, seed));
            check.add(a, seed, 0);
            // Tags have 32 bits: neighbours always differ, distant words nearly always.
            let same_tag = fresh(a, seed) == fresh(b, seed);
            let zero_tag = fresh(a, seed) == 0;
            prop_assert_eq!(check.errors(0), u64::from(!same_tag) + u64::from(!zero_tag));
        }

        #[test]
        fn words_of_one_page_and_its_neighbours_differ(page in 0u64..1 << 20, seed: u64, off in 1u64..4096) {
            prop_assert_ne!(fresh(page * 512, seed), fresh(page * 512 + off, seed));
        }

        #[test]
        fn shares_cover_every_word_once(
            words in 1u64..300, a in 0u64..300, b in 0u64..300, threads in 1u64..9,
        ) {
            let hot = a.min(b).min(words)..a.max(b).min(words);
            let mut hot_words = 0;
            let mut owned = 0;
            for thread in 0..threads {
                let share = ThreadWords::new(thread, threads, words, &hot);
                hot_words += share.hot_words();
                owned += share.owned;
                for position in 0..share.owned {
                    let index = thread + position * threads;
                    prop_assert!(index < words);
                    prop_assert_eq!(share.hot.contains(&position), hot.contains(&index));
                }
            }
            prop_assert_eq!(hot_words, hot.end - hot.start);
            prop_assert_eq!(owned, words);
        }

        #[test]
        fn picks_reach_all_that_is_owned_and_nothing_else(
            words in 32u64..200, start in 0u64..100, len in 8u64..100, threads in 1u64..5, seed: u64,
        ) {
            let hot = start.min(words - 8)..(start + len).min(words).max(start.min(words - 8) + 8);
            let mut seen = HashSet::new();
            for thread in 0..threads {
                let share = ThreadWords::new(thread, threads, words, &hot);
                let mut rng = Rng::new(seed, thread);
                for _ in 0..20_000 {
                    let index = share.pick(&mut rng, hot_below(0.5));
                    prop_assert_eq!(index % threads, thread);
                    prop_assert!(index < words);
                    seen.insert(index);
                }
            }
            prop_assert_eq!(seen.len() as u64, words);
        }

        #[test]
        fn the_weight_is_the_share_of_hot_picks(weight in 0.0f64..=1.0, seed: u64) {
            let hot = 700..800;
            let share = ThreadWords::new(0, 1, 800, &hot);
            let mut rng = Rng::new(seed, 0);
            let hits = (0..20_000)
                .filter(|_| hot.contains(&share.pick(&mut rng, hot_below(weight))))
                .count();
            // Standard deviation at most 0.0036.
            prop_assert!((hits as f64 / 20_000.0 - weight).abs() < 0.02);
        }
    }
}
