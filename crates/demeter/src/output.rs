//! Writing to stdout without the panic that `println!` has for a reader that went away.

use std::io::{self, Write};

/// Writes `text` to stdout and flushes it. [`crate::error::report`] knows the broken pipe.
pub fn print(text: impl AsRef<[u8]>) -> io::Result<()> {
    let mut stdout = io::stdout().lock();
    stdout.write_all(text.as_ref())?;
    stdout.flush()
}
