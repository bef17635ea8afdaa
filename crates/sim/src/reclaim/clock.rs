//! Two lists: an active and an inactive one.
//!
//! # Approach
//! Linux kept a list of active pages and a shorter one of inactive pages. At the end of the
//! active list a page's bit is cleared and it becomes inactive, accessed or not; at the end of the
//! inactive list it is active again if it was accessed in between, else it is demoted. The model
//! is a clock with two hands over the places where pages may be: what lies between them is
//! inactive.

use super::Reclaimable;

/// Rounds over all places in one run.
const ROUNDS: u32 = 2;

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
    pub(crate) fn turn(&mut self, pages: &mut impl Reclaimable, until_ps: u64) -> bool {
        let places = pages.places();
        let wanted = (places / (1 + active_per_inactive(pages.fast_bytes()))).max(1);
        let mut left = places * ROUNDS;
        while left > 0 && !pages.has_enough() {
            if pages.now_ps() >= until_ps {
                return false;
            }
            if self.inactive < wanted {
                let place = (self.hand + self.inactive) % places;
                let page = pages.page_at(place);
                self.inactive += page.unwrap_or(1);
                if page.is_some() {
                    pages.deactivate(place);
                }
                continue;
            }
            let place = self.hand % places;
            let page = pages.page_at(place);
            let step = page.unwrap_or(1);
            self.hand = (place + step) % places;
            self.inactive = self.inactive.saturating_sub(step);
            left = left.saturating_sub(step);
            if page.is_some() && !pages.take_accessed(place) && !pages.demote(place) {
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
