//! Cloud Hypervisor, through the REST API on its Unix socket (`--api-socket path=..`).
//!
//! [`Info`] parses its description of a VM and derives the guest-physical layout. The API does not
//! report where memory lies in its process: `memory.rs` finds the memfds there by name and size.
//! The API sends no events, so [`CloudHypervisor`] polls for changes.
//!
//! # Weaker than QEMU's monitor, and why it is safe
//! - A reset is noticed up to half a second late. But a reset, a restore and a received migration
//!   put all memory into new memfds (Vmm::vm_reboot and create_ram_region in Cloud Hypervisor's
//!   tree). Until then, holes go into old memfds that no VM uses. So memory must be in memfds, and
//!   a zone with a file is refused.
//! - A stop and resume between two polls is not noticed. Memory is unchanged then, because a
//!   snapshot is never loaded into a running VM.
//! - The plugged size of a zone's virtio-mem is not reported, only the requested size. So
//!   [`MemoryDevice`](super::MemoryDevice)s are refused.
//! - The memfd of a region is not reported. Regions of equal size are refused, and the balloon's
//!   proof must confirm the match before anything is punched.

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
pub use connection::{CloudHypervisor, Timeouts};
pub use info::Info;

/// Reason why Cloud Hypervisor cannot be used, or a VM cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum CloudHypervisorError {
    /// The socket cannot be connected to.
    #[error(
        "cannot connect to Cloud Hypervisor at {path}: {source}; start the VM with --api-socket path={path}"
    )]
    Connect {
        /// The socket.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The listener runs as an untrusted user.
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
    /// The listener is not the process that has the memory.
    #[error(
        "the socket {path} was opened by process {opener}, but Cloud Hypervisor is process {vmm}; have it \
         open the socket itself (--api-socket path={path}), in our PID namespace"
    )]
    NotItself {
        /// The socket.
        path: PathBuf,
        /// The process that opened the socket.
        opener: Pid,
        /// The process id that it reports.
        vmm: i64,
    },
    /// No answer came in time.
    #[error(
        "{vmm} does not answer {question} within {after:?}; is it busy with a snapshot, or stopped?"
    )]
    Silent {
        /// The hypervisor.
        vmm: String,
        /// The question.
        question: &'static str,
        /// How long we waited.
        after: Duration,
    },
    /// The process does not listen any more, or another one does.
    #[error("{vmm} is not there any more: {why}")]
    Gone {
        /// The hypervisor.
        vmm: String,
        /// The other listener, or its absence.
        why: String,
    },
    /// It refused.
    #[error("{vmm} refuses {question}: {words}")]
    Refused {
        /// The hypervisor.
        vmm: String,
        /// The question.
        question: &'static str,
        /// Its message.
        words: String,
    },
    /// Its answer does not match the API's description.
    #[error("{vmm} answers {question} with something unknown: {what}")]
    Answer {
        /// The hypervisor.
        vmm: String,
        /// The question.
        question: &'static str,
        /// The fault of the answer.
        what: String,
    },
    /// The VM is not running or not set up to be managed.
    #[error("the VM of {vmm} cannot be managed: {why}")]
    Vm {
        /// The hypervisor.
        vmm: String,
        /// The fault and its fix.
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

/// The name of a Cloud Hypervisor process by its socket.
fn at(path: &Path) -> String {
    format!("Cloud Hypervisor at {}", path.display())
}
