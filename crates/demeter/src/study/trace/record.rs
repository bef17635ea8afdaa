//! `demeter trace record`: records a program's accesses by user-mode emulation.

use std::ffi::OsString;
use std::ops::ControlFlow;
use std::path::PathBuf;
use std::sync::atomic::AtomicBool;

use anyhow::{Context, Result};
use demeter_lab::{Recorder, Recording, RecordingEnd};
use demeter_sim::Access;
use demeter_sim::trace::{TraceEvent, Writer, Written};

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
    // Ctrl-C also ends the program, and the recording so far is kept.
    signals::stop_flag()?;
    let (program, program_args) = args.program.split_first().context("name a program")?;
    let writer = Writer::create(&args.output)?;
    let recording = Recorder::from_env()?.start(program.as_ref(), program_args)?;
    let recorded = write(recording, writer, args.limit, &AtomicBool::new(false))?;
    output::say(super::written(&args.output, recorded.written));
    if recorded.is_cut {
        output::say(format_args!(
            "the program was ended at --limit {}",
            args.limit
        ));
    } else if !recorded.end.status.success() {
        output::say(format_args!(
            "the program did not succeed ({}); its trace goes up to there",
            recorded.end.status
        ));
    }
    Ok(())
}

/// A written trace.
pub struct RecordedTrace {
    /// Its contents.
    pub written: Written,
    /// Whether the program was ended at the limit.
    pub is_cut: bool,
    /// How the program ended.
    pub end: RecordingEnd,
}

/// Writes a program's accesses to a trace, up to `limit`.
pub fn write(
    recording: Recording,
    mut writer: Writer,
    limit: u64,
    stop: &AtomicBool,
) -> Result<RecordedTrace> {
    let mut failed = None;
    let end = recording.run(stop, |recorded| {
        let instructions = [TraceEvent::Instructions(recorded.instructions)];
        let accesses = recorded.accesses().map(|(gva, is_store)| {
            TraceEvent::Access(match is_store {
                true => Access::store(gva),
                false => Access::load(gva),
            })
        });
        let pushed = writer.push(recorded.thread, instructions.into_iter().chain(accesses));
        if let Err(error) = pushed {
            failed = Some(error);
        } else if writer.accesses() < limit {
            return ControlFlow::Continue(());
        }
        ControlFlow::Break(())
    })?;
    if let Some(error) = failed {
        return Err(error.into());
    }
    let is_cut = writer.accesses() >= limit;
    if !is_cut && !end.was_ready {
        anyhow::bail!(
            "it ended before it was ready ({}){}",
            end.status,
            last_words(&end)
        );
    }
    Ok(RecordedTrace {
        written: writer.finish()?,
        is_cut,
        end,
    })
}

/// The program's last output, to append to a line.
pub fn last_words(end: &RecordingEnd) -> String {
    match end.last_lines.lines().next_back() {
        Some(last) => format!(": {last}"),
        None => String::new(),
    }
}
