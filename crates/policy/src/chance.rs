//! Pseudorandom numbers. A seed always gives the same ones.

/// Marsaglia's 64-bit xorshift.
#[derive(Debug, Clone)]
pub struct Chance(u64);

impl Chance {
    /// A generator with this seed.
    pub fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number; never 0.
    pub fn number(&mut self) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0
    }

    /// The next number in [0, 1).
    pub fn draw(&mut self) -> f64 {
        (self.number() >> 11) as f64 / (1u64 << 53) as f64
    }

    /// The next number below `count`, which must not be 0.
    pub fn below(&mut self, count: u64) -> u64 {
        ((u128::from(self.number()) * u128::from(count)) >> 64) as u64
    }
}
