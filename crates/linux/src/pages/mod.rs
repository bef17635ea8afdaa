//! The interface to the kernel's page placement: looks up, moves and collapses pages.
//!
//! [`LivePages`] is the kernel, and tests use a simulated one. One conformance suite runs over both.

mod live;
#[cfg(any(test, feature = "testing"))]
pub mod simulated;

#[cfg(test)]
mod conformance;

use std::time::Duration;

use demeter_policy::{Block, GuestVirtAddr, NodeId, Pid};

pub use live::LivePages;

/// Maximum number of pages in a call, which bounds the kernel's work and our buffers.
pub const PAGES_PER_CALL_MAX: usize = 8192;

/// The kernel's answer for one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// It lies on this node.
    On(NodeId),
    /// It is not mapped or not resident.
    Absent,
    /// It was not looked up or not moved, for this reason.
    Failed(Errno),
}

/// An error number of the kernel (errno(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Its name, such as `EBUSY`; `errno N` for numbers that moving pages never returns.
    pub fn name(self) -> String {
        match self.0 {
            libc::EACCES => "EACCES".into(),
            libc::EAGAIN => "EAGAIN".into(),
            libc::EBUSY => "EBUSY".into(),
            libc::EFAULT => "EFAULT".into(),
            libc::EIO => "EIO".into(),
            libc::EINVAL => "EINVAL".into(),
            libc::ENODEV => "ENODEV".into(),
            libc::ENOENT => "ENOENT".into(),
            libc::ENOMEM => "ENOMEM".into(),
            libc::ENOSYS => "ENOSYS".into(),
            libc::EPERM => "EPERM".into(),
            libc::ESRCH => "ESRCH".into(),
            other => format!("errno {other}"),
        }
    }

    /// Why single pages do not move for this reason, and how to fix it.
    pub fn cause(self) -> &'static str {
        match self.0 {
            libc::EACCES => {
                "several processes map them, and KSM has merged some or CAP_SYS_NICE is missing"
            }
            libc::EBUSY | libc::EAGAIN => {
                "the kernel or a device uses them; they are tried again later"
            }
            libc::ENOMEM => "the other node has no room; they are tried again later",
            libc::EIO => "they could not be written back; see the kernel's log",
            _ => "the kernel does not say why; they are tried again later",
        }
    }
}

/// Looks up and moves the pages of a process.
///
/// [`Self::locate`] and [`Self::migrate`] append one [`PageState`] per address, in order, and take at most
/// [`PAGES_PER_CALL_MAX`] addresses.
pub trait Pages: Send {
    /// Looks up the nodes of pages.
    fn locate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError>;

    /// Moves pages to a node; the address of any part of a huge page moves it as a whole.
    ///
    /// A page with a state other than `On(to)` may still have moved; [`Self::locate`] tells.
    fn migrate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: NodeId,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError>;

    /// Splits later moves between this many threads, each with a call of its own. Until then one thread moves, and so it
    /// does where there are no threads.
    fn set_movers(&mut self, movers: usize) {
        let _ = movers;
    }

    /// CPU time that threads other than the caller's have moved since this was last asked.
    fn take_helped(&mut self) -> Duration {
        Duration::ZERO
    }

    /// Collapses each block to a huge page, on the node of most of its pages, if the kernel can.
    ///
    /// Blocks that are huge pages already stay as they are. The outcome is not reported, because small pages can be
    /// moved as well, only slower.
    fn collapse(&mut self, pid: Pid, blocks: &[Block]) -> Result<(), PagesError>;
}

/// An error of a whole call.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// The process has ended.
    #[error("process {0} has gone")]
    Gone(Pid),
    /// The process may not be changed (EPERM).
    #[error("EPERM; run as root, or grant CAP_SYS_NICE and CAP_SYS_PTRACE")]
    Denied(Pid),
    /// The process's cpuset excludes the node (EACCES).
    #[error("EACCES: its cpuset.mems excludes node {node}; add the node to move its memory")]
    NodeExcluded {
        /// The process.
        pid: Pid,
        /// The node.
        node: NodeId,
    },
    /// The node has no memory any more (ENODEV).
    #[error("ENODEV: node {0} has no memory that is online")]
    NodeGone(NodeId),
    /// The call is refused even for our own memory.
    #[error(
        "{call} is refused ({source}); allow the system call in the seccomp profile, or use a kernel with NUMA"
    )]
    Refused {
        /// The system call.
        call: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// Any other error.
    #[error("{call}: {source}")]
    Io {
        /// The system call.
        call: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
}

impl PagesError {
    /// The kernel's error number.
    pub fn errno(&self) -> Errno {
        Errno(match self {
            Self::Gone(_) => libc::ESRCH,
            Self::Denied(_) => libc::EPERM,
            Self::NodeExcluded { .. } => libc::EACCES,
            Self::NodeGone(_) => libc::ENODEV,
            Self::Refused { source, .. } | Self::Io { source, .. } => {
                source.raw_os_error().unwrap_or(libc::EIO)
            }
        })
    }
}
