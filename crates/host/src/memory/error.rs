//! Reasons why a VM's memory cannot be managed.

use std::io;
use std::path::PathBuf;

use demeter_policy::ByteCount;

use super::files::FILES_MAX;
use super::map::Overlap;
use super::process::ProcessError;
use crate::hypervisor::HypervisorError;
use crate::outside::{FileId, Stuck};

/// Reason why a VM's memory cannot be managed.
#[derive(Debug, thiserror::Error)]
pub enum MemoryError {
    /// The hypervisor did not answer or refused.
    #[error(transparent)]
    Hypervisor(#[from] HypervisorError),
    /// A memory backend cannot be used.
    #[error("memory backend {memdev:?} of {hypervisor}: {why}")]
    Backend {
        /// The hypervisor.
        hypervisor: String,
        /// The backend's id.
        memdev: String,
        /// The backend's fault.
        why: BackendError,
    },
    /// A device pins memory that would be punched.
    #[error(
        "device {device:?} of {hypervisor} keeps guest memory pinned; a VM with such a device cannot be ballooned"
    )]
    Pinned {
        /// The hypervisor.
        hypervisor: String,
        /// The device.
        device: String,
    },
    /// The hypervisor's and the kernel's data contradict each other.
    #[error("the memory map of {hypervisor} contradicts itself: {source}")]
    Overlap {
        /// The hypervisor.
        hypervisor: String,
        /// The overlap.
        source: Overlap,
    },
    /// The search takes too long.
    #[error(transparent)]
    Stuck(#[from] Stuck),
}

/// Reason why a memory backend cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BackendError {
    /// There is no backend of this name.
    #[error("there is none; there are: {0}; set memdev in the VM's configuration to one of them")]
    Missing(String),
    /// The memory is private to the hypervisor.
    #[error(
        "it is private; give its -object memory-backend-* the option share=on (Cloud Hypervisor: its \
         --memory-zone shared=on)"
    )]
    Private,
    /// The backend is larger than the bound. Our bookkeeping grows with the size that a hypervisor
    /// claims.
    #[error("it has {0}, and a tier may have {TIER_MAX} at the most")]
    TooLarge(ByteCount),
    /// The guest does not map it.
    #[error("the guest does not map it; assign it to a node: -numa node,memdev=..")]
    NotInGuest,
    /// It is mapped in more runs than any real machine has.
    #[error("the guest has it in more than {RUNS_MAX} runs of addresses")]
    Runs,
    /// The tier has too many files.
    #[error("it has more than {FILES_MAX} files")]
    InParts,
    /// The process behind the socket does not map this memory.
    #[error(transparent)]
    Process(#[from] ProcessError),
    /// The memory lies on hugetlbfs. Parts of a huge page cannot be freed, and freed ones may be
    /// lost for good.
    #[error(
        "it lies on hugetlbfs, where a hole loses the huge page's reservation, so the VM could die of \
         SIGBUS when it uses the memory again; use memory-backend-memfd without hugetlb, with \
         transparent huge pages (/sys/kernel/mm/transparent_hugepage/shmem_enabled)"
    )]
    Hugetlb,
    /// The file lies on a disk and may hold data that must persist.
    #[error(
        "it is {0}, which does not lie on tmpfs; use memory-backend-memfd, or name \
         its folder in memory_paths"
    )]
    OnDisk(PathBuf),
    /// The file cannot be read or does not answer.
    #[error("{0}")]
    File(#[from] io::Error),
    /// Two VMs, or two tiers of one VM, share a file.
    #[error("it is {file}, which is {other} already; give every memory backend a file of its own")]
    Shared {
        /// The file.
        file: FileId,
        /// The other VM and tier.
        other: String,
    },
}

/// Maximum memory of a VM's tier. Its bitmap takes 32 MiB.
pub const TIER_MAX: ByteCount = ByteCount(1 << 40);

/// Maximum number of address runs of a backend.
pub(super) const RUNS_MAX: usize = 1 << 16;
