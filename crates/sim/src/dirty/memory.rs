//! Second-level tables of a VM: mapped and writable pages.

use std::ops::Range;

use demeter_scenario::rng;

/// Pages of 4 KiB in a block of 2 MiB.
pub(super) const PAGES_A_BLOCK: usize = 512;

/// Access rights of a page; an unsplit block's rights apply to all its pages.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Entry {
    /// No access; every access faults.
    Absent,
    /// Loads only. A store faults, or is logged by hardware.
    ReadOnly,
    /// All accesses. The page is dirty.
    Writable,
}

/// The second-level tables of a VM.
pub(super) struct SecondLevelTables {
    entries: Vec<Entry>,
    /// By block: whether it has a table of pages.
    is_split: Vec<bool>,
    /// An access to a page is a store if the hash of its number is below this.
    stores_below: u64,
    /// Distance in pages between two accesses of a sweep.
    stride: usize,
    /// Pages per virtual CPU.
    slice: usize,
    /// By virtual CPU: pages of its sweep whose access stops.
    pending: Vec<usize>,
    dirty: usize,
}

impl SecondLevelTables {
    /// Memory of `vcpus` slices of `slice` pages, all writable; in blocks if `is_huge`.
    pub fn new(vcpus: usize, slice: usize, stride: usize, stores: f64, is_huge: bool) -> Self {
        let pages = vcpus * slice;
        Self {
            entries: vec![Entry::Writable; pages],
            is_split: vec![!is_huge; pages / PAGES_A_BLOCK],
            stores_below: (stores * u64::MAX as f64) as u64,
            stride,
            slice,
            pending: vec![0; vcpus],
            dirty: pages,
        }
    }

    /// Number of pages.
    pub fn pages(&self) -> usize {
        self.entries.len()
    }

    /// Number of blocks.
    pub fn blocks(&self) -> usize {
        self.is_split.len()
    }

    /// Pages of a virtual CPU's slice.
    pub fn slice(&self, vcpu: usize) -> Range<usize> {
        vcpu * self.slice..(vcpu + 1) * self.slice
    }

    /// Number of pages that a sweep of a slice accesses.
    pub fn steps(&self) -> usize {
        self.slice / self.stride
    }

    /// Distance in pages between two accesses of a sweep.
    pub fn stride(&self) -> usize {
        self.stride
    }

    /// Number of pages in a virtual CPU's sweep whose access stops.
    pub fn pending(&self, vcpu: usize) -> usize {
        self.pending[vcpu]
    }

    /// Number of pages written since the log was last cleared.
    pub fn dirty(&self) -> usize {
        self.dirty
    }

    /// Access rights of a page.
    pub fn entry(&self, page: usize) -> Entry {
        self.entries[page]
    }

    /// Whether the block of a page has a table of pages.
    pub fn is_split(&self, page: usize) -> bool {
        self.is_split[page / PAGES_A_BLOCK]
    }

    /// Whether the sweep's access to a page is a store.
    pub fn is_written(&self, page: usize) -> bool {
        rng::mix(page as u64) <= self.stores_below && self.stores_below > 0
    }

    /// Whether the sweep's access to a page stops.
    pub fn is_pending(&self, page: usize) -> bool {
        page.is_multiple_of(self.stride) && self.would_stop(page, self.entries[page])
    }

    fn would_stop(&self, page: usize, entry: Entry) -> bool {
        match entry {
            Entry::Absent => true,
            Entry::ReadOnly => self.is_written(page),
            Entry::Writable => false,
        }
    }

    /// Sets a page's access rights.
    pub fn set(&mut self, page: usize, entry: Entry) {
        let before = std::mem::replace(&mut self.entries[page], entry);
        self.dirty -= usize::from(before == Entry::Writable);
        self.dirty += usize::from(entry == Entry::Writable);
        if page.is_multiple_of(self.stride) {
            let vcpu = page / self.slice;
            self.pending[vcpu] -= usize::from(self.would_stop(page, before));
            self.pending[vcpu] += usize::from(self.would_stop(page, entry));
        }
    }

    /// Splits the block of a page into pages. A lazy split maps only the page that faults, so the other pages become
    /// absent.
    pub fn split(&mut self, page: usize, is_lazy: bool) {
        let block = page / PAGES_A_BLOCK;
        self.is_split[block] = true;
        if is_lazy {
            for page in block * PAGES_A_BLOCK..(block + 1) * PAGES_A_BLOCK {
                self.set(page, Entry::Absent);
            }
        }
    }

    /// Write-protects writable pages and returns the number of entries changed; an unsplit block counts once. `pages`
    /// must cover whole blocks.
    pub fn protect(&mut self, pages: Range<usize>) -> Protected {
        let mut protected = Protected::default();
        for first in pages.step_by(PAGES_A_BLOCK) {
            let block = first..first + PAGES_A_BLOCK;
            let writable = block
                .clone()
                .filter(|&p| self.entries[p] == Entry::Writable);
            let count = writable.count();
            if count == 0 {
                continue;
            }
            protected.dirty += count;
            match self.is_split(first) {
                true => protected.pages += count,
                false => protected.blocks += 1,
            }
            for page in block {
                if self.entries[page] == Entry::Writable {
                    self.set(page, Entry::ReadOnly);
                }
            }
        }
        protected
    }
}

/// Result of write-protection.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Protected {
    /// Number of page entries.
    pub pages: usize,
    /// Number of block entries.
    pub blocks: usize,
    /// Number of pages that were dirty.
    pub dirty: usize,
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Counters match the entries.
        #[test]
        fn counts_are_those_of_the_entries(
            stores in 0.0f64..=1.0,
            stride_bits in 0u32..10,
            steps in proptest::collection::vec((0usize..4, 0usize..2048), 0..40),
        ) {
            let mut memory = SecondLevelTables::new(2, 1024, 1 << stride_bits, stores, true);
            for (what, page) in steps {
                let block = page / PAGES_A_BLOCK * PAGES_A_BLOCK;
                match what {
                    0 => drop(memory.protect(block..block + PAGES_A_BLOCK)),
                    1 => memory.split(page, true),
                    2 => memory.split(page, false),
                    _ => memory.set(page, Entry::Writable),
                }
                let dirty = (0..2048).filter(|&p| memory.entry(p) == Entry::Writable).count();
                prop_assert_eq!(memory.dirty(), dirty);
                for vcpu in 0..2 {
                    let pending = memory.slice(vcpu).filter(|&p| memory.is_pending(p)).count();
                    prop_assert_eq!(memory.pending(vcpu), pending);
                }
            }
        }
    }

    #[test]
    fn a_block_is_protected_by_one_entry_and_pages_by_theirs() {
        let mut memory = SecondLevelTables::new(1, 1024, 1, 1.0, true);
        memory.split(0, false);
        memory.set(3, Entry::ReadOnly);
        let protected = memory.protect(0..1024);
        let expected = Protected {
            pages: 511,
            blocks: 1,
            dirty: 1023,
        };
        assert_eq!(protected, expected);
        assert_eq!((memory.dirty(), memory.pending(0)), (0, 1024));
    }
}
