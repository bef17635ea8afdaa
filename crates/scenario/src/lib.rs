//! Scenarios: which machine, which workload, which systems to compare.
//!
//! A scenario is a TOML file. The same file runs on every place that knows its systems.

mod check;
mod grid;
mod scenario;
mod workload;

pub use grid::{Axis, Grid, NoAxis, Point, plain};
pub use scenario::{
    Cpu, Error, Gups, Lab, Machine, Memlat, Scenario, Sim, System, Thp, Tier, UnknownSystem,
    Workload,
};
pub use workload::{App, Silo, SiloMix, Trace};
