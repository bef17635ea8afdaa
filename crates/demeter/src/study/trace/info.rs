//! `demeter trace info`: describes a trace.

use std::fmt::Write;
use std::path::PathBuf;

use anyhow::Result;
use demeter_sim::trace::{Frame, Header, Reader, Span};

use crate::output;

/// Maximum number of regions listed, the largest first.
const LISTED: usize = 12;

/// Arguments of `demeter trace info`.
#[derive(clap::Args)]
pub struct Args {
    /// The trace
    trace: PathBuf,
}

#[derive(Default)]
struct Counts {
    frames: u64,
    loads: u64,
    stores: u64,
    instructions: u64,
}

/// Reads the whole trace and describes it.
pub fn info(args: &Args) -> Result<()> {
    let mut reader = Reader::open(&args.trace)?;
    let mut counts = Counts::default();
    let mut frame = Frame::default();
    while reader.next_frame(&mut frame)?.is_some() {
        let stores = frame.accesses.iter().filter(|a| a.is_store()).count();
        counts.frames += 1;
        counts.stores += stores as u64;
        counts.loads += (frame.accesses.len() - stores) as u64;
        counts.instructions = counts.instructions.saturating_add(frame.instructions);
    }
    output::print(text(reader.header(), &counts))
}

fn text(header: &Header, counts: &Counts) -> String {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let total: u64 = header.regions.iter().map(|span| span.bytes).sum();
    let mut text = format!(
        "threads       {}\nloads         {}\nstores        {}\ninstructions  {}\nframes        {}\n\
         regions       {}, {:.1} MiB\n",
        header.threads,
        counts.loads,
        counts.stores,
        counts.instructions,
        counts.frames,
        header.regions.len(),
        mib(total),
    );
    let mut largest: Vec<Span> = header.regions.clone();
    largest.sort_by_key(|span| std::cmp::Reverse(span.bytes));
    for span in largest.iter().take(LISTED) {
        // Writing to a String cannot fail.
        let _ = writeln!(text, "  {:#16x}  {:12.1} MiB", span.base.0, mib(span.bytes));
    }
    if let Some(more) = largest.len().checked_sub(LISTED + 1) {
        let _ = writeln!(text, "  and {} smaller ones", more + 1);
    }
    text
}
