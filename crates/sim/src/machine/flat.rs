//! Memory that the memory controller tiers by itself, line by line: Intel's Flat Memory Mode.
//!
//! Zhong et al., OSDI 2024.
//!
//! # Problem
//! Software that tiers pages must see who uses them, and moves 64 lines where one is hot.
//!
//! # Approach
//! A page of slow memory and one of fast memory are a *pair*. Each line of the one and its fellow of the other
//! share a place in fast memory: whichever was accessed last is in it, the other one in slow memory. An
//! access that misses finds its line in slow memory and exchanges the two. A bit with each line in fast
//! memory tells which it is, so that a miss has read fast memory in vain: it waits for both (assumed, as is
//! that a prefetched miss waits for its transfer only). Pages of fast memory without a fellow are *dedicated*.
//!
//! A simulated page has 64 lines, as a real one, each of which stands for those of all real pages that the page
//! stands for.
//!
//! # Properties
//! - Of the two lines of a place one is in fast memory, the one that was accessed last.

use super::tier::LINE_BYTES;

/// Lines of a page.
const LINES: u32 = (demeter_policy::PAGE_SIZE / LINE_BYTES) as u32;

/// No page has this number.
const NONE: u32 = u32::MAX;

/// Which pages of the host's memory are pairs, and where their lines are.
#[derive(Debug, Clone)]
pub(crate) struct Flat {
    /// By page: the other one of its pair.
    fellow: Vec<u32>,
    /// By page of fast memory: lines that are in slow memory, as bits.
    away: Vec<u64>,
    /// First page of slow memory.
    slow: u32,
    /// Lines of a simulated page, log2.
    page_lines: u32,
}

impl Flat {
    /// Pages of `2^page_bits` bytes, none of them in a pair; those from `slow` on are slow memory.
    pub(crate) fn new(page_bits: u32, slow: u32, pages: u32) -> Self {
        Self {
            fellow: vec![NONE; pages as usize],
            away: vec![0; slow as usize],
            slow,
            page_lines: page_bits - LINE_BYTES.trailing_zeros(),
        }
    }

    /// Makes a pair; all lines are at home.
    pub(crate) fn join(&mut self, fast: u32, slow: u32) {
        debug_assert!(fast < self.slow && slow >= self.slow);
        self.fellow[fast as usize] = slow;
        self.fellow[slow as usize] = fast;
        self.away[fast as usize] = 0;
    }

    /// Makes two pages of a pair.
    pub(crate) fn part(&mut self, fast: u32) {
        let slow = std::mem::replace(&mut self.fellow[fast as usize], NONE);
        if let Some(fellow) = self.fellow.get_mut(slow as usize) {
            *fellow = NONE;
        }
        self.away[fast as usize] = 0;
    }

    /// The page of slow memory that a page of fast memory is in a pair with.
    pub(crate) fn fellow(&self, fast: u32) -> Option<u32> {
        let fellow = self.fellow.get(fast as usize).copied();
        fellow.filter(|&fellow| fellow != NONE)
    }

    /// Accesses a line, by its number in the host's memory. True when it was in fast memory.
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
            // By place, the page whose line is in fast memory.
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
