//! Why a session with a VM ends.

use std::io;

use demeter_policy::Pid;

use crate::hard_limit::HardLimitError;
use crate::history::HistoryError;
use crate::hypervisor::HypervisorError;
use crate::memory::MemoryError;
use crate::outside::Stuck;
use crate::provisioner::ProvisionError;

/// Reason why a session has ended.
#[derive(Debug)]
pub(super) enum End {
    /// The controller has dropped its end of a channel.
    Stopped,
    /// The VM cannot be managed now.
    Trouble(Trouble),
}

#[derive(Debug, thiserror::Error)]
pub(super) enum Trouble {
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    #[error(transparent)]
    Memory(#[from] MemoryError),
    #[error(transparent)]
    Provision(#[from] ProvisionError),
    #[error(transparent)]
    History(#[from] HistoryError),
    #[error(transparent)]
    HardLimit(#[from] HardLimitError),
    #[error(transparent)]
    Stuck(#[from] Stuck),
    #[error(
        "its process {pid} runs VM {other}, which is managed already; give each VM its own sockets, and name \
         each domain once"
    )]
    Shared { pid: Pid, other: String },
    #[error("cannot watch the hypervisor's process: {0}")]
    Process(#[from] io::Error),
}

impl<T: Into<Trouble>> From<T> for End {
    fn from(trouble: T) -> Self {
        Self::Trouble(trouble.into())
    }
}

/// Reason to stop managing the VM in its present setup.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Cut {
    /// The connection to the hypervisor has ended.
    Gone,
    /// The VM's setup may have changed and must be inspected again.
    Changed,
    /// The guest's answer contradicts the known setup. Like `Changed`; the guest is judged
    /// afterwards.
    Doubt,
    /// Managing the VM by histories has failed and the failure was reported.
    Failed,
}
