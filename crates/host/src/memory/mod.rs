//! A VM's memory on the host: the file behind each guest-physical range.
//!
//! The module assumes nothing about the machine's layout. QEMU reports where the guest has its
//! memory and where QEMU has mapped it. The kernel reports the file and offset of that mapping
//! (/proc/PID/maps) and duplicates the hypervisor's own descriptor (pidfd_getfd(2)). So memory may
//! be a memfd or a file in /dev/shm, even one whose name is gone.

mod file;
mod files;
mod live;
mod map;
mod named;
mod owners;
mod places;
mod process;

pub use file::{FileId, Kind, MemoryFile};
pub use live::{HostFiles, LiveBacking, MemoryError};
pub use map::{MemoryMap, Overlap, Piece};
pub(crate) use named::{NamedFile, named_files};
pub(crate) use owners::Owned;
pub use owners::{FileOwners, Owners};
pub(crate) use places::{Addresses, OnNodes, Places};
pub(crate) use process::pinned_by;
pub use process::{Mapped, Maps, ProcessError};
