//! Smooths a measured amount.

use crate::ByteCount;

/// A new measurement has this weight: one in `PARTS`.
const PARTS: u64 = 4;

/// An exponentially weighted mean; each new measurement has a quarter of the weight.
///
/// It lies between the lowest and the highest measurement, and converges to a constant one within four bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Smoothed(Option<u64>);

impl Smoothed {
    /// Adds a measurement, and returns the mean.
    pub fn update(&mut self, measured: ByteCount) -> ByteCount {
        let mean = self.0.map_or(measured.0, |mean| toward(mean, measured.0));
        self.0 = Some(mean);
        ByteCount(mean)
    }
}

/// A mean after one more measurement.
pub(super) fn toward(mean: u64, measured: u64) -> u64 {
    match measured >= mean {
        true => mean + (measured - mean) / PARTS,
        false => mean - (mean - measured) / PARTS,
    }
}
