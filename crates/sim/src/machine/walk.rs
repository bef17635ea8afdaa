//! Page walks, in one dimension and in two, with the page-walk caches of both.
//!
//! # Approach
//! One walker serves every dimension; what differs is where a table lies ([`Dimension::open`]).
//! In the host's dimension that is known. In the guest's it takes a walk of the host's tables,
//! so that a cold nested walk of four levels makes 4 × (4 + 1) + 4 = 24 references. A page-walk
//! cache of the guest's dimension holds where the next table lies in *host* memory, as the
//! combined mappings of Intel's manual (volume 3, 29.4) do.
//!
//! # Properties
//! - Cold walks reference as many entries as the manual's figure shows, for every page size.
//! - Walks with caches end at the same frame as those without.

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};

use super::assoc::Assoc;
use super::cpu::TlbModel;
use super::radix::{Address, PageSize, Radix, Table, entry_offset};
use super::segment::Segments;

/// Which address space cached translations belong to: a VM's number.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Space(pub(crate) u32);

/// Bits of the page numbers that tags hold, below the space's.
pub(crate) const KEY_BITS: u32 = 30;

/// Why a walk ended without a translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Fault {
    /// The guest maps nothing there.
    Page,
    /// The guest wants to notice the access.
    Hint,
    /// The hypervisor maps nothing at this guest-physical address.
    Violation(GuestPhysAddr),
    /// The hypervisor wants to notice the access to this guest-physical address.
    HostHint(GuestPhysAddr),
}

/// A translation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Mapping {
    /// Of the base page that holds the address.
    pub(crate) frame: u32,
    /// Of the page: the smaller one of both dimensions.
    pub(crate) size: PageSize,
    /// Whether its dirty bits are set, so that stores need no walk of their own.
    pub(crate) dirty: bool,
}

/// The next table: its number, and the 4 KiB page of host memory where it lies.
type Next = (u32, u32);

/// The page-walk caches of one dimension: the next table by address, one cache for each level.
#[derive(Debug, Clone)]
pub(crate) struct WalkCaches {
    /// First those that lead to a table of the last level.
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
        (1..levels).find_map(|level| {
            let cache = &mut self.by_level[level as usize - 1];
            let &mut (node, place) = cache.get(Self::key(level, space, addr))?;
            Some((Table { level, node }, place))
        })
    }

    #[inline(always)]
    fn insert(&mut self, table: Table, space: Space, addr: impl Address, place: u32) {
        let key = Self::key(table.level, space, addr);
        self.by_level[table.level as usize - 1].insert(key, (table.node, place));
    }

    /// Forgets what belongs to a space.
    pub(crate) fn clear_space(&mut self, space: Space) {
        for cache in &mut self.by_level {
            cache.retain(|key| key >> (KEY_BITS - 9) != u64::from(space.0));
        }
    }
}

/// A dimension of a walk.
trait Dimension<A> {
    /// The 4 KiB page of host memory where a table lies, by its number among all tables.
    fn open(&mut self, table_page: u32) -> Result<u32, Fault>;
    /// References an entry at this address in host memory.
    fn reference(&mut self, host_address: u64);
    /// What it means that nothing is mapped.
    fn absent(&self, addr: A) -> Fault;
    /// What it means that a page is to be noticed.
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
        let entry = tree.read(table, addr);
        if !entry.is_present() {
            return Err(dimension.absent(addr));
        }
        if table.level == 1 || entry.is_large() {
            if entry.is_hint() && (store || !entry.is_protected()) {
                return Err(dimension.noticed(addr));
            }
            tree.mark(table, addr, store);
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
        tree.mark(table, addr, false);
        table = Table {
            level: table.level - 1,
            node: entry.index(),
        };
        place = dimension.open(tree.table_page(table))?;
        caches.insert(table, space, addr, place);
    }
}

/// Tables that lie in host memory one after the other.
struct Direct<'a, A, R> {
    /// The 4 KiB page of host memory where they begin.
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

/// Second-level tables, with the caches that belong to them.
pub(crate) struct SecondLevel<'a> {
    /// The tables.
    pub(crate) tree: &'a mut Radix<GuestPhysAddr>,
    /// Their page-walk caches.
    pub(crate) caches: &'a mut WalkCaches,
    /// The 4 KiB page of host memory where the tables begin.
    pub(crate) first_page: u32,
    /// The VM's.
    pub(crate) space: Space,
    /// The VM's.
    pub(crate) segments: &'a Segments,
    /// Times that an address was compared with a segment's bounds.
    pub(crate) bound_checks: u64,
}

impl SecondLevel<'_> {
    /// Goes from a guest-physical to a host frame, by the segment where that leads there; tells each
    /// reference.
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

/// A guest's tables, which lie in guest-physical memory from address 0 on.
struct Guest<'a, 'b, R> {
    host: &'a mut SecondLevel<'b>,
    references: &'a mut R,
}

impl<R: FnMut(u64)> Dimension<GuestVirtAddr> for Guest<'_, '_, R> {
    #[inline(always)]
    fn open(&mut self, table_page: u32) -> Result<u32, Fault> {
        let gpa = GuestPhysAddr(u64::from(table_page) << 12);
        // The hardware sets accessed and dirty bits in the guest's tables: a store.
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

/// A walk without a hypervisor: tables begin at host address 0. Tells each reference.
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

/// A walk in two dimensions: to the host's frame of a guest-virtual address.
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
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::machine::cpu::ICE_LAKE_SP;
    use crate::machine::segment::{EscapeFilter, Segment};

    const GVA: GuestVirtAddr = GuestVirtAddr(0x12_4000_0000);

    struct World {
        guest: Radix<GuestVirtAddr>,
        host: Radix<GuestPhysAddr>,
        guest_caches: WalkCaches,
        host_caches: WalkCaches,
        segments: Segments,
    }

    impl World {
        /// One page of data, mapped with these sizes; the guest's tables as the host's size says.
        fn new(levels: u32, guest_size: PageSize, host_size: PageSize) -> Self {
            let mut guest = Radix::new(levels, 12);
            let mut host = Radix::new(levels, 12);
            let frame = 1 << 19;
            guest.map(GVA, guest_size, frame);
            let data = GuestPhysAddr(u64::from(frame) << 12);
            if host_size == PageSize::Base {
                for page in 0..1u64 << 14 {
                    host.map(GuestPhysAddr(page << 12), PageSize::Base, page as u32);
                }
            } else {
                for block in 0..32u64 {
                    host.map(
                        GuestPhysAddr(block << 21),
                        PageSize::Huge,
                        (block << 9) as u32,
                    );
                }
            }
            host.map(data, host_size, 1 << 15);
            let tlb = &ICE_LAKE_SP.tlb;
            let (guest_caches, host_caches) = (WalkCaches::new(tlb), WalkCaches::new(tlb));
            Self {
                guest,
                host,
                guest_caches,
                host_caches,
                segments: Segments::default(),
            }
        }

        fn references(&mut self) -> usize {
            self.translate().1
        }

        /// The mapping, references and comparisons with bounds.
        fn translate(&mut self) -> (Mapping, usize, u64) {
            let mut n = 0;
            let mut second = SecondLevel {
                tree: &mut self.host,
                caches: &mut self.host_caches,
                first_page: 0,
                space: Space(0),
                segments: &self.segments,
                bound_checks: 0,
            };
            let mapping = nested(
                &mut self.guest,
                &mut self.guest_caches,
                &mut second,
                GVA,
                false,
                &mut |_| {
                    n += 1;
                },
            )
            .unwrap();
            (mapping, n, second.bound_checks)
        }

        /// References when the host's page-walk caches are emptied before each of its walks.
        fn cold(&mut self) -> usize {
            struct Cold<'a>(&'a mut Radix<GuestPhysAddr>, usize);
            impl Cold<'_> {
                fn walk(&mut self, page: u32) -> Mapping {
                    let gpa = GuestPhysAddr(u64::from(page) << 12);
                    let mut caches = WalkCaches::new(&ICE_LAKE_SP.tlb);
                    let n = &mut self.1;
                    native(self.0, &mut caches, Space(0), gpa, false, &mut |_| *n += 1).unwrap()
                }
            }
            impl Dimension<GuestVirtAddr> for Cold<'_> {
                fn open(&mut self, table_page: u32) -> Result<u32, Fault> {
                    Ok(self.walk(table_page).frame)
                }
                fn reference(&mut self, _: u64) {
                    self.1 += 1;
                }
                fn absent(&self, _: GuestVirtAddr) -> Fault {
                    Fault::Page
                }
                fn noticed(&self, _: GuestVirtAddr) -> Fault {
                    Fault::Hint
                }
            }
            let mut cold = Cold(&mut self.host, 0);
            let mapping = walk(
                &mut self.guest,
                &mut self.guest_caches,
                Space(0),
                GVA,
                false,
                &mut cold,
            );
            cold.walk(mapping.unwrap().frame);
            cold.1
        }
    }

    #[test]
    fn cold_nested_walks_are_those_of_the_manual() {
        use PageSize::{Base, Huge};
        assert_eq!(World::new(4, Base, Base).cold(), 24);
        assert_eq!(World::new(5, Base, Base).cold(), 35);
        assert_eq!(World::new(4, Huge, Base).cold(), 19);
        assert_eq!(World::new(4, Base, Huge).cold(), 19);
        assert_eq!(World::new(4, Huge, Huge).cold(), 15);
        assert_eq!(World::new(5, Huge, Base).cold(), 29);
    }

    /// References and comparisons of a cold walk to where paging leads, under some segments.
    fn cold_with(guest: bool, host: bool, escapes: bool) -> (usize, u64) {
        let mut world = World::new(4, PageSize::Base, PageSize::Base);
        let data = GuestPhysAddr(1 << 31);
        let paged = {
            let mut world = World::new(4, PageSize::Base, PageSize::Base);
            world.translate().0.frame
        };
        let mut filter = EscapeFilter::default();
        if escapes {
            filter.insert(data.0);
        }
        let end = GuestVirtAddr(GVA.0 + 4096);
        world.segments.guest = guest.then(|| Segment::new(GVA, end, data.0, Default::default()));
        // Data lies at 2 GiB of the guest's and at 128 MiB of the host's memory; tables below.
        world.segments.host = host.then(|| {
            let (start, end) = (GuestPhysAddr(0), GuestPhysAddr(1 << 32));
            Segment::new(start, end, 0, filter)
        });
        let (mapping, references, checks) = world.translate();
        let by_host = host && !escapes;
        let expected = if by_host {
            (data.0 >> 12) as u32
        } else {
            paged
        };
        assert_eq!(mapping.frame, expected);
        (references, checks)
    }

    #[test]
    fn segments_take_dimensions_out_of_walks() {
        // VMM Direct: the guest's four entries, each table and the data compared with the bounds.
        assert_eq!(cold_with(false, true, false), (4, 5));
        // Guest Direct: the hypervisor's four entries.
        assert_eq!(cold_with(true, false, false), (4, 1));
        // Dual Direct: none.
        assert_eq!(cold_with(true, true, false), (0, 2));
        // What escapes is walked to by the hypervisor's tables.
        assert_eq!(cold_with(true, true, true), (4, 2));
        assert_eq!(cold_with(false, true, true), (8, 5));
    }

    #[test]
    fn native_walks_reference_one_entry_a_level() {
        for (levels, size, want) in [
            (4, PageSize::Base, 4),
            (5, PageSize::Base, 5),
            (4, PageSize::Huge, 3),
            (4, PageSize::Giant, 2),
        ] {
            let mut tree = Radix::new(levels, 12);
            tree.map(GVA, size, 1 << 18);
            let mut caches = WalkCaches::new(&ICE_LAKE_SP.tlb);
            let mut walk = || {
                let mut n = 0;
                native(&mut tree, &mut caches, Space(0), GVA, false, &mut |_| {
                    n += 1
                })
                .unwrap();
                n
            };
            assert_eq!(walk(), want);
            // Warm, only the last entry is read.
            assert_eq!(walk(), 1);
        }
    }

    #[test]
    fn warm_nested_walks_read_one_entry_of_each_dimension() {
        let mut world = World::new(4, PageSize::Base, PageSize::Base);
        let first = world.references();
        // The host's own caches help already on the first walk.
        assert!((9..24).contains(&first), "{first}");
        assert_eq!(world.references(), 2);
    }

    #[test]
    fn a_walk_that_fails_says_where() {
        let mut world = World::new(4, PageSize::Base, PageSize::Base);
        world.host.unmap(GuestPhysAddr(1 << 31));
        let mut second = SecondLevel {
            tree: &mut world.host,
            caches: &mut world.host_caches,
            first_page: 0,
            space: Space(0),
            segments: &world.segments,
            bound_checks: 0,
        };
        let mut go = |addr| {
            nested(
                &mut world.guest,
                &mut world.guest_caches,
                &mut second,
                addr,
                false,
                &mut |_| {},
            )
        };
        assert_eq!(go(GVA), Err(Fault::Violation(GuestPhysAddr(1 << 31))));
        assert_eq!(go(GuestVirtAddr(0x5000)), Err(Fault::Page));
        let (entry, _) = world.guest.find_mut(GVA).unwrap();
        entry.set_hint(true);
        let mut go = |addr| {
            nested(
                &mut world.guest,
                &mut world.guest_caches,
                &mut second,
                addr,
                false,
                &mut |_| {},
            )
        };
        assert_eq!(go(GVA), Err(Fault::Hint));
    }

    proptest! {
        /// Caches change what a walk costs, never where it ends; and they never cost more.
        #[test]
        fn caches_do_not_change_translations(
            pages in prop::collection::vec(0u64..1 << 22, 1..60),
            walks in prop::collection::vec((any::<prop::sample::Index>(), any::<bool>()), 1..200),
        ) {
            let mut tree = Radix::new(4, 12);
            for (frame, page) in pages.iter().enumerate() {
                let addr = GuestVirtAddr(page << 12);
                if tree.find(addr).is_none() {
                    tree.map(addr, PageSize::Base, frame as u32);
                }
            }
            let mut caches = WalkCaches::new(&ICE_LAKE_SP.tlb);
            for (which, store) in walks {
                let addr = GuestVirtAddr(pages[which.index(pages.len())] << 12);
                let mut n = 0;
                let got = native(&mut tree, &mut caches, Space(3), addr, store, &mut |_| n += 1);
                prop_assert_eq!(got.unwrap().frame, tree.frame(addr).unwrap());
                prop_assert!((1..=4).contains(&n));
                prop_assert!(tree.find(addr).unwrap().0.is_accessed());
            }
        }
    }
}
