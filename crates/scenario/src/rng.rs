//! Random numbers of workloads. A seed gives the same numbers everywhere.
//!
//! A number costs a nanosecond, or a few instructions under emulation.

/// A xorshift generator with 64 bits of state (Marsaglia's triple 13, 7, 17).
#[derive(Debug, Clone)]
pub struct Rng {
    state: u64,
}

impl Rng {
    /// A generator for `stream` of `seed`; streams are independent.
    pub fn new(seed: u64, stream: u64) -> Self {
        // Zero is the only state that xorshift never leaves.
        Self {
            state: mix(seed ^ mix(stream)).max(1),
        }
    }

    /// One generator for each of `threads`.
    pub fn for_threads(seed: u64, threads: u32) -> Vec<Self> {
        (0..threads.into())
            .map(|thread| Self::new(seed, thread))
            .collect()
    }

    /// The next 64 random bits.
    #[inline]
    #[expect(
        clippy::should_implement_trait,
        reason = "without end: no Option in hot loops"
    )]
    pub fn next(&mut self) -> u64 {
        let mut x = self.state;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.state = x;
        x
    }

    /// A random number of `0..count`; `count` must not be 0.
    #[inline]
    pub fn below(&mut self, count: u64) -> u64 {
        scale(self.next(), count)
    }
}

/// Maps `random` onto `0..count` by its high bits: a multiplication, no division.
/// `count` must not be 0.
#[inline]
pub fn scale(random: u64, count: u64) -> u64 {
    ((u128::from(random) * u128::from(count)) >> 64) as u64
}

/// Spreads `x` over 64 bits (the finalizer of splitmix64): a bijection.
#[inline]
pub fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
}

/// The bound below which a random 64-bit number falls with probability `share` (0 to 1).
#[inline]
pub fn bound(share: f64) -> u64 {
    // 2^64; the cast saturates, so that 1 includes every number but one.
    (share * 18_446_744_073_709_551_616.0) as u64
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::{prop_assert, proptest};

    proptest! {
        #[test]
        fn scale_stays_in_range(random: u64, count in 1u64..) {
            prop_assert!(scale(random, count) < count);
        }

        #[test]
        fn every_part_of_a_range_is_hit_evenly(seed: u64, stream in 0u64..64) {
            let mut rng = Rng::new(seed, stream);
            let mut hits = [0u32; 16];
            for _ in 0..16_000 {
                hits[rng.below(16) as usize] += 1;
            }
            // 1,000 expected each, standard deviation 31.
            prop_assert!(hits.iter().all(|&n| (800..1200).contains(&n)), "{:?}", hits);
        }

        #[test]
        fn a_bound_has_its_share(share in 0.0..=1.0f64, seed: u64) {
            let (bound, mut rng) = (bound(share), Rng::new(seed, 0));
            let hits = (0..10_000).filter(|_| rng.next() < bound).count() as f64;
            // Standard deviation at most 50.
            prop_assert!((hits - 10_000.0 * share).abs() < 300.0);
        }
    }
}
