//! Errors of workloads.

use std::io;

/// The reason that a workload cannot run or ended early.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// Contradictory arguments.
    #[error("{0}")]
    Arguments(String),
    /// A system call failed.
    #[error("{what}: {source}")]
    System {
        /// The operation, and a hint if there is one.
        what: String,
        /// The system's error.
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
        /// Wrong words, plus one if updates are missing.
        errors: u64,
    },
    /// A kernel's result differs from an earlier one.
    #[error("{0}: memory lost data")]
    Wrong(String),
    /// A server sent an unexpected answer.
    #[error("the server {0}")]
    Server(String),
    /// A SIGTERM or SIGINT arrived, which is not a failure.
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

    /// The exit code: 2 for wrong arguments, 0 for a requested stop, otherwise 1.
    pub fn exit_code(&self) -> u8 {
        match self {
            Self::Arguments(_) => 2,
            Self::Stopped => 0,
            _ => 1,
        }
    }
}
