//! The lab: real VMs with two emulated memory tiers, and the workloads that run in them.

pub mod inside;
pub mod link;
pub mod workload;
