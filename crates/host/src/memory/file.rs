//! The file behind a VM's memory, and punching holes into it.

use std::fs::File;
use std::io;
use std::os::fd::AsRawFd;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::PathBuf;

use demeter_policy::{ByteCount, PAGE_SIZE};
use rustix::fs::{FallocateFlags, fallocate, fstatfs};
use rustix::io::retry_on_intr;

use crate::backing::FileOffset;
use crate::outside::{self, FileId, MayWait};

/// Size of a block in st_blocks (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Storage behind a file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Kind {
    /// Memory: tmpfs, which includes memfds.
    Memory,
    /// Reserved huge pages: hugetlbfs, or a memfd with them.
    Hugetlb,
    /// Persistent storage.
    Disk,
}

/// st_fs of tmpfs and of hugetlbfs (statfs(2)).
const TMPFS_MAGIC: u32 = 0x0102_1994;
const HUGETLBFS_MAGIC: u32 = 0x9584_58f6;

/// A shared memory file of a VM.
#[derive(Debug)]
pub struct MemoryFile {
    file: File,
    kind: Kind,
}

impl MemoryFile {
    /// Takes a file that is open for writing.
    pub fn new(file: File, _: &MayWait) -> io::Result<Self> {
        let info = fstatfs(&file)?;
        // The kernel's constants have 32 bits.
        let kind = match info.f_type as u32 {
            TMPFS_MAGIC => Kind::Memory,
            HUGETLBFS_MAGIC => Kind::Hugetlb,
            _ => Kind::Disk,
        };
        Ok(Self { file, kind })
    }

    /// Storage behind the file.
    pub fn kind(&self) -> Kind {
        self.kind
    }

    /// Its current path, from the kernel.
    pub(super) fn path(&self, wait: &MayWait) -> io::Result<PathBuf> {
        let link = format!("/proc/self/fd/{}", self.file.as_raw_fd());
        outside::link_of(link.as_ref(), wait)
    }

    /// Its identity.
    pub(super) fn id(&self, _: &MayWait) -> io::Result<FileId> {
        Ok(FileId::of(&self.file.metadata()?))
    }

    /// Its length.
    pub(super) fn len(&self, _: &MayWait) -> io::Result<ByteCount> {
        Ok(ByteCount(self.file.metadata()?.len()))
    }

    /// Host memory that the file occupies now.
    pub fn backed(&self, _: &MayWait) -> io::Result<ByteCount> {
        let blocks = self.file.metadata()?.blocks();
        Ok(ByteCount(blocks.saturating_mul(BLOCK_BYTES)))
    }

    /// Reads from the file. Reading a hole allocates nothing.
    pub fn read(&self, offset: FileOffset, into: &mut [u8], _: &MayWait) -> io::Result<()> {
        self.file.read_exact_at(into, offset.0)
    }

    /// Punches a hole of whole base pages. It reads as zeros, and a write allocates new memory. The
    /// file keeps its length.
    pub fn punch(&self, offset: FileOffset, bytes: ByteCount, _: &MayWait) -> io::Result<()> {
        let (offset, bytes) = (offset.0, bytes.0);
        // The kernel would only zero part of a page, including data that is still in use.
        if !(offset | bytes).is_multiple_of(PAGE_SIZE) {
            return Err(io::ErrorKind::InvalidInput.into());
        }
        let how = FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE;
        Ok(retry_on_intr(|| fallocate(&self.file, how, offset, bytes))?)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::testing::memfd;

    const PAGES: u64 = 64;

    proptest! {
        /// The hole reads as zeros and returns to the host; the rest is unchanged.
        #[test]
        fn exactly_the_punched_part_returns(first in 0..PAGES, count in 1..PAGES) {
            let count = count.min(PAGES - first);
            let file = memfd(PAGES * PAGE_SIZE);
            let filled: Vec<u8> = (0..PAGES * PAGE_SIZE).map(|i| (i % 251 + 1) as u8).collect();
            file.write_all_at(&filled, 0).unwrap();
            let memory = MemoryFile::new(file.try_clone().unwrap(), &MayWait::in_a_test()).unwrap();
            prop_assert_eq!(memory.backed(&MayWait::in_a_test()).unwrap(), ByteCount(PAGES * PAGE_SIZE));

            memory.punch(FileOffset(first * PAGE_SIZE), ByteCount(count * PAGE_SIZE), &MayWait::in_a_test()).unwrap();
            prop_assert_eq!(memory.backed(&MayWait::in_a_test()).unwrap(), ByteCount((PAGES - count) * PAGE_SIZE));
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
        let memory = MemoryFile::new(memfd(PAGE_SIZE), &MayWait::in_a_test()).unwrap();
        for (offset, bytes) in [
            (u64::MAX, 1),
            (0, 0),
            (0, 1),
            (1, PAGE_SIZE),
            (1 << 63, PAGE_SIZE),
        ] {
            assert!(
                memory
                    .punch(FileOffset(offset), ByteCount(bytes), &MayWait::in_a_test())
                    .is_err()
            );
        }
    }

    #[test]
    fn what_lies_behind_a_file_is_told() {
        let kind = |file| MemoryFile::new(file, &MayWait::in_a_test()).unwrap().kind();
        assert_eq!(kind(memfd(PAGE_SIZE)), Kind::Memory);
        assert_eq!(kind(File::open("/proc/uptime").unwrap()), Kind::Disk);
        // An empty file needs no huge page.
        match rustix::fs::memfd_create("huge", rustix::fs::MemfdFlags::HUGETLB) {
            Ok(file) => assert_eq!(kind(file.into()), Kind::Hugetlb),
            Err(error) => eprintln!("skipped: no hugetlb memfd here: {error}"),
        }
    }
}
