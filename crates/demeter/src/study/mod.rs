//! The commands that study designs: in the lab, on the simulator, and from their results.
//!
//! They are the feature `study`. Without it the command is what production needs, and links none of lab, simulator
//! and report.

mod compare;
mod model;
mod progress;
mod report;
mod run;
mod sweep;
mod systems;
mod trace;
mod tune;

use demeter_sim::SimError;

/// A command of this group.
#[derive(clap::Subcommand)]
pub enum Command {
    /// Run a scenario under several systems and compare them
    Run(run::Args),
    /// Show a result file as a table, a page or a picture
    Report(report::Args),
    /// Compare two results of one scenario, case by case
    Compare(compare::Args),
    /// Run a scenario over a grid of its parameters on the simulator
    Sweep(sweep::Args),
    /// Find the best settings of a rival for a scenario
    Tune(tune::Args),
    /// List the systems that scenarios can compare, and where each runs
    Systems(systems::Args),
    /// Predict from counters what direct segments would save a program
    Model(model::Args),
    /// Record programs for the simulator, or look at such recordings
    Trace(trace::Args),
    /// First process of a lab VM
    #[command(hide = true)]
    LabInit,
}

impl Command {
    /// Does it.
    pub fn run(self) -> anyhow::Result<()> {
        match self {
            Self::Run(args) => run::run(args),
            Self::Report(args) => report::report(&args),
            Self::Compare(args) => compare::compare(&args),
            Self::Sweep(args) => sweep::sweep(&args),
            Self::Tune(args) => tune::tune(args),
            Self::Systems(args) => systems::systems(&args),
            Self::Model(args) => model::model(&args),
            Self::Trace(args) => trace::trace(&args),
            Self::LabInit => demeter_lab::inside::init().map_err(Into::into),
        }
    }
}

/// Whether a signal ended the lab or the simulator.
pub fn is_interrupted(error: &anyhow::Error) -> bool {
    matches!(error.downcast_ref(), Some(demeter_lab::Error::Interrupted))
        || matches!(error.downcast_ref(), Some(SimError::Interrupted))
}
