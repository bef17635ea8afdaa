//! Generations, as in Linux's multi-generational LRU (mm/vmscan.c, `lru_gen_*`).
//!
//! # Approach
//! A page belongs to the generation in which it was last found accessed. Ageing starts a new generation: a walk over
//! all tables clears the bits, and accessed pages join the youngest. Eviction checks pages of the oldest generation
//! again; it demotes idle pages and moves others to the youngest. When the oldest is empty and only two are left,
//! ageing runs again. If all pages are accessed soon, the interval between checks shrinks until some page is idle.

use super::Reclaimable;

/// Rounds of ageing in one run.
const ROUNDS: u32 = 8;

/// Generations that are not evicted (`MIN_NR_GENS`).
const KEPT: u32 = 2;

/// The generation of each page.
#[derive(Debug, Clone)]
pub(crate) struct Generations {
    /// The youngest generation.
    youngest: u32,
    /// Generation by slot.
    of: Vec<u32>,
    /// Next slot to evict.
    hand: u32,
    /// Slots left in this round.
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
    /// Demotes pages until the target is reached, all rounds are complete, or it is `until_ps`. Returns true if no work
    /// is left.
    pub(crate) fn turn(&mut self, pages: &mut impl Reclaimable, until_ps: u64) -> bool {
        let places = pages.places();
        self.of.resize(places as usize, self.youngest);
        let mut rounds = ROUNDS;
        while !pages.has_enough() {
            if pages.now_ps() >= until_ps {
                return false;
            }
            if self.left == 0 {
                if rounds == 0 {
                    return true;
                }
                rounds -= 1;
                self.age(pages);
                self.left = places;
            }
            let place = self.hand % places;
            let page = pages.page_at(place);
            let step = page.unwrap_or(1);
            self.hand = (place + step) % places;
            self.left = self.left.saturating_sub(step);
            let is_old = self.of[place as usize] + KEPT <= self.youngest;
            if page.is_none() || !is_old {
                continue;
            }
            if pages.take_accessed(place) {
                self.of[place as usize] = self.youngest;
            } else if !pages.demote(place) {
                return true;
            }
        }
        true
    }

    /// Starts a new generation.
    fn age(&mut self, pages: &mut impl Reclaimable) {
        self.youngest += 1;
        let places = pages.places();
        let mut place = 0;
        while place < places {
            let page = pages.page_at(place);
            if page.is_some() && pages.walk_accessed(place) {
                self.of[place as usize] = self.youngest;
            }
            place += page.unwrap_or(1);
        }
    }
}
