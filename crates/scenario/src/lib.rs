//! Scenarios: machine, workload, and systems to compare.
//!
//! A scenario is a TOML file. It runs in every place that has its systems.

mod catalogue;
mod check;
mod cost_percent;
mod design;
mod dirty_logging;
mod fault;
mod file;
mod grid;
mod node;
mod provision;
mod provision_check;
mod random;
mod result;
pub mod rng;
mod scenario;
#[cfg(feature = "schema")]
mod schema;
mod settings;
mod tlb;
mod translation;
mod vary;
mod workload;

pub use catalogue::{Color, Place, Row, System, UnknownSystem};
pub use cost_percent::CostPercent;
pub use design::Design;
pub use dirty_logging::{DirtyLogging, Isa, LoggedTask, MmuLock, Split};
pub use file::table_from_text;
pub use grid::{Axis, Grid, NoAxis, Point};
pub use node::MachineNode;
pub use provision::{
    Crashes, Provision, Provisioner, ResizeCycle, RivalPolicy, Soak, Through, Variant, Vm,
};
pub use result::estimate;
pub use scenario::{
    Clock, Cpu, Curve, Error, Lab, Machine, MachinePlace, SamplingUnit, Scenario, Sim, Thp, Tier,
};
pub use settings::Settings;
pub use tlb::{Geometry, TlbSizes};
pub use translation::{Pages, Translation, TranslationMode};
pub use vary::{Case, Published};
pub use workload::{
    App, Cgroup, Figure, Gups, Memlat, Mix, MixAccesses, MixPart, Number, Part, Pattern, Phase,
    Program, Programs, Ready, Several, Silo, SiloMix, Trace, Workload, Zipf,
};
