//! Helpers for tests of pictures and pages.

// Each test program uses only some of them.
#![allow(dead_code)]

use demeter_outcome::{
    Case, Point, Published, Repeats, RunResult, Speed, SystemResult, Tail, Unit, WorkloadResult,
};
use proptest::prelude::*;

/// An empty result of the simulator.
pub fn empty() -> RunResult {
    RunResult {
        scenario: "gups".into(),
        on: "sim".into(),
        seed: 1,
        duration_s: 60,
        ..RunResult::default()
    }
}

/// Checks that every element of an SVG is closed, and returns their number.
pub fn elements(svg: &str) -> usize {
    let mut open = Vec::new();
    let mut count = 0;
    for tag in svg.split('<').skip(1) {
        let (tag, _) = tag.split_once('>').expect("a tag ends");
        if let Some(name) = tag.strip_prefix('/') {
            assert_eq!(open.pop(), Some(name));
        } else {
            count += 1;
            if !tag.ends_with('/') {
                open.push(tag.split([' ', '\n']).next().unwrap());
            }
        }
    }
    assert!(open.is_empty(), "{open:?}");
    count
}

/// The pictures of a page.
pub fn pictures(page: &str) -> Vec<&str> {
    let starts = page.match_indices("<svg").map(|(at, _)| &page[at..]);
    starts
        .map(|text| &text[..text.find("</svg>").unwrap() + 6])
        .collect()
}

/// All coordinates and lengths of a picture, as text.
pub fn coordinates(svg: &str) -> Vec<&str> {
    let mut numbers = Vec::new();
    for name in [
        "x", "y", "x1", "x2", "y1", "y2", "cx", "cy", "r", "width", "height", "d",
    ] {
        let attribute = format!(" {name}=\"");
        for value in svg.split(&attribute).skip(1) {
            let value = value.split('"').next().unwrap();
            numbers.extend(value.split([' ', 'M', 'L', 'h']).filter(|n| !n.is_empty()));
        }
    }
    numbers.retain(|number| *number != "100%");
    numbers
}

/// Ordinary amounts and extreme ones.
pub fn amount() -> impl Strategy<Value = f64> {
    prop_oneof![0.0f64..100.0, proptest::num::f64::POSITIVE, Just(0.0)]
}

/// A random system, which may fail the check.
pub fn any_system() -> impl Strategy<Value = SystemResult> {
    let point = (prop::option::of(amount()), prop::option::of(0.0f64..=1.0));
    (
        any::<String>(),
        prop::collection::vec((amount(), point), 0..6),
        prop::collection::btree_map(any::<String>(), amount(), 0..4),
        prop::option::of(amount()),
        any::<(u64, Option<u64>)>(),
        (
            prop::option::of(amount()),
            prop::option::of((amount(), amount())),
            prop::option::of(prop::array::uniform4(amount())),
            prop::collection::btree_map("flush_.*", any::<u64>(), 0..3),
            (
                prop_oneof!["Mops", "ns", any::<String>()],
                prop::collection::vec(any::<String>(), 0..3),
            ),
        ),
    )
        .prop_map(|(name, points, cpu_s, value, (count, moved), more)| {
            let (elapsed_s, extremes, percentiles, counters, (unit, names)) = more;
            let unit = Unit::new(unit);
            let mut series: Vec<Point> = points
                .into_iter()
                .map(|(t_s, (speed, hot_in_fast))| Point {
                    t_s,
                    speed,
                    hot_in_fast,
                    fast_bytes: None,
                })
                .collect();
            series.sort_by(|a, b| a.t_s.total_cmp(&b.t_s));
            let workloads = names.into_iter().map(|name| WorkloadResult {
                name,
                speed: value.map(|value| Speed::new(unit.clone(), value, None)),
                series: series.clone(),
                ..WorkloadResult::default()
            });
            let workloads = workloads.collect();
            SystemResult {
                name,
                elapsed_s,
                repeats: extremes.map(|(min, max)| Repeats { runs: 3, min, max }),
                tail: percentiles.map(|[p50_ns, p90_ns, p99_ns, p999_ns]| Tail {
                    mean_ns: p50_ns,
                    p50_ns,
                    p90_ns,
                    p99_ns,
                    p999_ns,
                }),
                counters,
                speed: Some(Speed::new(unit, value, value)),
                hot_in_fast_final: value.map(|value| value.min(1.0)),
                workloads,
                mgmt_cpu_s: value.map(|value| -value),
                kswapd_scanned: count,
                bytes_promoted: moved,
                cpu_s,
                series,
                ..SystemResult::default()
            }
        })
}

/// Cases with few keys and values, so that they often make axes.
pub fn any_case() -> impl Strategy<Value = Case> {
    let key = prop_oneof![Just("sim.vms".to_owned()), "[ab]", any::<String>()];
    let value = prop_oneof!["[0-9]", "-?[0-9]{1,3}(e-?[0-9]{1,3})?", any::<String>()];
    let named = (
        prop_oneof!["none", "demeter", any::<String>()],
        any_system(),
    );
    let named = named.prop_map(|(name, system)| SystemResult { name, ..system });
    (
        0usize..3,
        prop::collection::vec((key, value), 0..3),
        prop::collection::vec(named, 0..4),
    )
        .prop_map(|(group, settings, systems)| Case {
            group,
            settings,
            systems,
        })
}

/// Any published figure.
pub fn any_published() -> impl Strategy<Value = Published> {
    (
        any::<(String, String, Option<String>, String)>(),
        prop::collection::vec(any::<(String, String)>(), 0..3),
        any::<(f64, Option<f64>, f64)>(),
    )
        .prop_map(|(texts, case, (value, ours, within))| {
            let (figure, system, over, source) = texts;
            Published {
                figure,
                system,
                over,
                case,
                value,
                ours,
                within,
                source,
            }
        })
}
