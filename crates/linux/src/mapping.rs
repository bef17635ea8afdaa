//! Memory shared with an untrusted writer: the kernel's perf ring, the lab's device.
//!
//! All accesses are atomic. The writer can make a value wrong, but cannot make reading it undefined behaviour.

use std::io;
use std::ops::Range;
use std::os::fd::{AsFd, AsRawFd};
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

/// A shared, writable mapping of the first bytes of a file or device.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
}

// SAFETY: this value owns the mapping, which is accessed only through atomics.
unsafe impl Send for Mapping {}

impl Mapping {
    /// Maps the first `len` bytes. The file must not become shorter; a PCI device's BAR and a perf event do not.
    pub fn new(file: &impl AsFd, len: usize) -> io::Result<Self> {
        let fd = file.as_fd().as_raw_fd();
        // SAFETY: a new mapping at an address that the kernel chooses aliases nothing of ours.
        let base = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                len,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                fd,
                0,
            )
        };
        if base == libc::MAP_FAILED {
            return Err(io::Error::last_os_error());
        }
        let base = NonNull::new(base.cast()).ok_or_else(|| io::Error::other("mapped at zero"))?;
        Ok(Self { base, len })
    }

    /// The 32-bit word at a byte offset.
    ///
    /// # Panics
    /// The word is not inside, or not aligned. The caller checks offsets against the length when it accepts the layout,
    /// and never takes them from the other side as they are.
    pub fn u32_at(&self, offset: usize) -> &AtomicU32 {
        assert!(offset.is_multiple_of(4) && offset <= self.len - 4);
        // SAFETY: inside the mapping and aligned (the base is page-aligned); lives as long as `self`; all our accesses
        // are atomic.
        unsafe { AtomicU32::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// The 64-bit word at a byte offset. Panics like [`Self::u32_at`].
    pub fn u64_at(&self, offset: usize) -> &AtomicU64 {
        assert!(offset.is_multiple_of(8) && offset <= self.len - 8);
        // SAFETY: as in `u32_at`.
        unsafe { AtomicU64::from_ptr(self.base.as_ptr().add(offset).cast()) }
    }

    /// Appends a copy of the 8-byte-aligned `range` of bytes to `out`. Panics like [`Self::u32_at`].
    pub fn copy(&self, range: Range<usize>, out: &mut Vec<u8>) {
        for offset in range.step_by(8) {
            let word = self.u64_at(offset).load(Ordering::Relaxed);
            out.extend_from_slice(&word.to_ne_bytes());
        }
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: base and len are those of the mapping made in `new`; no reference into it outlives `self`.
        unsafe { libc::munmap(self.base.as_ptr().cast(), self.len) };
    }
}

/// The unread part of a ring: `[tail, head)` modulo `capacity`, in one or two pieces.
///
/// `head` and `tail` count bytes since the ring's creation. `None` if the writer claims more than the ring can hold, or
/// its head ran backwards. `capacity` is not zero.
pub fn unread(head: u64, tail: u64, capacity: u64) -> Option<[Range<u64>; 2]> {
    let len = head.wrapping_sub(tail);
    if len > capacity {
        return None;
    }
    let start = tail % capacity;
    let first = len.min(capacity - start);
    Some([start..start + first, 0..len - first])
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn words_are_shared_with_the_file() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        let ours = Mapping::new(&file, 4096).unwrap();
        let theirs = Mapping::new(&file, 4096).unwrap();
        ours.u32_at(4092).store(7, Ordering::Release);
        assert_eq!(theirs.u32_at(4092).load(Ordering::Acquire), 7);
        let mut copy = Vec::new();
        theirs.copy(4080..4096, &mut copy);
        assert_eq!(copy.len(), 16);
        assert_eq!(copy[12], 7);
    }

    #[test]
    #[should_panic]
    fn a_word_outside_is_refused() {
        let file = tempfile::tempfile().unwrap();
        file.set_len(4096).unwrap();
        Mapping::new(&file, 4096).unwrap().u64_at(4096);
    }

    proptest! {
        #[test]
        fn unread_pieces_lie_in_the_ring_in_order(
            tail in any::<u64>(), len in 0u64..5000, log in 0u32..12,
        ) {
            // The positions of other ring sizes would jump when the counters wrap.
            let capacity = 1u64 << log;
            let pieces = unread(tail.wrapping_add(len), tail, capacity);
            prop_assert_eq!(pieces.is_some(), len <= capacity);
            if let Some(pieces) = pieces {
                let indices: Vec<_> = pieces.into_iter().flatten().collect();
                let expected: Vec<_> =
                    (0..len).map(|i| tail.wrapping_add(i) % capacity).collect();
                prop_assert_eq!(indices, expected);
            }
        }
    }
}
