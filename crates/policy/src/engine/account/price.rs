//! What moving a byte costs, as the driver measures it.

use crate::MIB;

/// What moving a byte is taken to cost before it is measured, picoseconds: one millisecond a MiB; and
/// the bytes that this counts for.
const FIRST_PS: u64 = 1_000;
const FIRST_BYTES: u64 = 2 * MIB;

/// A price is that of the last so many bytes, about.
pub(super) const PRICE_BYTES: u64 = 64 * MIB;

/// More than a byte costs on any machine, picoseconds.
const MAX_PS: u64 = 10_000_000;

/// What moving a byte costs in one direction.
#[derive(Debug, Clone, Copy, Default)]
pub(super) struct Price {
    /// Bytes that were tried, halved now and then.
    pub bytes: u64,
    /// What they took, likewise.
    pub took_ns: u64,
}

impl Price {
    /// Takes a batch into the mean.
    pub fn pay(&mut self, bytes: u64, took_ns: u64) {
        self.bytes = self.bytes.saturating_add(bytes.max(1));
        self.took_ns = self.took_ns.saturating_add(took_ns);
        while self.bytes > PRICE_BYTES {
            self.age();
        }
    }

    /// Whether what was measured counts for more than the guess.
    pub fn is_known(&self) -> bool {
        self.bytes > FIRST_BYTES
    }

    /// Half of what is known counts no longer.
    pub fn age(&mut self) {
        self.bytes /= 2;
        self.took_ns /= 2;
    }

    /// Picoseconds.
    pub fn ps_per_byte(&self) -> u64 {
        let first_ps = u128::from(FIRST_PS * FIRST_BYTES);
        let ps = u128::from(self.took_ns) * 1000 + first_ps;
        let ps = ps / u128::from(self.bytes + FIRST_BYTES);
        ps.min(MAX_PS.into()) as u64
    }
}
