//! Trackers: where samples come from.
//!
//! Every tracker answers the same questions behind [`Tracker`]; one conformance suite runs over
//! all of them.

use demeter_policy::{Pid, Sample};

/// A source of access samples for a set of processes.
///
/// The agent calls `set_targets` whenever the set changes and `drain` once an epoch. No method
/// blocks beyond the work it says; none polls.
pub trait Tracker: Send {
    /// Short name: `perf`, `damon`, `lab`.
    fn name(&self) -> &'static str;

    /// Follow exactly these processes from now on. A process that has gone is not an error: it
    /// is passed over.
    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError>;

    /// Appends the samples since the last call to `out`, at most `max` of them; the rest is
    /// counted as lost, never silently dropped.
    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError>;

    /// Stop observing until `resume`: no CPU is spent, what was observed meanwhile is dropped.
    fn pause(&mut self) -> Result<(), TrackerError>;

    /// Observe again.
    fn resume(&mut self) -> Result<(), TrackerError>;
}

/// What one drain did, beside the samples themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drained {
    /// Samples appended.
    pub taken: u64,
    /// Samples that the source lost or that were over `max`.
    pub lost: u64,
    /// Records that were malformed or belonged to nobody we follow.
    pub rejected: u64,
}

/// Why a tracker does not work.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// This machine, kernel or permission does not offer it.
    #[error("tracker {tracker}: {why}; {mend}")]
    Unavailable {
        /// Its name.
        tracker: &'static str,
        /// What is missing.
        why: String,
        /// What the person can do.
        mend: String,
    },
    /// The kernel refused an operation.
    #[error("tracker {tracker}: {what}: {source}")]
    Io {
        /// Its name.
        tracker: &'static str,
        /// What was tried, on which file.
        what: String,
        /// What the system said.
        source: std::io::Error,
    },
    /// Shared memory holds something that no honest writer would write.
    #[error("tracker {tracker}: corrupt ring: {what}")]
    Corrupt {
        /// Its name.
        tracker: &'static str,
        /// Which field.
        what: String,
    },
}
