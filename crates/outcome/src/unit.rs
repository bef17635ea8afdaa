//! The unit of a workload's speed.

use std::borrow::Cow;
use std::fmt;

use serde::{Deserialize, Serialize};

/// A unit of speed: of a throughput (`Mops`, `requests/s`) or an operation's time (`ns`, `us`, `ms` or `s`).
///
/// More is better for a throughput, and less for a time.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[serde(transparent)]
pub struct Unit(Cow<'static, str>);

impl Unit {
    /// Million operations per second.
    pub const MOPS: Self = Self(Cow::Borrowed("Mops"));
    /// Nanoseconds per operation.
    pub const NS: Self = Self(Cow::Borrowed("ns"));

    /// The unit called `name`; any name is allowed.
    pub fn new(name: impl Into<String>) -> Self {
        Self(Cow::Owned(name.into()))
    }

    /// Its name.
    pub fn name(&self) -> &str {
        &self.0
    }

    /// Whether it is the time of an operation, where less is better.
    pub fn is_time(&self) -> bool {
        self.time_ps().is_some()
    }

    /// The speed at which `done` was done in `ps` picoseconds; `None` if it has no meaning.
    ///
    /// `Mops` counts single operations; other throughputs count what their name says.
    pub fn speed(&self, done: f64, ps: f64) -> Option<f64> {
        match self.time_ps() {
            Some(unit_ps) => (done > 0.0).then(|| ps / unit_ps / done),
            None => (ps > 0.0).then(|| done / (ps / 1e12) / self.operations()),
        }
    }

    /// The work done in `ps` picoseconds at a speed: the inverse of [`Unit::speed`].
    pub fn done(&self, speed: f64, ps: f64) -> f64 {
        match self.time_ps() {
            Some(unit_ps) if speed > 0.0 => ps / unit_ps / speed,
            Some(_) => 0.0,
            None => speed * (ps / 1e12) * self.operations(),
        }
    }

    fn time_ps(&self) -> Option<f64> {
        match self.name() {
            "ns" => Some(1e3),
            "us" => Some(1e6),
            "ms" => Some(1e9),
            "s" => Some(1e12),
            _ => None,
        }
    }

    fn operations(&self) -> f64 {
        if *self == Self::MOPS { 1e6 } else { 1.0 }
    }
}

impl fmt::Display for Unit {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn speed_is_work_by_time_or_time_by_work(done in 1.0f64..1e15, ps in 1.0f64..1e18) {
            for (unit, at_four_in_two_seconds) in
                [("Mops", 2e-6), ("requests/s", 2.0), ("ns", 5e8), ("s", 0.5)]
            {
                let unit = Unit::new(unit);
                prop_assert_eq!(unit.speed(4.0, 2e12), Some(at_four_in_two_seconds));
                let back = unit.done(unit.speed(done, ps).unwrap(), ps);
                prop_assert!((back / done - 1.0).abs() < 1e-9);
                prop_assert_eq!(unit.speed(0.0, 0.0), None);
            }
        }
    }
}
