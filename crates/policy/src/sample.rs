//! What a tracker yields.

use crate::{Block, GuestVirtAddr, Pid};

/// One observed access, or `weight` accesses observed as one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Sample {
    /// The process that made the access.
    pub pid: Pid,
    /// The address that was accessed.
    pub addr: GuestVirtAddr,
    /// How many samples this record stands for; 1 for a hardware sample.
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
    /// Time of the block that was watched for them, nanoseconds.
    pub exposure_ns: u64,
    /// Whether that is the least rate: each look found an access, and any higher rate would have looked the same.
    pub is_least: bool,
}
