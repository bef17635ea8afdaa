//! Errors inside a VM, which the host prints.

use std::io;
use std::path::Path;

/// An error that ends a job.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// A system call failed.
    #[error("{what}: {source}")]
    Io {
        /// The operation and its file.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The kernel lacks a feature that the system under test needs.
    #[error("{what}; {hint}")]
    Unsupported {
        /// The missing feature.
        what: String,
        /// A hint for the user.
        hint: &'static str,
    },
    /// The emulator's plugin cannot distinguish the tiers.
    #[error(
        "the emulator's plugin cannot tell fast from slow memory: {0}; set DEMETER_QEMU to another \
         QEMU, 7.2 and 10.0 are known to work"
    )]
    Tiers(String),
    /// The workload violated its protocol or exited early.
    #[error("the workload {0}")]
    Workload(String),
    /// A host's guest failed.
    #[error("the guest {0}")]
    Guest(String),
    /// A program failed.
    #[error("{name}: the program {what}")]
    Program {
        /// Its name.
        name: String,
        /// The problem.
        what: String,
    },
    /// The user asked to stop.
    #[error("interrupted")]
    Interrupted,
    /// The host's order was not to continue.
    #[error("the host's order is {0:?} instead of \"go\"")]
    Order(Option<String>),
    /// The agent exited early.
    #[error("the agent ended early ({0}); see its log")]
    AgentDied(std::process::ExitStatus),
    /// The agent did not exit when asked.
    #[error("the agent did not end within {0:?} of SIGTERM; see its log")]
    AgentStuck(std::time::Duration),
    /// The agent does not answer.
    #[error("the agent's socket did not answer within {0:?} of its start; see its log")]
    AgentSilent(std::time::Duration),
}

impl Fault {
    /// Adds the operation and the file to an I/O error, for `map_err`.
    pub fn io(verb: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let what = format!("{verb} {}", path.as_ref().display());
        move |source| Self::Io { what, source }
    }
}
