//! Schedules looks at a VM's memory within a share of one CPU.
//!
//! # Problem
//! A look's cost is proportional to the VM's memory, and a block is hot after [`HOT_ONES`](super::HOT_ONES) looks. At a
//! steady rate a large VM would wait for minutes after its start, and again each time it changes to other memory.
//!
//! # Approach
//! While a VM's histories match its behaviour, looks use only a part of the share. The rest is saved, up to a limit.
//! The savings pay for a fast phase, which a VM gets when it is new, and when its last looks contradict its histories.
//! The phase ends when its histories are full of new looks. In a fast phase the VM's run time between looks is shorter,
//! too. Otherwise guests that share a CPU would wait for each other's looks.
//!
//! # Properties
//! - In any time t the CPU time is at most the share × t, plus the savings limit, plus one look.
//! - A new VM's history is full after 32 looks, each at a quarter of a CPU, if the savings suffice.

use std::time::Duration;

use super::LOOKS;

/// Mean CPU limit of looks at a VM, as a share of one CPU.
const SHARE: f64 = 0.05;

/// CPU share of looks while histories match the VM's behaviour.
const SETTLED: f64 = 0.04;

/// CPU share in a fast phase, while there are savings.
const HASTE: f64 = 0.25;

/// Looks per interval in a fast phase.
const HASTY_LOOKS: u32 = 4;

/// Limit of saved CPU time, seconds; full at the start. It pays for 32 looks at a VM of some hundred MiB on an emulated
/// host, or of some GiB on a real one.
const SAVED_MAX_S: f64 = 1.0;

/// Schedules looks. See the module's text.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Pace {
    /// Saved CPU time, seconds; negative if more was spent.
    saved_s: f64,
    /// Number of looks until the histories are full of new ones.
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
    /// The VM's run time between two looks: `interval` while its histories match its behaviour, less in a fast phase.
    pub fn interval(&self, interval: Duration) -> Duration {
        match self.hasty {
            0 => interval,
            _ => interval / HASTY_LOOKS,
        }
    }

    /// Records a look: its CPU time, the time since the previous one, and whether it contradicts the histories.
    ///
    /// Returns the pause before the next look.
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
            // A fast phase again, paid from savings.
            let hasty = pace.looked(look, rest + look, true);
            prop_assert!(hasty < rest / 2, "{hasty:?}");
        }
    }
}
