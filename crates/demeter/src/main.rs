//! The `demeter` command: a thin layer over the library crates.
//!
//! Each subcommand is a module with an `Args` to parse and a function to call. An error is one line, `error: what: why;
//! hint`, with exit code 1; wrong usage ends with 2.

mod address_heat;
mod dirty_log;
mod error;
mod groups;
mod guest;
mod host;
mod logging;
mod names;
mod output;
mod probe;
mod replay;
mod shell;
mod signals;
mod simulated;
mod speeds;
#[cfg(feature = "study")]
mod study;
mod top;

use std::process::ExitCode;

use clap::{CommandFactory, FromArgMatches, Parser, Subcommand};

/// Manages fast and slow memory of virtual machines, and compares ways to do so.
#[derive(Parser)]
#[command(
    version,
    infer_subcommands = true,
    after_help = "\
Examples:
  sudo demeter probe                        says what works on this machine
  sudo demeter guest --all                  manages all large processes of this guest
  sudo demeter host --config host.toml      sizes the VMs of this host
  demeter run scenarios/ci.toml --on sim    compares two systems in a second (package demeter-lab)
`demeter help COMMAND` describes a command."
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
    #[cfg(feature = "study")]
    #[command(flatten)]
    Study(study::Command),
    /// Print a shell's completion script
    Completions(shell::CompletionsArgs),
    /// Print the manual page, or write the pages of all subcommands to a folder
    Man(shell::ManArgs),
}

fn main() -> ExitCode {
    match run() {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => error::report(&error),
    }
}

fn run() -> anyhow::Result<()> {
    let command = groups::in_groups(Cli::command());
    groups::check_is_here(&command, std::env::args_os().skip(1))?;
    let cli = Cli::from_arg_matches(&command.get_matches()).unwrap_or_else(|error| error.exit());
    logging::start(cli.verbose)?;
    match cli.command {
        Command::Guest(args) => guest::guest(args),
        Command::Host(args) => host::host(args),
        Command::Top(args) => top::top(args),
        Command::Probe(args) => probe::probe(&args),
        Command::DirtyLog(args) => dirty_log::dirty_log(&args),
        Command::Replay(args) => replay::replay(&args),
        #[cfg(feature = "study")]
        Command::Study(command) => command.run(),
        Command::Completions(args) => shell::completions(&args, &mut Cli::command()),
        Command::Man(args) => shell::man(&args, Cli::command()),
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
