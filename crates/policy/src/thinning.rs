//! How many samples a calm agent takes.
//!
//! # Problem
//! A sample costs about a microsecond. A hot set is found the sooner, the more there are, and all CPUs of a large machine
//! yield many. While nothing changes they tell nothing new.
//!
//! # Approach
//! A calm agent takes one of `n` samples. `n` is a power of two, as large as leaves [`CALM_SAMPLES`] in an epoch. As soon as
//! blocks move, or moved memory earns less, all samples are taken again.
//!
//! # Properties
//! - Machines that yield few samples take them all.
//! - An agent that is not calm takes them all.
//! - A calm agent takes no fewer than [`CALM_SAMPLES`], if there were as many before.

use crate::damon::Prospect;

/// Samples of an epoch that show a change: two thousand cost less than half a percent of one CPU.
const CALM_SAMPLES: u64 = 2000;

/// The next thinning `n`: each n-th sample is taken. The last epoch had `samples` with the thinning `now`. The source can thin
/// by at most `most`.
pub fn thinning(prospect: &Prospect, samples: u64, now: u32, most: u32) -> u32 {
    let all = samples.saturating_mul(now.into());
    match prospect.is_calm {
        true => power_of_two(all / CALM_SAMPLES).min(power_of_two(most.into())),
        false => 1,
    }
}

/// The largest power of two that is not larger, or 1.
fn power_of_two(number: u64) -> u32 {
    1 << number.max(1).ilog2().min(u32::BITS - 1)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn prospect(is_calm: bool) -> Prospect {
        Prospect {
            is_calm,
            ..Prospect::OPEN
        }
    }

    proptest! {
        #[test]
        fn a_calm_agent_takes_enough_and_any_other_takes_all(
            all in 0u64..1 << 40, now in 0u32..12, most: u32,
        ) {
            let samples = all >> now;
            prop_assert_eq!(thinning(&prospect(false), samples, 1 << now, most), 1);
            let next = thinning(&prospect(true), samples, 1 << now, most);
            prop_assert!(next.is_power_of_two() && next <= most.max(1));
            let left = (samples << now) / u64::from(next);
            prop_assert!(next == 1 || left >= CALM_SAMPLES);
            prop_assert!(next > most / 2 || left < 2 * CALM_SAMPLES + 1);
        }
    }
}
