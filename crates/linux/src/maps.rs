//! Reads a process's address space from `/proc/PID/maps` (proc(5)).

mod largest;
mod movable;
mod parse;

use std::io;
use std::path::{Path, PathBuf};

use demeter_policy::{Pid, VirtRange};

use largest::Largest;
use movable::Sorting;
pub use movable::{Movable, Piece};
use parse::{for_each, for_each_of};

/// Maximum number of ranges kept per process: the largest. A program may have 65,530 mappings (`vm.max_map_count`), and
/// 64 such programs must not make the agent grow.
pub const RANGES_MAX: usize = 4096;

/// One mapping (virtual memory area) of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Vma {
    /// Its addresses.
    pub range: VirtRange,
    /// The process may read it.
    pub readable: bool,
    /// The process may write it.
    pub writable: bool,
    /// The kind of its memory.
    pub kind: VmaKind,
    /// The mapped part of an object that other processes may map, too.
    pub backing: Option<Backing>,
}

/// The identity of a file or shared memory, equal for all who map it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct ObjectId {
    /// The file system's device: major and minor number.
    device: (u32, u32),
    inode: u64,
    /// System V shared memory has its own numbers, on the device of all shared memory.
    is_sysv: bool,
}

/// The part of an object that is mapped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Backing {
    /// Which object.
    pub object: ObjectId,
    /// Offset of the mapping's first byte.
    pub offset: u64,
}

/// The kind of a mapping's memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum VmaKind {
    /// Private anonymous memory, including the heap.
    Anonymous,
    /// Shared memory: shared anonymous, memfd, System V, /dev/shm.
    Shmem,
    /// A file, private or shared: its page cache, and the process's private copies. Includes shared memory on a tmpfs
    /// other than /dev/shm.
    File,
    /// The main thread's stack.
    Stack,
    /// Memory whose pages cannot be moved: the kernel's own (vdso, vvar, vsyscall, uprobes), devices, hugetlb pages.
    Special,
}

/// An error in reading a process's mappings.
#[derive(Debug, thiserror::Error)]
pub enum MapsError {
    /// The process has ended.
    #[error("process {0} has gone")]
    Gone(Pid),
    /// The file exists but cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The maps file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Reads the mappings of a process: sorted, disjoint, the largest [`RANGES_MAX`].
///
/// Malformed lines and lines that overlap an earlier one are skipped: the kernel writes the file page by page while the
/// process goes on mapping.
pub fn read_maps(root: &Path, pid: Pid) -> Result<Vec<Vma>, MapsError> {
    let mut found = Largest::new(|vma: &Vma| vma.range.len().0);
    for_each_of(root, pid, |vma| found.push(vma))?;
    Ok(found.finish().0)
}

/// Reads the movable memory of a process. `may_move` is asked about each mapping with movable pages.
pub fn read_movable(
    root: &Path,
    pid: Pid,
    mut may_move: impl FnMut(&Vma) -> bool,
) -> Result<Movable, MapsError> {
    let mut found = Sorting::new();
    for_each_of(root, pid, |vma| found.add(&vma, &mut may_move))?;
    Ok(found.finish())
}

/// Parses a maps file as [`read_maps`] does.
pub fn parse_maps(text: &str) -> Vec<Vma> {
    let mut found = Largest::new(|vma: &Vma| vma.range.len().0);
    // Reading from memory does not fail.
    let _ = for_each(text.as_bytes(), |vma| found.push(vma));
    found.finish().0
}

#[cfg(test)]
mod tests;
