//! The figure that tells most of a result, and how figures are called.

use crate::schema::SystemResult;

/// What tables and pictures of cases show.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Measure {
    /// Seconds until a fixed amount of work was done.
    Elapsed,
    /// Million updates per second.
    Throughput,
    /// Nanoseconds per load.
    Latency,
}

impl Measure {
    /// What these results have: the first of the three that any of them has.
    pub(crate) fn of<'a>(systems: impl Iterator<Item = &'a SystemResult> + Clone) -> Self {
        let has = |measure: &Self| systems.clone().any(|s| measure.value(s).is_some());
        [Self::Elapsed, Self::Throughput, Self::Latency]
            .into_iter()
            .find(has)
            .unwrap_or(Self::Throughput)
    }

    /// The figure of one system.
    pub(crate) fn value(self, system: &SystemResult) -> Option<f64> {
        match self {
            Self::Elapsed => system.elapsed_s,
            Self::Throughput => system.mean_mops,
            Self::Latency => system.mean_latency_ns,
        }
    }

    /// How many times as fast as `baseline` a system is.
    pub(crate) fn speed(self, system: &SystemResult, baseline: &SystemResult) -> Option<f64> {
        let (ours, theirs) = (self.value(system)?, self.value(baseline)?);
        let speed = if self.less_is_better() {
            theirs / ours
        } else {
            ours / theirs
        };
        speed.is_finite().then_some(speed)
    }

    /// What a picture of it is called.
    pub(crate) fn title(self) -> &'static str {
        match self {
            Self::Elapsed => "Time for the work",
            Self::Throughput => "Throughput",
            Self::Latency => "Latency",
        }
    }

    /// Its unit, and which end is good.
    pub(crate) fn unit(self) -> &'static str {
        match self {
            Self::Elapsed => "seconds, less is better",
            Self::Throughput => "million updates per second, more is better",
            Self::Latency => "nanoseconds per operation, less is better",
        }
    }

    /// Whether the smallest figure is the best.
    pub(crate) fn less_is_better(self) -> bool {
        self != Self::Throughput
    }
}

/// A figure's name (see [`figure`](crate::figure())) in words. The unit is left out of a ratio.
pub(crate) fn words(name: &str, is_ratio: bool) -> String {
    let (words, unit) = match name {
        "elapsed_s" => ("time for the work", "s"),
        "mean_mops" => ("throughput", "Mops"),
        "steady_mops" => ("throughput at the end", "Mops"),
        "peak_mops" => ("peak throughput", "Mops"),
        "mean_latency_ns" => ("latency", "ns"),
        "steady_latency_ns" => ("latency at the end", "ns"),
        "hot_in_fast_final" => ("hot set in fast memory", ""),
        "t90_s" => ("t90", "s"),
        "mgmt_cpu_s" => ("management CPU", "s"),
        "cores_managing" => ("cores managing", ""),
        "bytes_promoted" => ("promoted", "bytes"),
        "bytes_demoted" => ("demoted", "bytes"),
        "tail.mean_ns" => ("mean of operations", "ns"),
        "tail.p50_ns" => ("p50 of operations", "ns"),
        "tail.p90_ns" => ("p90 of operations", "ns"),
        "tail.p99_ns" => ("p99 of operations", "ns"),
        "tail.p999_ns" => ("p99.9 of operations", "ns"),
        "counters.flush_total" => ("TLB flushes", ""),
        other => return other_words(other, is_ratio),
    };
    with_unit(words, unit, is_ratio)
}

fn other_words(name: &str, is_ratio: bool) -> String {
    let plain = |name: &str| name.replace('_', " ");
    if let Some(cause) = name.strip_prefix("cpu_s.") {
        with_unit(&format!("CPU to {}", plain(cause)), "s", is_ratio)
    } else if let Some(kind) = name.strip_prefix("counters.flush_") {
        format!("flushes {}", plain(kind))
    } else {
        plain(name.strip_prefix("counters.").unwrap_or(name))
    }
}

fn with_unit(words: &str, unit: &str, is_ratio: bool) -> String {
    if is_ratio || unit.is_empty() {
        words.into()
    } else {
        format!("{words}, {unit}")
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn system(elapsed_s: Option<f64>, mean_mops: Option<f64>, ns: Option<f64>) -> SystemResult {
        SystemResult {
            elapsed_s,
            mean_mops,
            mean_latency_ns: ns,
            ..SystemResult::default()
        }
    }

    #[test]
    fn the_time_for_fixed_work_tells_most() {
        let (both, rate) = (
            system(Some(2.0), Some(1.0), None),
            system(None, Some(1.0), None),
        );
        let latency = system(None, None, Some(5.0));
        assert_eq!(Measure::of([&rate, &both].into_iter()), Measure::Elapsed);
        assert_eq!(Measure::of([&rate].into_iter()), Measure::Throughput);
        assert_eq!(Measure::of([&latency].into_iter()), Measure::Latency);
    }

    #[test]
    fn half_the_time_is_twice_the_speed() {
        let slow = system(Some(8.0), Some(1.0), Some(50.0));
        let fast = system(Some(4.0), Some(3.0), Some(10.0));
        assert_eq!(Measure::Elapsed.speed(&fast, &slow), Some(2.0));
        assert_eq!(Measure::Throughput.speed(&fast, &slow), Some(3.0));
        assert_eq!(Measure::Latency.speed(&fast, &slow), Some(5.0));
        let nothing = system(Some(0.0), None, None);
        assert_eq!(Measure::Elapsed.speed(&nothing, &slow), None);
        assert_eq!(Measure::Throughput.speed(&nothing, &slow), None);
    }

    #[test]
    fn figures_have_words() {
        assert_eq!(words("elapsed_s", false), "time for the work, s");
        assert_eq!(words("elapsed_s", true), "time for the work");
        assert_eq!(words("cpu_s.track", false), "CPU to track, s");
        assert_eq!(
            words("counters.flush_host_invept", true),
            "flushes host invept"
        );
        assert_eq!(words("counters.hint_faults", false), "hint faults");
    }
}
