//! Scenarios: which machine, which workload, which systems to compare.
//!
//! A scenario is a TOML file. The same file runs on every place that knows its systems.

mod check;
mod provision;
mod provision_check;
mod scenario;

pub use provision::{Crashes, Policy, Provision, Provisioner, Swing, Variant, Vm};
pub use scenario::{
    Error, Gups, Lab, Machine, Memlat, Phase, Scenario, System, Thp, Tier, UnknownSystem, Workload,
};
