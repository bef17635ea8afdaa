//! Numbers that look like chance, for tests: the same ones for the same seed.

/// Marsaglia's xorshift with 64 bits.
#[derive(Debug, Clone)]
pub(crate) struct Chance(u64);

impl Chance {
    /// What follows from this seed.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1)
    }

    /// The next number, from 0 up to 1.
    pub(crate) fn draw(&mut self) -> f64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 >> 11) as f64 / (1u64 << 53) as f64
    }
}
