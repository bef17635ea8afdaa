//! Samples and observations, the results of trackers.

use crate::{Block, GuestVirtAddr, Pid};

/// One observed access, or `weight` accesses observed as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The process that made the access.
    pub pid: Pid,
    /// The address that was accessed.
    pub addr: GuestVirtAddr,
    /// Number of samples that it represents; 1 for a hardware sample.
    pub weight: u32,
}

/// Evidence of one block's heat, from looks at its accessed bits.
///
/// The block's access rate is estimated as `events / exposure_ns`, with the certainty of a Poisson count of `events`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Observation {
    /// The process.
    pub pid: Pid,
    /// Its block.
    pub block: Block,
    /// Accesses found.
    pub events: u32,
    /// Exposure, nanoseconds: the time in which the block was observed.
    pub exposure_ns: u64,
    /// Whether the rate is a lower bound: each look found an access, so that a higher rate would give the same result.
    pub is_least: bool,
}
