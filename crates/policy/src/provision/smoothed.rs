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
        let mean = match self.0 {
            None => measured.0,
            Some(mean) if measured.0 >= mean => mean + (measured.0 - mean) / PARTS,
            Some(mean) => mean - (mean - measured.0) / PARTS,
        };
        self.0 = Some(mean);
        ByteCount(mean)
    }
}
