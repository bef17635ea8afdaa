//! `demeter trace`: recorded programs for the simulator.

mod convert;
mod info;
mod record;
mod source;
mod stand_in;

use anyhow::Result;
use clap::Subcommand;
use demeter_sim::trace::Written;

pub use stand_in::stand_in;

/// Arguments of `demeter trace`.
#[derive(clap::Args)]
pub struct Args {
    #[command(subcommand)]
    command: Command,
}

#[derive(Subcommand)]
enum Command {
    /// Run a program under an emulator and record all its memory accesses
    Record(record::Args),
    /// Describe a trace, and check that it is complete
    Info(info::Args),
    /// Convert a trace of valgrind's lackey or of ChampSim's tracer
    Convert(convert::Args),
}

/// Runs the subcommand.
pub fn trace(args: &Args) -> Result<()> {
    match &args.command {
        Command::Record(args) => record::record(args),
        Command::Info(args) => info::info(args),
        Command::Convert(args) => convert::convert(args),
    }
}

/// One line about a new trace.
fn written(path: &std::path::Path, written: Written) -> String {
    let Written {
        accesses,
        threads,
        file_bytes,
    } = written;
    let each = file_bytes as f64 / accesses as f64;
    let threads = match threads {
        1 => "1 thread".into(),
        n => format!("{n} threads"),
    };
    format!(
        "{}: {accesses} accesses of {threads} in {file_bytes} bytes, {each:.2} each",
        path.display()
    )
}
