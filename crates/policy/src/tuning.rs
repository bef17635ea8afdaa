//! The parameters of an agent's policy.

use std::time::Duration;

use serde::{Deserialize, Serialize};

use crate::{ByteCount, MIB};

/// More than any machine can copy.
const RATE_LIMIT_MAX_MIB_S: u64 = 1 << 20;

/// The paper's sampling period, and the largest by default.
pub const SAMPLE_PERIOD_MAX: u32 = 4093;

/// Samples per second of a CPU that only waits for the slowest memory. A few hundred show a hot set by the time that its
/// move pays.
const SAMPLES_PER_CPU_S: u32 = 600;

/// Parameters of sampling, heat and moves, in the units of the agent's configuration file; a scenario has the same
/// keys. Defaults are those of the Demeter paper where it gives them.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields, default)]
pub struct Tuning {
    /// Loads per sample. By default 4093, and less where memory is so slow that a CPU would yield few samples.
    pub sample_period: Option<u32>,
    /// Smallest latency of a sampled load, nanoseconds (CPU cycles on Intel, as its hardware counts them).
    pub latency_threshold_ns: u32,

    /// Time between two decisions, milliseconds.
    pub epoch_ms: u64,
    /// Number of samples by which a part of a range must exceed the rest to be split off; `demeter-paper` only, in the
    /// simulator.
    pub tau_split: u32,
    /// Minimum ratio of its density to that of the rest, in either direction; `demeter-paper` only.
    pub alpha: f64,
    /// Size of the smallest range, MiB; a power of two; `demeter-paper` only.
    pub granularity_mib: u64,
    /// Maximum number of ranges of a process; `demeter-paper` only.
    pub max_ranges: usize,

    /// Limit of promotions, and of demotions, MiB per second. With 0 nothing moves, not even for the balloon, and the
    /// agent only observes. By default moves are limited only by their cost and benefit.
    pub rate_limit_mib_s: u64,
}

impl Default for Tuning {
    fn default() -> Self {
        Self {
            sample_period: None,
            latency_threshold_ns: 64,
            epoch_ms: 500,
            tau_split: 15,
            alpha: 2.0,
            granularity_mib: 2,
            max_ranges: 512,
            rate_limit_mib_s: 1_048_576,
        }
    }
}

/// A value is out of bounds.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
#[error("{key} = {value} is out of bounds; {hint}")]
pub struct OutOfBounds {
    /// The key.
    pub key: &'static str,
    /// Its value.
    pub value: String,
    /// The bounds.
    pub hint: String,
}

impl Tuning {
    /// Checks values beyond their types.
    ///
    /// # Errors
    /// The first value that is out of bounds.
    pub fn check(&self) -> Result<(), OutOfBounds> {
        within("epoch_ms", self.epoch_ms, 10, 60_000)?;
        if let Some(period) = self.sample_period {
            within("sample_period", period.into(), 1, 1 << 31)?;
        }
        within("tau_split", self.tau_split.into(), 1, 100_000)?;
        within("granularity_mib", self.granularity_mib, 2, 1024)?;
        within("max_ranges", self.max_ranges as u64, 8, 8192)?;
        within(
            "rate_limit_mib_s",
            self.rate_limit_mib_s,
            0,
            RATE_LIMIT_MAX_MIB_S,
        )?;
        if !self.granularity_mib.is_power_of_two() {
            return Err(OutOfBounds {
                key: "granularity_mib",
                value: self.granularity_mib.to_string(),
                hint: "give a power of two".into(),
            });
        }
        if !(self.alpha >= 1.0 && self.alpha <= 1000.0) {
            return Err(OutOfBounds {
                key: "alpha",
                value: self.alpha.to_string(),
                hint: "give 1 to 1000".into(),
            });
        }
        Ok(())
    }

    /// Loads per sample on a machine whose slowest memory has this latency.
    pub fn loads_per_sample(&self, slowest_ns: u32) -> u32 {
        let loads_per_s = 1_000_000_000 / slowest_ns.max(1);
        let few = (loads_per_s / SAMPLES_PER_CPU_S).max(1);
        self.sample_period.unwrap_or(few.min(SAMPLE_PERIOD_MAX))
    }

    /// Time between two decisions.
    pub fn epoch(&self) -> Duration {
        Duration::from_millis(self.epoch_ms)
    }

    /// Limit of moves in one direction per epoch.
    pub fn batch(&self) -> ByteCount {
        let bytes = u128::from(self.rate_limit_mib_s) * u128::from(MIB) * u128::from(self.epoch_ms);
        ByteCount((bytes / 1000) as u64)
    }
}

fn within(key: &'static str, value: u64, least: u64, most: u64) -> Result<(), OutOfBounds> {
    if (least..=most).contains(&value) {
        return Ok(());
    }
    Err(OutOfBounds {
        key,
        value: value.to_string(),
        hint: format!("give {least} to {most}"),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn defaults_are_in_bounds() {
        let tuning = Tuning::default();
        assert_eq!(tuning.check(), Ok(()));
        let limited = Tuning {
            rate_limit_mib_s: 256,
            ..Tuning::default()
        };
        assert_eq!(limited.batch(), ByteCount(128 * MIB));
        assert_eq!(tuning.epoch(), Duration::from_millis(500));
    }

    #[test]
    fn slow_memory_is_sampled_more_often() {
        let mut tuning = Tuning::default();
        assert_eq!(tuning.loads_per_sample(200), 4093);
        assert_eq!(tuning.loads_per_sample(2000), 833);
        assert_eq!(tuning.loads_per_sample(u32::MAX), 1);
        assert_eq!(tuning.loads_per_sample(0), 4093);
        tuning.sample_period = Some(16_381);
        assert_eq!(tuning.loads_per_sample(2000), 16_381);
    }

    #[test]
    fn values_out_of_bounds_are_named_with_the_hint() {
        type Change = fn(&mut Tuning);
        let refused: [(Change, &str); 9] = [
            (
                |t| t.epoch_ms = 9,
                "epoch_ms = 9 is out of bounds; give 10 to 60000",
            ),
            (
                |t| t.sample_period = Some(0),
                "sample_period = 0 is out of bounds; give 1 to 2147483648",
            ),
            (
                |t| t.tau_split = 0,
                "tau_split = 0 is out of bounds; give 1 to 100000",
            ),
            (
                |t| t.granularity_mib = 1,
                "granularity_mib = 1 is out of bounds; give 2 to 1024",
            ),
            (
                |t| t.granularity_mib = 3,
                "granularity_mib = 3 is out of bounds; give a power of two",
            ),
            (
                |t| t.max_ranges = 7,
                "max_ranges = 7 is out of bounds; give 8 to 8192",
            ),
            (
                |t| t.rate_limit_mib_s = 1_048_577,
                "rate_limit_mib_s = 1048577 is out of bounds; give 0 to 1048576",
            ),
            (
                |t| t.alpha = 0.5,
                "alpha = 0.5 is out of bounds; give 1 to 1000",
            ),
            (
                |t| t.alpha = f64::NAN,
                "alpha = NaN is out of bounds; give 1 to 1000",
            ),
        ];
        for (change, said) in refused {
            let mut tuning = Tuning::default();
            change(&mut tuning);
            assert_eq!(tuning.check().unwrap_err().to_string(), said);
        }
    }
}
