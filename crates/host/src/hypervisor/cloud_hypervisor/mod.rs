//! Cloud Hypervisor, by the REST API on its Unix socket (`--api-socket path=..`).
//!
//! [`Info`] reads what it says of a VM, and tells from that where the guest has its memory. Where that is in
//! the VMM's process it does not say: `memory.rs` finds the memfds there, by their name and size.
//! [`CloudHypervisor`] asks, and looks now and then whether something has changed, because nobody tells.
//!
//! # Weaker than QEMU's monitor, and why it is safe all the same
//! - A reset is noticed up to half a second late. But a reset, a restore and a received migration make all
//!   memory anew, in other memfds (Vmm::vm_reboot and create_ram_region in Cloud Hypervisor's tree): what is
//!   punched by an old map until then belongs to nobody. So memory must be in memfds, and a zone
//!   with a file is refused.
//! - That a VM was stopped and went on between two looks is not noticed. Its memory is the same then:
//!   a snapshot is never loaded into a VM that is there.
//! - How much a guest has of a zone's virtio-mem is not told, only what it was asked to have. So
//!   [`MemoryDevice`](super::MemoryDevice)s are refused.
//! - Which memfd is which region is not told. Regions of the same size are refused; a balloon's
//!   proof has to agree with what was found before anything is punched.

mod connection;
pub mod info;
mod memory;
#[cfg(test)]
mod tests;

use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_http::AskError;
use demeter_policy::Pid;
use demeter_proto::shown;

use super::HypervisorError;
pub use connection::{CloudHypervisor, Limits};
pub use info::Info;

/// Why Cloud Hypervisor cannot be talked to, or a VM of it cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum CloudHypervisorError {
    /// Nobody listens, or we may not connect.
    #[error(
        "cannot connect to Cloud Hypervisor at {path}: {source}; start the VM with --api-socket path={path}"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The listener belongs to somebody else.
    #[error(
        "the socket {path} belongs to user {uid}, who is neither root nor us; if Cloud Hypervisor runs as \
         that user, set owner_uid = {uid} for this VM"
    )]
    Foreign {
        /// The socket.
        path: PathBuf,
        /// The user behind it.
        uid: u32,
    },
    /// The listener is not the one that has the memory.
    #[error(
        "the socket {path} was opened by process {opener}, but Cloud Hypervisor is process {vmm}; have it \
         open the socket itself (--api-socket path={path}), in our PID namespace"
    )]
    NotItself {
        /// The socket.
        path: PathBuf,
        /// Who opened it.
        opener: Pid,
        /// What it says of itself.
        vmm: i64,
    },
    /// No answer comes in time.
    #[error(
        "{vmm} does not answer {question} within {after:?}; is it busy with a snapshot, or stopped?"
    )]
    Silent {
        /// Which.
        vmm: String,
        /// What it was asked.
        question: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// It listens no more, or somebody else does.
    #[error("{vmm} is not there any more: {why}")]
    Gone {
        /// Which.
        vmm: String,
        /// What is there instead.
        why: String,
    },
    /// It says no.
    #[error("{vmm} refuses {question}: {words}")]
    Refused {
        /// Which.
        vmm: String,
        /// What it was asked.
        question: &'static str,
        /// Its words.
        words: String,
    },
    /// It answers something else than its API's description says.
    #[error("{vmm} answers {question} with something unknown: {what}")]
    Answer {
        /// Which.
        vmm: String,
        /// What it was asked.
        question: &'static str,
        /// What is wrong with it.
        what: String,
    },
    /// The VM does not run, or is not made so that it can be managed.
    #[error("the VM of {vmm} cannot be managed: {why}")]
    Vm {
        /// Which.
        vmm: String,
        /// The fault, and how to repair it.
        why: String,
    },
}

impl CloudHypervisorError {
    fn of_answer(path: &Path, question: &'static str, after: Duration, error: AskError) -> Self {
        let vmm = at(path);
        match error {
            AskError::Io(error) if error.kind() == io::ErrorKind::TimedOut => Self::Silent {
                vmm,
                question,
                after,
            },
            AskError::Io(error) => Self::Gone {
                vmm,
                why: error.to_string(),
            },
            AskError::Status { status, body } => Self::Refused {
                vmm,
                question,
                words: match shown(body.trim().lines().next().unwrap_or_default()) {
                    words if words.is_empty() => format!("HTTP status {status}"),
                    words => words.chars().take(200).collect(),
                },
            },
            error @ (AskError::NotHttp | AskError::TooLong(_)) => Self::Answer {
                vmm,
                question,
                what: error.to_string(),
            },
        }
    }
}

impl From<CloudHypervisorError> for HypervisorError {
    fn from(error: CloudHypervisorError) -> Self {
        let text = error.to_string();
        match error {
            CloudHypervisorError::Silent { .. } => Self::Timeout(text),
            CloudHypervisorError::Gone { .. } => Self::Gone(text),
            _ => Self::Failed(text),
        }
    }
}

/// The name of a VMM by its socket.
fn at(path: &Path) -> String {
    format!("Cloud Hypervisor at {}", path.display())
}
