//! The host controller: divides a pool of fast and slow memory between VMs while they run.
//!
//! It gives each VM its share of each tier and really frees the memory that a VM gives up.
//!
//! ```text
//! API, policy → Controller → commands → one task per VM: Provisioner → guest, hypervisor
//!                   ↑                              │
//!                   └─────────── observations ─────┘
//! ```
//!
//! The [`controller`] is pure: it decides, and keeps committed memory within the pool. A
//! [`provisioner`] carries out a decision on one VM. Each VM has its own task, so a VM that does
//! not answer delays no other. A guest's data is checked against the [`backing`] of its memory
//! before it is used.

pub mod agent;
pub mod api;
pub mod backing;
pub mod controller;
mod hard_limit;
mod history;
pub mod hypervisor;
pub mod memory;
pub mod metrics;
pub mod outside;
mod privileges;
pub mod probe;
pub mod process;
pub mod provisioner;
mod run;
pub mod store;
#[cfg(test)]
mod testing;
mod vm;

pub use demeter_host_api::{BadVmName, PoolName, VmName, body, config, view};
pub use run::{RunError, run, serve};
