//! The `demeter` command.

mod run;

use std::process::ExitCode;

use clap::{Parser, Subcommand};

/// Tiered memory for virtual machines.
#[derive(Debug, Parser)]
#[command(version, about)]
struct Cli {
    #[command(subcommand)]
    command: Command,
}

#[derive(Debug, Subcommand)]
enum Command {
    /// Run a scenario under several systems and compare them
    Run(run::RunArgs),
    /// First process of a lab VM
    #[command(hide = true)]
    LabInit,
}

fn main() -> ExitCode {
    tracing_subscriber::fmt()
        .with_writer(std::io::stderr)
        .with_env_filter(
            tracing_subscriber::EnvFilter::try_from_default_env().unwrap_or_else(|_| "info".into()),
        )
        .init();
    let outcome = match Cli::parse().command {
        Command::Run(args) => run::run(args),
        Command::LabInit => demeter_lab::inside::init().map_err(Into::into),
    };
    match outcome {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            eprintln!("demeter: {error:#}");
            match error.downcast_ref() {
                // What a shell expects of a program that SIGINT ended.
                Some(demeter_lab::Error::Interrupted) => ExitCode::from(130),
                _ => ExitCode::FAILURE,
            }
        }
    }
}
