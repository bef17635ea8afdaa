//! Axes that begin at zero, with ticks at round numbers.

/// Largest value that is drawn; above it sums and products would overflow.
const VALUE_MAX: f64 = 1e300;
/// Below this an axis has nothing to show.
const VALUE_MIN: f64 = 1e-9;

/// An axis from zero to `top`.
#[derive(Debug, Clone, Copy)]
pub(crate) struct Axis {
    top: f64,
    step: f64,
}

impl Axis {
    /// Ends at the first tick that is not below `max`. At most `ticks_max` ticks besides zero.
    pub(crate) fn rounded(max: f64, ticks_max: u32) -> Self {
        let max = sensible(max);
        let step = round_step(max / f64::from(ticks_max.max(1)));
        Self {
            top: (max / step - 1e-9).ceil() * step,
            step,
        }
    }

    /// Ends exactly at `max`.
    pub(crate) fn exact(max: f64, ticks_max: u32) -> Self {
        let max = sensible(max);
        Self {
            top: max,
            step: round_step(max / f64::from(ticks_max.max(1))),
        }
    }

    /// Where `value` lies between zero (0) and the axis' end (1).
    pub(crate) fn share(&self, value: f64) -> f64 {
        if value.is_finite() {
            (value / self.top).clamp(0.0, 1.0)
        } else {
            0.0
        }
    }

    /// The ticks' values, from zero upwards.
    pub(crate) fn ticks(&self) -> Vec<f64> {
        let count = (self.top / self.step + 1e-9).floor() as u32;
        (0..=count)
            .map(|index| f64::from(index) * self.step)
            .collect()
    }

    /// A tick's value with as many digits as tell it from its neighbours.
    pub(crate) fn label(&self, tick: f64) -> String {
        if self.top >= 1e7 {
            return crate::number::short(tick);
        }
        let decimals = (-self.step.log10().floor()).clamp(0.0, 9.0) as usize;
        format!("{tick:.decimals$}")
    }
}

fn sensible(max: f64) -> f64 {
    if max.is_finite() && max >= VALUE_MIN {
        max.min(VALUE_MAX)
    } else {
        1.0
    }
}

/// The smallest of 1, 2, 5 times a power of ten that is not below `raw`.
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
        fn neighbours_have_different_labels(max in 1e-6f64..1e6, ticks_max in 1u32..12) {
            let axis = Axis::rounded(max, ticks_max);
            let mut labels: Vec<_> = axis.ticks().iter().map(|t| axis.label(*t)).collect();
            let all = labels.len();
            labels.dedup();
            prop_assert_eq!(labels.len(), all);
        }
    }
}
