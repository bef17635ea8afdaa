//! Anonymous memory with controlled placement and first touch.

use std::io;
use std::ops::Range;
use std::sync::atomic::AtomicU64;

use demeter_policy::NodeId;

use super::Error;

/// Alignment of a region: the size of a huge page on x86-64.
const ALIGN_BYTES: usize = 2 << 20;

/// Page size of mbind(2).
pub(crate) const PAGE_BYTES: u64 = 4096;

/// How a region is mapped.
#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Mapping {
    /// Whether processes that are forked share it.
    pub(crate) is_shared: bool,
    /// Address space without access that is reserved on each side of it, bytes.
    pub(crate) reserve_bytes: u64,
}

/// An untouched anonymous mapping, aligned to 2 MiB.
///
/// It is accessed as words shared by several threads. The system decides on huge pages.
pub struct Region {
    base: *mut libc::c_void,
    mapped_bytes: usize,
    first: *const AtomicU64,
    words: usize,
}

// SAFETY: only the region owns the mapping, and it is only accessed as atomics.
unsafe impl Sync for Region {}

impl Region {
    /// Maps `bytes` bytes, a multiple of 8, for this process alone.
    ///
    /// # Errors
    /// The address space is too small.
    pub fn map(bytes: u64) -> Result<Self, Error> {
        Self::map_as(bytes, Mapping::default())
    }

    /// Maps memory as `mapping` says.
    pub(crate) fn map_as(bytes: u64, mapping: Mapping) -> Result<Self, Error> {
        let too_large = || Error::Arguments(format!("{bytes} bytes cannot be mapped"));
        let bytes = usize::try_from(bytes).map_err(|_| too_large())?;
        let reserve_bytes = usize::try_from(mapping.reserve_bytes).map_err(|_| too_large())?;
        let reserve_bytes = reserve_bytes.next_multiple_of(ALIGN_BYTES);
        let usable_bytes = bytes.checked_add(ALIGN_BYTES).ok_or_else(too_large)?;
        let mapped_bytes = reserve_bytes
            .checked_mul(2)
            .and_then(|both| both.checked_add(usable_bytes))
            .ok_or_else(too_large)?;
        let kind = match mapping.is_shared {
            true => libc::MAP_SHARED,
            false => libc::MAP_PRIVATE,
        };
        let map = |at: *mut libc::c_void, bytes, protection, flags| {
            let flags = flags | libc::MAP_ANONYMOUS | libc::MAP_NORESERVE;
            // SAFETY: a new anonymous mapping at an address of the kernel's choice, or in place of a part of one that
            // nobody has used yet.
            let mapped = unsafe { libc::mmap(at, bytes, protection, flags, -1, 0) };
            match mapped {
                libc::MAP_FAILED => Err(Error::last_os(format!(
                    "cannot map {bytes} bytes of memory"
                ))),
                mapped => Ok(mapped),
            }
        };
        let (access, nowhere) = (libc::PROT_READ | libc::PROT_WRITE, std::ptr::null_mut());
        let (base, usable) = if reserve_bytes == 0 {
            let base = map(nowhere, mapped_bytes, access, kind)?;
            (base, base)
        } else {
            let base = map(nowhere, mapped_bytes, libc::PROT_NONE, libc::MAP_PRIVATE)?;
            // SAFETY: the reserve is a part of the mapping.
            let at = unsafe { base.byte_add(reserve_bytes) };
            (base, map(at, usable_bytes, access, kind | libc::MAP_FIXED)?)
        };
        let padding = usable.align_offset(ALIGN_BYTES);
        // SAFETY: the padding is below ALIGN_BYTES, by which the usable part is longer than asked.
        let first = unsafe { usable.byte_add(padding) }.cast::<AtomicU64>();
        Ok(Self {
            base,
            mapped_bytes,
            first,
            words: bytes / size_of::<AtomicU64>(),
        })
    }

    /// The virtual address of the first byte.
    pub fn start(&self) -> u64 {
        self.first as u64
    }

    /// All words of the region.
    pub fn words(&self) -> &[AtomicU64] {
        // SAFETY: `first` is aligned and `words` words lie inside the mapping, which lives as long
        // as `self`; fresh anonymous memory reads as zero, a valid AtomicU64.
        unsafe { std::slice::from_raw_parts(self.first, self.words) }
    }

    /// Sets the nodes of all its pages for first touch: mbind(2) with `mode`.
    pub(crate) fn set_policy(&self, nodes: &[u32], mode: libc::c_int) -> Result<(), Error> {
        let ids: Vec<NodeId> = nodes.iter().copied().map(NodeId).collect();
        let bytes = (self.words * size_of::<AtomicU64>()) as u64;
        let bytes = bytes.next_multiple_of(PAGE_BYTES);
        bind(self.start(), bytes, &ids, mode).map_err(|source| Error::System {
            what: format!(
                "--bind or --interleave {nodes:?}: mbind refused the nodes (numactl -H lists them)"
            ),
            source,
        })
    }

    /// Sets the preferred node of the byte offsets `range` (widened to whole pages) for first touch: mbind(2) with
    /// MPOL_PREFERRED.
    ///
    /// # Errors
    /// There is no such node.
    pub fn prefer_node(&self, range: &Range<u64>, node: u32) -> Result<(), Error> {
        if node >= u64::BITS {
            return Err(Error::Arguments(format!(
                "--place-hot {node}: nodes go from 0 to 63"
            )));
        }
        let start = self.start() + range.start / PAGE_BYTES * PAGE_BYTES;
        let end = self.start() + range.end.next_multiple_of(PAGE_BYTES);
        let bound = bind(start, end - start, &[NodeId(node)], libc::MPOL_PREFERRED);
        bound.map_err(|source| Error::System {
            what: format!("--place-hot {node}: mbind refused the node (numactl -H lists them)"),
            source,
        })
    }
}

/// Sets the nodes for the first touch of a range of our memory: mbind(2) with `mode`, for nodes from 0 to 63.
///
/// # Errors
/// The kernel's, or a node is out of range.
pub fn bind(start: u64, bytes: u64, nodes: &[NodeId], mode: libc::c_int) -> io::Result<()> {
    let mut mask = 0;
    for node in nodes {
        mask |= 1u64
            .checked_shl(node.0)
            .ok_or(io::ErrorKind::InvalidInput)?;
    }
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
    fn a_region_with_reserves_is_used_as_any_other() {
        let mapping = Mapping {
            is_shared: true,
            reserve_bytes: 5 << 30,
        };
        let region = Region::map_as(3 << 20, mapping).unwrap();
        assert_eq!(region.start() % ALIGN_BYTES as u64, 0);
        assert!(region.start() - region.base as u64 >= 5 << 30);
        assert!(region.mapped_bytes >= 10 << 30);
        region.words().last().unwrap().store(1, Relaxed);
        assert!(
            Region::map_as(
                1 << 20,
                Mapping {
                    reserve_bytes: u64::MAX / 2,
                    ..mapping
                }
            )
            .is_err()
        );
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
