//! Reclaim by demotion, as kswapd does it: in a guest's fast node, or in the hypervisor.
//!
//! # Problem
//! Pages of fast memory that nobody uses have to go to slow memory, until enough is free. What
//! is known of a page is one bit, whether it was accessed since the bit was last cleared.
//!
//! # Properties
//! - A page that was accessed between two looks stays.
//! - A run ends: when enough is free, after its rounds, at its time, or when nothing can move.

mod clock;
mod generations;
mod seen;

pub(crate) use clock::Clock;
pub(crate) use generations::Generations;
pub(crate) use seen::Seen;

/// What reclaim goes over: places, at each of which a page of fast memory may begin.
pub(crate) trait Reclaimable {
    /// How many places there are.
    fn places(&self) -> u32;
    /// Bytes of fast memory.
    fn fast_bytes(&self) -> u64;
    /// How many places the page takes that begins here; nothing where none begins.
    fn page_at(&mut self, place: u32) -> Option<u32>;
    /// The page that begins here becomes inactive: it is forgotten whether it was accessed.
    fn deactivate(&mut self, place: u32);
    /// Whether the inactive page that begins here was accessed since; that is forgotten.
    fn take_accessed(&mut self, place: u32) -> bool;
    /// The same for any page, found on a walk over tables.
    fn walk_accessed(&mut self, place: u32) -> bool;
    /// Demotes the page that begins here; false when there is no room below.
    fn demote(&mut self, place: u32) -> bool;
    /// Whether enough is free.
    fn has_enough(&self) -> bool;
    /// Now.
    fn now_ps(&self) -> u64;
}

/// How a kernel keeps its pages in order of use.
#[derive(Debug, Clone)]
pub(crate) enum Lists {
    /// An active and an inactive list: TPP's kernel.
    Two(Clock),
    /// Generations: kernels of today.
    Generations(Generations),
}

impl Default for Lists {
    fn default() -> Self {
        Self::Two(Clock::default())
    }
}

impl Lists {
    /// Demotes until enough is free, there is nothing to demote, or it is `until_ps`; true when
    /// there is no more to do.
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

    /// Pages of one place each; time passes with every look.
    struct Pages {
        /// What is there: whether it was accessed, and how often it was looked at.
        pages: Vec<Option<(bool, u32)>>,
        free: usize,
        enough: usize,
        room: usize,
        now_ps: u64,
    }

    impl Pages {
        /// Some of them are accessed.
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
                // Ageing is one walk, whatever the time.
                prop_assert!(pages.now_ps <= until_ps + count as u64 + 1);
            }
        }

        /// What is accessed between any two looks stays.
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
