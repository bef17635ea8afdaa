//! Writing to stdout and stderr without the panic that `println!` and `eprintln!` have for a reader that
//! went away.

use std::fmt;
use std::io::{self, Write};

use anyhow::Context;

/// Whoever read our output wants no more of it. A command that gets this cleans up and passes it
/// on; the exit code is 0.
#[derive(Debug)]
pub struct ReaderGone;

impl fmt::Display for ReaderGone {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str("nobody reads standard output")
    }
}

impl std::error::Error for ReaderGone {}

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

/// Tells a person at the terminal something, on standard error. That the terminal has gone stops
/// nothing: what runs still has to clean up.
pub fn say(line: impl fmt::Display) {
    let _ = writeln!(io::stderr(), "{line}");
}
