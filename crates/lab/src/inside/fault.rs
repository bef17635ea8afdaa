//! What can go wrong inside a VM; the host prints it.

use std::io;
use std::path::Path;

/// Why a job failed.
#[derive(Debug, thiserror::Error)]
pub enum Fault {
    /// The kernel refused something.
    #[error("{what}: {source}")]
    Io {
        /// What was tried, on which file.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// This kernel lacks what the system under test needs.
    #[error("{what}; {hint}")]
    Unsupported {
        /// What is missing.
        what: String,
        /// What the person can do.
        hint: &'static str,
    },
    /// The emulator's plugin cannot tell the tiers apart.
    #[error(
        "the emulator's plugin cannot tell fast from slow memory: {0}; set DEMETER_QEMU to another \
         QEMU, 7.2 and 10.0 are known to work"
    )]
    Tiers(String),
    /// The workload broke its protocol or ended early.
    #[error("the workload {0}")]
    Workload(String),
    /// A host's guest went wrong.
    #[error("the guest {0}")]
    Guest(String),
    /// A program went wrong.
    #[error("{name}: the program {what}")]
    Program {
        /// Its name.
        name: String,
        /// What is wrong with it.
        what: String,
    },
    /// The person asked us to stop.
    #[error("interrupted")]
    Interrupted,
    /// The host said something else than to go on.
    #[error("the host's order is {0:?} instead of \"go\"")]
    Order(Option<String>),
    /// The agent ended before it was told to.
    #[error("the agent ended early ({0}); see its log")]
    AgentDied(std::process::ExitStatus),
    /// The agent did not end when it was told to.
    #[error("the agent did not end within {0:?} of SIGTERM; see its log")]
    AgentStuck(std::time::Duration),
    /// The agent does not answer.
    #[error("the agent's socket did not answer within {0:?} of its start; see its log")]
    AgentSilent(std::time::Duration),
}

impl Fault {
    /// For `map_err`: names the operation and the file.
    pub fn io(verb: &'static str, path: impl AsRef<Path>) -> impl FnOnce(io::Error) -> Self {
        let what = format!("{verb} {}", path.as_ref().display());
        move |source| Self::Io { what, source }
    }
}
