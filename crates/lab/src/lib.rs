//! The lab: real VMs with two emulated memory tiers.
//!
//! [`run()`] takes a scenario, boots a VM for each of its systems ([`Lab`]) and combines their reports ([`link`]) into
//! one result. [`inside`] is the part in the VM. The measured programs are in the crate `demeter-workload`, or any
//! others. [`run_here()`] uses this machine's own two nodes instead. A [`Recorder`] runs a program without a VM and records all its memory accesses.

mod cpus;
mod error;
mod fault;
mod here;
pub mod inside;
mod launch;
pub mod link;
pub mod process_usage;
mod program;
mod provision;
mod record;
mod run;
mod timeline;
mod tune;
mod vm;

pub use error::{Error, VmFault};
pub use launch::Launch;
pub use record::{Recorded, Recorder, Recording, RecordingEnd};
pub use run::{LabRun, Repetition, run, run_here};
pub use tune::{Search, TooLittleTime};
pub use vm::{Initramfs, Lab, dies_with_this_thread};
