//! Searches for the best settings of a rival in a scenario.
//!
//! Problem: a rival has several settings, a run takes a minute or two, and the tables should show each rival at its
//! best. Approach: one setting at a time, in order of importance. Each of its values is tried with the best values of
//! the earlier ones. The number of runs is then the sum of the numbers of values, not the product. Properties: the
//! result is the best of all runs. The default settings run first, so the result is never worse than them. No run
//! starts that might not end in time.

use std::time::{Duration, Instant};

use demeter_outcome::{SystemResult, best};
use demeter_scenario::{Settings, System, Thp};

/// Estimated time of a VM besides the timed phase, before the first run: booting, populating and verifying.
const BESIDES: Duration = Duration::from_secs(45);

/// A value of a setting: its name, and a function that sets it.
type Value = (&'static str, fn(&mut Settings));

const HUGE_PAGES: &[Value] = &[
    ("huge pages never", |s| s.thp = Some(Thp::Never)),
    ("huge pages madvise", |s| s.thp = Some(Thp::Madvise)),
    ("huge pages always", |s| s.thp = Some(Thp::Always)),
];
const WATERMARKS: &[Value] = &[
    ("watermarks 1 %", |s| s.watermark_scale_factor = Some(100)),
    ("watermarks 5 %", |s| s.watermark_scale_factor = Some(500)),
];

/// Linux's settings, most important first.
const LINUX: &[&[Value]] = &[
    HUGE_PAGES,
    &[
        ("scan 64 MiB", |s| s.scan_size_mib = Some(64)),
        ("scan 1024 MiB", |s| s.scan_size_mib = Some(1024)),
    ],
    &[
        ("every 0.2 s", |s| s.scan_period_min_ms = Some(200)),
        ("every 5 s", |s| s.scan_period_min_ms = Some(5000)),
    ],
    &[
        ("16 MiB/s", |s| s.rate_mib_per_s = Some(16)),
        ("128 MiB/s", |s| s.rate_mib_per_s = Some(128)),
    ],
    WATERMARKS,
    &[("two LRU lists", |s| s.multi_gen_lru = Some(false))],
];

/// DAMON's settings.
const DAMON: &[&[Value]] = &[
    HUGE_PAGES,
    &[
        ("looks every 5 ms", |s| s.sample_ms = Some(5)),
        ("looks every 20 ms", |s| s.sample_ms = Some(20)),
        ("looks every 50 ms", |s| s.sample_ms = Some(50)),
    ],
    &[
        ("16 MiB/s", |s| s.rate_mib_per_s = Some(16)),
        ("256 MiB/s", |s| s.rate_mib_per_s = Some(256)),
    ],
    WATERMARKS,
];

/// A search for the best settings of a rival.
#[derive(Debug)]
pub struct Search {
    rival: System,
    knobs: &'static [&'static [Value]],
    clock: Clock,
}

/// Error: the time limit is too short.
#[derive(Debug, thiserror::Error)]
#[error("one run takes about {each_s} s: give --time {minutes} or more, or a shorter --duration")]
pub struct TooLittleTime {
    /// Seconds per run.
    pub each_s: u64,
    /// Minutes needed for one run.
    pub minutes: u64,
}

impl Search {
    /// A search for settings of `rival`, within `limit` if there is one. Its runs have this timed phase. The time limit
    /// starts now.
    pub fn new(rival: System, timed_phase: Duration, limit: Option<Duration>) -> Self {
        Self {
            rival,
            knobs: knobs(rival),
            clock: Clock::new(timed_phase + BESIDES, limit),
        }
    }

    /// Describes the search to the user before it starts.
    ///
    /// # Errors
    /// When not even one run fits into the limit.
    pub fn promise(&self) -> Result<String, TooLittleTime> {
        let all = 1 + self.knobs.iter().map(|values| values.len()).sum::<usize>();
        self.clock.promise(all)
    }

    /// Runs the search. Returns the best settings with their result and all others, or none without a result. `run`
    /// executes one run.
    ///
    /// # Errors
    /// The first error of `run`.
    pub fn run<E>(
        mut self,
        run: &mut dyn FnMut(&Settings) -> Result<Option<SystemResult>, E>,
    ) -> Result<Option<(Settings, SystemResult)>, E> {
        let clock = &mut self.clock;
        search(self.rival, self.knobs, &mut |settings| {
            if !clock.begins() {
                return Ok(None);
            }
            let result = run(settings)?;
            clock.ended();
            Ok(result)
        })
    }
}

fn knobs(rival: System) -> &'static [&'static [Value]] {
    match rival {
        System::Damon => DAMON,
        _ => LINUX,
    }
}

/// Searches for the best settings and returns them with their result and all others, or none if the first run failed.
/// `run` returns none when no time is left.
fn search<E>(
    rival: System,
    knobs: &[&[Value]],
    run: &mut dyn FnMut(&Settings) -> Result<Option<SystemResult>, E>,
) -> Result<Option<(Settings, SystemResult)>, E> {
    let mut tried = vec![Settings::new(rival, "as it is")];
    let Some(first) = run(&tried[0])? else {
        return Ok(None);
    };
    let mut results = vec![first];
    'knobs: for values in knobs {
        let so_far = best_of(&tried, &results).clone();
        for (name, set) in *values {
            let mut settings = so_far.clone();
            set(&mut settings);
            settings.name = if so_far == tried[0] {
                (*name).to_owned()
            } else {
                format!("{}, {name}", so_far.name)
            };
            let Some(result) = run(&settings)? else {
                break 'knobs;
            };
            tried.push(settings);
            results.push(result);
        }
    }
    let settings = best_of(&tried, &results).clone();
    Ok(best(results).map(|result| (settings, result)))
}

/// The settings of the best result.
fn best_of<'a>(tried: &'a [Settings], results: &[SystemResult]) -> &'a Settings {
    let best = best(results.to_vec()).and_then(|best| best.settings);
    let found = tried.iter().find(|s| Some(&s.name) == best.as_ref());
    found.unwrap_or(&tried[0])
}

/// Estimates run times and the number of runs that fit into the limit.
#[derive(Debug)]
struct Clock {
    started: Instant,
    run_began: Instant,
    /// Duration of the longest run; before the first run, an estimate.
    longest: Duration,
    limit: Option<Duration>,
    is_measured: bool,
}

impl Clock {
    fn new(guess: Duration, limit: Option<Duration>) -> Self {
        let now = Instant::now();
        Self {
            started: now,
            run_began: now,
            longest: guess,
            limit,
            is_measured: false,
        }
    }

    /// Describes the search to the user before it starts.
    fn promise(&self, all: usize) -> Result<String, TooLittleTime> {
        let minutes = |time: Duration| time.as_secs_f64() / 60.0;
        let each = self.longest.as_secs();
        match self.limit {
            Some(limit) if limit < self.longest => Err(TooLittleTime {
                each_s: each,
                minutes: each.div_ceil(60),
            }),
            Some(limit) if limit < self.longest * all as u32 => Ok(format!(
                "about {} of {all} settings, {each} s each, in at most {:.0} minutes; all would take \
                 {:.0}",
                limit.as_secs() / each,
                minutes(limit),
                minutes(self.longest * all as u32).ceil()
            )),
            _ => Ok(format!(
                "{all} settings, about {each} s each: {:.0} minutes",
                minutes(self.longest * all as u32).ceil()
            )),
        }
    }

    /// Whether another run ends in time; if so, it starts now.
    fn begins(&mut self) -> bool {
        self.run_began = Instant::now();
        let end = self.started.elapsed() + self.longest;
        self.limit.is_none_or(|limit| end <= limit)
    }

    fn ended(&mut self) {
        let took = self.run_began.elapsed();
        self.longest = if self.is_measured {
            self.longest.max(took)
        } else {
            took
        };
        self.is_measured = true;
    }
}

#[cfg(test)]
mod tests {
    use std::convert::Infallible;
    use std::path::Path;

    use demeter_outcome::{Speed, Unit};
    use demeter_scenario::{Error, Scenario};

    use super::*;

    /// A rival that prefers small pages, and small scans only with small pages.
    fn speed(settings: &Settings) -> f64 {
        let is_small = settings.thp == Some(Thp::Never);
        let scans_little = settings.scan_size_mib == Some(64);
        match (is_small, scans_little) {
            (true, true) => 4.0,
            (true, false) => 3.0,
            (false, true) => 1.0,
            (false, false) => 2.0,
        }
    }

    fn found_in(runs: usize) -> Option<(Settings, SystemResult)> {
        let mut left = runs;
        search(System::Linux, LINUX, &mut |settings| {
            if left == 0 {
                return Ok(None);
            }
            left -= 1;
            Ok::<_, Infallible>(Some(SystemResult {
                settings: Some(settings.name.clone()),
                speed: Some(Speed::new(Unit::MOPS, speed(settings), None)),
                ..SystemResult::default()
            }))
        })
        .unwrap()
    }

    #[test]
    fn knobs_add_up_to_the_best_and_never_to_less_than_was_found() {
        let (settings, result) = found_in(usize::MAX).unwrap();
        assert_eq!(
            (settings.thp, settings.scan_size_mib),
            (Some(Thp::Never), Some(64))
        );
        assert_eq!(settings.name, "huge pages never, scan 64 MiB");
        assert_eq!(result.mean(), Some(4.0));
        let all: usize = LINUX.iter().map(|values| values.len()).sum();
        assert_eq!(result.other_settings.len(), all);
        let mut before = 0.0;
        for runs in 1..=all + 1 {
            let (_, result) = found_in(runs).unwrap();
            assert_eq!(result.other_settings.len(), runs - 1);
            assert!(result.mean() >= Some(before), "{runs}");
            before = result.mean().unwrap();
        }
        assert!(found_in(0).is_none());
    }

    #[test]
    fn every_setting_that_is_tried_is_one_that_a_scenario_may_have() {
        let shipped = concat!(env!("CARGO_MANIFEST_DIR"), "/../../scenarios/ci.toml");
        let scenario = Scenario::load(Path::new(shipped)).unwrap();
        for rival in [System::Linux, System::Damon] {
            search(rival, knobs(rival), &mut |settings| {
                let mut scenario = scenario.clone();
                scenario.settings = vec![settings.clone()];
                scenario.check()?;
                Ok::<_, Error>(Some(SystemResult {
                    settings: Some(settings.name.clone()),
                    ..SystemResult::default()
                }))
            })
            .unwrap();
        }
    }

    #[test]
    fn the_time_is_stated_and_kept() {
        let minute = Duration::from_secs(60);
        assert!(Clock::new(minute, Some(minute / 2)).promise(12).is_err());
        let said = |limit| Clock::new(minute, limit).promise(12).unwrap();
        assert!(said(None).contains("12 settings") && said(None).contains("12 minutes"));
        assert!(said(Some(5 * minute)).contains("about 5 of 12 settings"));
        let mut clock = Clock::new(minute, Some(minute * 3 / 2));
        assert!(clock.begins());
        clock.ended();
        // A run is now known to take no time, but the limit of a minute and a half expires at once.
        assert!(clock.begins());
        clock.longest = 2 * minute;
        assert!(!clock.begins());
    }
}
