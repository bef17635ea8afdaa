//! The controller's interface to people and programs: its configuration, its views, and the bodies of its API.
//!
//! Clients use this crate without the controller.

pub mod body;
pub mod config;
mod names;
pub mod view;

pub use names::{BadVmName, PoolName, VmName};
