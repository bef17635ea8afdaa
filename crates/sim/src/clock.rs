//! Reclaim by demotion, as kswapd does it: in a guest's fast node, or in the hypervisor.
//!
//! # Problem
//! Pages of fast memory that nobody uses have to go to slow memory, until enough is free. What
//! is known of a page is one bit, whether it was accessed since the bit was last cleared.
//!
//! # Approach
//! Linux keeps a list of active pages and a shorter one of inactive pages. At the end of the
//! active list a page's bit is cleared and it becomes inactive, accessed or not; at the end of the
//! inactive list it is active again if it was accessed in between, else it is demoted. The model
//! is a clock with two hands over the places where pages may be: what lies between them is
//! inactive.
//!
//! # Properties
//! - A page that was accessed after it became inactive stays.
//! - A run ends: when enough is free, after two rounds, at its time, or when nothing can move.

/// Rounds over all places in one run.
const ROUNDS: u32 = 2;

/// What the hands pass over: places, at each of which a page of fast memory may begin.
pub(crate) trait Face {
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

/// The two hands.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    /// Where the inactive list ends, and how many places on it begins.
    hand: u32,
    inactive: u32,
}

impl Clock {
    /// Demotes until enough is free, two rounds are done, or it is `until_ps`; true when there is
    /// no more to do.
    pub(crate) fn turn(&mut self, face: &mut impl Face, until_ps: u64) -> bool {
        let places = face.places();
        let wanted = (places / (1 + active_per_inactive(face.fast_bytes()))).max(1);
        let mut left = places * ROUNDS;
        while left > 0 && !face.has_enough() {
            if face.now_ps() >= until_ps {
                return false;
            }
            if self.inactive < wanted {
                let place = (self.hand + self.inactive) % places;
                let page = face.page_at(place);
                self.inactive += page.unwrap_or(1);
                if page.is_some() {
                    face.deactivate(place);
                }
                continue;
            }
            let place = self.hand % places;
            let page = face.page_at(place);
            let step = page.unwrap_or(1);
            self.hand = (place + step) % places;
            self.inactive = self.inactive.saturating_sub(step);
            left = left.saturating_sub(step);
            if page.is_some() && !face.take_accessed(place) && !face.demote(place) {
                return true;
            }
        }
        true
    }
}

/// How many times as long the active list may be as the inactive one on a node of so many bytes
/// (mm/vmscan.c, `inactive_is_low`).
fn active_per_inactive(bytes: u64) -> u32 {
    ((10 * (bytes >> 30)).isqrt() as u32).max(1)
}

#[cfg(test)]
pub(crate) mod tests {
    use proptest::prelude::*;

    use super::*;

    /// Pages of one place each; time passes with every look.
    pub(crate) struct Pages {
        /// What is there: whether it was accessed, and how often it was looked at.
        pub(crate) pages: Vec<Option<(bool, u32)>>,
        pub(crate) free: usize,
        pub(crate) enough: usize,
        pub(crate) room: usize,
        pub(crate) now_ps: u64,
    }

    impl Pages {
        /// Some of them are accessed.
        pub(crate) fn access(&mut self, used: &[bool]) {
            for (page, &used) in self.pages.iter_mut().zip(used) {
                if let Some(page) = page {
                    page.0 |= used;
                }
            }
        }
    }

    impl Face for Pages {
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

    proptest! {
        #[test]
        fn a_run_ends_and_demotes_no_more_than_it_should(
            pages in prop::collection::vec(prop::option::of(any::<bool>()), 1..300),
            enough in 0usize..300,
            room in 0usize..300,
            until_ps in 0u64..2000,
        ) {
            let pages: Vec<_> = pages.into_iter().map(|p| p.map(|a| (a, 0))).collect();
            let count = pages.iter().flatten().count();
            let mut face = Pages { pages, free: 0, enough, room, now_ps: 0 };
            let is_done = Clock::default().turn(&mut face, until_ps);
            prop_assert!(face.free <= enough.min(room).min(count));
            prop_assert!(face.now_ps <= until_ps.max(1));
            prop_assert!(is_done || face.now_ps >= until_ps);
        }

        /// Whatever is accessed before each turn stays, if a turn takes one look.
        #[test]
        fn what_is_accessed_stays(used in prop::collection::vec(any::<bool>(), 16..100)) {
            let pages = used.iter().map(|_| Some((true, 0))).collect();
            let idle = used.iter().filter(|&&u| !u).count();
            let mut face = Pages { pages, free: 0, enough: idle, room: usize::MAX, now_ps: 0 };
            let mut clock = Clock::default();
            for _ in 0..used.len() * 20 {
                face.access(&used);
                let until_ps = face.now_ps + 1;
                clock.turn(&mut face, until_ps);
            }
            for (page, &used) in face.pages.iter().zip(&used) {
                prop_assert_eq!(page.is_some(), used);
            }
        }
    }
}
