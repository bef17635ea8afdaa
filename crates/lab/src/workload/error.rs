//! Why a workload ends early.

use std::io;

/// Why a workload cannot run or ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Arguments that make no sense together.
    #[error("{0}")]
    Arguments(String),
    /// The system refused something.
    #[error("{what}: {source}")]
    System {
        /// The attempt, and how to repair it where that is known.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Standard input ended while `--hold` waited for a line.
    #[error("standard input was closed while --hold waited for a line")]
    HoldClosed,
    /// Words with a wrong tag, or updates that are missing.
    #[error("{errors} errors in {words} words: memory lost data")]
    Corrupt {
        /// Words checked.
        words: u64,
        /// Wrong words, plus one when the updates do not add up.
        errors: u64,
    },
    /// A kernel's result that differs from what it was before.
    #[error("{0}: memory lost data")]
    Wrong(String),
    /// A server that says what it should not.
    #[error("the server {0}")]
    Server(String),
    /// SIGTERM or SIGINT came: not a failure.
    #[error("stopped by a signal")]
    Stopped,
}

impl Error {
    /// An [`Error::System`] from the system's last error.
    pub(crate) fn last_os(what: impl Into<String>) -> Self {
        Self::System {
            what: what.into(),
            source: io::Error::last_os_error(),
        }
    }

    /// The exit code that says this: 2 for wrong arguments, 0 for a wanted stop, else 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Arguments(_) => 2,
            Self::Stopped => 0,
            _ => 1,
        }
    }
}
