//! Computes a program's figure from the numbers that it prints, without I/O.

/// Collects numbers, and computes a figure per interval and overall.
#[derive(Debug, Clone, Default)]
pub struct Meter {
    is_counter: bool,
    interval: Readings,
    phase: Readings,
}

/// Summary of any number of readings.
#[derive(Debug, Clone, Copy, Default)]
struct Readings {
    sum: f64,
    count: u32,
    first: Option<Reading>,
    last: Option<Reading>,
}

#[derive(Debug, Clone, Copy)]
struct Reading {
    t_s: f64,
    value: f64,
}

impl Meter {
    /// A meter for counters, or for numbers that are figures themselves.
    pub fn new(is_counter: bool) -> Self {
        Self {
            is_counter,
            ..Self::default()
        }
    }

    /// Adds a number printed at `t_s`, in seconds on any monotonic clock. Ignores numbers that are not finite.
    pub fn add(&mut self, t_s: f64, value: f64) {
        if value.is_finite() {
            let reading = Reading { t_s, value };
            self.interval.add(reading);
            self.phase.add(reading);
        }
    }

    /// Clears all readings at the start of the timed phase.
    pub fn begin(&mut self) {
        *self = Self::new(self.is_counter);
    }

    /// The figure of the interval that ends now; none if there are too few readings.
    pub fn end_interval(&mut self) -> Option<f64> {
        let figure = self.interval.figure(self.is_counter);
        // A counter's growth is measured from the last reading of the previous interval.
        self.interval = Readings {
            first: self.interval.last.or(self.interval.first),
            ..Readings::default()
        };
        figure
    }

    /// The figure of the whole phase.
    pub fn mean(&self) -> Option<f64> {
        self.phase.figure(self.is_counter)
    }
}

impl Readings {
    fn add(&mut self, reading: Reading) {
        self.sum += reading.value;
        self.count += 1;
        self.first.get_or_insert(reading);
        self.last = Some(reading);
    }

    /// The mean of figures, or a counter's growth per second. A counter that has shrunk belongs to a restarted program.
    fn figure(&self, is_counter: bool) -> Option<f64> {
        let last = self.last?;
        if !is_counter {
            return Some(self.sum / f64::from(self.count));
        }
        let first = self.first?;
        let length_s = last.t_s - first.t_s;
        (length_s > 0.0 && last.value >= first.value).then(|| (last.value - first.value) / length_s)
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn figures_are_averaged_and_gaps_stay_gaps() {
        let mut meter = Meter::new(false);
        meter.add(0.5, 99.0);
        meter.begin();
        meter.add(1.0, 2.0);
        meter.add(1.5, 4.0);
        meter.add(1.6, f64::NAN);
        assert_eq!(meter.end_interval(), Some(3.0));
        assert_eq!(meter.end_interval(), None);
        meter.add(3.5, 9.0);
        assert_eq!(meter.end_interval(), Some(9.0));
        assert_eq!(meter.mean(), Some(5.0));
    }

    #[test]
    fn a_counter_that_starts_again_is_no_figure() {
        let mut meter = Meter::new(true);
        meter.add(0.0, 100.0);
        assert_eq!(meter.end_interval(), None);
        meter.add(1.0, 5.0);
        assert_eq!(meter.end_interval(), None);
        meter.add(2.0, 9.0);
        assert_eq!(meter.end_interval(), Some(4.0));
    }

    proptest! {
        /// The rate of a steady counter does not depend on the number of readings.
        #[test]
        fn a_steady_counter_has_one_rate(
            rate in 0.0f64..1e9,
            steps in proptest::collection::vec(1u32..2000, 2..40),
            every in 1usize..5,
        ) {
            let mut meter = Meter::new(true);
            let (mut t_s, mut figures) = (0.0, vec![]);
            for (index, step) in steps.iter().enumerate() {
                t_s += f64::from(*step) / 1e3;
                meter.add(t_s, t_s * rate);
                if index % every == 0 {
                    figures.extend(meter.end_interval());
                }
            }
            figures.extend(meter.mean());
            prop_assert!(!figures.is_empty());
            for figure in figures {
                prop_assert!((figure - rate).abs() <= rate * 1e-6 + 1e-6, "{} {}", figure, rate);
            }
        }
    }
}
