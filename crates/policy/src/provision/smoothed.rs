//! An estimate that follows what is measured, but not every stir of it.

use crate::ByteCount;

/// Of the way to a new measurement, one in so many parts is gone.
const PARTS: u64 = 4;

/// An exponentially weighted mean of measurements, each with a quarter of the weight.
///
/// It lies between the least and the greatest measurement, and comes to a constant one to within
/// four bytes.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq)]
pub struct Smoothed(Option<u64>);

impl Smoothed {
    /// Takes a measurement in, and gives the mean.
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
