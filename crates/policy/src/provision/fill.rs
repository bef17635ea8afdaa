//! Divides a pool in proportion to weights, within bounds.

/// The bounds of a VM's memory.
#[derive(Debug, Clone, Copy)]
pub(super) struct Bounds {
    /// The minimum.
    pub(super) least: u64,
    /// The maximum; not below `least`.
    pub(super) most: u64,
}

impl Bounds {
    pub(super) fn clamp(&self, bytes: u64) -> u64 {
        bytes.clamp(self.least, self.most)
    }
}

/// Divides `pool` between all VMs by one common level: a VM gets weight × level, within its bounds.
///
/// The level is the highest for which the pool suffices. The sum of `least` must not exceed the pool.
pub(super) fn fill(pool: u64, weights: &[u64], bounds: &[Bounds]) -> Vec<u64> {
    let at = |level: u128| {
        let each = weights.iter().zip(bounds);
        each.map(move |(&weight, bounds)| bounds.clamp(scale(weight, level)))
    };
    let suffices = |level: u128| at(level).map(u128::from).sum::<u128>() <= pool.into();
    // Bit by bit from the top, since the sum grows with the level.
    let highest = (0..u128::BITS).rev().fold(0, |level, bit| {
        let higher = level | 1 << bit;
        if suffices(higher) { higher } else { level }
    });
    at(highest).collect()
}

/// `weight` × `level`, where `level` is in units of 2^-64, so that a step is less than a byte.
fn scale(weight: u64, level: u128) -> u64 {
    (u128::from(weight).saturating_mul(level) >> 64) as u64
}
