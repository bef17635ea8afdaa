//! The lab: real VMs with two emulated memory tiers, and the workloads that run in them.
//!
//! [`run()`] takes a scenario, boots a VM for each of its systems ([`Lab`]) and makes one result
//! of what they report ([`link`]). What happens in such a VM is in [`inside`], the programs that
//! are measured there in [`workload`].

mod error;
mod http;
pub mod inside;
pub mod link;
mod provision;
mod run;
mod summary;
mod vm;
pub mod workload;

pub use error::{Error, VmFault};
pub use run::{run, stop_on_signals};
pub use vm::{Initramfs, Lab};
