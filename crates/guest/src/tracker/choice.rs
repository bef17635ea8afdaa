//! Chooses the tracker.

use serde::{Deserialize, Serialize};

use super::damon::DamonTracker;
use super::lab::LabTracker;
use super::perf::PerfTracker;
use super::retry::Retry;
use super::{Open, Settings, Tracker, TrackerError};

/// The configured tracker.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(rename_all = "lowercase")]
#[derive(strum::EnumString, strum::IntoStaticStr, strum::VariantNames)]
#[strum(serialize_all = "lowercase")]
pub enum Choice {
    /// The best one that works: perf, else lab, else damon.
    #[default]
    Auto,
    /// Load samples from the CPU.
    Perf,
    /// Accessed bits from the kernel's DAMON.
    Damon,
    /// Load samples from the lab's emulator.
    Lab,
}

/// A tracker that was tried and not used.
#[derive(Debug)]
pub struct PassedOver {
    /// Its name.
    pub tracker: &'static str,
    /// The reason.
    pub why: TrackerError,
}

/// All trackers, best first.
const TRACKERS: [(Choice, Open); 3] = [
    (Choice::Perf, |settings| {
        Ok(Box::new(PerfTracker::new(settings)?))
    }),
    (Choice::Lab, |settings| {
        Ok(Box::new(LabTracker::new(settings)?))
    }),
    (Choice::Damon, |settings| {
        Ok(Box::new(DamonTracker::new(settings)?))
    }),
];

/// Opens the configured tracker, or the first that works; returns the failed ones, which are tried again from time to
/// time.
pub fn choose(
    want: Choice,
    settings: &Settings,
) -> Result<(Box<dyn Tracker>, Vec<PassedOver>), TrackerError> {
    let mut passed_over = Vec::new();
    for (at, (choice, open)) in TRACKERS.into_iter().enumerate() {
        if want != Choice::Auto && want != choice {
            continue;
        }
        match open(settings) {
            Ok(tracker) if passed_over.is_empty() => return Ok((tracker, passed_over)),
            Ok(tracker) => {
                let better = TRACKERS[..at].iter();
                let better = better.map(|&(choice, open)| (choice.into(), open));
                let retry = Retry::new(tracker, better.collect(), settings);
                return Ok((Box::new(retry), passed_over));
            }
            Err(why) if want != Choice::Auto => return Err(why),
            Err(why) => passed_over.push(PassedOver {
                tracker: choice.into(),
                why,
            }),
        }
    }
    Err(TrackerError::NoneWorks(passed_over))
}

/// Tries every tracker; `None` if it works.
pub(crate) fn try_all(settings: &Settings) -> Vec<(&'static str, Option<TrackerError>)> {
    TRACKERS
        .iter()
        .map(|(choice, open)| (choice.into(), open(settings).err()))
        .collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn nowhere() -> (tempfile::TempDir, Settings) {
        let root = tempfile::tempdir().unwrap();
        let settings = Settings {
            root: root.path().into(),
            ..Settings::default()
        };
        (root, settings)
    }

    #[test]
    fn every_tracker_that_fails_is_named_with_its_reason() {
        let (_root, settings) = nowhere();
        let error = choose(Choice::Auto, &settings).err().unwrap().to_string();
        for name in ["perf", "lab", "damon"] {
            assert!(error.contains(&format!("tracker {name}: ")), "{error}");
        }
    }

    #[test]
    fn what_somebody_else_has_may_work_later() {
        const RECLAIM: &str = "sys/module/damon_reclaim/parameters/enabled";
        let (root, settings) = nowhere();
        let error = choose(Choice::Auto, &settings).err().unwrap();
        assert!(!error.is_temporary(), "{error}");
        crate::tracker::damon::tests::FakeDamon::new(root.path());
        let reclaim = root.path().join(RECLAIM);
        std::fs::create_dir_all(reclaim.parent().unwrap()).unwrap();
        std::fs::write(&reclaim, "Y\n").unwrap();
        for choice in [Choice::Auto, Choice::Damon] {
            let error = choose(choice, &settings).err().unwrap();
            assert!(error.is_temporary(), "{error}");
            assert!(
                error.to_string().contains("in use by DAMON_RECLAIM"),
                "{error}"
            );
        }
    }

    #[test]
    fn a_tracker_asked_for_by_name_gives_its_own_reason() {
        let (_root, settings) = nowhere();
        let error = choose(Choice::Lab, &settings).err().unwrap();
        assert!(
            matches!(error, TrackerError::Unavailable { tracker: "lab", .. }),
            "{error}"
        );
    }

    #[test]
    fn auto_takes_the_lab_before_damon() {
        let (root, settings) = nowhere();
        crate::tracker::lab::tests::FakeDevice::new(root.path(), 1);
        let (tracker, passed_over) = choose(Choice::Auto, &settings).unwrap();
        assert_eq!(tracker.name(), "lab");
        let names: Vec<_> = passed_over.iter().map(|passed| passed.tracker).collect();
        assert_eq!(names, ["perf"]);
    }

    #[test]
    fn choices_are_written_in_lower_case() {
        #[derive(Deserialize)]
        struct Config {
            tracker: Choice,
        }
        let config: Config = toml::from_str("tracker = \"damon\"").unwrap();
        assert_eq!(config.tracker, Choice::Damon);
        assert!(toml::from_str::<Config>("tracker = \"Damon\"").is_err());
    }
}
