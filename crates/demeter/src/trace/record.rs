//! `demeter trace record`: a program's accesses, by user-mode emulation.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;

use anyhow::{Context, Result};
use demeter_lab::Recorder;
use demeter_sim::Access;
use demeter_sim::trace::{Event, Writer};

use crate::output;
use crate::signals;

/// Arguments of `demeter trace record`.
#[derive(clap::Args)]
pub struct Args {
    /// The trace to write
    #[arg(short, long, value_name = "FILE", default_value = "program.trace")]
    output: PathBuf,
    /// End the program after this many accesses
    #[arg(long, value_name = "N", default_value_t = 1_000_000_000)]
    limit: u64,
    /// The program and its arguments: an x86-64 program for Linux
    #[arg(required = true, trailing_var_arg = true, value_name = "PROGRAM")]
    program: Vec<OsString>,
}

/// Runs the program and writes its trace.
pub fn record(args: &Args) -> Result<()> {
    // Ctrl-C is for the program, too: it ends, and what was recorded is kept.
    signals::stop_flag()?;
    let mut writer = Writer::create(&args.output)?;
    let (program, program_args) = args.program.split_first().context("name a program")?;
    let recording = Recorder::from_env()?.start(program.as_ref(), program_args)?;
    let mut failed = None;
    let status = recording.run(|recorded| {
        let instructions = [Event::Instructions(recorded.instructions)];
        let accesses = recorded.accesses().map(|(gva, is_store)| {
            Event::Access(match is_store {
                true => Access::store(gva),
                false => Access::load(gva),
            })
        });
        let pushed = writer.push(recorded.thread, instructions.into_iter().chain(accesses));
        if let Err(error) = pushed {
            failed = Some(error);
        } else if writer.accesses() < args.limit {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break(())
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let limited = writer.accesses() >= args.limit;
    let written = writer.finish()?;
    output::say(super::written(&args.output, written));
    if limited {
        output::say(format_args!(
            "the program was ended at --limit {}",
            args.limit
        ));
    } else if !status.success() {
        output::say(format_args!(
            "the program did not succeed ({status}); its trace goes up to there"
        ));
    }
    Ok(())
}
