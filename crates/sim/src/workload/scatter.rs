//! A computed random permutation.
//!
//! **Problem.** A pointer chase visits every line of 100 GiB once, in random order; a hash table scatters its popular
//! keys. A stored permutation would need as much memory as the simulated program.
//!
//! **Approach.** Each round is an xor with the own upper half and a multiplication by an odd number. It permutes the
//! numbers of `b` bits, where `2^b` is the next power of two. A result outside `0..count` is permuted again until it
//! falls inside, on average less than twice.
//!
//! **Properties.** [`Scatter::at`] is a bijection of `0..count`, and [`Scatter::position`] is its inverse. Different
//! seeds give different orders. Neighbours do not stay neighbours.

use super::rng::mix;

const ROUNDS: usize = 3;

/// A pseudorandom permutation of `0..count`.
#[derive(Debug, Clone)]
pub(crate) struct Scatter {
    count: u64,
    mask: u64,
    /// At least half of the bits, so that `x ^ (x >> shift)` is its own inverse.
    shift: u32,
    factors: [u64; ROUNDS],
    inverses: [u64; ROUNDS],
}

impl Scatter {
    /// The permutation of `0..count` for `seed`. `count` is at most 2^63.
    pub(crate) fn new(count: u64, seed: u64) -> Self {
        let bits = count.next_power_of_two().trailing_zeros().max(1);
        let mut state = seed;
        let factors = std::array::from_fn(|_| {
            state = mix(state);
            state | 1
        });
        Self {
            count,
            mask: u64::MAX >> (64 - bits),
            shift: bits.div_ceil(2),
            factors,
            inverses: factors.map(odd_inverse),
        }
    }

    /// Number of elements.
    pub(crate) fn count(&self) -> u64 {
        self.count
    }

    /// The element at `position`, which must be below the count.
    #[inline]
    pub(crate) fn at(&self, position: u64) -> u64 {
        let mut x = position;
        loop {
            for factor in self.factors {
                x = (x ^ (x >> self.shift)).wrapping_mul(factor) & self.mask;
            }
            x ^= x >> self.shift;
            if x < self.count {
                return x;
            }
        }
    }

    /// The position of an element, which must be below the count.
    #[inline]
    pub(crate) fn position(&self, thing: u64) -> u64 {
        let mut x = thing;
        loop {
            x ^= x >> self.shift;
            for inverse in self.inverses.iter().rev() {
                x = x.wrapping_mul(*inverse) & self.mask;
                x ^= x >> self.shift;
            }
            if x < self.count {
                return x;
            }
        }
    }
}

/// The inverse of `odd` modulo 2^64: Newton's iteration, from five correct bits on.
fn odd_inverse(odd: u64) -> u64 {
    let mut inverse = odd.wrapping_mul(3) ^ 2;
    for _ in 0..4 {
        inverse = inverse.wrapping_mul(2u64.wrapping_sub(odd.wrapping_mul(inverse)));
    }
    inverse
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn every_thing_has_one_position(count in 1u64..3000, seed: u64) {
            let scatter = Scatter::new(count, seed);
            let mut seen = vec![false; count as usize];
            for position in 0..count {
                let thing = scatter.at(position);
                prop_assert!(!std::mem::replace(&mut seen[thing as usize], true));
                prop_assert_eq!(scatter.position(thing), position);
            }
        }

        #[test]
        fn the_inverse_holds_for_large_counts(count in 1u64..1 << 63, seed: u64, position: u64) {
            let scatter = Scatter::new(count, seed);
            let position = position % count;
            prop_assert_eq!(scatter.position(scatter.at(position)), position);
        }

        #[test]
        fn seeds_differ_and_neighbours_part(seed: u64) {
            let (a, b) = (Scatter::new(1 << 20, seed), Scatter::new(1 << 20, seed.wrapping_add(1)));
            let same = (0..1000).filter(|&i| a.at(i) == b.at(i)).count();
            let near = (0..1000).filter(|&i| a.at(i).abs_diff(a.at(i + 1)) < 512).count();
            prop_assert!(same < 10 && near < 20, "{} same, {} near", same, near);
        }

        #[test]
        fn the_first_tenth_is_spread_over_all(seed: u64) {
            let scatter = Scatter::new(160_000, seed);
            let mut hits = [0u32; 16];
            for position in 0..16_000 {
                hits[(scatter.at(position) / 10_000) as usize] += 1;
            }
            prop_assert!(hits.iter().all(|&n| (700..1300).contains(&n)), "{:?}", hits);
        }
    }
}
