//! How a failed command ends: one line on stderr and an exit code.

use std::io::{self, Write};
use std::process::ExitCode;

use demeter_sim::SimError;

use crate::output::ReaderGone;

/// Says what went wrong in one line and returns the exit code.
///
/// A reader of our output that went away (`demeter report x.json | head -1`) is not a failure.
pub fn report(error: &anyhow::Error) -> ExitCode {
    if error.is::<ReaderGone>() {
        return ExitCode::SUCCESS;
    }
    // Nobody is left to tell when stderr is gone too.
    let _ = writeln!(io::stderr(), "error: {}", one_line(error));
    let interrupted = matches!(error.downcast_ref(), Some(demeter_lab::Error::Interrupted))
        || matches!(error.downcast_ref(), Some(SimError::Interrupted));
    match interrupted {
        // What a shell expects of a program that SIGINT ended.
        true => ExitCode::from(130),
        false => ExitCode::FAILURE,
    }
}

/// The chain of causes, joined by colons. A cause that its parent's text already contains is not
/// said twice, and line breaks in a message become blanks.
fn one_line(error: &anyhow::Error) -> String {
    let mut line = String::new();
    for cause in error.chain() {
        let text = cause.to_string();
        let text = text.lines().map(str::trim).collect::<Vec<_>>().join(" ");
        if line.is_empty() {
            line = text;
        } else if !line.contains(&text) {
            line.push_str(": ");
            line.push_str(&text);
        }
    }
    line
}

#[cfg(test)]
mod tests {
    use anyhow::{Context, anyhow};

    use super::*;

    #[test]
    fn causes_are_joined_once_and_on_one_line() {
        let error = Err::<(), _>(anyhow!("disk\n  full"))
            .context("cannot write a: disk full")
            .context("report")
            .unwrap_err();
        assert_eq!(one_line(&error), "report: cannot write a: disk full");
        let error = Err::<(), _>(anyhow!("why")).context("what").unwrap_err();
        assert_eq!(one_line(&error), "what: why");
    }
}
