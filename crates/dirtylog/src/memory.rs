//! Guest memory: mapped, aligned, filled, and unmapped on drop.

use std::fs;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use crate::error::Error;
use crate::settings::{BLOCK_BYTES, Backing};

/// Size of a step when filling memory, so that the caller can show progress and stop it.
const FILL_BYTES: usize = 64 << 20;

/// Memory of this process that a guest may write at any time; read by atomics only.
#[derive(Debug)]
pub struct Memory {
    mapped: NonNull<u8>,
    mapped_bytes: usize,
    /// Start of the used part, aligned to a block at least.
    begin: NonNull<u8>,
    bytes: usize,
}

// SAFETY: this value owns the mapping, which belongs to no thread.
unsafe impl Send for Memory {}
// SAFETY: shared references access the memory by atomics, or the kernel does.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps memory; `bytes` is a multiple of the backing's page size.
    pub fn map(bytes: u64, backing: Backing) -> Result<Self, Error> {
        let bytes = bytes as usize;
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mut mapped_bytes = bytes + BLOCK_BYTES as usize;
        if let Some(page) = backing.hugetlb_bytes() {
            flags |= libc::MAP_HUGETLB | (page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
            // The kernel aligns hugetlb mappings itself.
            mapped_bytes = bytes;
        }
        // SAFETY: a new mapping at an address that the kernel chooses overlaps nothing.
        let mapped = unsafe {
            let access = libc::PROT_READ | libc::PROT_WRITE;
            libc::mmap(ptr::null_mut(), mapped_bytes, access, flags, -1, 0)
        };
        if mapped == libc::MAP_FAILED {
            return Err(Error::last("map memory of the guest"));
        }
        let Some(mapped) = NonNull::new(mapped.cast::<u8>()) else {
            return Err(Error::last("map memory of the guest"));
        };
        let skipped = match backing.hugetlb_bytes() {
            Some(_) => 0,
            None => mapped.align_offset(BLOCK_BYTES as usize),
        };
        let memory = Self {
            mapped,
            mapped_bytes,
            // SAFETY: one block more than needed was mapped, and less than one is skipped.
            begin: unsafe { mapped.add(skipped) },
            bytes,
        };
        let advice = match backing {
            Backing::Base => Some(libc::MADV_NOHUGEPAGE),
            Backing::Transparent => Some(libc::MADV_HUGEPAGE),
            Backing::Huge2M | Backing::Huge1G => None,
        };
        if let Some(advice) = advice {
            // A kernel without transparent huge pages returns an error. The memory then has base pages, as requested or
            // as the report shows.
            let _ = memory.advise(0, bytes, advice);
        }
        Ok(memory)
    }

    /// Fills the memory page by page. `on` gets the filled share, and can stop it.
    pub fn fill(&self, on: &dyn Fn(f64) -> Result<(), Error>) -> Result<(), Error> {
        for from in (0..self.bytes).step_by(FILL_BYTES) {
            on(from as f64 / self.bytes as f64)?;
            let bytes = FILL_BYTES.min(self.bytes - from);
            self.advise(from, bytes, libc::MADV_POPULATE_WRITE)
                .map_err(|_| Error::last("fill memory of the guest (Linux 5.14 or later can)"))?;
        }
        Ok(())
    }

    fn advise(&self, from: usize, bytes: usize, advice: libc::c_int) -> Result<(), ()> {
        assert!(from + bytes <= self.bytes);
        // SAFETY: the range is within our mapping, and none of these advices discards its contents.
        let done = unsafe { libc::madvise(self.begin.add(from).as_ptr().cast(), bytes, advice) };
        if done == 0 { Ok(()) } else { Err(()) }
    }

    /// Start address, for the kernel.
    pub fn address(&self) -> u64 {
        self.begin.as_ptr() as u64
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The word `offset` bytes from the start.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        let offset = offset as usize;
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: the word is within the mapping, aligned, lives as long as `self`, and is accessed by atomics only.
        unsafe { &*self.begin.add(offset).as_ptr().cast::<AtomicU64>() }
    }

    /// Copies bytes into the memory, before a guest runs.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let offset = offset as usize;
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: the target is within the mapping, exclusively ours (`&mut`), and overlaps nothing.
        unsafe {
            self.begin
                .add(offset)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len())
        };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: `map` has mapped it with this size, and no reference to it remains.
        unsafe { libc::munmap(self.mapped.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// Checks that the host below `root` (its /proc and /sys) has this much memory.
pub fn is_there(root: &Path, bytes: u64, backing: Backing) -> Result<(), Error> {
    let Some(page) = backing.hugetlb_bytes() else {
        let available_mib = available_mib(root).unwrap_or(u64::MAX);
        let needed_mib = bytes >> 20;
        // Logging itself needs at most one percent for tables and bitmaps.
        if needed_mib + needed_mib / 64 >= available_mib {
            return Err(Error::Memory {
                needed_mib,
                available_mib,
            });
        }
        return Ok(());
    };
    let size_kib = page >> 10;
    let folder = root.join(format!("sys/kernel/mm/hugepages/hugepages-{size_kib}kB"));
    let number = |file: &str| -> Option<u64> {
        fs::read_to_string(folder.join(file))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    let (Some(total), Some(free)) = (number("nr_hugepages"), number("free_hugepages")) else {
        return Err(Error::NoHugePages { size_kib });
    };
    // Pages that others have reserved but not touched count as free.
    let free = free.saturating_sub(number("resv_hugepages").unwrap_or(0));
    let needed = bytes / page;
    match needed <= free {
        true => Ok(()),
        false => Err(Error::HugePages {
            backing,
            size_kib,
            needed,
            free,
            total: total.max(free),
        }),
    }
}

fn available_mib(root: &Path) -> Option<u64> {
    let text = fs::read_to_string(root.join("proc/meminfo")).ok()?;
    let line = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))?;
    let kib: u64 = line.trim().strip_suffix("kB")?.trim().parse().ok()?;
    Some(kib >> 10)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::Ordering;

    use super::*;

    #[test]
    fn memory_is_aligned_filled_and_written() {
        let mut memory = Memory::map(4 << 20, Backing::Base).unwrap();
        assert!(memory.address().is_multiple_of(BLOCK_BYTES));
        memory.fill(&|_| Ok(())).unwrap();
        memory.write((4 << 20) - 8, &7u64.to_le_bytes());
        assert_eq!(
            memory.word((4 << 20) - 8).load(Ordering::Relaxed),
            u64::from_le(7)
        );
        let stopped = memory.fill(&|_| Err(Error::Interrupted));
        assert!(matches!(stopped, Err(Error::Interrupted)));
    }

    #[test]
    fn too_few_huge_pages_are_told_with_how_many_to_set_aside() {
        let root = tempfile::tempdir().unwrap();
        let there = |bytes| is_there(root.path(), bytes, Backing::Huge2M);
        let error = there(BLOCK_BYTES).unwrap_err().to_string();
        assert!(error.contains("no huge pages of 2048 KiB"), "{error}");
        let folder = root.path().join("sys/kernel/mm/hugepages/hugepages-2048kB");
        fs::create_dir_all(&folder).unwrap();
        for (file, number) in [
            ("nr_hugepages", 10),
            ("free_hugepages", 6),
            ("resv_hugepages", 2),
        ] {
            fs::write(folder.join(file), format!("{number}\n")).unwrap();
        }
        assert!(there(4 * BLOCK_BYTES).is_ok());
        let error = there(5 * BLOCK_BYTES).unwrap_err().to_string();
        assert!(error.contains("takes 5 free huge pages"), "{error}");
        assert!(error.contains("echo 11 > "), "{error}");
    }

    #[test]
    fn a_host_with_too_little_memory_is_left_alone() {
        let root = tempfile::tempdir().unwrap();
        let there = |mib: u64| is_there(root.path(), mib << 20, Backing::Base);
        // If the host does not report its memory, the attempt is allowed.
        assert!(there(1 << 10).is_ok());
        fs::create_dir_all(root.path().join("proc")).unwrap();
        let meminfo = "MemTotal:  4096000 kB\nMemAvailable:    1024000 kB\n";
        fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
        assert!(there(900).is_ok());
        let error = there(1000).unwrap_err().to_string();
        assert!(error.contains("1000 MiB are available"), "{error}");
    }
}
