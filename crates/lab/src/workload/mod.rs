//! Workload programs, which run in the guest under a memory tiering system.
//!
//! The programs are thin wrappers of this module. All map and populate memory, report `ready`, run the timed phase with
//! one report per interval, and report `done`. They know nothing of tiers, except that `--place-hot` binds the hot set
//! of gups and memlat to a node.

mod args;
mod chain;
mod csr;
mod error;
mod event;
pub mod forks;
mod geometry;
pub mod graph;
pub mod gups;
pub mod kvload;
pub mod memlat;
pub mod mix;
pub(crate) mod region;
mod sharers;
mod single_worker;
mod size;
mod store;
pub mod sweep;
mod tagged_words;
mod timed;
mod wait;

pub(crate) use demeter_scenario::rng;

pub use args::run_program;
pub use error::Error;
pub use event::{Rate, WorkloadEvent};
pub(crate) use region::bind;
pub use size::{Size, SizeError};
