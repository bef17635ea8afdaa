//! Trackers: the sources of access samples.
//!
//! One conformance suite runs over all implementations of [`Tracker`].

mod choice;
#[cfg(test)]
mod conformance;
pub mod damon;
pub mod lab;
mod owners;
pub mod perf;
mod retry;

use std::path::PathBuf;
use std::time::Duration;

use demeter_linux::damon::Owner;
use demeter_policy::damon::{CPU_PERCENT, Prospect};
use demeter_policy::{
    Block, GuestVirtAddr, Observation, PAGE_SIZE, Pid, SAMPLE_PERIOD_MAX, Sample, Tuning,
};

pub(crate) use choice::try_all;
pub use choice::{Choice, PassedOver, choose};

/// A source of access samples for a set of processes.
///
/// The agent calls `set_targets` whenever the set changes and `drain` once an epoch. No method waits or polls beyond
/// its own work.
pub trait Tracker: Send {
    /// Short name: `perf`, `damon`, `lab`.
    fn name(&self) -> &'static str;

    /// Loads that one sample represents, if known.
    fn loads_per_sample(&self) -> Option<u32> {
        None
    }

    /// Whether loads may overlap, so that their latencies add up to more than the time that a program waits.
    fn loads_overlap(&self) -> bool {
        true
    }

    /// Upper bound of a program's assumed share of time that it waits for memory.
    fn waits(&self) -> f64 {
        1.0
    }

    /// Tracks exactly these processes from now on. Ended processes are skipped without an error.
    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError>;

    /// Appends at most `max` new samples to `out`, or keeps observations for [`Self::observed`].
    ///
    /// Samples beyond `max` are counted as lost. During a pause there are none.
    ///
    /// After [`TrackerError::Corrupt`] the source is resynchronized and the next call works; samples before the fault
    /// were appended.
    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError>;

    /// Replaces the list of blocks to scan first. Trackers whose samples are accesses ignore it.
    fn want(&mut self, _blocks: &[(Pid, Block)]) {}

    /// Observations of the last drain; empty for trackers whose samples are accesses.
    fn observed(&self) -> &[Observation] {
        &[]
    }

    /// Tells the tracker that the agent sleeps until its next epoch.
    ///
    /// A tracker that costs CPU looks the more rarely, the less the prospect promises. One that takes samples may leave
    /// some out.
    fn epoch_ended(&mut self, _prospect: Prospect) -> Result<(), TrackerError> {
        Ok(())
    }

    /// Since the end of the last epoch each n-th sample is taken, with this `n`.
    fn thinning(&self) -> u32 {
        1
    }

    /// Stops observing until `resume`, without CPU cost. Events meanwhile are dropped.
    fn pause(&mut self) -> Result<(), TrackerError>;

    /// Resumes observing.
    fn resume(&mut self) -> Result<(), TrackerError>;
}

/// Opens a tracker.
type Open = fn(&Settings) -> Result<Box<dyn Tracker>, TrackerError>;

/// Settings of all trackers.
#[derive(Debug, Clone, PartialEq)]
pub struct Settings {
    /// Root of `/proc` and `/sys`: `/`, or a test's directory.
    pub root: PathBuf,
    /// Slow loads per sample.
    pub period: u32,
    /// Smallest latency of a sampled load, nanoseconds.
    pub latency_threshold_ns: u32,
    /// Time between two drains.
    pub epoch: Duration,
    /// CPU limit of a tracker without hardware support: % of one CPU per sixteen CPUs.
    pub cpu_percent: f64,
    /// Whether to turn DAMON_STAT off while DAMON is used; the kernel starts it by itself.
    pub take_damon: bool,
}

impl Default for Settings {
    fn default() -> Self {
        let tuning = Tuning::default();
        Self {
            root: "/".into(),
            period: SAMPLE_PERIOD_MAX,
            latency_threshold_ns: tuning.latency_threshold_ns,
            epoch: tuning.epoch(),
            cpu_percent: CPU_PERCENT,
            take_damon: true,
        }
    }
}

/// Whether an address can be a user program's: not in the first page, nor in the kernel's half with 5-level page
/// tables.
pub(crate) fn is_user_address(addr: GuestVirtAddr) -> bool {
    (PAGE_SIZE..1 << 56).contains(&addr.0)
}

/// The result of one drain, without the samples.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Drained {
    /// Samples appended, or observations kept.
    pub taken: u64,
    /// Samples that the source lost or that were over `max`.
    pub lost: u64,
    /// Records that were malformed or belong to no target.
    pub rejected: u64,
    /// Whether nothing was scanned since the last drain.
    pub is_repeat: bool,
}

/// An error of a tracker.
#[derive(Debug, thiserror::Error)]
pub enum TrackerError {
    /// Another Demeter process, an agent or a controller, uses it.
    #[error("tracker {tracker}: another Demeter uses it; stop that one first")]
    Taken {
        /// The tracker's name.
        tracker: &'static str,
    },
    /// Another user has DAMON.
    #[error("tracker {tracker}: DAMON is in use by {by}; {hint}", hint = .by.hint())]
    Held {
        /// The tracker's name.
        tracker: &'static str,
        /// The user of DAMON.
        by: Owner,
    },
    /// All trackers that were tried failed.
    #[error("no tracker works here ({}); `demeter probe` says what each one needs", reasons(.0))]
    NoneWorks(Vec<PassedOver>),
    /// This machine, kernel or permission does not offer it.
    #[error("tracker {tracker}: {why}; {hint}")]
    Unavailable {
        /// The tracker's name.
        tracker: &'static str,
        /// The missing part.
        why: String,
        /// The way to fix it.
        hint: String,
    },
    /// The kernel refused an operation.
    #[error("tracker {tracker}: {what}: {source}")]
    Io {
        /// The tracker's name.
        tracker: &'static str,
        /// The operation and its file.
        what: String,
        /// The system's error.
        source: std::io::Error,
    },
    /// The unit gives no samples any more, not even of accesses that it must see.
    #[error(
        "tracker {tracker}: silent: {why}; another tracker takes its place where `tracker` is auto"
    )]
    Silent {
        /// Its name.
        tracker: &'static str,
        /// The proof that failed.
        why: String,
    },
    /// A better tracker than this one works now.
    #[error("tracker {tracker}: {better} works now, and takes its place")]
    Outdone {
        /// The tracker's name.
        tracker: &'static str,
        /// The better one's.
        better: &'static str,
    },
    /// Shared memory has an impossible value.
    #[error("tracker {tracker}: corrupt ring: {what}")]
    Corrupt {
        /// The tracker's name.
        tracker: &'static str,
        /// The field.
        what: String,
    },
}

impl TrackerError {
    /// Whether a tracker may work later: this one, once no other process uses what it needs, or another in its place.
    pub fn is_temporary(&self) -> bool {
        match self {
            Self::Taken { .. } | Self::Held { .. } | Self::Silent { .. } | Self::Outdone { .. } => {
                true
            }
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
