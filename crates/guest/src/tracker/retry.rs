//! Returns to a better tracker once that works.

use std::time::{Duration, Instant};

use demeter_policy::damon::Prospect;
use demeter_policy::{Block, Observation, Pid, Sample};

use super::{Drained, Open, Settings, Tracker, TrackerError};

/// Time to the first trial of the better trackers. A trial of a unit that gives nothing takes 0.3 s of a CPU.
const FIRST: Duration = Duration::from_secs(60);
/// Longest time between two trials: each doubles it.
const LONGEST: Duration = Duration::from_secs(3600);

/// A tracker that works, and better ones that did not.
///
/// It ends with [`TrackerError::Outdone`] when a better one works. The agent then starts with that one, since samples
/// and accessed bits do not mix.
pub(super) struct Retry {
    tracker: Box<dyn Tracker>,
    /// Names of the better ones, and how they are opened; best first.
    better: Vec<(&'static str, Open)>,
    settings: Settings,
    due: Instant,
    pause: Duration,
}

impl Retry {
    pub fn new(
        tracker: Box<dyn Tracker>,
        better: Vec<(&'static str, Open)>,
        settings: &Settings,
    ) -> Self {
        Self {
            tracker,
            better,
            settings: settings.clone(),
            due: Instant::now() + FIRST,
            pause: FIRST,
        }
    }

    /// Tries the better trackers when it is time.
    fn retry(&mut self, now: Instant) -> Result<(), TrackerError> {
        if now < self.due {
            return Ok(());
        }
        let works = |&&(_, open): &&(&str, Open)| open(&self.settings).is_ok();
        if let Some(&(better, _)) = self.better.iter().find(works) {
            return Err(TrackerError::Outdone {
                tracker: self.tracker.name(),
                better,
            });
        }
        self.pause = (self.pause * 2).min(LONGEST);
        self.due = now + self.pause;
        Ok(())
    }
}

impl Tracker for Retry {
    fn name(&self) -> &'static str {
        self.tracker.name()
    }

    fn loads_per_sample(&self) -> Option<u32> {
        self.tracker.loads_per_sample()
    }

    fn loads_overlap(&self) -> bool {
        self.tracker.loads_overlap()
    }

    fn waits(&self) -> f64 {
        self.tracker.waits()
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        self.tracker.set_targets(targets)
    }

    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        self.tracker.drain(out, max)
    }

    fn want(&mut self, blocks: &[(Pid, Block)]) {
        self.tracker.want(blocks);
    }

    fn observed(&self) -> &[Observation] {
        self.tracker.observed()
    }

    fn epoch_ended(&mut self, prospect: Prospect) -> Result<(), TrackerError> {
        self.tracker.epoch_ended(prospect)?;
        self.retry(Instant::now())
    }

    fn thinning(&self) -> u32 {
        self.tracker.thinning()
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.tracker.pause()
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        self.tracker.resume()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    struct Fake;

    impl Tracker for Fake {
        fn name(&self) -> &'static str {
            "lab"
        }
        fn set_targets(&mut self, _: &[Pid]) -> Result<(), TrackerError> {
            Ok(())
        }
        fn drain(&mut self, _: &mut Vec<Sample>, _: usize) -> Result<Drained, TrackerError> {
            Ok(Drained::default())
        }
        fn pause(&mut self) -> Result<(), TrackerError> {
            Ok(())
        }
        fn resume(&mut self) -> Result<(), TrackerError> {
            Ok(())
        }
    }

    /// A unit that works while the file `unit` exists.
    fn perf(settings: &Settings) -> Result<Box<dyn Tracker>, TrackerError> {
        match settings.root.join("unit").exists() {
            true => Ok(Box::new(Fake)),
            false => Err(TrackerError::Taken { tracker: "perf" }),
        }
    }

    fn worse() -> (tempfile::TempDir, Retry) {
        let root = tempfile::tempdir().unwrap();
        let settings = Settings {
            root: root.path().into(),
            ..Settings::default()
        };
        let retry = Retry::new(Box::new(Fake), vec![("perf", perf)], &settings);
        (root, retry)
    }

    #[test]
    fn a_better_tracker_is_returned_to_when_it_works() {
        let (root, mut retry) = worse();
        let first = retry.due;
        retry.retry(first).unwrap();
        std::fs::write(root.path().join("unit"), "").unwrap();
        retry.retry(first + FIRST).expect("it is not time yet");
        let error = retry.retry(first + 2 * FIRST).unwrap_err();
        assert!(error.is_temporary(), "the agent starts again");
        assert_eq!(
            error.to_string(),
            "tracker lab: perf works now, and takes its place"
        );
    }

    #[test]
    fn trials_of_a_unit_that_never_works_become_rare_and_go_on() {
        let (_root, mut retry) = worse();
        let mut pause = FIRST;
        for _ in 0..20 {
            let due = retry.due;
            retry.retry(due).unwrap();
            pause = (pause * 2).min(LONGEST);
            assert_eq!(retry.due, due + pause);
        }
        assert_eq!(pause, LONGEST);
    }
}
