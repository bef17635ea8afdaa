//! A random cycle through all cache lines of a region.

use std::sync::atomic::{AtomicU64, Ordering::Relaxed};

use super::rng::{Rng, scale};

/// Words in a cache line of 64 bytes.
pub(crate) const LINE_WORDS: usize = 8;

/// Links the cache lines of `words` into one random cycle: the first word of each line holds the
/// index of the first word of the next line.
///
/// Uses Sattolo's algorithm in place: every permutation with a single cycle has equal probability, and no further
/// memory is needed.
pub(crate) fn link(words: &[AtomicU64], rng: &mut Rng) {
    let lines = words.len() / LINE_WORDS;
    let next_of = |line: usize| &words[line * LINE_WORDS];
    for line in 0..lines {
        next_of(line).store((line * LINE_WORDS) as u64, Relaxed);
    }
    for line in (1..lines).rev() {
        let other = scale(rng.next(), line as u64) as usize;
        let next = next_of(line).swap(next_of(other).load(Relaxed), Relaxed);
        next_of(other).store(next, Relaxed);
    }
}

/// Follows the cycle for `hops` steps from the word `at`; returns the last index.
#[inline]
pub(crate) fn follow(words: &[AtomicU64], mut at: u64, hops: u64) -> u64 {
    for _ in 0..hops {
        at = words[at as usize].load(Relaxed);
    }
    at
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, prop_assert_eq, prop_assert_ne, proptest};

    proptest! {
        #[test]
        fn the_cycle_visits_every_line_once(lines in 1usize..500, seed: u64) {
            let words: Vec<AtomicU64> = (0..lines * LINE_WORDS).map(|_| AtomicU64::new(7)).collect();
            link(&words, &mut Rng::new(seed, 0));
            let mut seen = vec![false; lines];
            let mut at = 0;
            for _ in 0..lines {
                prop_assert_eq!(at as usize % LINE_WORDS, 0);
                prop_assert!(!std::mem::replace(&mut seen[at as usize / LINE_WORDS], true));
                at = follow(&words, at, 1);
            }
            prop_assert_eq!(at, 0);
        }

        #[test]
        fn another_seed_is_another_cycle(seed: u64) {
            let make = |seed| {
                let words: Vec<AtomicU64> = (0..4096).map(|_| AtomicU64::new(0)).collect();
                link(&words, &mut Rng::new(seed, 0));
                words.into_iter().map(AtomicU64::into_inner).collect::<Vec<_>>()
            };
            prop_assert_eq!(make(seed), make(seed));
            prop_assert_ne!(make(seed), make(seed.wrapping_add(1)));
        }
    }
}
