//! Memory footprint of a recorded program, as regions.

use std::collections::BTreeMap;

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, PAGE_SIZE};

use super::format::{REGIONS_MAX, Span};

/// Maximum number of distinct blocks: 8 TiB if they are dense.
pub(super) const BLOCKS_MAX: usize = 1 << 22;

/// Cache of recent blocks, which avoids most tree look-ups.
const RECENT: usize = 64;

/// The touched part of each block of 2 MiB.
#[derive(Debug, Clone)]
pub(super) struct Footprint {
    blocks: BTreeMap<u64, Pages>,
    recent: [(u64, Pages); RECENT],
}

/// Pages of a block, `[first, end)`, counted from address 0.
#[derive(Debug, Clone, Copy, Default)]
struct Pages {
    first: u64,
    end: u64,
}

impl Footprint {
    pub(super) fn new() -> Self {
        Self {
            blocks: BTreeMap::new(),
            recent: [(u64::MAX, Pages::default()); RECENT],
        }
    }

    /// Records an access; false if there are too many blocks.
    pub(super) fn add(&mut self, gva: GuestVirtAddr) -> bool {
        let (block, page) = (gva.0 / BLOCK_SIZE, gva.0 / PAGE_SIZE);
        let recent = &mut self.recent[block as usize % RECENT];
        if recent.0 == block && recent.1.first <= page && page < recent.1.end {
            return true;
        }
        let pages = self.blocks.entry(block).or_insert(Pages {
            first: page,
            end: page + 1,
        });
        pages.first = pages.first.min(page);
        pages.end = pages.end.max(page + 1);
        *recent = (block, *pages);
        self.blocks.len() <= BLOCKS_MAX
    }

    /// The regions in address order. Gaps within a region are less than a block, or larger if there would be too many
    /// regions.
    pub(super) fn regions(&self) -> Vec<Span> {
        let mut gap_max = BLOCK_SIZE / PAGE_SIZE;
        loop {
            let mut regions: Vec<Pages> = Vec::new();
            for pages in self.blocks.values() {
                match regions.last_mut() {
                    Some(last) if pages.first - last.end < gap_max => last.end = pages.end,
                    _ => regions.push(*pages),
                }
            }
            if regions.len() <= REGIONS_MAX {
                return regions.into_iter().map(Span::from).collect();
            }
            gap_max *= 2;
        }
    }
}

impl From<Pages> for Span {
    fn from(pages: Pages) -> Self {
        Self {
            base: GuestVirtAddr(pages.first * PAGE_SIZE),
            bytes: (pages.end - pages.first) * PAGE_SIZE,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    proptest! {
        #[test]
        fn regions_hold_all_that_was_touched(
            addrs in proptest::collection::vec(0u64..1 << 32, 1..300),
        ) {
            let mut footprint = Footprint::new();
            for addr in &addrs {
                prop_assert!(footprint.add(GuestVirtAddr(*addr)));
            }
            let regions = footprint.regions();
            prop_assert!(regions.windows(2).all(|w| w[0].base.0 + w[0].bytes <= w[1].base.0));
            for addr in &addrs {
                let holds = |s: &Span| addr.wrapping_sub(s.base.0) < s.bytes;
                prop_assert!(regions.iter().any(holds));
            }
            // No page outside the outermost pages.
            for span in regions {
                let end = span.base.0 + span.bytes;
                prop_assert!(addrs.iter().any(|a| a / PAGE_SIZE == span.base.0 / PAGE_SIZE));
                prop_assert!(addrs.iter().any(|a| a / PAGE_SIZE + 1 == end / PAGE_SIZE));
            }
        }
    }

    #[test]
    fn too_many_regions_become_fewer() {
        let mut footprint = Footprint::new();
        for i in 0..3 * REGIONS_MAX as u64 {
            footprint.add(GuestVirtAddr(i * 3 * BLOCK_SIZE));
        }
        let regions = footprint.regions();
        assert!(regions.len() <= REGIONS_MAX && !regions.is_empty());
    }
}
