//! The best settings of a rival for a scenario.
//!
//! Problem: a rival has several knobs, a run takes a minute or two, and no table may show a rival
//! that a reader could set better.
//! Approach: one knob after the other, those that matter most first: each of its values is tried
//! with the best of the knobs before it. That takes the sum of their numbers, not the product.
//! Properties: what is returned is the best of all that ran; settings that change nothing ran first,
//! so the result is never worse than those; no run begins that might not end in time.

use std::time::{Duration, Instant};

use demeter_outcome::{SystemResult, best};
use demeter_scenario::{Settings, System, Thp};

/// What a VM takes besides the timed phase, as long as none has run: booting, filling memory, and
/// checking it.
const BESIDES: Duration = Duration::from_secs(45);

/// A value of a knob: what it is called, and what it sets.
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

/// The knobs of Linux's tiering, those first that matter most.
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

/// The knobs of DAMON.
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

/// There is too little time.
#[derive(Debug, thiserror::Error)]
#[error("one run takes about {each_s} s: give --time {minutes} or more, or a shorter --duration")]
pub struct TooLittleTime {
    /// Seconds that a run takes.
    pub each_s: u64,
    /// Minutes that suffice for one.
    pub minutes: u64,
}

impl Search {
    /// A search among the settings of `rival`, in runs whose timed phase takes so long; it takes no
    /// longer than `limit`, if there is one. The time begins now.
    pub fn new(rival: System, timed_phase: Duration, limit: Option<Duration>) -> Self {
        Self {
            rival,
            knobs: knobs(rival),
            clock: Clock::new(timed_phase + BESIDES, limit),
        }
    }

    /// What a person is told before anything starts.
    ///
    /// # Errors
    /// When not even one run fits.
    pub fn promise(&self) -> Result<String, TooLittleTime> {
        let all = 1 + self.knobs.iter().map(|values| values.len()).sum::<usize>();
        self.clock.promise(all)
    }

    /// The best settings, and what came of them with all others beside it; nothing where there was no
    /// result. `run` makes one run.
    ///
    /// # Errors
    /// The first that a run gives.
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

/// The best settings, and what came of them, with all others beside it; nothing where not even the
/// first ran. `run` says nothing when there is no time left for it.
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

/// How long runs take, and how many still fit.
#[derive(Debug)]
struct Clock {
    started: Instant,
    run_began: Instant,
    /// The longest run so far; before the first, what one is thought to take.
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

    /// What the person is told before anything starts.
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

    /// Whether one more run ends in time; it begins now.
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

    /// A rival that likes small pages and small scans, the latter only with the former.
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
        // A run is now known to take no time at all, but a minute and a half is over at once.
        assert!(clock.begins());
        clock.longest = 2 * minute;
        assert!(!clock.begins());
    }
}
