//! `demeter trace convert`: converts other tools' recordings to traces.

use std::path::PathBuf;

use anyhow::Result;
use clap::ValueEnum;
use demeter_sim::trace::{self, TraceEvent, Writer};

use super::source::Source;
use crate::output;

/// Arguments of `demeter trace convert`.
#[derive(clap::Args)]
pub struct Args {
    /// Format of the input
    #[arg(long, value_enum)]
    from: Format,
    /// The recording; .xz and .gz are decompressed by xz and gzip
    input: PathBuf,
    /// The trace to write
    output: PathBuf,
}

#[derive(Debug, Clone, Copy, ValueEnum)]
enum Format {
    /// valgrind --tool=lackey --trace-mem=yes --log-file=INPUT
    Lackey,
    /// ChampSim's tracer: 64 bytes for each instruction
    Champsim,
}

/// Writes the trace.
pub fn convert(args: &Args) -> Result<()> {
    let mut source = Source::open(&args.input)?;
    let mut writer = Writer::create(&args.output)?;
    // Neither format distinguishes threads.
    let found = |events: &[TraceEvent]| writer.push(0, events.iter().copied());
    match args.from {
        Format::Lackey => trace::lackey(source.reader(), &args.input, found)?,
        Format::Champsim => trace::champsim(source.reader(), &args.input, found)?,
    }
    source.finish()?;
    let written = writer.finish()?;
    output::say(super::written(&args.output, written));
    Ok(())
}
