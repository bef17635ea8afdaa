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
    /// Maps one page of data with these sizes. The guest's tables use the host's page size.
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

    /// References of a walk, with the host's page-walk caches emptied before each host walk.
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

/// References and bound comparisons of a cold walk that ends at the paging result, with some segments.
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
    // Data lies at 2 GiB of the guest's memory and at 128 MiB of the host's; tables lie below.
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
    // VMM Direct: four guest entries; each table and the data are compared with the bounds.
    assert_eq!(cold_with(false, true, false), (4, 5));
    // Guest Direct: four entries of the hypervisor's tables.
    assert_eq!(cold_with(true, false, false), (4, 1));
    // Dual Direct: none.
    assert_eq!(cold_with(true, true, false), (0, 2));
    // Escaping pages need a walk of the hypervisor's tables.
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
        // A warm walk reads the last entry only.
        assert_eq!(walk(), 1);
    }
}

#[test]
fn warm_nested_walks_read_one_entry_of_each_dimension() {
    let mut world = World::new(4, PageSize::Base, PageSize::Base);
    let first = world.references();
    // The host's caches already help within the first walk.
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
    /// Caches never change where a walk ends, and never raise its cost.
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
