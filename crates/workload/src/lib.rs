//! Workload programs, which run in a guest under a memory tiering system, or on any Linux.
//!
//! The programs are thin wrappers of this crate. All map and populate memory, report `ready`, run the timed phase with
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
mod region;
mod sharers;
mod single_worker;
mod size;
mod store;
pub mod sweep;
mod tagged_words;
mod timed;
mod wait;

use demeter_scenario::rng;

/// The names of the programs.
pub const PROGRAMS: [&str; 7] = ["forks", "graph", "gups", "kvload", "memlat", "mix", "sweep"];

pub use args::run_program;
pub use error::Error;
pub use event::{Rate, WorkloadEvent};
pub use region::{Region, bind};
pub use size::{Size, SizeError};
