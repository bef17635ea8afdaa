use proptest::prelude::*;

use super::*;

/// Picoseconds in a second.
const S: u64 = 1_000_000_000_000;

fn by_name<T>(values: impl IntoIterator<Item = (&'static str, T)>) -> BTreeMap<String, T> {
    values
        .into_iter()
        .map(|(name, value)| (name.into(), value))
        .collect()
}

/// Nine seconds; share of the hot set in fast memory at the end of each. Second `i` has `2 i - 1` million operations.
fn timeline(hot: [f64; 10]) -> Timeline {
    let moment = |(i, hot): (usize, f64)| {
        let i = i as u64;
        Moment {
            at_ps: i * S,
            work: vec![Work {
                done: (i * i) as f64 * 1e6,
                time_ps: i * S,
            }],
            fast_bytes: vec![(i > 0).then_some(i)],
            hot_in_fast: Some(hot),
            cpu_ps: by_name([("migrate", 7 * S + i * S / 10), ("walk", i * S / 10 * 9)]),
            counters: by_name([("samples", 5 + i)]),
            kswapd_scanned: 3 + 2 * i,
            promoted_bytes: (i > 0).then_some(i * 10),
            demoted_bytes: Some(i * 20),
            memory_overhead_bytes: (i < 3).then_some(100 - i),
            lag_ps: Some(i * i * S / 100),
        }
    };
    Timeline {
        meters: vec![Meter {
            unit: Some(Unit::MOPS),
            ..Meter::default()
        }],
        moments: hot.into_iter().enumerate().map(moment).collect(),
        ..Timeline::default()
    }
}

#[test]
fn figures_of_the_whole_phase_and_of_its_last_third() {
    let hot = [0.0, 0.0, 0.5, 0.9, 0.9, 0.9, 0.9, 0.9, 0.9, 0.95];
    let result = timeline(hot).summarise("x").unwrap();
    let noise = [
        result.metadata.host_noise,
        result.metadata.host_noise_steady,
    ];
    assert_eq!(noise, [Some(0.09), Some(0.15)]);
    assert!(result.metadata.is_disturbed());
    assert_eq!(
        (result.mean(), result.steady()),
        (Some(9.0), Some((81.0 - 36.0) / 3.0))
    );
    assert_eq!(
        (result.t90_s, result.hot_in_fast_final),
        (Some(3.0), Some(0.95))
    );
    assert_eq!(
        (result.bytes_promoted, result.bytes_demoted),
        (Some(90), Some(180))
    );
    // The maximum over the run.
    assert_eq!(result.memory_overhead_bytes, Some(100));
    assert_eq!(result.moved_steady_bytes_per_s, Some(30.0));
    assert!((result.mgmt_cpu_s.unwrap() - 0.9).abs() < 1e-9);
    assert!((result.mgmt_cpu_steady_s.unwrap() - 0.3).abs() < 1e-9);
    assert!((result.cpu_s["walk"] - 8.1).abs() < 1e-9);
    assert_eq!((result.counters["samples"], result.kswapd_scanned), (9, 18));
    let speeds: Vec<_> = result.series.iter().map(|p| (p.t_s, p.speed)).collect();
    assert_eq!(
        (speeds.len(), speeds[0], speeds[8]),
        (9, (1.0, Some(1.0)), (9.0, Some(17.0)))
    );
}

#[test]
fn a_jump_starts_a_clock_of_its_own() {
    for (hot, first, second) in [
        (
            [0.0, 0.95, 0.95, 0.95, 0.0, 0.0, 0.92, 0.95, 0.95, 0.95],
            Some(1.0),
            Some(2.0),
        ),
        // A hot set found only after the jump was not found before it.
        (
            [0.0, 0.0, 0.0, 0.0, 0.0, 0.0, 0.92, 0.95, 0.95, 0.95],
            None,
            Some(2.0),
        ),
        // Found at the start, and at the jump.
        ([1.0; 10], Some(0.0), Some(0.0)),
    ] {
        let mut timeline = timeline(hot);
        timeline.shift_ps = Some(4 * S);
        let result = timeline.summarise("x").unwrap();
        assert_eq!((result.t90_s, result.t90_after_shift_s), (first, second));
    }
}

#[test]
fn who_does_not_say_what_is_hot_has_no_share_of_it() {
    let mut timeline = timeline([1.0; 10]);
    timeline
        .moments
        .iter_mut()
        .for_each(|m| m.hot_in_fast = None);
    let result = timeline.summarise("x").unwrap();
    assert_eq!((result.hot_in_fast_final, result.t90_s), (None, None));
    assert!(
        result
            .series
            .iter()
            .all(|point| point.hot_in_fast.is_none())
    );
}

#[test]
fn a_clock_that_is_a_little_late_is_in_time() {
    let mut late = timeline([0.0; 10]);
    late.moments[6].at_ps += S / 100;
    let steady = |timeline: &Timeline| timeline.summarise("x").unwrap().steady();
    assert_eq!(steady(&late), Some((81.0 - 25.0) / 4.0));
    late.slack_ps = S / 20;
    assert_eq!(steady(&late), Some(15.0));
}

#[test]
fn several_workloads_have_figures_of_their_own() {
    let mut both = timeline([0.0; 10]);
    both.meters[0].name = "gups".into();
    both.meters[0].elapsed_s = Some(9.0);
    both.meters.push(Meter {
        name: "search".into(),
        unit: Some(Unit::NS),
        elapsed_s: Some(8.0),
    });
    both.meters.push(Meter {
        elapsed_s: Some(1.0),
        ..Meter::default()
    });
    for moment in &mut both.moments {
        let work = Work {
            done: 4e6 * (moment.at_ps / S) as f64,
            time_ps: moment.at_ps,
        };
        moment.work.push(work);
    }
    let result = both.summarise("x").unwrap();
    assert_eq!((result.speed, result.elapsed_s), (None, Some(9.0)));
    assert!(result.series.iter().all(|point| point.speed.is_none()));
    let [gups, search, silent] = &result.workloads[..] else {
        panic!("three workloads");
    };
    assert_eq!(gups.speed.as_ref().unwrap().mean, Some(9.0));
    assert_eq!(
        (search.name.as_str(), search.elapsed_s),
        ("search", Some(8.0))
    );
    assert_eq!(search.speed.as_ref().unwrap().mean, Some(250.0));
    assert_eq!(search.series[0].speed, Some(250.0));
    assert_eq!((&silent.speed, silent.series.len()), (&None, 9));
    both.meters[2].elapsed_s = None;
    assert_eq!(both.summarise("x").unwrap().elapsed_s, None);
}

#[test]
fn without_an_interval_there_is_no_result() {
    let mut timeline = timeline([0.0; 10]);
    timeline.moments.truncate(1);
    assert_eq!(timeline.summarise("x"), None);
    assert_eq!(Timeline::default().summarise("x"), None);
}

proptest! {
    /// No timeline panics, and if clocks run forward, the mean is that of all intervals.
    #[test]
    fn the_mean_is_that_of_all_intervals(
        steps in prop::collection::vec((1u64..5 * S, 1u64..1 << 40), 1..20),
        before in any::<u32>(), unit in prop::sample::select(vec![Unit::MOPS, Unit::NS]),
    ) {
        let mut moments = vec![Moment::default()];
        let (mut at_ps, mut done) = (0, 0);
        for (ps, work) in &steps {
            (at_ps, done) = (at_ps + ps, done + work);
            let work = vec![Work { done: done as f64, time_ps: at_ps }];
            let counters = by_name([("samples", done)]);
            moments.push(Moment { at_ps, work, counters, ..Moment::default() });
        }
        for moment in &mut moments {
            *moment.counters.entry("samples".into()).or_default() += u64::from(before);
        }
        let meters = vec![Meter { unit: Some(unit.clone()), ..Meter::default() }];
        let timeline = Timeline { meters, moments, ..Timeline::default() };
        let result = timeline.summarise("x").unwrap();
        let speeds = result.series.iter().map(|point| point.speed.unwrap()).zip(&steps);
        let (sum, weight) = speeds.fold((0.0, 0.0), |(sum, all), (speed, (ps, work))| {
            let weight = if unit.is_time() { *work } else { *ps } as f64;
            (sum + speed * weight, all + weight)
        });
        let mean = result.mean().unwrap();
        prop_assert!((sum / weight / mean - 1.0).abs() < 1e-9);
        prop_assert_eq!(result.counters["samples"], done);
    }

    #[test]
    fn nonsense_is_summarised_without_a_panic(
        times in prop::collection::vec(any::<u64>(), 0..5), done in any::<f64>(),
        slack_ps in any::<u64>(), shift_ps in any::<Option<u64>>(),
    ) {
        let moment = |at_ps: &u64| Moment {
            at_ps: *at_ps,
            work: vec![Work { done, time_ps: *at_ps }],
            hot_in_fast: Some(done),
            cpu_ps: by_name([("kswapd", *at_ps)]),
            promoted_bytes: Some(*at_ps),
            demoted_bytes: Some(u64::MAX),
            ..Moment::default()
        };
        let meters = vec![Meter { unit: Some(Unit::NS), ..Meter::default() }];
        let moments = times.iter().map(moment).collect();
        let _ = Timeline { meters, moments, shift_ps, slack_ps }.summarise("x");
    }
}
