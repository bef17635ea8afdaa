//! The cost of moving a byte, as the driver measures it.

use serde::{Deserialize, Serialize};

use crate::{BLOCK_SIZE, MIB};

/// A price is that of about the last 64 MiB.
pub(super) const PRICE_BYTES: u64 = 64 * MIB;

/// The cost of moving a byte in one direction. It costs nothing until it is measured.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub(super) struct Price {
    /// Bytes that were tried, halved now and then.
    pub bytes: u64,
    /// The time they took, halved likewise.
    pub took_ns: u64,
}

impl Price {
    /// Takes a batch into the mean, but not the time of the first one. That one finds the kernel's code and lists cold; it
    /// would stay the price until something is worth moving at it.
    pub fn pay(&mut self, bytes: u64, took_ns: u64) {
        if self.bytes == 0 {
            self.bytes = 1;
            return;
        }
        self.bytes = self.bytes.saturating_add(bytes);
        self.took_ns = self.took_ns.saturating_add(took_ns);
        while self.bytes > PRICE_BYTES {
            self.age();
        }
    }

    /// Whether at least a block was measured.
    pub fn is_known(&self) -> bool {
        self.bytes > BLOCK_SIZE
    }

    /// This price, or the other direction's where only that was measured.
    pub fn or(&self, other: &Self) -> Self {
        match self.is_known() || !other.is_known() {
            true => *self,
            false => *other,
        }
    }

    /// Half of what is known counts no longer.
    pub fn age(&mut self) {
        self.bytes /= 2;
        self.took_ns /= 2;
    }

    /// Picoseconds a byte.
    pub fn ps_per_byte(&self) -> u64 {
        if !self.is_known() {
            return 0;
        }
        let ps = u128::from(self.took_ns) * 1000 / u128::from(self.bytes);
        ps.min(u32::MAX.into()) as u64
    }

    /// The cost of `bytes`, seconds.
    pub fn seconds(&self, bytes: u64) -> f64 {
        self.ps_per_byte() as f64 * bytes as f64 * 1e-12
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_first_move_does_not_make_the_price() {
        let mut price = Price::default();
        price.pay(4 << 20, 111_000_000);
        assert!(!price.is_known());
        assert_eq!(price.seconds(2 << 20), 0.0);
        price.pay(4 << 20, 2_800_000);
        assert!(price.is_known());
        assert!(price.seconds(2 << 20) < 2e-3);
    }

    #[test]
    fn a_slow_small_batch_does_not_stop_all_moves_for_ever() {
        let mut price = Price::default();
        (0..16).for_each(|_| price.pay(4 << 20, 4 * 700_000));
        let usual_ps = price.ps_per_byte();
        price.pay(1 << 20, 20_000_000);
        assert!(price.ps_per_byte() < 3 * usual_ps);
        (0..64).for_each(|_| price.pay(1 << 20, 200_000_000));
        assert!(price.ps_per_byte() > 20 * usual_ps);
        (0..40).for_each(|_| price.age());
        assert!(price.ps_per_byte() < 3 * usual_ps);
    }
}
