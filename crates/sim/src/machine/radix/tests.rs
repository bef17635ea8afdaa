use std::collections::BTreeMap;

use proptest::prelude::*;

use super::*;

proptest! {
    /// A tree holds the same pages as an ordered map.
    #[test]
    fn what_was_mapped_is_found(
        page_bits in 12u32..=16,
        levels in 4u32..=5,
        steps in prop::collection::vec((0u64..40, 0u64..512, 0u32..4), 1..200),
    ) {
        let mut tree = Radix::new(levels, page_bits);
        let mut twin: BTreeMap<u64, (u32, PageSize)> = BTreeMap::new();
        let per_block = 1u64 << (HUGE_BITS - page_bits);
        for (n, (block, page, what)) in steps.into_iter().enumerate() {
            let base = (block * 37) << HUGE_BITS;
            let at = base + ((page % per_block) << page_bits);
            let frame = n as u32 * 512;
            let huge = twin.get(&base).is_some_and(|p| p.1 == PageSize::Huge);
            match what {
                0 | 1 if !huge => {
                    tree.unmap(GuestVirtAddr(at));
                    tree.map(GuestVirtAddr(at), PageSize::Base, frame);
                    twin.insert(at, (frame, PageSize::Base));
                }
                2 => {
                    tree.for_each(GuestVirtAddr(base)..GuestVirtAddr(base + (1 << HUGE_BITS)), |_, e, _| *e = Entry::default());
                    twin.retain(|&a, _| a >> HUGE_BITS != base >> HUGE_BITS);
                    tree.map(GuestVirtAddr(base), PageSize::Huge, frame);
                    twin.insert(base, (frame, PageSize::Huge));
                }
                _ => {
                    tree.unmap(GuestVirtAddr(at));
                    twin.remove(if huge { &base } else { &at });
                }
            }
        }
        let mut seen = BTreeMap::new();
        tree.for_each(GuestVirtAddr(0)..GuestVirtAddr(1 << 40), |at, e, size| { seen.insert(at.0, (e.index(), size)); });
        prop_assert_eq!(&seen, &twin);
        for (&at, &(frame, size)) in &twin {
            prop_assert_eq!(tree.find(GuestVirtAddr(at)).map(|(e, s)| (e.index(), s)), Some((frame, size)));
        }
    }
}

#[test]
fn entries_lie_where_the_hardware_has_them() {
    // The second entry of a table of each level.
    for level in 1..=5 {
        assert_eq!(entry_offset(level, GuestPhysAddr(1 << (9 * level + 3))), 8);
    }
    assert_eq!(entry_offset(1, GuestPhysAddr(511 << 12)), 511 * 8);
}

#[test]
fn a_mapped_page_takes_four_bytes() {
    let mut tree = Radix::new(4, 12);
    let pages = 1 << 18;
    for i in 0..pages {
        tree.map(GuestPhysAddr(i << 12), PageSize::Base, i as u32);
    }
    assert!(
        tree.state_bytes() as u64 <= 9 * pages,
        "{}",
        tree.state_bytes()
    );
}
