//! A VM's memory on the host: the file behind each guest-physical range.
//!
//! The module assumes nothing about the machine's layout. QEMU reports where the guest has its
//! memory and where QEMU has mapped it. The kernel reports the file and offset of that mapping
//! (/proc/PID/maps) and duplicates the hypervisor's own descriptor (pidfd_getfd(2)). So memory may
//! be a memfd or a file in /dev/shm, even one whose name is gone.

mod error;
mod file;
mod files;
mod host_files;
mod live;
mod map;
mod named;
mod owners;
mod pinned;
mod places;
mod process;
mod search;

pub use error::MemoryError;
pub use file::{Kind, MemoryFile};
pub use host_files::HostFiles;
pub use live::LiveBacking;
pub use map::{MemoryMap, Overlap, Piece};
pub(crate) use named::{NamedFile, named_files};
pub(crate) use owners::Owned;
pub use owners::{FileOwners, Owners};
pub(crate) use pinned::pinned_by;
pub(crate) use places::{Addresses, OnNodes, Places};
pub use process::{Mapped, Maps, ProcessError};
