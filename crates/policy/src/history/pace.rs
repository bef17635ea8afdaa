//! When a VM's memory is looked at again, so that looking keeps within a share of one CPU.
//!
//! # Problem
//! A look costs in proportion to the VM's memory, and a block is hot after [`HOT_ONES`](super::HOT_ONES) looks. At a
//! steady pace a large VM would wait for minutes after its start, and again each time that it turns to other memory.
//!
//! # Approach
//! A VM whose histories tell what it does is looked at for a part of the share. What is left is saved, up to a bound,
//! and spent in haste when it is needed: on a VM that is new, and on one whose last looks contradict what its histories
//! say, until its histories are full of new looks. In haste the VM's run time from one look to the next is a part of the
//! interval, too: guests that share a CPU would else wait for each other's looks.
//!
//! # Properties
//! - In any time t no more is spent than share x t, what may be saved, and one look.
//! - A new VM's history is full after 32 looks, each at a fourth of a CPU, where what may be saved pays for them.

use std::time::Duration;

use super::LOOKS;

/// The most that looking at a VM may take of one CPU, in the mean.
const SHARE: f64 = 0.05;

/// What looking takes of one CPU while histories tell what the VM does.
const SETTLED: f64 = 0.04;

/// What it takes in haste, while something is saved.
const HASTE: f64 = 0.25;

/// Looks in an interval, in haste.
const HASTY_LOOKS: u32 = 4;

/// CPU time that may be saved, seconds, and is there at the start: for 32 looks at a VM of some hundred MiB on an
/// emulated host, of some GiB on a real one.
const SAVED_MAX_S: f64 = 1.0;

/// See the module's text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// CPU time that is there to spend, seconds; below zero it is owed.
    saved_s: f64,
    /// Looks until the histories are full of new ones.
    hasty: u32,
}

impl Default for Pace {
    fn default() -> Self {
        Self {
            saved_s: SAVED_MAX_S,
            hasty: LOOKS,
        }
    }
}

impl Pace {
    /// How long the VM runs from one look to the next, where that is `interval` while its histories tell what it
    /// does.
    pub fn interval(&self, interval: Duration) -> Duration {
        match self.hasty {
            0 => interval,
            _ => interval / HASTY_LOOKS,
        }
    }

    /// Takes in a look that took so much CPU time and ended so long after the one before, and whether it contradicts
    /// the histories. Returns the pause until the next one.
    pub fn looked(&mut self, spent: Duration, after: Duration, is_contradicted: bool) -> Duration {
        let spent_s = spent.as_secs_f64();
        let gained = after.as_secs_f64() * SHARE;
        self.saved_s = (self.saved_s + gained).min(SAVED_MAX_S) - spent_s;
        self.hasty = match is_contradicted {
            true => LOOKS,
            false => self.hasty.saturating_sub(1),
        };
        let part = match self.hasty {
            0 => SETTLED,
            _ => HASTE,
        };
        let owed_s = (-self.saved_s).max(0.0) / SHARE;
        Duration::from_secs_f64(owed_s.max(spent_s / part - spent_s))
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn no_more_is_spent_than_the_share_and_what_was_saved(
            looks in prop::collection::vec((1u64..3000, 0u64..500, any::<bool>()), 1..300),
        ) {
            let mut pace = Pace::default();
            let (mut now_s, mut spent_s, mut rest) = (0.0, 0.0, Duration::ZERO);
            for (cost_ms, late_ms, is_contradicted) in looks {
                let cost = Duration::from_millis(cost_ms);
                let bound_s = now_s + rest.as_secs_f64();
                prop_assert!(spent_s <= bound_s * SHARE + SAVED_MAX_S + 1e-6);
                let after = rest + Duration::from_millis(late_ms) + cost;
                now_s += after.as_secs_f64();
                spent_s += cost.as_secs_f64();
                rest = pace.looked(cost, after, is_contradicted);
            }
        }

        #[test]
        fn a_new_vm_is_known_soon_and_then_costs_little(look_us in 100u64..31_000) {
            let look = Duration::from_micros(look_us);
            let mut pace = Pace::default();
            let (mut now, mut rest) = (Duration::ZERO, Duration::ZERO);
            let interval = Duration::from_secs(1);
            for _ in 0..LOOKS {
                prop_assert!(pace.interval(interval) < interval);
                now += rest + look;
                rest = pace.looked(look, rest + look, false);
            }
            prop_assert!(now <= look.div_f64(HASTE) * LOOKS, "{now:?}");
            for _ in 0..LOOKS {
                rest = pace.looked(look, rest + look, false);
            }
            prop_assert!(rest + look >= look.div_f64(SHARE), "{rest:?}");
            prop_assert_eq!(pace.interval(interval), interval);
            // Haste again, of what was saved.
            let hasty = pace.looked(look, rest + look, true);
            prop_assert!(hasty < rest / 2, "{hasty:?}");
        }
    }
}
