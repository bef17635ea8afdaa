//! Tests of result files as users and other programs write them.

use std::fs;
use std::path::Path;

use demeter_outcome::{ContentError, Error, RunResult, Unit, write_file};

const EXAMPLE: &str = include_str!("example.json");

fn example() -> RunResult {
    RunResult::from_json(EXAMPLE).unwrap()
}

/// The example with one piece of text replaced.
fn altered(from: &str, to: &str) -> Result<RunResult, ContentError> {
    assert!(EXAMPLE.contains(from), "{from}");
    RunResult::from_json(&EXAMPLE.replacen(from, to, 1))
}

fn names_in(dir: &Path) -> Vec<String> {
    let entries = fs::read_dir(dir).unwrap();
    let mut names: Vec<_> = entries
        .map(|entry| entry.unwrap().file_name().into_string().unwrap())
        .collect();
    names.sort();
    names
}

#[test]
fn the_documented_example_is_what_we_write() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("result.json");
    example().save(&path).unwrap();
    assert_eq!(fs::read_to_string(&path).unwrap(), EXAMPLE);
    assert_eq!(RunResult::load(&path).unwrap(), example());
    assert_eq!(names_in(dir.path()), ["result.json"]);
}

#[test]
fn fields_that_came_later_are_ignored() {
    assert_eq!(
        altered("\"seed\": 1,", "\"seed\": 1, \"new\": [1],").unwrap(),
        example()
    );
}

#[test]
fn a_file_of_schema_1_is_read() {
    let old = RunResult::from_json(include_str!("schema-1.json")).unwrap();
    let mut demeter = old.systems[0].clone();
    let metadata = std::mem::take(&mut demeter.metadata);
    assert_eq!(
        (metadata.event_log_hash, metadata.scale),
        (Some(123456789012345), Some(64))
    );
    assert_eq!((old.schema, &demeter), (2, &example().systems[0]));
    let linux = old.systems[1].speed.as_ref().unwrap();
    assert_eq!(
        (&linux.unit, linux.mean, linux.steady),
        (&Unit::NS, Some(950.5), Some(779.0))
    );
    assert_eq!(old.systems[1].series[1].speed, Some(800.0));
    let wss = &old.systems[2];
    assert_eq!(wss.provisioning.as_ref().unwrap().p99_resizing, Some(0.5));
    let left = &wss.workloads[0];
    assert_eq!(
        (left.name.as_str(), left.series[0].speed),
        ("left", Some(1.5))
    );
    // A file that is no result is rejected in schema 1, too.
    for text in [
        "[1]",
        r#"{"schema":1,"systems":[[]]}"#,
        r#"{"schema":1,"cases":7}"#,
    ] {
        assert!(
            matches!(RunResult::from_json(text), Err(ContentError::Shape(_))),
            "{text}"
        );
    }
}

#[test]
fn what_is_no_result_is_named() {
    assert!(matches!(
        RunResult::from_json("seed = 1"),
        Err(ContentError::Json(_))
    ));
    assert!(matches!(
        RunResult::from_json(&EXAMPLE[..300]),
        Err(ContentError::Json(_))
    ));
    assert!(matches!(
        RunResult::from_json("{}"),
        Err(ContentError::Shape(_))
    ));
    assert!(matches!(
        altered("\"seed\": 1", "\"seed\": \"x\""),
        Err(ContentError::Shape(_))
    ));
    let error = altered("\"schema\": 2", "\"schema\": 7").unwrap_err();
    assert!(matches!(error, ContentError::Schema { found: 7 }));
    assert!(error.to_string().contains("knows only 1 to 2"), "{error}");
    // Another version may have another shape: the version is the news, not the shape.
    let future = RunResult::from_json(r#"{"schema":3,"machines":[]}"#);
    assert!(matches!(future, Err(ContentError::Schema { found: 3 })));
}

#[test]
fn values_that_nobody_can_measure_are_named() {
    let cases = [
        (
            "\"t_s\": 2.0",
            "\"t_s\": -2.0",
            "systems[0].series[1].t_s is -2",
        ),
        (
            "\"t_s\": 2.0",
            "\"t_s\": 1.0",
            "systems[0].series[1].t_s is 1",
        ),
        (
            "\"hot_in_fast\": 0.5",
            "\"hot_in_fast\": 1.5",
            "systems[0].series[0].hot_in_fast is 1.5",
        ),
        (
            "\"mean\": 1.5",
            "\"mean\": -1.5",
            "systems[0].speed.mean is -1.5",
        ),
        (
            "\"t90_s\": 2.0",
            "\"t90_s\": -1.0",
            "systems[0].t90_s is -1",
        ),
        (
            "\"agent_user\": 0.05",
            "\"agent_user\": -1",
            "systems[0].cpu_s.agent_user is -1",
        ),
    ];
    for (from, to, expected) in cases {
        let error = altered(from, to).unwrap_err().to_string();
        assert!(error.starts_with(expected), "{error}");
    }
    // A difference of two noisy runs.
    altered("\"mgmt_cpu_s\": 0.25", "\"mgmt_cpu_s\": -0.25").unwrap();
}

#[test]
fn cases_and_published_figures_are_checked_too() {
    let with = |fields: &str| {
        let from = "\"duration_s\": 2,";
        altered(from, &format!("{from} {fields},"))
    };
    let case = |system: &str| {
        let system = format!(
            "\"name\": \"x\", \"hot_in_fast_final\": 0, \"kswapd_scanned\": 0, \"series\": [], {system}"
        );
        with(&format!(
            "\"cases\": [{{\"settings\": [[\"sim.vms\", \"2\"]], \"systems\": [{{{system}}}]}}]"
        ))
    };
    let whole = case(
        "\"elapsed_s\": 5, \"repeats\": {\"runs\": 2, \"min\": 4, \"max\": 6}, \
         \"tail\": {\"mean_ns\": 9, \"p50_ns\": 1, \"p90_ns\": 1, \"p99_ns\": 2, \"p999_ns\": 30}",
    )
    .unwrap();
    assert_eq!(whole.cases[0].settings, [("sim.vms".into(), "2".into())]);
    assert_eq!(whole.cases[0].systems[0].elapsed_s, Some(5.0));
    let written = serde_json::to_string(&whole).unwrap();
    assert_eq!(RunResult::from_json(&written).unwrap(), whole);

    let published = |value: &str, within: &str| {
        with(&format!(
            "\"published\": [{{\"figure\": \"t90_s\", \"system\": \"x\", \"value\": {value}, \
             \"ours\": -1, \"within\": {within}, \"source\": \"s\"}}]"
        ))
    };
    published("-2", "0.1").unwrap();
    let refused = [
        (case("\"elapsed_s\": -5"), "systems[0].elapsed_s is -5"),
        (
            case("\"repeats\": {\"runs\": 2, \"min\": 4, \"max\": 3}"),
            "systems[0].repeats.max is 3",
        ),
        (
            case(
                "\"tail\": {\"mean_ns\": 9, \"p50_ns\": 5, \"p90_ns\": 4, \"p99_ns\": 7, \
                 \"p999_ns\": 8}",
            ),
            "systems[0].tail.p90_ns is 4",
        ),
        (published("1", "-0.1"), "published[0].within is -0.1"),
    ];
    for (result, expected) in refused {
        let error = result.unwrap_err().to_string();
        assert!(error.contains(expected), "{error}");
    }
}

#[test]
fn what_cannot_be_saved_leaves_the_old_file_and_nothing_else() {
    let dir = tempfile::tempdir().unwrap();
    let path = dir.path().join("result.json");
    fs::write(&path, "old").unwrap();
    let mut result = example();
    result.systems[0].t90_s = Some(f64::NAN);
    assert!(matches!(result.save(&path), Err(Error::Content { .. })));
    assert_eq!(fs::read_to_string(&path).unwrap(), "old");
    assert_eq!(names_in(dir.path()), ["result.json"]);

    let nowhere = dir.path().join("missing/result.json");
    assert!(matches!(example().save(&nowhere), Err(Error::Write { .. })));
    assert!(matches!(
        example().save(dir.path()),
        Err(Error::Write { .. })
    ));
    assert_eq!(names_in(dir.path()), ["result.json"]);
}

#[test]
fn devices_and_links_stay_what_they_are() {
    write_file(Path::new("/dev/null"), b"x").unwrap();
    assert!(!fs::metadata("/dev/null").unwrap().is_file());
    assert!(matches!(
        write_file(Path::new("/dev/full"), b"x"),
        Err(Error::Write { .. })
    ));

    let dir = tempfile::tempdir().unwrap();
    let (link, target) = (dir.path().join("link"), dir.path().join("target"));
    fs::write(&target, "old").unwrap();
    std::os::unix::fs::symlink(&target, &link).unwrap();
    write_file(&link, b"new").unwrap();
    assert!(fs::symlink_metadata(&link).unwrap().is_symlink());
    assert_eq!(fs::read_to_string(&target).unwrap(), "new");
}

#[test]
fn a_missing_file_is_named() {
    let error = RunResult::load(Path::new("/nowhere/r.json")).unwrap_err();
    assert_eq!(error.to_string(), "cannot read result file /nowhere/r.json");
}
