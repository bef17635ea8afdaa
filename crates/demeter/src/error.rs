//! Reports a failed command: one line on stderr and an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use demeter_outcome::one_line;

use crate::output::ReaderGone;
#[cfg(feature = "study")]
use crate::study;

/// Prints the error in one line and returns the exit code.
///
/// A closed output (`demeter report x.json | head -1`) is not a failure.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<ReaderGone>() {
        return ExitCode::SUCCESS;
    }
    // If stderr is closed, too, the error cannot be reported.
    let _ = writeln!(io::stderr(), "error: {}", one_line(error.as_ref()));
    match is_interrupted(error) {
        // The exit code that shells expect after SIGINT.
        true => ExitCode::from(130),
        false => ExitCode::FAILURE,
    }
}

fn is_interrupted(error: &anyhow::Error) -> bool {
    #[cfg(feature = "study")]
    if study::is_interrupted(error) {
        return true;
    }
    matches!(
        error.downcast_ref(),
        Some(demeter_dirtylog::Error::Interrupted)
    )
}
