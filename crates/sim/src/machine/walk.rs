//! Page walks, native and nested, with page-walk caches.
//!
//! # Approach
//! One walker serves both dimensions; they differ only in how they locate a table ([`Dimension::open`]). The host
//! dimension knows where its tables lie. The guest dimension must walk the host's tables for each of its own. A cold
//! nested walk of four levels therefore makes 4 × (4 + 1) + 4 = 24 references. A guest page-walk cache holds the *host*
//! address of the next table, as the combined mappings of Intel's manual (volume 3, 29.4) do.
//!
//! # Properties
//! - Cold walks reference as many entries as the manual's figure shows, for every page size.
//! - Walks with and without caches end at the same frame.

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};

use super::assoc::Assoc;
use super::cpu::TlbModel;
use super::mapping::{Fault, Mapping};
use super::radix::{Address, PageSize, Radix, Table, entry_offset};
use super::segment::Segments;

/// The address space of cached translations: a VM's number. VMs that share no core may have equal numbers.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space(pub(crate) u32);

impl Space {
    /// Number of spaces.
    pub(crate) const COUNT: u32 = 64;
}

/// Width of page numbers in tags, below the space's bits.
pub(crate) const KEY_BITS: u32 = 30;

/// The next table: its number, and its 4 KiB page of host memory.
type Next = (u32, u32);

/// Page-walk caches of one dimension, one for each level: the next table by address.
#[derive(Debug, Clone)]
pub(crate) struct WalkCaches {
    /// In level order; the first leads to last-level tables.
    by_level: [Assoc<Next, 4>; 4],
}

impl WalkCaches {
    pub(crate) fn new(tlb: &TlbModel) -> Self {
        Self {
            by_level: tlb.walk.map(Assoc::new),
        }
    }

    #[inline(always)]
    fn key(level: u32, space: Space, addr: impl Address) -> u64 {
        addr.number() >> (9 * level + 12) | u64::from(space.0) << (KEY_BITS - 9)
    }

    /// The lowest table that is known for an address.
    #[inline(always)]
    fn lowest(&mut self, levels: u32, space: Space, addr: impl Address) -> Option<(Table, u32)> {
        // A plain loop: the compiler did not inline `find_map`, which a nested walk calls three times.
        for (level, cache) in (1..levels).zip(&mut self.by_level) {
            if let Some(&mut (node, place)) = cache.get(Self::key(level, space, addr)) {
                return Some((Table { level, node }, place));
            }
        }
        None
    }

    #[inline(always)]
    fn insert(&mut self, table: Table, space: Space, addr: impl Address, place: u32) {
        let key = Self::key(table.level, space, addr);
        self.by_level[table.level as usize - 1].insert(key, (table.node, place));
    }

    /// Drops all entries of a space.
    pub(crate) fn clear_space(&mut self, space: Space) {
        for cache in &mut self.by_level {
            cache.retain(|key| key >> (KEY_BITS - 9) != u64::from(space.0));
        }
    }
}

/// One dimension of a walk: the guest's or the host's.
trait Dimension<A> {
    /// The 4 KiB page of host memory that holds a table, by the table's number.
    fn open(&mut self, table_page: u32) -> Result<u32, Fault>;
    /// References an entry at this address in host memory.
    fn reference(&mut self, host_address: u64);
    /// The fault for an unmapped address.
    fn absent(&self, addr: A) -> Fault;
    /// The fault for a page that is marked to detect accesses.
    fn noticed(&self, addr: A) -> Fault;
}

#[inline(always)]
fn walk<A: Address>(
    tree: &mut Radix<A>,
    caches: &mut WalkCaches,
    space: Space,
    addr: A,
    store: bool,
    dimension: &mut impl Dimension<A>,
) -> Result<Mapping, Fault> {
    let root = tree.root();
    let (mut table, mut place) = match caches.lowest(root.level, space, addr) {
        Some(known) => known,
        None => (root, dimension.open(tree.table_page(root))?),
    };
    loop {
        let offset = entry_offset(table.level, addr);
        dimension.reference(u64::from(place) << 12 | offset);
        let slot = tree.entry_mut(table, addr);
        let entry = *slot;
        if !entry.is_present() {
            return Err(dimension.absent(addr));
        }
        if table.level == 1 || entry.is_large() {
            if entry.is_hint() && (store || !entry.is_protected()) {
                return Err(dimension.noticed(addr));
            }
            slot.mark(store);
            let size = match table.level {
                1 => PageSize::Base,
                2 => PageSize::Huge,
                _ => PageSize::Giant,
            };
            return Ok(Mapping {
                frame: entry.index() + tree.within(addr, size),
                size,
                dirty: store || entry.is_dirty(),
            });
        }
        slot.mark(false);
        table = Table {
            level: table.level - 1,
            node: entry.index(),
        };
        place = dimension.open(tree.table_page(table))?;
        caches.insert(table, space, addr, place);
    }
}

/// Tables that lie contiguously in host memory.
struct Direct<'a, A, R> {
    /// Their first 4 KiB page of host memory.
    first_page: u32,
    references: &'a mut R,
    absent: fn(A) -> Fault,
    noticed: fn(A) -> Fault,
}

impl<A, R: FnMut(u64)> Dimension<A> for Direct<'_, A, R> {
    #[inline(always)]
    fn open(&mut self, table_page: u32) -> Result<u32, Fault> {
        Ok(self.first_page + table_page)
    }

    #[inline(always)]
    fn reference(&mut self, host_address: u64) {
        (self.references)(host_address);
    }

    fn absent(&self, addr: A) -> Fault {
        (self.absent)(addr)
    }

    fn noticed(&self, addr: A) -> Fault {
        (self.noticed)(addr)
    }
}

/// Second-level tables and their caches.
pub(crate) struct SecondLevel<'a> {
    /// The tables.
    pub(crate) tree: &'a mut Radix<GuestPhysAddr>,
    /// Their page-walk caches.
    pub(crate) caches: &'a mut WalkCaches,
    /// The 4 KiB page of host memory where the tables begin.
    pub(crate) first_page: u32,
    /// The VM's address space.
    pub(crate) space: Space,
    /// The VM's segments.
    pub(crate) segments: &'a Segments,
    /// Number of comparisons with segment bounds.
    pub(crate) bound_checks: u64,
}

impl SecondLevel<'_> {
    /// Translates a guest-physical to a host frame, by a segment if one covers it. Reports each reference.
    #[inline(always)]
    fn walk(
        &mut self,
        gpa: GuestPhysAddr,
        store: bool,
        references: &mut impl FnMut(u64),
    ) -> Result<Mapping, Fault> {
        if let Some(segment) = &self.segments.host {
            self.bound_checks += 1;
            if let Some(mapping) = segment.mapping(gpa, self.tree.page_bits()) {
                return Ok(mapping);
            }
        }
        let mut direct = Direct {
            first_page: self.first_page,
            references,
            absent: Fault::Violation,
            noticed: Fault::HostHint,
        };
        walk(self.tree, self.caches, self.space, gpa, store, &mut direct)
    }
}

/// A guest's tables, at guest-physical address 0 and up.
struct Guest<'a, 'b, R> {
    host: &'a mut SecondLevel<'b>,
    references: &'a mut R,
}

impl<R: FnMut(u64)> Dimension<GuestVirtAddr> for Guest<'_, '_, R> {
    #[inline(always)]
    fn open(&mut self, table_page: u32) -> Result<u32, Fault> {
        let gpa = GuestPhysAddr(u64::from(table_page) << 12);
        // The hardware sets accessed and dirty bits in the guest's tables, which counts as a store.
        let mapping = self.host.walk(gpa, true, self.references)?;
        let page_bits = self.host.tree.page_bits();
        let within = gpa.0 & ((1 << page_bits) - 1);
        Ok(((u64::from(mapping.frame) << page_bits | within) >> 12) as u32)
    }

    #[inline(always)]
    fn reference(&mut self, host_address: u64) {
        (self.references)(host_address);
    }

    fn absent(&self, _addr: GuestVirtAddr) -> Fault {
        Fault::Page
    }

    fn noticed(&self, _addr: GuestVirtAddr) -> Fault {
        Fault::Hint
    }
}

/// A walk without a hypervisor. Tables begin at host address 0. Reports each reference.
#[inline(always)]
pub(crate) fn native<A: Address>(
    tree: &mut Radix<A>,
    caches: &mut WalkCaches,
    space: Space,
    addr: A,
    store: bool,
    references: &mut impl FnMut(u64),
) -> Result<Mapping, Fault> {
    let mut direct = Direct {
        first_page: 0,
        references,
        absent: |_| Fault::Page,
        noticed: |_| Fault::Hint,
    };
    walk(tree, caches, space, addr, store, &mut direct)
}

/// A nested walk: the host frame of a guest-virtual address.
#[inline(always)]
pub(crate) fn nested(
    tree: &mut Radix<GuestVirtAddr>,
    caches: &mut WalkCaches,
    host: &mut SecondLevel<'_>,
    addr: GuestVirtAddr,
    store: bool,
    references: &mut impl FnMut(u64),
) -> Result<Mapping, Fault> {
    let (space, page_bits) = (host.space, tree.page_bits());
    let by_segment = host.segments.guest.as_ref().and_then(|segment| {
        host.bound_checks += 1;
        segment.mapping(addr, page_bits)
    });
    let in_guest = match by_segment {
        Some(mapping) => mapping,
        None => {
            let mut guest = Guest { host, references };
            walk(tree, caches, space, addr, store, &mut guest)?
        }
    };
    let within = addr.0 & ((1 << page_bits) - 1);
    let gpa = GuestPhysAddr(u64::from(in_guest.frame) << page_bits | within);
    let in_host = host.walk(gpa, store, references)?;
    Ok(Mapping {
        frame: in_host.frame,
        size: in_guest.size.min(in_host.size),
        dirty: in_guest.dirty && in_host.dirty,
    })
}

#[cfg(test)]
mod tests;
