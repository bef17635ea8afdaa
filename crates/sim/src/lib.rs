//! A deterministic simulated machine with two memory tiers: cores, guests, a hypervisor, and the
//! systems that manage memory on them.
//!
//! The same scenario and seed give the same result, on any machine and with any number of threads.

mod program;
pub mod trace;
pub mod workload;

pub use program::{Access, BATCH, Batch, Program, Region};
