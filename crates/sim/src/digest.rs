//! The hash of a run's events.

/// A running hash of all events (FNV-1a; 48 bits, so that JSON readers represent it exactly).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(pub(crate) u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422)
    }
}

impl Digest {
    /// Adds a number to the hash.
    pub(crate) fn add(&mut self, value: u64) {
        for byte in value.to_le_bytes() {
            self.0 = ((self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)) & ((1 << 48) - 1);
        }
    }
}
