//! Page tables: radix trees of four or five levels, as the hardware walks them.
//!
//! # Approach
//! A simulated page stands for `2^k` contiguous real pages. Only tables of the last level are therefore smaller than
//! real ones: they have `2^(9-k)` entries. All higher levels, huge pages and page-walk caches match the hardware.
//! Entries are 32 bits wide and lie in two arenas. For the caches, an entry still has the *table address* of an 8-byte
//! entry in a table of 4 KiB.
//!
//! # Properties
//! - A look-up finds exactly the mapped pages, with their sizes.
//! - A mapped page takes 4 bytes; tables above the last level take next to nothing.

use std::marker::PhantomData;
use std::ops::Range;

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};

/// Bits of an address below a page table entry of the second level: 2 MiB.
pub(crate) const HUGE_BITS: u32 = 21;

/// Entries of a table above the last level.
const FANOUT: usize = 512;

/// Maximum number of tables above the last level: enough for 4 TiB scattered over as many GiB.
const UPPER_MAX: u32 = 8192;

/// The largest frame or table number that fits into an entry.
pub(crate) const INDEX_MAX: u32 = (1 << 26) - 1;

const PRESENT: u32 = 1 << 31;
const ACCESSED: u32 = 1 << 30;
const DIRTY: u32 = 1 << 29;
const LARGE: u32 = 1 << 28;
const HINT: u32 = 1 << 27;
const STORES: u32 = 1 << 26;

/// A page size; its number is the index of its TLB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(crate) enum PageSize {
    /// 4 KiB (times the scale).
    Base,
    /// 2 MiB.
    Huge,
    /// 1 GiB.
    Giant,
}

impl PageSize {
    /// The table level whose entries map such pages, counted from 1 at the bottom.
    pub(crate) fn level(self) -> u32 {
        self as u32 + 1
    }

    fn of_level(level: u32) -> Self {
        match level {
            1 => Self::Base,
            2 => Self::Huge,
            _ => Self::Giant,
        }
    }
}

/// A page table entry.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct Entry(u32);

impl Entry {
    fn new(index: u32, flags: u32) -> Self {
        debug_assert!(index <= INDEX_MAX);
        Self(index | flags | PRESENT)
    }

    /// The first frame of the page, or the number of the next table.
    #[inline(always)]
    pub(crate) fn index(self) -> u32 {
        self.0 & INDEX_MAX
    }

    #[inline(always)]
    pub(crate) fn is_present(self) -> bool {
        self.0 & PRESENT != 0
    }

    #[inline(always)]
    pub(crate) fn is_large(self) -> bool {
        self.0 & LARGE != 0
    }

    /// Whether the page was accessed since the bit was last cleared.
    #[inline(always)]
    pub(crate) fn is_accessed(self) -> bool {
        self.0 & ACCESSED != 0
    }

    /// Whether the page was written to.
    #[inline(always)]
    pub(crate) fn is_dirty(self) -> bool {
        self.0 & DIRTY != 0
    }

    /// Whether the next access must fault, to detect it.
    #[inline(always)]
    pub(crate) fn is_hint(self) -> bool {
        self.0 & HINT != 0
    }

    /// Whether only the next store must fault: the page is write-protected.
    #[inline(always)]
    pub(crate) fn is_protected(self) -> bool {
        self.0 & STORES != 0
    }

    /// Clears the dirty bit, and sets or clears write protection.
    pub(crate) fn set_protected(&mut self, protected: bool) {
        self.0 = if protected {
            self.0 & !DIRTY | HINT | STORES
        } else {
            self.0 & !(HINT | STORES)
        };
    }

    /// Clears the dirty bit; returns whether it was set.
    pub(crate) fn take_dirty(&mut self) -> bool {
        let was = self.is_dirty();
        self.0 &= !DIRTY;
        was
    }

    /// Clears the accessed bit; returns whether it was set.
    pub(crate) fn take_accessed(&mut self) -> bool {
        let was = self.is_accessed();
        self.0 &= !ACCESSED;
        was
    }

    /// Sets the accessed bit, and the dirty bit for a store, as a walk does. Writes only if a bit changes.
    #[inline(always)]
    pub(crate) fn mark(&mut self, store: bool) {
        let bits = if store { ACCESSED | DIRTY } else { ACCESSED };
        if self.0 & bits != bits {
            self.0 |= bits;
        }
    }

    /// Makes the next access fault, or clears that mark.
    pub(crate) fn set_hint(&mut self, hint: bool) {
        self.0 = if hint { self.0 | HINT } else { self.0 & !HINT };
    }

    /// Replaces the frame and keeps the bits.
    pub(crate) fn set_index(&mut self, frame: u32) {
        debug_assert!(frame <= INDEX_MAX);
        self.0 = self.0 & !INDEX_MAX | frame;
    }
}

/// An address that page tables translate.
pub(crate) trait Address: Copy {
    /// The address with this number.
    fn of(number: u64) -> Self;
    /// The address as a number.
    fn number(self) -> u64;
}

macro_rules! address {
    ($($kind:ty),*) => {$(
        impl Address for $kind {
            #[inline(always)]
            fn of(number: u64) -> Self {
                Self(number)
            }

            #[inline(always)]
            fn number(self) -> u64 {
                self.0
            }
        }
    )*};
}

address!(GuestVirtAddr, GuestPhysAddr);

/// Upper bound of the physical memory for tables that map `bytes`.
pub(crate) fn table_bytes(bytes: u64) -> u64 {
    (u64::from(UPPER_MAX) + (bytes >> HUGE_BITS) + 2) * 4096
}

/// Extra tables beyond a dense address space: those at both ends of each mapping.
const PARTIAL_TABLES: u64 = 64;

/// Memory of tables that are touched on demand, in pages of `page_bytes`. It is far below [`table_bytes`], which leaves
/// room for scattered address spaces.
pub(crate) fn touched_table_bytes(bytes: u64, page_bytes: u64) -> u64 {
    let tables = [bytes >> (HUGE_BITS + 9), bytes >> HUGE_BITS];
    let touched = tables.map(|n| ((n + PARTIAL_TABLES) * 4096).next_multiple_of(page_bytes));
    touched.iter().sum()
}

/// Byte offset of the entry for an address in its 4 KiB table.
#[inline(always)]
pub(crate) fn entry_offset(level: u32, addr: impl Address) -> u64 {
    (addr.number() >> (9 * level + 3) & 0x1ff) * 8
}

/// The position of a table.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    /// Level, 1 at the bottom.
    pub(crate) level: u32,
    /// Its number in its arena.
    pub(crate) node: u32,
}

/// A page table tree, for guest-virtual or guest-physical addresses.
#[derive(Debug, Clone)]
pub(crate) struct Radix<A> {
    levels: u32,
    page_bits: u32,
    upper: Vec<Entry>,
    leaf: Vec<Entry>,
    /// Unused tables of the last level.
    free: Vec<u32>,
    /// For each block of 2 MiB, the number of its last-level table plus 1; 0 for none. Everything but page walks uses
    /// this index instead of descending.
    bottom: Vec<u32>,
    addresses: PhantomData<A>,
}

impl<A: Address> Radix<A> {
    /// An empty tree. `page_bits`: log2 of a page's bytes, 12 to 21.
    pub(crate) fn new(levels: u32, page_bits: u32) -> Self {
        debug_assert!((12..=HUGE_BITS).contains(&page_bits) && (4..=5).contains(&levels));
        Self {
            levels,
            page_bits,
            upper: vec![Entry::default(); FANOUT],
            leaf: vec![],
            free: vec![],
            bottom: vec![],
            addresses: PhantomData,
        }
    }

    /// log2 of a page's bytes.
    pub(crate) fn page_bits(&self) -> u32 {
        self.page_bits
    }

    /// The root table.
    #[inline(always)]
    pub(crate) fn root(&self) -> Table {
        Table {
            level: self.levels,
            node: 0,
        }
    }

    /// Number of the 4 KiB page of a table among all tables.
    #[inline(always)]
    pub(crate) fn table_page(&self, table: Table) -> u32 {
        if table.level == 1 {
            UPPER_MAX + table.node
        } else {
            table.node
        }
    }

    #[inline(always)]
    fn leaf_entries(&self) -> usize {
        1 << (HUGE_BITS - self.page_bits)
    }

    #[inline(always)]
    fn slot(&self, table: Table, addr: A) -> usize {
        let addr = addr.number();
        if table.level == 1 {
            let n = self.leaf_entries();
            table.node as usize * n + ((addr >> self.page_bits) as usize & (n - 1))
        } else {
            let index = addr >> (9 * table.level + 3);
            table.node as usize * FANOUT + (index as usize & (FANOUT - 1))
        }
    }

    /// The entry for `addr` in `table`.
    #[inline(always)]
    pub(crate) fn read(&self, table: Table, addr: A) -> Entry {
        let slot = self.slot(table, addr);
        if table.level == 1 {
            self.leaf[slot]
        } else {
            self.upper[slot]
        }
    }

    /// The entry for `addr` in `table`, mutable.
    #[inline(always)]
    pub(crate) fn entry_mut(&mut self, table: Table, addr: A) -> &mut Entry {
        let slot = self.slot(table, addr);
        if table.level == 1 {
            &mut self.leaf[slot]
        } else {
            &mut self.upper[slot]
        }
    }

    /// Maps the page of this size at `addr` to `frame` and the following frames. Nothing may be mapped there; for a
    /// huge page an empty table may exist.
    pub(crate) fn map(&mut self, addr: A, size: PageSize, frame: u32) {
        let mut table = self.root();
        while table.level > size.level() {
            let entry = self.read(table, addr);
            debug_assert!(!entry.is_large(), "{:#x} is mapped", addr.number());
            let next = if entry.is_present() {
                entry.index()
            } else {
                let next = self.grow(table.level - 1);
                *self.entry_mut(table, addr) = Entry::new(next, 0);
                if table.level == 2 {
                    self.set_bottom(addr, next + 1);
                }
                next
            };
            table = Table {
                level: table.level - 1,
                node: next,
            };
        }
        let large = if size == PageSize::Base { 0 } else { LARGE };
        let before = self.read(table, addr);
        if before.is_present() && !before.is_large() && table.level == 2 {
            self.free.push(before.index());
            self.set_bottom(addr, 0);
        }
        *self.entry_mut(table, addr) = Entry::new(frame, large);
    }

    fn set_bottom(&mut self, addr: A, table: u32) {
        let block = (addr.number() >> HUGE_BITS) as usize;
        if self.bottom.len() <= block {
            self.bottom.resize(block + 1, 0);
        }
        self.bottom[block] = table;
    }

    /// The slot of `addr` in its last-level table, if that table exists.
    #[inline(always)]
    fn bottom_slot(&self, addr: A) -> Option<usize> {
        let node = self
            .bottom
            .get((addr.number() >> HUGE_BITS) as usize)?
            .checked_sub(1)?;
        Some(self.slot(Table { level: 1, node }, addr))
    }

    fn grow(&mut self, level: u32) -> u32 {
        if level > 1 {
            let node = (self.upper.len() / FANOUT) as u32;
            assert!(node < UPPER_MAX, "address spaces are dense and below 4 TiB");
            self.upper
                .resize(self.upper.len() + FANOUT, Entry::default());
            return node;
        }
        let n = self.leaf_entries();
        if let Some(node) = self.free.pop() {
            self.leaf[node as usize * n..][..n].fill(Entry::default());
            return node;
        }
        let node = (self.leaf.len() / n) as u32;
        self.leaf.resize(self.leaf.len() + n, Entry::default());
        node
    }

    /// The entry that maps `addr`, and the page size.
    pub(crate) fn find(&self, addr: A) -> Option<(Entry, PageSize)> {
        let table = self.descend(addr)?;
        let entry = self.read(table, addr);
        entry
            .is_present()
            .then(|| (entry, PageSize::of_level(table.level)))
    }

    /// The entry that maps `addr`, mutable, and the page size.
    pub(crate) fn find_mut(&mut self, addr: A) -> Option<(&mut Entry, PageSize)> {
        let table = self.descend(addr)?;
        let entry = self.entry_mut(table, addr);
        entry
            .is_present()
            .then_some((entry, PageSize::of_level(table.level)))
    }

    /// Whether nothing was ever mapped in the 2 MiB around `addr`.
    pub(crate) fn is_empty_block(&self, addr: A) -> bool {
        let mut table = self.root();
        while table.level >= 2 {
            let entry = self.read(table, addr);
            if !entry.is_present() {
                return true;
            }
            if entry.is_large() {
                return false;
            }
            table = Table {
                level: table.level - 1,
                node: entry.index(),
            };
        }
        false
    }

    /// The frame of the base page that holds `addr`.
    pub(crate) fn frame(&self, addr: A) -> Option<u32> {
        let (entry, size) = self.find(addr)?;
        Some(entry.index() + self.within(addr, size))
    }

    /// Number of base pages from the start of the page of this size to `addr`.
    #[inline(always)]
    pub(crate) fn within(&self, addr: A, size: PageSize) -> u32 {
        let bits = match size {
            PageSize::Base => return 0,
            PageSize::Huge => HUGE_BITS,
            PageSize::Giant => HUGE_BITS + 9,
        };
        ((addr.number() & ((1 << bits) - 1)) >> self.page_bits) as u32
    }

    /// The table with the entry that maps `addr`, if all tables above exist.
    fn descend(&self, addr: A) -> Option<Table> {
        if let Some(&table) = self.bottom.get((addr.number() >> HUGE_BITS) as usize)
            && table > 0
        {
            return Some(Table {
                level: 1,
                node: table - 1,
            });
        }
        let mut table = self.root();
        while table.level > 1 {
            let entry = self.read(table, addr);
            if !entry.is_present() {
                return None;
            }
            if entry.is_large() {
                break;
            }
            table = Table {
                level: table.level - 1,
                node: entry.index(),
            };
        }
        Some(table)
    }

    /// Removes the mapping of the page that holds `addr`.
    pub(crate) fn unmap(&mut self, addr: A) -> Option<(Entry, PageSize)> {
        let (entry, size) = self.find_mut(addr)?;
        Some((std::mem::take(entry), size))
    }

    /// Visits every mapped page that begins in `range`, in address order.
    pub(crate) fn for_each(
        &mut self,
        range: Range<A>,
        mut visit: impl FnMut(A, &mut Entry, PageSize),
    ) {
        let page = 1u64 << self.page_bits;
        let range = range.start.number()..range.end.number();
        let mut at = range.start.next_multiple_of(page);
        while at < range.end {
            let Some(table) = self.descend(A::of(at)) else {
                // No table: skip the block.
                at = (at | ((1 << HUGE_BITS) - 1)) + 1;
                continue;
            };
            let size = PageSize::of_level(table.level);
            let bits = match size {
                PageSize::Base => self.page_bits,
                _ => 9 * table.level + 3,
            };
            if size == PageSize::Base {
                // Visit all entries of this table.
                let end = range.end.min((at | ((1 << HUGE_BITS) - 1)) + 1);
                let first = self.slot(table, A::of(at));
                let n = (end - at).div_ceil(page) as usize;
                for (i, entry) in self.leaf[first..first + n].iter_mut().enumerate() {
                    if entry.is_present() {
                        visit(A::of(at + i as u64 * page), entry, size);
                    }
                }
                at += n as u64 * page;
            } else {
                let start = at >> bits << bits;
                let entry = self.entry_mut(table, A::of(at));
                if entry.is_present() && start >= range.start {
                    visit(A::of(start), entry, size);
                }
                at = start + (1 << bits);
            }
        }
    }

    /// Bytes of the simulator's own memory.
    pub(crate) fn state_bytes(&self) -> usize {
        (self.upper.capacity() + self.leaf.capacity() + self.bottom.capacity()) * 4
    }

    /// Address of the last-level entry of `addr` in the simulator's own memory, for a prefetch.
    #[inline(always)]
    pub(crate) fn bottom_place(&self, addr: A) -> Option<*const u8> {
        Some((&raw const *self.leaf.get(self.bottom_slot(addr)?)?).cast())
    }

    /// Simulated address of the last-level entry of `addr`: its byte offset among all tables.
    #[inline(always)]
    pub(crate) fn bottom_address(&self, addr: A) -> Option<u64> {
        let node = self
            .bottom
            .get((addr.number() >> HUGE_BITS) as usize)?
            .checked_sub(1)?;
        let page = self.table_page(Table { level: 1, node });
        Some(u64::from(page) << 12 | entry_offset(1, addr))
    }

    /// The frame of a page, if it is mapped as a base page.
    #[inline(always)]
    pub(crate) fn bottom_frame(&self, addr: A) -> Option<u32> {
        let entry = self.leaf.get(self.bottom_slot(addr)?)?;
        entry.is_present().then(|| entry.index())
    }
}

#[cfg(test)]
mod tests;
