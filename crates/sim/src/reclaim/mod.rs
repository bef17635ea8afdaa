//! Reclaim by demotion, as in kswapd: in a guest's fast node, or in the hypervisor.
//!
//! # Problem
//! Idle pages of fast memory must move to slow memory until enough is free. One bit is known of a page: whether it was
//! accessed since the bit was last cleared.
//!
//! # Properties
//! - A page that was accessed between two checks stays.
//! - A run ends when the target is reached, after its rounds, at its time limit, or when no page can move.

mod clock;
mod generations;
mod seen;

pub(crate) use clock::Clock;
pub(crate) use generations::Generations;
pub(crate) use seen::Seen;

/// The page slots that reclaim scans; a page of fast memory may begin at each.
pub(crate) trait Reclaimable {
    /// Number of slots.
    fn places(&self) -> u32;
    /// Bytes of fast memory.
    fn fast_bytes(&self) -> u64;
    /// Number of slots of the page that begins here; none if no page begins here.
    fn page_at(&mut self, place: u32) -> Option<u32>;
    /// Makes the page that begins here inactive and clears its accessed bit.
    fn deactivate(&mut self, place: u32);
    /// Clears the accessed bit of the inactive page that begins here; returns the old bit.
    fn take_accessed(&mut self, place: u32) -> bool;
    /// Clears the accessed bit of any page, in a walk over tables; returns the old bit.
    fn walk_accessed(&mut self, place: u32) -> bool;
    /// Demotes the page that begins here; false if the slow node is full.
    fn demote(&mut self, place: u32) -> bool;
    /// Whether the target is reached.
    fn has_enough(&self) -> bool;
    /// Current time.
    fn now_ps(&self) -> u64;
}

/// The kernel's page lists for reclaim.
#[derive(Debug, Clone)]
pub(crate) enum Lists {
    /// An active and an inactive list, as in TPP's kernel.
    Two(Clock),
    /// Generations, as in current kernels.
    Generations(Generations),
}

impl Default for Lists {
    fn default() -> Self {
        Self::Two(Clock::default())
    }
}

impl Lists {
    /// Demotes pages until the target is reached, no candidate is left, or it is `until_ps`. Returns true if no work is
    /// left.
    pub(crate) fn turn(&mut self, pages: &mut impl Reclaimable, until_ps: u64) -> bool {
        match self {
            Self::Two(clock) => clock.turn(pages, until_ps),
            Self::Generations(generations) => generations.turn(pages, until_ps),
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pages of one slot each; every check takes time.
    struct Pages {
        /// By slot: whether the page was accessed, and how often it was checked.
        pages: Vec<Option<(bool, u32)>>,
        free: usize,
        enough: usize,
        room: usize,
        now_ps: u64,
    }

    impl Pages {
        /// Marks some pages as accessed.
        fn access(&mut self, used: &[bool]) {
            for (page, &used) in self.pages.iter_mut().zip(used) {
                if let Some(page) = page {
                    page.0 |= used;
                }
            }
        }
    }

    impl Reclaimable for Pages {
        fn places(&self) -> u32 {
            self.pages.len() as u32
        }
        fn fast_bytes(&self) -> u64 {
            4 << 30
        }
        fn page_at(&mut self, place: u32) -> Option<u32> {
            self.pages[place as usize].map(|_| 1)
        }
        fn deactivate(&mut self, place: u32) {
            self.take_accessed(place);
        }
        fn take_accessed(&mut self, place: u32) -> bool {
            self.now_ps += 1;
            let page = self.pages[place as usize].as_mut().expect("a page");
            page.1 += 1;
            std::mem::take(&mut page.0)
        }
        fn walk_accessed(&mut self, place: u32) -> bool {
            self.take_accessed(place)
        }
        fn demote(&mut self, place: u32) -> bool {
            if self.room == 0 {
                return false;
            }
            self.room -= 1;
            self.free += 1;
            let (_, looks) = self.pages[place as usize].take().expect("a page");
            assert!(looks >= 2, "demoted before it was inactive");
            true
        }
        fn has_enough(&self) -> bool {
            self.free >= self.enough
        }
        fn now_ps(&self) -> u64 {
            self.now_ps
        }
    }

    fn all_kinds() -> [Lists; 2] {
        [Lists::default(), Lists::Generations(Generations::default())]
    }

    proptest! {
        #[test]
        fn a_run_ends_and_demotes_no_more_than_it_should(
            pages in prop::collection::vec(prop::option::of(any::<bool>()), 1..300),
            enough in 0usize..300,
            room in 0usize..300,
            until_ps in 0u64..5000,
        ) {
            for mut lists in all_kinds() {
                let pages: Vec<_> = pages.iter().map(|p| p.map(|a| (a, 0))).collect();
                let count = pages.iter().flatten().count();
                let mut pages = Pages { pages, free: 0, enough, room, now_ps: 0 };
                let is_done = lists.turn(&mut pages, until_ps);
                prop_assert!(pages.free <= enough.min(room).min(count));
                prop_assert!(is_done || pages.now_ps >= until_ps);
                // Ageing is one walk, even beyond the time limit.
                prop_assert!(pages.now_ps <= until_ps + count as u64 + 1);
            }
        }

        /// Pages accessed between any two checks stay.
        #[test]
        fn what_is_accessed_stays(used in prop::collection::vec(any::<bool>(), 16..100)) {
            for mut lists in all_kinds() {
                let pages = used.iter().map(|_| Some((true, 0))).collect();
                let idle = used.iter().filter(|&&u| !u).count();
                let mut pages = Pages { pages, free: 0, enough: idle, room: usize::MAX, now_ps: 0 };
                for _ in 0..used.len() * 20 {
                    pages.access(&used);
                    let until_ps = pages.now_ps + 1;
                    lists.turn(&mut pages, until_ps);
                }
                for (page, &used) in pages.pages.iter().zip(&used) {
                    prop_assert_eq!(page.is_some(), used);
                }
            }
        }
    }
}
