//! The main figure of a result.

use demeter_outcome::{SystemResult, Unit};

use crate::text::clean;

/// The main figure in tables and pictures of cases.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Seconds until a fixed amount of work was done.
    Elapsed,
    /// Speed of the workload.
    Speed(Unit),
}

impl Measure {
    /// The main figure of these results: the elapsed time if any has one, else the speed.
    pub(crate) fn of<'a>(systems: impl Iterator<Item = &'a SystemResult> + Clone) -> Self {
        if systems.clone().any(|system| system.elapsed_s.is_some()) {
            return Self::Elapsed;
        }
        Self::speed_of(systems)
    }

    /// The speed, in the unit of these results.
    pub(crate) fn speed_of<'a>(systems: impl Iterator<Item = &'a SystemResult>) -> Self {
        let mut speeds = systems.filter_map(|system| system.speed.as_ref());
        Self::Speed(speeds.next().map_or(Unit::MOPS, |speed| speed.unit.clone()))
    }

    /// The figure of one system.
    pub(crate) fn value(&self, system: &SystemResult) -> Option<f64> {
        match self {
            Self::Elapsed => system.elapsed_s,
            Self::Speed(unit) => system.speed.as_ref().filter(|s| s.unit == *unit)?.mean,
        }
    }

    /// Speedup of a system over `baseline`.
    pub(crate) fn speed(&self, system: &SystemResult, baseline: &SystemResult) -> Option<f64> {
        self.times(self.value(system)?, self.value(baseline)?)
    }

    /// Ratio by which a figure is better than `theirs`.
    pub(crate) fn times(&self, ours: f64, theirs: f64) -> Option<f64> {
        let times = if self.less_is_better() {
            theirs / ours
        } else {
            ours / theirs
        };
        times.is_finite().then_some(times)
    }

    /// Title of its picture.
    pub(crate) fn title(&self) -> &'static str {
        match self {
            Self::Elapsed => "Time for the work",
            Self::Speed(unit) if unit.is_time() => "Latency",
            Self::Speed(_) => "Throughput",
        }
    }

    /// Its unit, and which end is better.
    pub(crate) fn unit(&self) -> String {
        let unit = match self {
            Self::Elapsed => "seconds".into(),
            Self::Speed(unit) if *unit == Unit::MOPS => "million updates per second".into(),
            Self::Speed(unit) if *unit == Unit::NS => "nanoseconds per operation".into(),
            Self::Speed(unit) if unit.is_time() => format!("{unit} per operation"),
            Self::Speed(unit) => clean::name(unit.name()),
        };
        let good = if self.less_is_better() {
            "less"
        } else {
            "more"
        };
        format!("{unit}, {good} is better")
    }

    /// The heading of its columns.
    pub(crate) fn heading(&self) -> String {
        match self {
            Self::Elapsed => "elapsed".into(),
            Self::Speed(unit) if unit.is_time() => format!("latency, {unit}"),
            Self::Speed(unit) => clean::name(unit.name()),
        }
    }

    /// Whether the smallest figure is the best.
    pub(crate) fn less_is_better(&self) -> bool {
        match self {
            Self::Elapsed => true,
            Self::Speed(unit) => unit.is_time(),
        }
    }
}

#[cfg(test)]
mod tests {
    use demeter_outcome::Speed;

    use super::*;

    fn system(elapsed_s: Option<f64>, speed: Option<(Unit, f64)>) -> SystemResult {
        SystemResult {
            elapsed_s,
            speed: speed.map(|(unit, mean)| Speed {
                unit,
                mean: Some(mean),
                steady: None,
            }),
            ..SystemResult::default()
        }
    }

    #[test]
    fn the_time_for_fixed_work_tells_most() {
        let both = system(Some(2.0), Some((Unit::MOPS, 1.0)));
        let rate = system(None, Some((Unit::MOPS, 1.0)));
        let latency = system(None, Some((Unit::NS, 5.0)));
        assert_eq!(Measure::of([&rate, &both].into_iter()), Measure::Elapsed);
        assert_eq!(Measure::of([&rate].into_iter()), Measure::Speed(Unit::MOPS));
        assert_eq!(
            Measure::of([&latency].into_iter()),
            Measure::Speed(Unit::NS)
        );
    }

    #[test]
    fn half_the_time_is_twice_the_speed() {
        let frames = Unit::new("frames/s");
        for (unit, slow, fast) in [
            (Unit::MOPS, 1.0, 3.0),
            (Unit::NS, 30.0, 10.0),
            (frames, 2.0, 6.0),
        ] {
            let (slow, fast) = (Some((unit.clone(), slow)), Some((unit.clone(), fast)));
            let (slow, fast) = (system(Some(8.0), slow), system(Some(4.0), fast));
            assert_eq!(Measure::Elapsed.speed(&fast, &slow), Some(2.0));
            assert_eq!(Measure::Speed(unit.clone()).speed(&fast, &slow), Some(3.0));
            let nothing = system(Some(0.0), None);
            assert_eq!(Measure::Elapsed.speed(&nothing, &slow), None);
            assert_eq!(Measure::Speed(unit).speed(&nothing, &slow), None);
        }
    }

    #[test]
    fn a_unit_says_which_end_is_good() {
        let words = |unit: &str| Measure::Speed(Unit::new(unit)).unit();
        assert_eq!(words("requests/s"), "requests/s, more is better");
        assert_eq!(words("ms"), "ms per operation, less is better");
    }
}
