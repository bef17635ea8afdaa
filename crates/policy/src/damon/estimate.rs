//! Estimates access rates from accessed bits.

use std::time::Duration;

use crate::{Block, Observation, Pid};

/// Makes an observation of `looks` looks at a block, `found` of which found an access.
///
/// Each look came `interval` after the bit of a random page was cleared; the block has `entries` page-table entries.
/// Accesses that arrive independently at a rate r leave a page untouched for a time T with probability exp(-rT). So if
/// a share f of the looks finds an access, a page's rate is -ln(1 - f) / T. If all looks find one, the rate is a lower
/// bound, computed as if half of one more look had found none.
pub(super) fn observe(
    (pid, block): (Pid, Block),
    interval: Duration,
    looks: u32,
    found: u32,
    entries: f64,
) -> Observation {
    let (n, k) = (f64::from(looks.max(1)), f64::from(found.min(looks)));
    let interval_ns = interval.as_nanos() as f64;
    let per_look = match found {
        0 => 0.0,
        _ if found < looks => -(1.0 - k / n).ln(),
        _ => (n + n).ln(),
    };
    let exposure_ns = match found {
        0 => n * interval_ns / entries,
        _ => k * interval_ns / (entries * per_look),
    };
    Observation {
        pid,
        block,
        events: found.min(looks),
        exposure_ns: (exposure_ns.round() as u64).max(1),
        is_least: found >= looks,
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const AT: (Pid, Block) = (Pid(7), Block(3));

    fn rate(interval_us: u64, looks: u32, found: u32, entries: f64) -> f64 {
        let seen = observe(
            AT,
            Duration::from_micros(interval_us),
            looks,
            found,
            entries,
        );
        f64::from(seen.events) / seen.exposure_ns as f64 * 1e9
    }

    #[test]
    fn a_page_that_half_of_the_looks_find_has_its_rate() {
        let per_page = 2f64.ln() / 0.08;
        assert!((rate(80_000, 4, 2, 1.0) / per_page - 1.0).abs() < 1e-6);
        assert!((rate(80_000, 4, 2, 512.0) / (512.0 * per_page) - 1.0).abs() < 1e-3);
    }

    #[test]
    fn looks_that_find_nothing_tell_for_how_long() {
        let seen = observe(AT, Duration::from_millis(80), 4, 0, 512.0);
        assert_eq!((seen.events, seen.exposure_ns), (0, 625_000));
    }

    proptest! {
        #[test]
        fn more_found_is_a_higher_rate_and_no_look_counts_twice(
            interval_us in 100u64..100_000, looks in 1u32..32, entries in 1u32..=512,
        ) {
            let rates: Vec<f64> =
                (0..=looks).map(|k| rate(interval_us, looks, k, entries.into())).collect();
            prop_assert!(rates.windows(2).all(|w| w[0] < w[1]), "{:?}", rates);
            let all = Duration::from_micros(interval_us) * looks;
            for found in 0..=looks {
                let seen = observe(AT, Duration::from_micros(interval_us), looks, found, entries.into());
                prop_assert_eq!(seen.events, found);
                // A rate is never more certain than the total time of the looks allows, except for rounding.
                let bound = all.as_nanos() as f64 / f64::from(entries);
                prop_assert!((1.0..=bound.max(1.0) * 1.5).contains(&(seen.exposure_ns as f64)));
            }
        }
    }
}
