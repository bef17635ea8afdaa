//! One Demeter at a time per source of samples.

use std::fs::File;
use std::os::fd::AsRawFd;

/// Takes a file's lock (flock(2)), if nobody has it. It ends with the file, so at the latest with
/// the process, and leaves nothing behind.
pub fn try_lock(file: &File) -> bool {
    // SAFETY: flock takes a descriptor, which `file` keeps open, and touches no memory.
    unsafe { libc::flock(file.as_raw_fd(), libc::LOCK_EX | libc::LOCK_NB) == 0 }
}
