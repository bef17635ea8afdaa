//! DAMON, the kernel's monitor of data accesses: kdamonds of our own, and what they find.

mod admin;
mod aggregations;
mod regions;

use std::time::Duration;

pub use admin::{Kdamond, Operations};
pub use aggregations::{Aggregations, Format, Reported};
pub use regions::Region;

#[cfg(any(test, feature = "testing"))]
pub use aggregations::testing;

/// How a pass looks at regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// From clearing an accessed bit to looking at it.
    pub interval: Duration,
    /// Looks at each region.
    pub looks: u32,
}

impl Pass {
    /// How long it takes, but for what kdamond itself needs.
    pub fn length(&self) -> Duration {
        self.interval * self.looks
    }
}

/// Why DAMON cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DamonError {
    /// Another process of ours has it.
    #[error("another Demeter uses DAMON; stop it first")]
    Taken,
    /// This machine, kernel or permission does not offer it, or somebody else has it.
    #[error("{why}; {mend}")]
    Unavailable {
        /// What is missing.
        why: String,
        /// What the person can do.
        mend: String,
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
