//! Reclaim by generations, as Linux's multi-generational LRU does it (mm/vmscan.c, `lru_gen_*`).
//!
//! # Problem
//! As [`crate::clock`]: which pages of fast memory nobody uses, by a bit for each.
//!
//! # Approach
//! A page belongs to the generation in which it was last found accessed. Ageing begins a new
//! generation: a walk over all tables clears the bits, and what was accessed joins the youngest.
//! Pages of the oldest generation are looked at once more and demoted, or join the youngest. When
//! it is empty and only two are left, ageing comes again, at once if need be: where everything is
//! accessed soon, the time between two looks shrinks until something was not.
//!
//! # Properties
//! - A page that was accessed in the youngest two generations stays.
//! - A run ends: when enough is free, after its rounds, at its time, or when nothing can move.

use crate::clock::Face;

/// Rounds of ageing in one run.
const ROUNDS: u32 = 8;

/// Generations that are not evicted (`MIN_NR_GENS`).
const KEPT: u32 = 2;

/// Who belongs where.
#[derive(Debug, Clone)]
pub(crate) struct Generations {
    /// The youngest generation.
    youngest: u32,
    /// By place.
    of: Vec<u32>,
    /// Where eviction goes on.
    hand: u32,
    /// Places that it has still to pass in this round.
    left: u32,
}

impl Default for Generations {
    /// All pages in the youngest generation.
    fn default() -> Self {
        Self {
            youngest: KEPT,
            of: vec![],
            hand: 0,
            left: 0,
        }
    }
}

impl Generations {
    /// Demotes until enough is free, its rounds are done, or it is `until_ps`; true when there is no
    /// more to do.
    pub(crate) fn turn(&mut self, face: &mut impl Face, until_ps: u64) -> bool {
        let places = face.places();
        self.of.resize(places as usize, self.youngest);
        let mut rounds = ROUNDS;
        while !face.has_enough() {
            if face.now_ps() >= until_ps {
                return false;
            }
            if self.left == 0 {
                if rounds == 0 {
                    return true;
                }
                rounds -= 1;
                self.age(face);
                self.left = places;
            }
            let place = self.hand % places;
            let page = face.page_at(place);
            let step = page.unwrap_or(1);
            self.hand = (place + step) % places;
            self.left = self.left.saturating_sub(step);
            let is_old = self.of[place as usize] + KEPT <= self.youngest;
            if page.is_none() || !is_old {
                continue;
            }
            if face.take_accessed(place) {
                self.of[place as usize] = self.youngest;
            } else if !face.demote(place) {
                return true;
            }
        }
        true
    }

    /// Begins a generation.
    fn age(&mut self, face: &mut impl Face) {
        self.youngest += 1;
        let places = face.places();
        let mut place = 0;
        while place < places {
            let page = face.page_at(place);
            if page.is_some() && face.walk_accessed(place) {
                self.of[place as usize] = self.youngest;
            }
            place += page.unwrap_or(1);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::clock::tests::Pages;

    proptest! {
        #[test]
        fn a_run_ends_and_demotes_no_more_than_it_should(
            pages in prop::collection::vec(prop::option::of(any::<bool>()), 1..300),
            enough in 0usize..300,
            room in 0usize..300,
            until_ps in 0u64..5000,
        ) {
            let pages: Vec<_> = pages.into_iter().map(|p| p.map(|a| (a, 0))).collect();
            let count = pages.iter().flatten().count();
            let mut face = Pages { pages, free: 0, enough, room, now_ps: 0 };
            let is_done = Generations::default().turn(&mut face, until_ps);
            prop_assert!(face.free <= enough.min(room).min(count));
            prop_assert!(is_done || face.now_ps >= until_ps);
            // Ageing is one walk, whatever the time.
            prop_assert!(face.now_ps <= until_ps + count as u64 + 1);
        }

        /// What is accessed between any two runs stays, if a run ages once.
        #[test]
        fn what_is_accessed_stays(used in prop::collection::vec(any::<bool>(), 16..100)) {
            let pages = used.iter().map(|_| Some((true, 0))).collect();
            let idle = used.iter().filter(|&&u| !u).count();
            let mut face = Pages { pages, free: 0, enough: idle, room: usize::MAX, now_ps: 0 };
            let mut generations = Generations::default();
            for _ in 0..used.len() * 20 {
                face.access(&used);
                let until_ps = face.now_ps + 1;
                generations.turn(&mut face, until_ps);
            }
            for (page, &used) in face.pages.iter().zip(&used) {
                prop_assert_eq!(page.is_some(), used);
            }
        }
    }
}
