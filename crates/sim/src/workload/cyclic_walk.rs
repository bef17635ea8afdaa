//! A cyclic walk over contiguous items.
//!
//! # Problem
//! A simulated page and a simulated access both stand for `2^k` real ones. A streaming program would therefore stay in
//! each page, and in all memory, `2^k` times too long.
//!
//! # Approach
//! In each simulated page, the walk visits one real page's worth of contiguous items, as prefetchers expect, and skips
//! the rest.
//!
//! # Properties
//! - Without scaling, every item is visited once per round, in order.
//! - A round visits its items divided by `2^k`, to within a run, evenly spread.

use demeter_policy::PAGE_SIZE;

/// A cyclic walk, scaled by `2^k`.
#[derive(Debug, Clone)]
pub(super) struct CyclicWalk {
    start: u64,
    end: u64,
    next: u64,
    /// Items per run, items left in this run, and items skipped after it.
    run: u64,
    left: u64,
    skipped: u64,
}

impl CyclicWalk {
    /// A walk over the items `start..end` (at least one), each of `item_bytes`.
    pub(super) fn new(items: std::ops::Range<u64>, item_bytes: u64, scale_bits: u32) -> Self {
        let run = PAGE_SIZE.div_ceil(item_bytes.max(1));
        Self {
            start: items.start,
            end: items.end,
            next: items.start,
            run,
            left: run,
            skipped: run * ((1 << scale_bits) - 1),
        }
    }

    /// The current item.
    pub(super) fn item(&self) -> u64 {
        self.next
    }

    /// Advances to the next item; returns true at the end of a round.
    pub(super) fn advance(&mut self) -> bool {
        self.next += 1;
        self.left -= 1;
        if self.left == 0 {
            self.left = self.run;
            self.next += self.skipped;
        }
        let is_over = self.next >= self.end;
        if is_over {
            self.next = self.start + (self.next - self.end) % (self.end - self.start);
        }
        is_over
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn without_scale_every_item_comes_in_order(
            start in 0u64..1000,
            items in 1u64..5000,
            item_bytes in 1u64..10_000,
        ) {
            let mut sweep = CyclicWalk::new(start..start + items, item_bytes, 0);
            for _ in 0..2 {
                for item in start..start + items {
                    prop_assert_eq!(sweep.item(), item);
                    prop_assert_eq!(sweep.advance(), item + 1 == start + items);
                }
            }
        }

        #[test]
        fn scaled_rounds_visit_a_page_of_each(
            start in 0u64..1000,
            items in 10_000u64..200_000,
            item_bytes in 8u64..5000,
            scale_bits in 1u32..8,
        ) {
            let mut sweep = CyclicWalk::new(start..start + items, item_bytes, scale_bits);
            let stride = sweep.run << scale_bits;
            let mut by_stride = vec![0u64; items.div_ceil(stride) as usize];
            for round in 0..4 {
                let mut visited = 0u64;
                loop {
                    let item = sweep.item();
                    prop_assert!((start..start + items).contains(&item));
                    by_stride[((item - start) / stride) as usize] += 1;
                    visited += 1;
                    if sweep.advance() {
                        break;
                    }
                }
                let even = items >> scale_bits;
                let within = sweep.run + even / (items / stride).max(1) + 1;
                prop_assert!(visited.abs_diff(even) <= within, "round {round}: {visited} of {even}");
            }
            // Each whole stride had its run in each of the four rounds, give or take one.
            for &visits in &by_stride[..(items / stride) as usize] {
                prop_assert!(visits.abs_diff(4 * sweep.run) <= 2 * sweep.run, "{visits}");
            }
        }
    }
}
