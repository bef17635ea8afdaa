//! Writes to stdout and stderr without panics when the reader is gone, unlike `println!` and `eprintln!`.

use std::fmt;
use std::io::{self, Write};
use std::time::Duration;

use anyhow::Context;

/// The reader of our output has closed it. The command cleans up and returns this error; the exit code is 0.
#[derive(Debug)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("standard output is closed")
    }
}

impl std::error::Error for ReaderGone {}

/// Interval of progress messages.
pub const SAY_EVERY: Duration = Duration::from_secs(5);

/// Writes `text` to stdout and flushes it.
pub fn print(text: impl AsRef<[u8]>) -> anyhow::Result<()> {
    let mut stdout = io::stdout().lock();
    match stdout
        .write_all(text.as_ref())
        .and_then(|()| stdout.flush())
    {
        Err(error) if error.kind() == io::ErrorKind::BrokenPipe => Err(ReaderGone.into()),
        other => other.context("cannot write to standard output"),
    }
}

/// Prints a line on stderr. A closed terminal is no error, because the command still has to clean up.
pub fn say(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
