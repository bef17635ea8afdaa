//! The `demeter` command: a thin layer over the library crates.
//!
//! Each subcommand is a module with an `Args` to parse and a function to call. An error is one line, `error: what: why;
//! hint`, with exit code 1; wrong usage ends with 2.

mod compare;
mod dirty_log;
mod error;
mod guest;
mod host;
mod logging;
mod model;
mod names;
mod output;
mod probe;
mod progress;
mod replay;
mod report;
mod run;
mod shell;
mod signals;
mod sweep;
mod systems;
mod top;
mod trace;
mod tune;

use std::process::ExitCode;

use clap::{CommandFactory, Parser, Subcommand};

/// Manages fast and slow memory of virtual machines, and compares ways to do so.
#[derive(Parser)]
#[command(
    version,
    infer_subcommands = true,
    after_help = "\
To operate: guest (in a VM), host (on its host), top, probe, dirty-log, replay
To study:   run, report, compare, sweep, tune, systems, model, trace

Examples:
  demeter run scenarios/ci.toml --on sim    compares two systems in a second
  sudo demeter probe                        says what works on this machine
  sudo demeter guest --all                  manages all large processes of this guest
  sudo demeter host --config host.toml      sizes the VMs of this host"
)]
struct Cli {
    /// Log more to stderr: -v events, -vv details; RUST_LOG takes precedence
    #[arg(short, long, global = true, action = clap::ArgAction::Count)]
    verbose: u8,

    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Keep the hot memory of processes on this machine's fast node
    Guest(guest::Args),
    /// Divide this machine's fast and slow memory between its VMs
    Host(host::Args),
    /// Show the VMs of this host, or the processes of this guest, live
    Top(top::Args),
    /// Check what works on this machine, and how to fix the rest
    Probe(probe::Args),
    /// Measure what dirty logging, as in a live migration, costs a guest on this host
    DirtyLog(dirty_log::Args),
    /// Replay an agent's recording, and compare the decisions
    Replay(replay::Args),
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
    /// Record programs for the simulator, or inspect recordings
    Trace(trace::Args),
    /// Print a shell's completion script
    Completions(shell::CompletionsArgs),
    /// Print the manual page, or write the pages of all subcommands to a folder
    Man(shell::ManArgs),
    /// First process of a lab VM
    #[command(hide = true)]
    LabInit,
}

fn main() -> ExitCode {
    let cli = Cli::parse();
    match logging::start(cli.verbose).and_then(|()| dispatch(cli.command)) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error::report(&error),
    }
}

fn dispatch(command: Command) -> anyhow::Result<()> {
    match command {
        Command::Run(args) => run::run(args),
        Command::Guest(args) => guest::guest(args),
        Command::Replay(args) => replay::replay(&args),
        Command::Host(args) => host::host(args),
        Command::Top(args) => top::top(args),
        Command::Probe(args) => probe::probe(&args),
        Command::DirtyLog(args) => dirty_log::dirty_log(&args),
        Command::Report(args) => report::report(&args),
        Command::Sweep(args) => sweep::sweep(&args),
        Command::Tune(args) => tune::tune(args),
        Command::Systems(args) => systems::systems(&args),
        Command::Compare(args) => compare::compare(&args),
        Command::Model(args) => model::model(&args),
        Command::Trace(args) => trace::trace(&args),
        Command::Completions(args) => shell::completions(&args, &mut Cli::command()),
        Command::Man(args) => shell::man(&args, Cli::command()),
        Command::LabInit => demeter_lab::inside::init().map_err(Into::into),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_command_line_is_well_formed() {
        Cli::command().debug_assert();
    }
}
