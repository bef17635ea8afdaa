//! Axes with ticks at round numbers: from zero, or by powers of ten.

/// Largest value that is drawn; sums and products of larger ones would overflow.
const VALUE_MAX: f64 = 1e300;
/// A smaller axis is empty.
const VALUE_MIN: f64 = 1e-9;

/// An axis of amounts.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Axis {
    /// From zero to `top`.
    Linear {
        /// Its end.
        top: f64,
        /// Distance between ticks.
        step: f64,
    },
    /// From a power of ten to another.
    Log {
        /// Exponent of the first.
        from: i32,
        /// Exponent of the last, above `from`.
        to: i32,
        /// Powers between ticks.
        step: i32,
    },
}

impl Axis {
    /// From zero to the first tick at or above `max`, with at most `ticks_max` ticks besides zero.
    pub(crate) fn rounded(max: f64, ticks_max: u32) -> Self {
        let max = sensible(max);
        let step = round_step(max / f64::from(ticks_max.max(1)));
        Self::Linear {
            top: (max / step - 1e-9).ceil() * step,
            step,
        }
    }

    /// From zero to exactly `max`.
    pub(crate) fn exact(max: f64, ticks_max: u32) -> Self {
        let max = sensible(max);
        Self::Linear {
            top: max,
            step: round_step(max / f64::from(ticks_max.max(1))),
        }
    }

    /// From the last power of ten at or below `min` to the first at or above `max`.
    pub(crate) fn log(min: f64, max: f64, ticks_max: u32) -> Self {
        let exponent = |value: f64| sensible(value).log10();
        let from = (exponent(min) + 1e-9).floor() as i32;
        let to = ((exponent(max) - 1e-9).ceil() as i32).max(from + 1);
        Self::Log {
            from,
            to,
            step: ((to - from) as u32).div_ceil(ticks_max.max(1)) as i32,
        }
    }

    /// Position of `value` between the axis' start (0) and end (1).
    pub(crate) fn share(&self, value: f64) -> f64 {
        if !value.is_finite() {
            return 0.0;
        }
        match *self {
            Self::Linear { top, .. } => (value / top).clamp(0.0, 1.0),
            Self::Log { from, to, .. } => {
                let exponent = value.max(f64::MIN_POSITIVE).log10();
                ((exponent - f64::from(from)) / f64::from(to - from)).clamp(0.0, 1.0)
            }
        }
    }

    /// The ticks' values, ascending.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        match *self {
            Self::Linear { top, step } => {
                let count = (top / step + 1e-9).floor() as u32;
                (0..=count).map(|index| f64::from(index) * step).collect()
            }
            Self::Log { from, to, step } => (from..=to)
                .step_by(step.max(1) as usize)
                .map(|exponent| 10f64.powi(exponent))
                .collect(),
        }
    }

    /// A tick's value with enough digits to differ from its neighbours.
    pub(crate) fn label(&self, tick: f64) -> String {
        match *self {
            Self::Linear { top, step } if top < 1e7 => {
                let decimals = (-step.log10().floor()).clamp(0.0, 9.0) as usize;
                format!("{tick:.decimals$}")
            }
            Self::Log { .. } if tick < 1e-3 => format!("{tick:.0e}"),
            Self::Log { .. } if tick < 1.0 => tick.to_string(),
            Self::Log { .. } if tick < 1e6 => format!("{tick:.0}"),
            _ => crate::text::number::short(tick),
        }
    }
}

fn sensible(max: f64) -> f64 {
    if max.is_finite() && max >= VALUE_MIN {
        max.min(VALUE_MAX)
    } else {
        1.0
    }
}

/// The smallest of 1, 2, 5 times a power of ten at or above `raw`.
fn round_step(raw: f64) -> f64 {
    let power = 10f64.powf(raw.log10().floor());
    let steps = [1.0, 2.0, 5.0].map(|factor| factor * power);
    steps
        .into_iter()
        .find(|step| *step >= raw * (1.0 - 1e-9))
        .unwrap_or(10.0 * power)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn ticks_are_round() {
        let labels = |axis: Axis| {
            axis.ticks()
                .iter()
                .map(|t| axis.label(*t))
                .collect::<Vec<_>>()
        };
        assert_eq!(
            labels(Axis::rounded(2.34, 5)),
            ["0.0", "0.5", "1.0", "1.5", "2.0", "2.5"]
        );
        assert_eq!(
            labels(Axis::exact(60.0, 6)),
            ["0", "10", "20", "30", "40", "50", "60"]
        );
        assert_eq!(
            labels(Axis::exact(25.0, 6)),
            ["0", "5", "10", "15", "20", "25"]
        );
        assert_eq!(labels(Axis::exact(47.0, 5)), ["0", "10", "20", "30", "40"]);
        assert_eq!(labels(Axis::rounded(0.0, 2)), ["0.0", "0.5", "1.0"]);
        assert_eq!(
            labels(Axis::log(150.0, 90_000.0, 6)),
            ["100", "1000", "10000", "100000"]
        );
        assert_eq!(labels(Axis::log(100.0, 100.0, 6)), ["100", "1000"]);
        assert_eq!(
            labels(Axis::log(0.02, 2e9, 3)),
            ["0.01", "100", "1.00M", "10.0G"]
        );
    }

    proptest! {
        #[test]
        fn ticks_cover_the_range_and_are_bounded(
            max in proptest::num::f64::POSITIVE | proptest::num::f64::ZERO,
            ticks_max in 1u32..20,
        ) {
            let axis = Axis::rounded(max, ticks_max);
            let ticks = axis.ticks();
            prop_assert!(ticks.len() >= 2 && ticks.len() <= ticks_max as usize + 1);
            prop_assert!(ticks.iter().all(|tick| tick.is_finite()));
            prop_assert!(ticks.windows(2).all(|pair| pair[0] < pair[1]));
            if max <= VALUE_MAX {
                prop_assert!(*ticks.last().unwrap() >= max * (1.0 - 1e-6));
            }
            let exact = Axis::exact(max, ticks_max).ticks();
            prop_assert!(!exact.is_empty() && exact.len() <= ticks_max as usize + 1);
            prop_assert!(exact.iter().all(|tick| axis.share(*tick) <= 1.0));
        }

        #[test]
        fn powers_of_ten_hold_what_they_were_made_for(
            a in proptest::num::f64::POSITIVE | proptest::num::f64::ZERO,
            b in proptest::num::f64::POSITIVE | proptest::num::f64::ZERO,
            ticks_max in 1u32..20,
        ) {
            let (min, max) = if a <= b { (a, b) } else { (b, a) };
            let axis = Axis::log(min, max, ticks_max);
            let ticks = axis.ticks();
            prop_assert!(!ticks.is_empty() && ticks.len() <= ticks_max as usize + 1);
            prop_assert!(ticks.windows(2).all(|pair| pair[0] < pair[1]));
            let (low, high) = (axis.share(min), axis.share(max));
            prop_assert!((0.0..=1.0).contains(&low) && (low..=1.0).contains(&high));
        }

        #[test]
        fn neighbours_have_different_labels(max in 1e-6f64..1e6, ticks_max in 1u32..12) {
            let axis = Axis::rounded(max, ticks_max);
            let mut labels: Vec<_> = axis.ticks().iter().map(|t| axis.label(*t)).collect();
            let all = labels.len();
            labels.dedup();
            prop_assert_eq!(labels.len(), all);
        }
    }
}
