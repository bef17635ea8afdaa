//! DAMON, the kernel's monitor of data accesses: kdamonds of our own, and what they find.

mod admin;
mod aggregations;
mod left;
mod owner;

pub use admin::{Kdamond, Statistic, clean_up, is_filler};
pub use aggregations::{Aggregations, Format, Reported, Tracepoint};
pub use owner::Owner;

use demeter_policy::{Pid, VirtRange};

#[cfg(any(test, feature = "testing"))]
pub use aggregations::testing;

/// A region of one aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Looks that found it accessed.
    pub accesses: u32,
}

/// Why DAMON cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DamonError {
    /// Another process of ours has it.
    #[error("another Demeter uses DAMON; stop it first")]
    Taken,
    /// Somebody else has it.
    #[error("DAMON is in use by {0}; {hint}", hint = .0.hint())]
    Held(Owner),
    /// This machine, kernel or permission does not offer it.
    #[error("{why}; {hint}")]
    Unavailable {
        /// What is missing.
        why: String,
        /// What the person can do.
        hint: String,
    },
    /// The kernel refused an operation.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, on which file.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
}

#[cfg(test)]
mod tests;
