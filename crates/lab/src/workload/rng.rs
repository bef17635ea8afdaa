//! Random numbers that cost a few instructions, for loops that run under emulation.

/// A xorshift generator with 64 bits of state (Marsaglia's triple 13, 7, 17).
#[derive(Debug, Clone)]
pub(crate) struct Rng {
    state: u64,
}

impl Rng {
    /// A generator for `stream` of `seed`; different streams are unrelated.
    pub(crate) fn new(seed: u64, stream: u64) -> Self {
        // Zero is the one state that xorshift never leaves.
        Self {
            state: mix(seed ^ mix(stream)).max(1),
        }
    }

    /// The next 64 random bits.
    #[inline]
    pub(crate) fn next(&mut self) -> u64 {
        let mut x = self.state;
        x ^= x << 13;
        x ^= x >> 7;
        x ^= x << 17;
        self.state = x;
        x
    }
}

/// Maps `random` onto `0..count` by its high bits: a multiplication, no division.
/// `count` must not be 0.
#[inline]
pub(crate) fn scale(random: u64, count: u64) -> u64 {
    ((u128::from(random) * u128::from(count)) >> 64) as u64
}

/// Spreads `x` over 64 bits (the finalizer of splitmix64): a bijection.
pub(crate) fn mix(x: u64) -> u64 {
    let x = x.wrapping_add(0x9e37_79b9_7f4a_7c15);
    let x = (x ^ (x >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
    let x = (x ^ (x >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
    x ^ (x >> 31)
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
                hits[scale(rng.next(), 16) as usize] += 1;
            }
            // 1,000 expected each, standard deviation 31.
            prop_assert!(hits.iter().all(|&n| (800..1200).contains(&n)), "{:?}", hits);
        }
    }
}
