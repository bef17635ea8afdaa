//! A VM's memory on the host: which file backs which guest-physical range, and giving parts of it
//! back.
//!
//! Nothing is assumed about the machine. QEMU says which memory lies where for its guest and where
//! it has mapped it itself; the kernel says which file that mapping is, at which offset
//! (/proc/PID/maps), and lends the file (/proc/PID/fd). So it makes no difference whether memory
//! is a memfd, a file in /dev/shm or on hugetlbfs, and whether its name is still there.

mod claims;
mod file;
mod live;
mod map;
mod process;

pub use claims::Claims;
pub use file::{FileId, FileOffset, MemoryFile};
pub use live::{LiveBacking, MemoryError};
pub use map::{MemoryMap, Overlap, Piece};
pub use process::ProcessError;
