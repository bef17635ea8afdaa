//! What dirty logging costs a guest on this host, and which settings help.
//!
//! # Problem
//! A live migration has KVM log which pages the guest writes. Logging takes the guest's right to write to
//! pages away, splits its huge pages, and takes the right away again with each pass. How long the guest
//! stands still depends on the processor, the kernel, the size of pages and how the log is read; a model
//! does not replace looking.
//!
//! # Approach
//! A VM of our own through `/dev/kvm`, with no VMM beside it: virtual CPUs sweep slices of memory and store
//! to each page, or to one in so many (`guest`). Each counts its stores and its longest wait in memory
//! that is not logged. After a while logging is switched on, and the log is read as a migration does
//! ([`run`]). KVM's counters (`stats`) tell faults and how much is still mapped by huge pages.
//! [`sweep`] tries settings in turn and recommends one.
//!
//! # Properties
//! - A pass ends only when each virtual CPU has swept its slice since the pass began, so each page that it
//!   stores to is dirty and has faulted as often as it lost the right to be written.
//! - Nothing stays behind: memory, VM and threads end with the measurement, whatever ends it.
//! - Every wait has a bound ([`Settings::pass_limit_s`], [`STOP_LIMIT`]).

mod error;
mod guest;
mod machine;
mod memory;
mod offer;
mod report;
mod run;
mod samples;
mod settings;
mod stats;
pub mod sweep;

pub use error::Error;
pub use offer::{EagerSplit, Offer};
pub use report::{Counts, Report, Speed, Step, What};
pub use run::{STOP_LIMIT, Watch, offer, run};
pub use samples::Sample;
pub use settings::{Backing, Protect, Settings, SettingsError};
