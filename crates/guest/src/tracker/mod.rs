//! Trackers: where samples come from.
//!
//! Every tracker answers the same questions behind [`Tracker`]; one conformance suite runs over
//! all of them.

mod choice;
#[cfg(test)]
mod conformance;
pub mod damon;
pub mod lab;
mod owners;
pub mod perf;

use std::path::PathBuf;
use std::time::Duration;

use demeter_linux::damon::Owner;
use demeter_policy::damon::CPU_PERCENT;
use demeter_policy::{Block, GuestVirtAddr, Observation, PAGE_SIZE, Pid, Sample, Tuning};

pub(crate) use choice::try_all;
pub use choice::{Choice, PassedOver, choose};

/// A source of access samples for a set of processes.
///
/// The agent calls `set_targets` whenever the set changes and `drain` once an epoch. No method
/// blocks beyond the work it says; none polls.
pub trait Tracker: Send {
    /// Short name: `perf`, `damon`, `lab`.
    fn name(&self) -> &'static str;

    /// Loads that a sample stands for, where that is known.
    fn loads_per_sample(&self) -> Option<u32> {
        None
    }

    /// Share of its time that a program is taken to wait for memory, at most.
    fn waits(&self) -> f64 {
        1.0
    }

    /// Follow exactly these processes from now on. A process that has gone is not an error: it
    /// is passed over.
    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError>;

    /// Appends the samples since the last call to `out`, or keeps observations for [`Self::observed`]; at most `max` of
    /// them. The rest is counted as lost, never silently dropped. While paused there are none.
    ///
    /// After [`TrackerError::Corrupt`] the source is in step again and the next call works; what
    /// was sound before the fault has been appended.
    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError>;

    /// Blocks that the caller most wants to have looked at, in place of those before. Of no use to trackers whose samples
    /// are accesses.
    fn want(&mut self, _blocks: &[(Pid, Block)]) {}

    /// Observations of the last drain. Nothing of a tracker whose samples are accesses.
    fn observed(&self) -> &[Observation] {
        &[]
    }

    /// The caller has decided and moved what it wanted, and sleeps until its next epoch. If it is calm, it found nothing
    /// to do: news can wait, and a tracker that costs CPU looks seldom.
    fn epoch_ended(&mut self, _is_calm: bool) -> Result<(), TrackerError> {
        Ok(())
    }

    /// Stop observing until `resume`: no CPU is spent, what was observed meanwhile is dropped.
    fn pause(&mut self) -> Result<(), TrackerError>;

    /// Observe again.
    fn resume(&mut self) -> Result<(), TrackerError>;
}

/// What every tracker is made from.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Where `/proc` and `/sys` are found: `/`, or a directory that stands in for it.
    pub root: PathBuf,
    /// One sample for so many slow loads.
    pub period: u32,
    /// Loads faster than this are not sampled, nanoseconds.
    pub latency_threshold_ns: u32,
    /// Time between two drains.
    pub epoch: Duration,
    /// The most that a tracker without hardware's help may take of one CPU for each eight, %.
    pub cpu_percent: f64,
    /// Whether DAMON_STAT, which the kernel starts by itself, is turned off while DAMON is used.
    pub take_damon: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let tuning = Tuning::default();
        Self {
            root: "/".into(),
            period: tuning.sample_period,
            latency_threshold_ns: tuning.latency_threshold_ns,
            epoch: tuning.epoch(),
            cpu_percent: CPU_PERCENT,
            take_damon: true,
        }
    }
}

/// Whether a user program can have memory there: not in the first page and not in the kernel's
/// half, with 5-level page tables at the most.
pub(crate) fn is_user_address(addr: GuestVirtAddr) -> bool {
    (PAGE_SIZE..1 << 56).contains(&addr.0)
}

/// What one drain did, beside the samples themselves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drained {
    /// Samples appended, or observations kept.
    pub taken: u64,
    /// Samples that the source lost or that were over `max`.
    pub lost: u64,
    /// Records that were malformed or belonged to nobody we follow.
    pub rejected: u64,
    /// True if there was no look since the last drain.
    pub is_repeat: bool,
}

/// Why a tracker does not work.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// Another process of ours has it: an agent that runs, or a controller.
    #[error("tracker {tracker}: another Demeter uses it; stop that one first")]
    Taken {
        /// Its name.
        tracker: &'static str,
    },
    /// Somebody else has DAMON.
    #[error("tracker {tracker}: DAMON is in use by {by}; {hint}", hint = .by.hint())]
    Held {
        /// Its name.
        tracker: &'static str,
        /// The user of DAMON.
        by: Owner,
    },
    /// None of those that were tried works.
    #[error("no tracker works here ({}); `demeter probe` says what each one needs", reasons(.0))]
    NoneWorks(Vec<PassedOver>),
    /// This machine, kernel or permission does not offer it.
    #[error("tracker {tracker}: {why}; {hint}")]
    Unavailable {
        /// Its name.
        tracker: &'static str,
        /// What is missing.
        why: String,
        /// What the person can do.
        hint: String,
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
    /// It gave samples, and gives none of accesses that it must see.
    #[error(
        "tracker {tracker}: silent: {why}; another tracker takes its place where `tracker` is auto"
    )]
    Silent {
        /// Its name.
        tracker: &'static str,
        /// The proof that failed.
        why: String,
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

impl TrackerError {
    /// Whether a tracker may work later: this one, once nobody else has what it needs, or another in its place.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Taken { .. } | Self::Held { .. } | Self::Silent { .. } => true,
            Self::NoneWorks(passed_over) => {
                passed_over.iter().any(|passed| passed.why.is_temporary())
            }
            Self::Unavailable { .. } | Self::Io { .. } | Self::Corrupt { .. } => false,
        }
    }
}

fn reasons(passed_over: &[PassedOver]) -> String {
    let reasons: Vec<_> = passed_over.iter().map(|it| it.why.to_string()).collect();
    reasons.join("; ")
}
