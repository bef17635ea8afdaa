//! A deterministic simulated machine with two memory tiers: cores, guests, a hypervisor, and memory managers.
//!
//! Equal scenarios and seeds give equal results, on any machine and with any number of threads.

mod cases;
mod cpu_scheduler;
mod damon;
mod digest;
mod dirty;
mod error;
mod guest;
mod hypervisor;
mod latency;
pub mod linear;
mod machine;
mod parallel_runs;
mod program;
mod progress;
mod provision;
mod reclaim;
mod reserve;
mod resizable;
mod run;
mod setup;
mod sweep;
mod system;
mod testbed;
mod timeline;
pub mod trace;
mod vm;
pub mod workload;
mod world;

pub use cases::run_all;
pub use error::SimError;
pub use parallel_runs::{PlannedRun, RunLimits, RunProgress, run_jobs};
pub use program::{Access, BATCH, Batch, Program, Region};
pub use run::look;
pub use sweep::Sweep;
pub use testbed::{Model, Testbed};
