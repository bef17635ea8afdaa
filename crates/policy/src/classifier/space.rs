//! From VMAs to the runs of granules that a classifier covers.

use crate::VirtRange;

/// A run of granules, `[start, end)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Span {
    pub start: u32,
    pub end: u32,
}

/// Addresses at or above this are left out, so that a granule number fits 32 bits.
const ADDRESS_BITS: u32 = 47;

/// The runs of granules that `vmas` touch: sorted, disjoint, not adjacent, at most `most` (those
/// with the smallest gaps between them become one).
pub(super) fn spans(vmas: &[VirtRange], granule_bits: u32, most: usize) -> Vec<Span> {
    let mut spans: Vec<Span> = vmas
        .iter()
        .filter(|v| v.end().0 <= 1 << ADDRESS_BITS)
        .map(|v| Span {
            start: (v.start().0 >> granule_bits) as u32,
            end: v.end().0.div_ceil(1 << granule_bits) as u32,
        })
        .collect();
    spans.sort_unstable_by_key(|s| (s.start, s.end));
    join_nearer(&mut spans, 0);
    if spans.len() > most.max(1) {
        let mut gaps: Vec<u32> = spans.windows(2).map(|w| w[1].start - w[0].end).collect();
        gaps.sort_unstable();
        let widest = gaps[spans.len() - most.max(1) - 1];
        join_nearer(&mut spans, widest);
    }
    spans
}

/// Joins sorted spans with at most `gap` granules between them.
fn join_nearer(spans: &mut Vec<Span>, gap: u32) {
    spans.dedup_by(|next, last| {
        let near = next.start <= last.end.saturating_add(gap);
        if near {
            last.end = last.end.max(next.end);
        }
        near
    });
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::GuestVirtAddr;

    proptest! {
        #[test]
        fn spans_cover_every_vma_within_the_bound(
            vmas in prop::collection::vec((0u64..1 << 40, 1u64..1 << 30), 0..60),
            most in 1usize..20,
        ) {
            let vmas: Vec<_> = vmas.iter()
                .filter_map(|&(s, l)| VirtRange::new(GuestVirtAddr(s), GuestVirtAddr(s + l)))
                .collect();
            let spans = spans(&vmas, 21, most);
            prop_assert!(spans.len() <= most);
            prop_assert!(spans.windows(2).all(|w| w[0].end < w[1].start));
            for v in &vmas {
                let (first, last) = ((v.start().0 >> 21) as u32, ((v.end().0 - 1) >> 21) as u32);
                prop_assert!(spans.iter().any(|s| s.start <= first && last < s.end));
            }
        }
    }

    #[test]
    fn five_level_addresses_are_left_out() {
        let high = VirtRange::new(GuestVirtAddr(1 << 50), GuestVirtAddr((1 << 50) + 4096));
        assert_eq!(spans(&[high.unwrap()], 21, 8), vec![]);
    }
}
