//! Measures the cost of KVM's dirty logging on this host, and finds good settings.
//!
//! # Problem
//! For a live migration, KVM logs the pages that the guest writes. Logging write-protects pages, splits huge pages, and
//! write-protects again in each pass. The guest's delay depends on the processor, the kernel, the page size and the way
//! the log is read, so it must be measured.
//!
//! # Approach
//! A VM of our own through `/dev/kvm`, without a VMM. Virtual CPUs sweep slices of memory and store to each page, or to
//! one in several (`guest`). Each counts its stores and its longest wait in memory that is not logged. After a warm-up
//! logging is enabled, and the log is read as a migration reads it ([`run`]). KVM's counters (`stats`) show faults and
//! the rest of huge pages. [`sweep`] tries several settings and recommends one.
//!
//! # Properties
//! - A pass ends only after each virtual CPU has swept its slice. So each page that it stores to is dirty, and has
//!   faulted once per write protection.
//! - Nothing remains: memory, VM and threads end with the measurement, however it ends.
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
