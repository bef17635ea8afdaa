//! The host controller: owns a pool of fast and of slow memory, gives each VM its share of each,
//! changes it while VMs run, and takes memory really back.
//!
//! ```text
//! API, policy → Controller → commands → one task per VM: Provisioner → guest, hypervisor
//!                   ↑                              │
//!                   └─────────── observations ─────┘
//! ```
//!
//! The [`controller`] is pure: it decides, and keeps what it committed within the pool. A
//! [`provisioner`] carries a decision out on one VM; each VM has a task of its own, so that one
//! that does not answer delays no other. Nothing that a guest says is believed before it is
//! checked against the [`backing`] of its memory.

pub mod agent;
pub mod api;
pub mod backing;
pub mod config;
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
pub mod view;
mod vm;
mod vm_name;

pub use run::{RunError, run, serve};
pub use vm_name::{BadVmName, VmName};
