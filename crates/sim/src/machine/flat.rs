//! Memory that the memory controller tiers by itself, line by line: Intel's Flat Memory Mode.
//!
//! Zhong et al., OSDI 2024.
//!
//! # Problem
//! Software tiering must track accesses, and moves 64 lines even if only one is hot.
//!
//! # Approach
//! A page of slow memory and one of fast memory form a *pair*. Lines at equal offsets share a place in fast
//! memory. The line accessed last is in fast memory, the other in slow memory. A miss fetches its line from slow memory
//! and exchanges the two. A bit stored with each fast line tells which line it is, so a miss reads fast memory first
//! and waits for both (assumed). A prefetched miss waits for its transfer only (assumed). Fast pages without a partner
//! are *dedicated*.
//!
//! A simulated page has 64 lines, as a real one. Each stands for the lines of all real pages in the simulated page.
//!
//! # Properties
//! - Of the two lines of a place, the one accessed last is in fast memory.

use super::tier::LINE_BYTES;

/// Lines of a page.
const LINES: u32 = (demeter_policy::PAGE_SIZE / LINE_BYTES) as u32;

/// A number that no page has.
const NONE: u32 = u32::MAX;

/// The pairs of host pages, and the tier of each of their lines.
#[derive(Debug, Clone)]
pub(crate) struct Flat {
    /// By page: the other page of its pair.
    fellow: Vec<u32>,
    /// By page of fast memory: bit mask of its lines that are in slow memory.
    away: Vec<u64>,
    /// First page of slow memory.
    slow: u32,
    /// Lines of a simulated page, log2.
    page_lines: u32,
}

impl Flat {
    /// Unpaired pages of `2^page_bits` bytes; those from `slow` on are slow memory.
    pub(crate) fn new(page_bits: u32, slow: u32, pages: u32) -> Self {
        Self {
            fellow: vec![NONE; pages as usize],
            away: vec![0; slow as usize],
            slow,
            page_lines: page_bits - LINE_BYTES.trailing_zeros(),
        }
    }

    /// Makes two pages a pair, with all lines in their own tier.
    pub(crate) fn join(&mut self, fast: u32, slow: u32) {
        debug_assert!(fast < self.slow && slow >= self.slow);
        self.fellow[fast as usize] = slow;
        self.fellow[slow as usize] = fast;
        self.away[fast as usize] = 0;
    }

    /// Splits a pair.
    pub(crate) fn part(&mut self, fast: u32) {
        let slow = std::mem::replace(&mut self.fellow[fast as usize], NONE);
        if let Some(fellow) = self.fellow.get_mut(slow as usize) {
            *fellow = NONE;
        }
        self.away[fast as usize] = 0;
    }

    /// The slow page that is paired with a fast page.
    pub(crate) fn fellow(&self, fast: u32) -> Option<u32> {
        let fellow = self.fellow.get(fast as usize).copied();
        fellow.filter(|&fellow| fellow != NONE)
    }

    /// Accesses a line, by its number in the host's memory. Returns true if it was in fast memory.
    pub(crate) fn access(&mut self, line: u64) -> bool {
        let page = (line >> self.page_lines) as u32;
        let Some(fellow) = self.fellow(page) else {
            return page < self.slow;
        };
        let bit = 1 << (line % u64::from(LINES));
        let away = &mut self.away[page.min(fellow) as usize];
        let is_in_fast = (*away & bit == 0) == (page < self.slow);
        if !is_in_fast {
            *away ^= bit;
        }
        is_in_fast
    }

    /// Share of a page's lines that are in fast memory, 0 to 1.
    pub(crate) fn in_fast(&self, page: u32) -> f64 {
        let is_fast = page < self.slow;
        let Some(fellow) = self.fellow(page) else {
            return f64::from(u8::from(is_fast));
        };
        let away = f64::from(self.away[page.min(fellow) as usize].count_ones());
        let share = away / f64::from(LINES);
        if is_fast { 1.0 - share } else { share }
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// Pages 0 to 3 are fast, 4 to 7 slow; 0 and 1 are in no pair.
        #[test]
        fn the_line_that_was_accessed_last_is_in_fast_memory(
            accesses in prop::collection::vec((0u32..6, 0u64..64), 1..400), scale in 0u32..4,
        ) {
            let mut flat = Flat::new(12 + scale, 4, 8);
            flat.join(2, 4);
            flat.join(3, 5);
            // For each place, the page whose line is in fast memory.
            let mut there = BTreeMap::new();
            for (page, line) in accesses {
                let place = if page < 4 { page } else { page - 2 };
                let last = there.insert((place, line), page).unwrap_or(place);
                let number = u64::from(page) << (6 + scale) | line;
                prop_assert_eq!(flat.access(number), last == page);
                prop_assert!(flat.access(number));
            }
            for (fast, slow) in [(2, 4), (3, 5)] {
                prop_assert_eq!(flat.in_fast(fast) + flat.in_fast(slow), 1.0);
                let moved = (0..64).filter(|&line| there.get(&(fast, line)) == Some(&slow)).count();
                prop_assert_eq!(flat.in_fast(slow), moved as f64 / 64.0);
                flat.part(fast);
                prop_assert_eq!((flat.in_fast(fast), flat.in_fast(slow)), (1.0, 0.0));
            }
            prop_assert_eq!((flat.in_fast(0), flat.in_fast(7)), (1.0, 0.0));
        }
    }
}
