//! The file behind a VM's memory: giving parts of it back to the host.

use std::fmt;
use std::fs::File;
use std::io;
use std::mem::MaybeUninit;
use std::os::fd::AsRawFd;
use std::os::unix::fs::MetadataExt;

use demeter_policy::{ByteCount, PAGE_SIZE};

use crate::backing::FileOffset;

/// A file, whatever its name: device and inode (stat(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct FileId {
    /// st_dev.
    pub device: u64,
    /// st_ino.
    pub inode: u64,
}

impl fmt::Display for FileId {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (major, minor) = (libc::major(self.device), libc::minor(self.device));
        write!(f, "file {} of device {major}:{minor}", self.inode)
    }
}

/// Bytes in a unit of st_blocks (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// A shared memory file of a VM.
#[derive(Debug)]
pub struct MemoryFile {
    file: File,
    page_bytes: u64,
}

impl MemoryFile {
    /// Takes a file that is open for writing.
    pub fn new(file: File) -> io::Result<Self> {
        let mut info = MaybeUninit::<libc::statfs>::uninit();
        // SAFETY: the descriptor is open and the kernel fills the whole structure, which lives
        // until the call is over.
        if unsafe { libc::fstatfs(file.as_raw_fd(), info.as_mut_ptr()) } != 0 {
            return Err(io::Error::last_os_error());
        }
        // SAFETY: the call has succeeded, so it has filled it.
        let info = unsafe { info.assume_init() };
        let page_bytes = match info.f_type {
            libc::HUGETLBFS_MAGIC => u64::try_from(info.f_bsize).unwrap_or(PAGE_SIZE),
            _ => PAGE_SIZE,
        };
        Ok(Self { file, page_bytes })
    }

    /// The pages that the file is made of: only whole ones return to the host.
    pub fn page_bytes(&self) -> ByteCount {
        ByteCount(self.page_bytes)
    }

    /// Bytes of host memory that the file takes now.
    pub fn backed(&self) -> io::Result<ByteCount> {
        let blocks = self.file.metadata()?.blocks();
        Ok(ByteCount(blocks.saturating_mul(BLOCK_BYTES)))
    }

    /// Gives a part of the file back to the host; whoever reads there finds zeros, and whoever
    /// writes there gets new memory. The file stays as long as it is. Whole base pages only.
    pub fn punch(&self, offset: FileOffset, bytes: ByteCount) -> io::Result<()> {
        let number = |value: u64| match libc::off_t::try_from(value) {
            // A part of a page would only be zeroed, with whatever its owner has there.
            Ok(number) if value.is_multiple_of(PAGE_SIZE) => Ok(number),
            _ => Err(io::Error::from_raw_os_error(libc::EINVAL)),
        };
        let (offset, bytes) = (number(offset.0)?, number(bytes.0)?);
        loop {
            // SAFETY: takes a descriptor of ours and numbers; no memory of this process is
            // involved, unless it has mapped the file, and this crate maps none.
            let result = unsafe {
                libc::fallocate(
                    self.file.as_raw_fd(),
                    libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE,
                    offset,
                    bytes,
                )
            };
            let error = io::Error::last_os_error();
            match result {
                0 => return Ok(()),
                _ if error.kind() == io::ErrorKind::Interrupted => {}
                _ => return Err(error),
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use proptest::prelude::*;

    use super::*;
    use crate::testing::memfd;

    const PAGES: u64 = 64;

    proptest! {
        /// What is punched reads as zeros and returns to the host; all else stays as it is.
        #[test]
        fn exactly_the_punched_part_returns(first in 0..PAGES, count in 1..PAGES) {
            let count = count.min(PAGES - first);
            let file = memfd(PAGES * PAGE_SIZE);
            let filled: Vec<u8> = (0..PAGES * PAGE_SIZE).map(|i| (i % 251 + 1) as u8).collect();
            file.write_all_at(&filled, 0).unwrap();
            let memory = MemoryFile::new(file.try_clone().unwrap()).unwrap();
            prop_assert_eq!(memory.page_bytes(), ByteCount(PAGE_SIZE));
            prop_assert_eq!(memory.backed().unwrap(), ByteCount(PAGES * PAGE_SIZE));

            memory.punch(FileOffset(first * PAGE_SIZE), ByteCount(count * PAGE_SIZE)).unwrap();
            prop_assert_eq!(memory.backed().unwrap(), ByteCount((PAGES - count) * PAGE_SIZE));
            let mut want = filled;
            let hole = (first * PAGE_SIZE) as usize..((first + count) * PAGE_SIZE) as usize;
            want[hole].fill(0);
            let mut read = vec![0; want.len()];
            file.read_exact_at(&mut read, 0).unwrap();
            prop_assert!(read == want);
        }
    }

    #[test]
    fn nonsense_is_refused() {
        let memory = MemoryFile::new(memfd(PAGE_SIZE)).unwrap();
        for (offset, bytes) in [
            (u64::MAX, 1),
            (0, 0),
            (0, 1),
            (1, PAGE_SIZE),
            (1 << 63, PAGE_SIZE),
        ] {
            assert!(memory.punch(FileOffset(offset), ByteCount(bytes)).is_err());
        }
    }
}
