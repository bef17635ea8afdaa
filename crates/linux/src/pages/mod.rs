//! The seam to the kernel's page placement: where pages are, moving them, and making them huge.
//!
//! [`LivePages`] is the kernel; tests stand a simulated one in its place. One conformance suite
//! runs over both.

mod live;
#[cfg(any(test, feature = "testing"))]
pub mod simulated;

#[cfg(test)]
mod conformance;

use demeter_policy::{Block, GuestVirtAddr, NodeId, Pid};

pub use live::LivePages;

/// The most pages in one call: bounds the kernel's work and our buffers.
pub const PAGES_PER_CALL_MAX: usize = 8192;

/// What the kernel says of one page.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum PageState {
    /// It lies on this node.
    On(NodeId),
    /// Nothing is mapped there, or it is not in memory.
    Absent,
    /// It was not looked at or not moved, for this reason.
    Failed(Errno),
}

/// An error number of the kernel (errno(3)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Errno(pub i32);

impl Errno {
    /// Its name, `EBUSY` for example; `errno N` for those that moving pages never yields.
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

    /// Why single pages do not move for this reason, and what helps.
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

/// Where the pages of a process are, and moving them to a node.
///
/// The first two calls append one [`PageState`] per address, in order, and take at most
/// [`PAGES_PER_CALL_MAX`] addresses.
pub trait Pages: Send {
    /// Asks where pages are.
    fn locate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError>;

    /// Moves pages to a node, each whole: a huge page is moved by the address of any part of it.
    /// A state other than `On(to)` may mean that the page did move all the same: whoever needs
    /// to know asks [`Self::locate`].
    fn migrate(
        &mut self,
        pid: Pid,
        pages: &[GuestVirtAddr],
        to: NodeId,
        out: &mut Vec<PageState>,
    ) -> Result<(), PagesError>;

    /// Makes a huge page of each block's small ones, on the node where most of them lie, as far
    /// as the kernel can; blocks that are huge pages already stay as they are. Says nothing of
    /// the outcome: small pages are as good for whoever moves them next, only slower.
    fn collapse(&mut self, pid: Pid, blocks: &[Block]) -> Result<(), PagesError>;
}

/// Why a whole call failed.
#[derive(Debug, thiserror::Error)]
pub enum PagesError {
    /// The process has ended.
    #[error("process {0} has gone")]
    Gone(Pid),
    /// The process belongs to somebody else (EPERM).
    #[error("EPERM; run as root, or grant CAP_SYS_NICE and CAP_SYS_PTRACE")]
    Denied(Pid),
    /// The process's cpuset has no such node (EACCES).
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
    /// The call is refused even for memory of one's own.
    #[error(
        "{call} is refused ({source}); allow the system call in the seccomp profile, or use a kernel with NUMA"
    )]
    Refused {
        /// The system call.
        call: &'static str,
        /// The system's error.
        source: std::io::Error,
    },
    /// Anything else that the kernel said.
    #[error("{call}: {source}")]
    Io {
        /// The system call.
        call: &'static str,
        /// What the system said.
        source: std::io::Error,
    },
}

impl PagesError {
    /// The kernel's number for it.
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
