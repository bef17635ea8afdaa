//! Workload programs: what runs in the guest while somebody manages its memory tiers.
//!
//! The programs are thin; everything they do is here. All follow one course: map and populate
//! memory, say `ready`, run the timed phase with one report an interval, say `done`. They know
//! nothing of tiers, except that `--place-hot` binds the hot set of gups and memlat to a node.

mod alone;
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
mod size;
mod store;
pub mod sweep;
mod timed;
mod wait;
mod words;

pub(crate) use demeter_scenario::rng;

pub use args::run_program;
pub use error::Error;
pub use event::{Event, Rate};
pub(crate) use region::bind;
pub use size::{Size, SizeError};
