//! What a tracker yields.

use crate::{GuestVirtAddr, Pid};

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
