//! The files of one tier as a single address range.
//!
//! Most hypervisors have one file for a node. Cloud Hypervisor has one for each run of its
//! addresses.

use std::io;

use demeter_policy::ByteCount;

use super::file::MemoryFile;
use super::owners::OwnedFile;
use crate::backing::FileOffset;
use crate::outside::{FileId, MayWait};

/// Maximum number of files of a tier; a machine has few runs of memory.
pub(super) const FILES_MAX: usize = 16;

/// Files laid end to end.
#[derive(Debug, Default)]
pub(super) struct Files(Vec<Part>);

#[derive(Debug)]
struct Part {
    id: FileId,
    /// Start among the files.
    base: u64,
    bytes: u64,
    file: MemoryFile,
    /// Keeps the file reserved while it may be punched.
    _owned: OwnedFile,
}

impl Files {
    /// Start of a file that was added.
    pub(super) fn base(&self, id: FileId) -> Option<FileOffset> {
        let part = self.0.iter().find(|part| part.id == id)?;
        Some(FileOffset(part.base))
    }

    /// Adds a file. Returns its start, or `None` if there are too many.
    pub(super) fn add(
        &mut self,
        id: FileId,
        file: MemoryFile,
        owned: OwnedFile,
        wait: &MayWait,
    ) -> io::Result<Option<FileOffset>> {
        let bytes = file.len(wait)?.0;
        let base = self.0.last().map_or(0, |last| last.base + last.bytes);
        if self.0.len() == FILES_MAX || base.checked_add(bytes).is_none() {
            return Ok(None);
        }
        self.0.push(Part {
            id,
            base,
            bytes,
            file,
            _owned: owned,
        });
        Ok(Some(FileOffset(base)))
    }

    /// Punches a hole into a range of the files.
    pub(super) fn punch(
        &self,
        offset: FileOffset,
        bytes: ByteCount,
        wait: &MayWait,
    ) -> io::Result<()> {
        self.each(offset, bytes.0, |file, offset, piece| {
            file.punch(offset, ByteCount(piece.end - piece.start), wait)
        })
    }

    /// Reads from the files.
    pub(super) fn read(
        &self,
        offset: FileOffset,
        into: &mut [u8],
        wait: &MayWait,
    ) -> io::Result<()> {
        self.each(offset, into.len() as u64, |file, offset, piece| {
            let part = &mut into[piece.start as usize..piece.end as usize];
            file.read(offset, part, wait)
        })
    }

    /// Host memory that all files occupy now.
    pub(super) fn backed(&self, wait: &MayWait) -> io::Result<ByteCount> {
        let mut sum = 0_u64;
        for part in &self.0 {
            sum = sum.saturating_add(part.file.backed(wait)?.0);
        }
        Ok(ByteCount(sum))
    }

    /// Applies `work` to each file that overlaps the range, with the overlap's place in the range.
    fn each(
        &self,
        offset: FileOffset,
        bytes: u64,
        mut work: impl FnMut(&MemoryFile, FileOffset, std::ops::Range<u64>) -> io::Result<()>,
    ) -> io::Result<()> {
        let mut done = 0;
        while done < bytes {
            let at = offset.0.saturating_add(done);
            // The file may have grown since, so a range may run past the known end of the last
            // file.
            let part = self.0.iter().rfind(|part| part.base <= at);
            let part = part.ok_or(io::ErrorKind::InvalidInput)?;
            let is_last = self.0.last().is_some_and(|last| last.base == part.base);
            let into = at - part.base;
            let room = if is_last { u64::MAX } else { part.bytes - into };
            let piece = done..done + room.min(bytes - done);
            done = piece.end;
            work(&part.file, FileOffset(into), piece)?;
        }
        // Pass an empty range on, so that the file rejects it.
        match (bytes, self.0.first()) {
            (0, Some(part)) => work(&part.file, offset, 0..0),
            _ => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::os::unix::fs::FileExt;

    use demeter_policy::PAGE_SIZE;
    use proptest::prelude::*;

    use super::*;
    use crate::memory::FileOwners;
    use crate::testing::memfd;

    proptest! {
        /// A hole reads as zeros in whichever file it lies; the rest is unchanged.
        #[test]
        fn several_files_are_as_one(
            sizes in prop::collection::vec(1..5_u64, 1..4),
            first in 0..12_u64,
            count in 1..12_u64,
        ) {
            let wait = &MayWait::in_a_test();
            let owners = FileOwners::default();
            let mut files = Files::default();
            let whole: u64 = sizes.iter().sum();
            for pages in &sizes {
                let file = memfd(pages * PAGE_SIZE);
                file.write_all_at(&vec![7; (pages * PAGE_SIZE) as usize], 0).unwrap();
                let file = MemoryFile::new(file, wait).unwrap();
                let id = file.id(wait).unwrap();
                let owned = owners.take(id, "a test".into()).unwrap();
                prop_assert_eq!(files.base(id), None);
                let base = files.add(id, file, owned, wait).unwrap();
                prop_assert_eq!(files.base(id), base);
            }
            let first = first.min(whole - 1);
            let count = count.min(whole - first);
            let hole = first * PAGE_SIZE..(first + count) * PAGE_SIZE;
            files.punch(FileOffset(hole.start), ByteCount(count * PAGE_SIZE), wait).unwrap();
            let mut read = vec![1; (whole * PAGE_SIZE) as usize];
            files.read(FileOffset(0), &mut read, wait).unwrap();
            let right = |at: usize| (read[at] == 0) == hole.contains(&(at as u64));
            prop_assert!((0..read.len()).all(right));
            prop_assert_eq!(files.backed(wait).unwrap(), ByteCount((whole - count) * PAGE_SIZE));
        }
    }
}
