//! Memory of the guest: mapped, aligned, filled, and unmapped with its owner.

use std::fs;
use std::path::Path;
use std::ptr::{self, NonNull};
use std::sync::atomic::AtomicU64;

use crate::error::Error;
use crate::settings::{BLOCK_BYTES, Backing};

/// Filled at a time, so that whoever waits can be told and can stop it.
const FILL_BYTES: usize = 64 << 20;

/// Memory of our own that a guest may write at any time: it is read by atomics only.
#[derive(Debug)]
pub struct Memory {
    mapped: NonNull<u8>,
    mapped_bytes: usize,
    /// Where what is used begins, aligned to a block at least.
    begin: NonNull<u8>,
    bytes: usize,
}

// SAFETY: it owns the mapping, which belongs to no thread.
unsafe impl Send for Memory {}
// SAFETY: through a shared reference its memory is reached by atomics, or by the kernel.
unsafe impl Sync for Memory {}

impl Memory {
    /// Maps memory; `bytes` are whole pages of the backing.
    pub fn map(bytes: u64, backing: Backing) -> Result<Self, Error> {
        let bytes = bytes as usize;
        let mut flags = libc::MAP_PRIVATE | libc::MAP_ANONYMOUS;
        let mut mapped_bytes = bytes + BLOCK_BYTES as usize;
        if let Some(page) = backing.hugetlb_bytes() {
            flags |= libc::MAP_HUGETLB | (page.trailing_zeros() as i32) << libc::MAP_HUGE_SHIFT;
            // The kernel aligns these itself.
            mapped_bytes = bytes;
        }
        // SAFETY: a new mapping at a place that the kernel chooses touches nothing that is there.
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
            // SAFETY: one block more was mapped than is used, and less than one is skipped.
            begin: unsafe { mapped.add(skipped) },
            bytes,
        };
        let advice = match backing {
            Backing::Base => Some(libc::MADV_NOHUGEPAGE),
            Backing::Transparent => Some(libc::MADV_HUGEPAGE),
            Backing::Huge2M | Backing::Huge1G => None,
        };
        if let Some(advice) = advice {
            // A kernel without transparent huge pages refuses, and has none: what was asked for, or
            // what the report then shows.
            let _ = memory.advise(0, bytes, advice);
        }
        Ok(memory)
    }

    /// Fills it page by page. `on` hears the share that is done, and may stop it.
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
        // SAFETY: the range lies within the mapping, which is ours, and none of these advices drops
        // what it holds.
        let done = unsafe { libc::madvise(self.begin.add(from).as_ptr().cast(), bytes, advice) };
        if done == 0 { Ok(()) } else { Err(()) }
    }

    /// Where it begins, for the kernel.
    pub fn address(&self) -> u64 {
        self.begin.as_ptr() as u64
    }

    /// Its size.
    pub fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// A word of it, `offset` bytes from its begin.
    pub fn word(&self, offset: u64) -> &AtomicU64 {
        let offset = offset as usize;
        assert!(offset.is_multiple_of(8) && offset + 8 <= self.bytes);
        // SAFETY: it lies within the mapping, is aligned, lives as long as `self`, and is reached by
        // atomics only.
        unsafe { &*self.begin.add(offset).as_ptr().cast::<AtomicU64>() }
    }

    /// Copies bytes into it, before a guest runs.
    pub fn write(&mut self, offset: u64, bytes: &[u8]) {
        let offset = offset as usize;
        assert!(offset + bytes.len() <= self.bytes);
        // SAFETY: the target lies within the mapping, is ours alone (`&mut`), and overlaps nothing.
        unsafe {
            self.begin
                .add(offset)
                .copy_from_nonoverlapping(NonNull::from(bytes).cast(), bytes.len())
        };
    }
}

impl Drop for Memory {
    fn drop(&mut self) {
        // SAFETY: it was mapped by `map`, with this size, and nobody has a reference to it any more.
        unsafe { libc::munmap(self.mapped.as_ptr().cast(), self.mapped_bytes) };
    }
}

/// Whether the host whose /proc and /sys lie below `root` has this much.
pub fn is_there(root: &Path, bytes: u64, backing: Backing) -> Result<(), Error> {
    let Some(page) = backing.hugetlb_bytes() else {
        let available_mib = available_mib(root).unwrap_or(u64::MAX);
        let needed_mib = bytes >> 20;
        // What logging itself takes, tables and bitmaps, is a hundredth at the most.
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
    // Those that others have reserved and not touched yet count as free.
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
        // A host that does not tell is tried.
        assert!(there(1 << 10).is_ok());
        fs::create_dir_all(root.path().join("proc")).unwrap();
        let meminfo = "MemTotal:  4096000 kB\nMemAvailable:    1024000 kB\n";
        fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
        assert!(there(900).is_ok());
        let error = there(1000).unwrap_err().to_string();
        assert!(error.contains("1000 MiB are available"), "{error}");
    }
}
