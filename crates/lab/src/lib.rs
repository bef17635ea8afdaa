//! The lab: real VMs with two emulated memory tiers, and the workloads that run in them.
//!
//! [`run()`] takes a scenario, boots a VM for each of its systems ([`Lab`]) and makes one result
//! of what they report ([`link`]). What happens in such a VM is in [`inside`], the programs that
//! are measured there in [`workload`]. [`run_here()`] does the same on this machine's own two nodes. A [`Recorder`] runs a program without a VM and hears of every
//! access that it makes.

mod error;
mod here;
pub mod inside;
pub mod link;
mod program;
mod provision;
mod record;
mod run;
mod timeline;
mod tune;
pub mod uses;
mod vm;
pub mod workload;

pub use error::{Error, VmFault};
pub use program::Launch;
pub use record::{Recorded, Recorder, Recording, RecordingEnd};
pub use run::{LabRun, Repetition, run, run_here};
pub use tune::{Search, TooLittleTime};
pub use vm::{Initramfs, Lab, dies_with_this_thread};
