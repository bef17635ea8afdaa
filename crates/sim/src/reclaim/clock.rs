//! Reclaim with two lists, active and inactive.
//!
//! # Approach
//! Linux kept a list of active pages and a shorter list of inactive pages. At the end of the active list, a page's bit
//! is cleared and it becomes inactive, accessed or not. At the end of the inactive list, a page becomes active again if
//! it was accessed; if not, it is demoted. The model is a clock with two hands that sweep over all page slots. Pages
//! between the hands are inactive.

use super::Reclaimable;

/// Rounds over all slots in one run.
const ROUNDS: u32 = 2;

/// The two hands.
#[derive(Debug, Clone, Default)]
pub(crate) struct Clock {
    /// End of the inactive list, and its length in slots.
    hand: u32,
    inactive: u32,
}

impl Clock {
    /// Demotes pages until the target is reached, two rounds are complete, or it is `until_ps`. Returns true if no work
    /// is left.
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

/// Maximum ratio of active to inactive pages on a node of this size (mm/vmscan.c, `inactive_is_low`).
fn active_per_inactive(bytes: u64) -> u32 {
    ((10 * (bytes >> 30)).isqrt() as u32).max(1)
}
