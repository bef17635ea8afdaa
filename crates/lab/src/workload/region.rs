//! Anonymous memory with controlled placement and first touch.

use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use demeter_policy::NodeId;

use super::Error;

/// Alignment of a region: the size of a huge page on x86-64.
const ALIGN_BYTES: usize = 2 << 20;

/// Page size of mbind(2).
const PAGE_BYTES: u64 = 4096;

/// An untouched private anonymous mapping, aligned to 2 MiB.
///
/// It is accessed as words shared by several threads. The system decides on huge pages.
pub(crate) struct Region {
    base: *mut libc::c_void,
    mapped_bytes: usize,
    first: *const AtomicU64,
    words: usize,
}

// SAFETY: only the region owns the mapping, and it is only accessed as atomics.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes` bytes, a multiple of 8.
    pub(crate) fn map(bytes: u64) -> Result<Self, Error> {
        let too_large = || Error::Arguments(format!("{bytes} bytes cannot be mapped"));
        let bytes = usize::try_from(bytes).map_err(|_| too_large())?;
        let mapped_bytes = bytes.checked_add(ALIGN_BYTES).ok_or_else(too_large)?;
        // SAFETY: a new anonymous mapping at an address that the kernel chooses.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                mapped_bytes,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_PRIVATE | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE,
                -1,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(Error::last_os(format!(
                "cannot map {bytes} bytes of memory"
            )));
        }
        let padding = base.align_offset(ALIGN_BYTES);
        // SAFETY: the padding is below ALIGN_BYTES, the extra length of the mapping.
        let first = unsafe { base.byte_add(padding) }.cast::<AtomicU64>();
        Ok(Self {
            base,
            mapped_bytes,
            first,
            words: bytes / size_of::<AtomicU64>(),
        })
    }

    /// The virtual address of the first byte.
    pub(crate) fn start(&self) -> u64 {
        self.first as u64
    }

    /// All words of the region.
    pub(crate) fn words(&self) -> &[AtomicU64] {
        // SAFETY: `first` is aligned and `words` words lie inside the mapping, which lives as long
        // as `self`; fresh anonymous memory reads as zero, a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(self.first, self.words) }
    }

    /// Sets the preferred node of the byte offsets `range` (widened to whole pages) for first touch: mbind(2) with
    /// MPOL_PREFERRED.
    pub(crate) fn prefer_node(&self, range: &Range<u64>, node: u32) -> Result<(), Error> {
        if node >= u64::BITS {
            return Err(Error::Arguments(format!(
                "--place-hot {node}: nodes go from 0 to 63"
            )));
        }
        let start = self.start() + range.start / PAGE_BYTES * PAGE_BYTES;
        let end = self.start() + range.end.next_multiple_of(PAGE_BYTES);
        let bound = bind(start, end - start, NodeId(node), libc::MPOL_PREFERRED);
        bound.map_err(|source| Error::System {
            what: format!("--place-hot {node}: mbind refused the node (numactl -H lists them)"),
            source,
        })
    }
}

/// Sets the node for the first touch of a range of our memory: mbind(2) with `mode`, for a node from 0 to 63.
pub(crate) fn bind(start: u64, bytes: u64, node: NodeId, mode: libc::c_int) -> io::Result<()> {
    let mask = 1u64
        .checked_shl(node.0)
        .ok_or(io::ErrorKind::InvalidInput)?;
    // SAFETY: mbind reads one word of mask and changes only page placement, not memory. The kernel uses one bit less
    // than `maxnode`.
    let done = unsafe {
        libc::syscall(
            libc::SYS_mbind,
            start,
            bytes,
            mode,
            &raw const mask,
            u64::from(u64::BITS) + 1,
            0,
        )
    };
    match done {
        0 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

impl Drop for Region {
    fn drop(&mut self) {
        // SAFETY: unmaps exactly the mapping of `map`; no borrow of the words outlives `self`.
        unsafe { libc::munmap(self.base, self.mapped_bytes) };
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::Ordering::Relaxed;

    #[test]
    fn regions_are_aligned_and_zero() {
        let region = Region::map(3 << 20).unwrap();
        assert_eq!(region.start() % ALIGN_BYTES as u64, 0);
        assert_eq!(region.words().len(), (3 << 20) / 8);
        assert!(region.words().iter().all(|word| word.load(Relaxed) == 0));
        region.words().last().unwrap().store(1, Relaxed);
    }

    #[test]
    fn a_node_that_is_not_there_is_refused() {
        let region = Region::map(1 << 20).unwrap();
        assert!(matches!(
            region.prefer_node(&(0..4096), 64),
            Err(Error::Arguments(_))
        ));
        assert!(matches!(
            region.prefer_node(&(0..4096), 63),
            Err(Error::System { .. })
        ));
    }
}
