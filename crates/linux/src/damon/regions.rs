//! What DAMON tells of a range of addresses.

use demeter_policy::{Pid, VirtRange};

/// A region of one aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Looks that found it accessed.
    pub accesses: u32,
    /// Bytes that each of its page-table entries maps; not zero.
    pub page_bytes: u64,
}
