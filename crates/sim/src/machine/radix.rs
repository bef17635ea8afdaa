//! Page tables: radix trees of four or five levels, as the hardware walks them.
//!
//! # Approach
//! A simulated page stands for `2^k` real ones in a row, so that only the tables of the last level
//! are smaller than real ones: `2^(9-k)` entries. All levels above, and so huge pages and
//! page-walk caches, are the hardware's. Entries are 32 bits wide and lie in two arenas; an
//! entry's *table address* is still that of 8 bytes in a table of 4 KiB, for the caches' sake.
//!
//! # Properties
//! - What was mapped is found, with its size, until it is unmapped; nothing else is.
//! - A mapped page takes 4 bytes, and tables above the last level next to nothing.

use std::marker::PhantomData;
use std::ops::Range;

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};

/// Bits of an address below a page table entry of the second level: 2 MiB.
pub(crate) const HUGE_BITS: u32 = 21;

/// Entries of a table above the last level.
const FANOUT: usize = 512;

/// Tables above the last level: enough for 4 TiB scattered over as many GiB.
const UPPER_MAX: u32 = 8192;

/// The largest frame or table number that an entry holds.
pub(crate) const INDEX_MAX: u32 = (1 << 26) - 1;

const PRESENT: u32 = 1 << 31;
const ACCESSED: u32 = 1 << 30;
const DIRTY: u32 = 1 << 29;
const LARGE: u32 = 1 << 28;
const HINT: u32 = 1 << 27;
const STORES: u32 = 1 << 26;

/// A page's size; as a number, the index of its TLB.
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
    /// The level of table whose entries map such pages, counted from 1 at the bottom.
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

    /// Whether the next access shall fault, to be noticed.
    #[inline(always)]
    pub(crate) fn is_hint(self) -> bool {
        self.0 & HINT != 0
    }

    /// Whether only the next store shall fault: the page is write-protected.
    #[inline(always)]
    pub(crate) fn is_protected(self) -> bool {
        self.0 & STORES != 0
    }

    /// Clears the dirty bit, and makes the next store fault, or not.
    pub(crate) fn set_protected(&mut self, protected: bool) {
        self.0 = if protected {
            self.0 & !DIRTY | HINT | STORES
        } else {
            self.0 & !(HINT | STORES)
        };
    }

    /// Clears the dirty bit; tells whether it was set.
    pub(crate) fn take_dirty(&mut self) -> bool {
        let was = self.is_dirty();
        self.0 &= !DIRTY;
        was
    }

    /// Clears the accessed bit; tells whether it was set.
    pub(crate) fn take_accessed(&mut self) -> bool {
        let was = self.is_accessed();
        self.0 &= !ACCESSED;
        was
    }

    /// Sets the accessed bit, and the dirty bit for a store, as a walk does. Writes only what changes.
    #[inline(always)]
    pub(crate) fn mark(&mut self, store: bool) {
        let bits = if store { ACCESSED | DIRTY } else { ACCESSED };
        if self.0 & bits != bits {
            self.0 |= bits;
        }
    }

    /// Makes the next access fault, or not.
    pub(crate) fn set_hint(&mut self, hint: bool) {
        self.0 = if hint { self.0 | HINT } else { self.0 & !HINT };
    }

    /// Puts another frame in; the bits stay.
    pub(crate) fn set_index(&mut self, frame: u32) {
        debug_assert!(frame <= INDEX_MAX);
        self.0 = self.0 & !INDEX_MAX | frame;
    }
}

/// An address that page tables translate.
pub(crate) trait Address: Copy {
    /// The address with this number.
    fn of(number: u64) -> Self;
    /// Its number.
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

/// Bytes that tables can take in physical memory when `bytes` are mapped.
pub(crate) fn table_bytes(bytes: u64) -> u64 {
    (u64::from(UPPER_MAX) + (bytes >> HUGE_BITS) + 2) * 4096
}

/// Tables beside those that the bytes of a dense address space need: of each mapping's first and last part.
const PARTIAL_TABLES: u64 = 64;

/// The same where tables are touched as they are needed, in pages of so many bytes: of the room that [`table_bytes`] leaves for
/// scattered address spaces nearly nothing.
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

/// Where an entry is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Table {
    /// 1 at the bottom.
    pub(crate) level: u32,
    /// Which table of its arena.
    pub(crate) node: u32,
}

/// A tree of page tables that translate addresses of one kind: a guest's, or the second level.
#[derive(Debug, Clone)]
pub(crate) struct Radix<A> {
    levels: u32,
    page_bits: u32,
    upper: Vec<Entry>,
    leaf: Vec<Entry>,
    /// Tables of the last level that are not in use.
    free: Vec<u32>,
    /// The table of the last level by block of 2 MiB, plus 1; 0 for none. The way down is for
    /// walks; everybody else goes this one.
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

    /// The table on top.
    #[inline(always)]
    pub(crate) fn root(&self) -> Table {
        Table {
            level: self.levels,
            node: 0,
        }
    }

    /// Number of the 4 KiB page that a table takes among all tables.
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

    /// The same, to be changed.
    #[inline(always)]
    pub(crate) fn entry_mut(&mut self, table: Table, addr: A) -> &mut Entry {
        let slot = self.slot(table, addr);
        if table.level == 1 {
            &mut self.leaf[slot]
        } else {
            &mut self.upper[slot]
        }
    }

    /// Maps the page of this size at `addr` to `frame` and those after it. Nothing is mapped
    /// there, or for a huge page only an empty table.
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

    /// The slot of `addr` in a table of the last level, if there is such a table.
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

    /// The entry that maps `addr`, with the page's size.
    pub(crate) fn find(&self, addr: A) -> Option<(Entry, PageSize)> {
        let table = self.descend(addr)?;
        let entry = self.read(table, addr);
        entry
            .is_present()
            .then(|| (entry, PageSize::of_level(table.level)))
    }

    /// The same, to be changed.
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

    /// Base pages between the start of the page of this size that holds `addr` and `addr`.
    #[inline(always)]
    pub(crate) fn within(&self, addr: A, size: PageSize) -> u32 {
        let bits = match size {
            PageSize::Base => return 0,
            PageSize::Huge => HUGE_BITS,
            PageSize::Giant => HUGE_BITS + 9,
        };
        ((addr.number() & ((1 << bits) - 1)) >> self.page_bits) as u32
    }

    /// The table with the entry that maps `addr`, if there are tables down to there.
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

    /// Takes the mapping of the page that holds `addr` out.
    pub(crate) fn unmap(&mut self, addr: A) -> Option<(Entry, PageSize)> {
        let (entry, size) = self.find_mut(addr)?;
        Some((std::mem::take(entry), size))
    }

    /// Visits every mapped page that begins in `range`, by address.
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
                // No table: on to the next one.
                at = (at | ((1 << HUGE_BITS) - 1)) + 1;
                continue;
            };
            let size = PageSize::of_level(table.level);
            let bits = match size {
                PageSize::Base => self.page_bits,
                _ => 9 * table.level + 3,
            };
            if size == PageSize::Base {
                // All of this table at once.
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

    /// Where the entry of `addr` lies in this computer's memory if it is one of the last level,
    /// for a prefetch.
    #[inline(always)]
    pub(crate) fn bottom_place(&self, addr: A) -> Option<*const u8> {
        Some((&raw const *self.leaf.get(self.bottom_slot(addr)?)?).cast())
    }

    /// Where the hardware has the entry of `addr` if it is one of the last level: the byte among
    /// all tables.
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
