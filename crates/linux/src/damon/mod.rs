//! DAMON, the kernel's access monitor: our own kdamonds and their results.

mod admin;
mod aggregations;
mod file;
mod left;
mod owner;

pub use admin::{Kdamond, REGIONS_PER_BLOCK_MAX, Statistic, clean_up, is_filler};
pub use aggregations::{Aggregations, Format, Reported, Tracepoint};
pub use owner::Owner;

use demeter_policy::{Pid, VirtRange};

#[cfg(any(test, feature = "testing"))]
pub use aggregations::testing;

/// A region's report of one aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Its process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Number of looks that found it accessed.
    pub accesses: u32,
}

/// An error of DAMON.
#[derive(Debug, thiserror::Error)]
pub enum DamonError {
    /// Another Demeter process uses it.
    #[error("another Demeter uses DAMON; stop it first")]
    Taken,
    /// Another user has it.
    #[error("DAMON is in use by {0}; {hint}", hint = .0.hint())]
    Held(Owner),
    /// This machine, kernel or permission does not offer it.
    #[error("{why}; {hint}")]
    Unavailable {
        /// The missing part.
        why: String,
        /// The way to fix it.
        hint: String,
    },
    /// The kernel refused an operation.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its file.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests;
