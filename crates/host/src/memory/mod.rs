//! A VM's memory on the host: which file backs which guest-physical range, and giving parts of it
//! back.
//!
//! Nothing is assumed about the machine. QEMU says which memory lies where for its guest and where
//! it has mapped it itself; the kernel says which file that mapping is, at which offset
//! (/proc/PID/maps), and lends the descriptor that the hypervisor itself has of it (pidfd_getfd(2)). So it makes no difference whether memory
//! is a memfd or a file in /dev/shm, and whether its name is still there.

mod file;
mod files;
mod live;
mod map;
mod named;
mod owners;
mod process;

pub use file::{FileId, Kind, MemoryFile};
pub use live::{HostFiles, LiveBacking, MemoryError};
pub use map::{MemoryMap, Overlap, Piece};
pub(crate) use named::{NamedFile, named_files};
pub(crate) use owners::Owned;
pub use owners::{FileOwners, Owners};
pub(crate) use process::pinned_by;
pub use process::{Mapped, Maps, ProcessError};
