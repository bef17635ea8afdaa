//! Properties of all pictures: finite numbers, bounded size, and no markup from the file.

mod common;

use common::{any_case, any_published, any_system, coordinates, elements, pictures};
use demeter_outcome::{
    CrashFigures, Metadata, Point, Provisioning, Resize, RunResult, SoakFigures, Speed,
    SystemResult, Unit, Use, WorkloadResult,
};
use demeter_report::{html, table, throughput_svg};
use proptest::prelude::*;

fn result(systems: Vec<SystemResult>) -> RunResult {
    RunResult {
        on: "lab".into(),
        shift_at_s: Some(30),
        systems,
        ..common::empty()
    }
}

fn system(name: &str, points: usize) -> SystemResult {
    let point = |index| Point {
        t_s: f64::from(index),
        speed: Some(2.0),
        hot_in_fast: Some(1.0),
        ..Point::default()
    };
    SystemResult {
        name: name.into(),
        speed: Some(Speed::new(Unit::MOPS, 2.0, 2.0)),
        hot_in_fast_final: Some(0.0),
        cpu_s: [("kswapd".to_owned(), 1.5)].into(),
        series: (0..points as u32).map(point).collect(),
        ..SystemResult::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig::with_cases(100))]

    #[test]
    fn any_result_is_drawn_with_numbers_and_closed_elements(
        systems in prop::collection::vec(any_system(), 0..5),
        cases in prop::collection::vec(any_case(), 0..6),
        published in prop::collection::vec(any_published(), 0..3),
        scenario in any::<String>(),
        duration_s in any::<u64>(),
        shift_at_s in any::<Option<u64>>(),
    ) {
        let result = RunResult {
            scenario,
            duration_s,
            shift_at_s,
            cases,
            published,
            ..result(systems)
        };
        let svg = throughput_svg(&result);
        let page = html(&result);
        for picture in pictures(&page).into_iter().chain([svg.as_str()]) {
            elements(picture);
            for number in coordinates(picture) {
                let in_picture = number.parse().is_ok_and(|n: f64| (-100.0..9000.0).contains(&n));
                prop_assert!(in_picture, "{number}");
            }
        }
        let table = table(&result);
        prop_assert!(table.chars().all(|c| c == '\n' || !c.is_control()));
    }

    #[test]
    fn ordinary_tables_fit_a_hundred_columns(
        mops in 0.0f64..1000.0,
        cpu_s in 0.0f64..59.0,
        count in 0u64..1_000_000,
        moved in 0u64..1 << 30,
    ) {
        let named = |name: &str| SystemResult {
            speed: Some(Speed::new(Unit::MOPS, mops, mops)),
            hot_in_fast_final: Some(1.0),
            t90_s: Some(12.5),
            t90_after_shift_s: Some(2.5),
            mgmt_cpu_s: Some(cpu_s),
            mgmt_cpu_steady_s: Some(cpu_s / 6.0),
            kswapd_scanned: count,
            bytes_promoted: Some(moved),
            bytes_demoted: Some(moved),
            verify_errors: Some(0),
            ..system(name, 0)
        };
        let table = table(&result(vec![named("demeter-damon"), named("oracle")]));
        for line in table.lines() {
            prop_assert!(line.len() <= 100, "{} columns\n{table}", line.len());
        }
    }
}

#[test]
fn names_are_shown_and_never_obeyed() {
    let evil = "</title><script>alert(1)</script>\"' onload=\"x\u{1b}[31m";
    let mut hostile = system(evil, 3);
    hostile.cpu_s.insert(evil.into(), 1.0);
    hostile.counters.insert(evil.into(), 1);
    let hostile = RunResult {
        scenario: evil.into(),
        on: evil.into(),
        ..result(vec![hostile])
    };
    let page = html(&hostile);
    assert!(page.contains("&lt;/title&gt;&lt;script&gt;"));
    for text in [&page, &throughput_svg(&hostile)] {
        assert!(!text.contains("<script") && !text.contains("onload=\""));
        assert!(!text.contains('\u{1b}'));
    }
    assert!(!table(&hostile).contains('\u{1b}'));
}

#[test]
fn the_page_asks_nobody_for_anything() {
    let page = html(&result(vec![system("demeter", 60)]));
    let without_namespace = page.replace("http://www.w3.org/2000/svg", "");
    for outside in [
        "http:", "https:", "src=", "@import", "url(", "<link", "<script",
    ] {
        assert!(!without_namespace.contains(outside), "{outside}");
    }
}

#[test]
fn nothing_and_one_point_are_drawn() {
    for systems in [
        vec![],
        vec![system("demeter", 0)],
        vec![system("demeter", 1)],
    ] {
        let result = result(systems);
        assert!(elements(&throughput_svg(&result)) > 5);
        assert!(html(&result).contains("<table"));
        assert!(table(&result).contains("system"));
    }
    // A lone point is a dot, not an invisible line.
    assert!(throughput_svg(&result(vec![system("demeter", 1)])).contains("h0\""));
}

#[test]
fn a_thousand_systems_and_a_million_points_stay_small() {
    let names = (0..1000).map(|index| system(&format!("system-{index}"), 60));
    let page = html(&result(names.collect()));
    assert!(page.len() < 1 << 20, "{} bytes", page.len());
    assert!(page.contains("the first 12 of 1000 systems"));
    assert!(page.contains("system-999"));

    let long = RunResult {
        duration_s: 1_000_000,
        ..result(vec![system("demeter", 1_000_000)])
    };
    assert!(throughput_svg(&long).len() < 64 << 10);
}

#[test]
fn the_table_compares_with_the_oracle() {
    let half = SystemResult {
        speed: Some(Speed::new(Unit::MOPS, 1.0, 0.5)),
        mgmt_cpu_s: Some(6.0),
        mgmt_cpu_steady_s: Some(1.0),
        kswapd_scanned: 7,
        bytes_promoted: Some(3 << 20),
        verify_errors: Some(0),
        ..system("linux", 1)
    };
    let result = RunResult {
        shift_at_s: None,
        ..result(vec![half, system("oracle", 1)])
    };
    let table = table(&result);
    let row: Vec<&str> = table.lines().nth(2).unwrap().split_whitespace().collect();
    let expected = [
        "linux", "1.00", "0.500", "50.0", "25.0", "0.0", "-", "6.0", "10.0", "5.0", "7", "3", "-",
        "0",
    ];
    assert_eq!(row, expected);
    let unit = html(&result);
    assert!(unit.contains("million updates per second"));
}

#[test]
fn what_must_be_known_of_a_figure_is_marked() {
    let run = |name: &str, mops, noise| SystemResult {
        speed: Some(Speed::new(Unit::MOPS, mops, mops)),
        metadata: Metadata {
            host_noise_steady: Some(noise),
            ..Metadata::default()
        },
        ..system(name, 1)
    };
    let best = SystemResult {
        settings: Some("small pages".into()),
        other_settings: vec![system("linux", 1)],
        ..run("linux", 2.1, 0.01)
    };
    let marked = table(&result(vec![run("oracle", 2.0, 0.05), best]));
    let line = |start: &str| marked.lines().find(|line| line.starts_with(start)).unwrap();
    line("oracle* ");
    assert!(
        line("linux (small pages) ").contains(" 105.0^ "),
        "{marked}"
    );
    for note in [
        "In brackets",
        "* Disturbed",
        "(at most 5 %)",
        "^ More than the oracle",
    ] {
        assert!(marked.replace('\n', " ").contains(note), "{note}: {marked}");
    }
    let plain = table(&result(vec![
        run("oracle", 2.0, 0.01),
        run("linux", 2.0, 0.0),
    ]));
    assert!(!plain.contains(['^', '*']), "{plain}");
}

#[test]
fn memlat_is_reported_as_latency() {
    let latency = |name: &str, ns| SystemResult {
        speed: Some(Speed::new(Unit::NS, ns, ns)),
        series: vec![Point {
            t_s: 1.0,
            speed: Some(ns),
            ..Point::default()
        }],
        ..system(name, 0)
    };
    let result = result(vec![latency("linux", 400.0), latency("oracle", 100.0)]);
    let table = table(&result);
    assert!(table.contains("latency, ns") && !table.contains("Mops"));
    // Four times the oracle's latency is a quarter of its performance.
    assert!(
        table.lines().nth(2).unwrap().contains("25.0  25.0"),
        "{table}"
    );
    assert!(html(&result).contains("Latency over time"));
}

fn provisioned(name: &str, provisioning: Provisioning) -> SystemResult {
    SystemResult {
        provisioning: Some(provisioning),
        ..system(name, 5)
    }
}

#[test]
fn provisioning_has_its_own_figures() {
    let taken = Provisioning {
        bytes_inflated: Some(1000),
        host_bytes_returned: Some(995),
        inflate_gib_per_s: Some(2.5),
        resizes: vec![Resize {
            took_s: Some(0.75),
            ..Resize::default()
        }],
        pool_violations: Some(0),
        ..Provisioning::default()
    };
    let mut late = taken.clone();
    late.resizes.push(Resize::default());
    let fixed = SystemResult {
        speed: Some(Speed::new(Unit::MOPS, 4.0, None)),
        ..provisioned("static", Provisioning::default())
    };
    let text = table(&result(vec![
        fixed,
        provisioned("demeter-balloon", taken),
        provisioned("virtio-balloon", late),
    ]));
    let row = |name: &str| -> Vec<&str> {
        let line = text.lines().find(|line| line.starts_with(name)).unwrap();
        line.split_whitespace().skip(1).collect()
    };
    assert_eq!(row("static")[2], "100.0");
    let ours = row("demeter-balloon");
    assert_eq!((ours[2], ours[4], ours[5]), ("50.0", "2.50", "99.5"));
    // The longest resize; none if one never ended. A figure that no system has gets no column.
    assert_eq!(ours[6], "0.750");
    assert_eq!(row("virtio-balloon")[6], "-");
    assert!(text.contains("over pool"), "{text}");
}

#[test]
fn crashes_have_a_table_of_their_own() {
    let figures = CrashFigures {
        cycles: 200,
        by_event: [("kill agent".to_owned(), 47)].into(),
        recovered_max_s: 12.34,
        wrong_words: 0,
        ..CrashFigures::default()
    };
    let text = table(&result(vec![provisioned(
        "demeter-balloon",
        Provisioning {
            crashes: Some(figures),
            ..Provisioning::default()
        },
    )]));
    for expected in [" 200 ", " 47 ", "12.3", "well again"] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
}

#[test]
fn a_soak_has_a_table_of_its_own() {
    let of = |who: &str, late, grew| Use {
        who: who.into(),
        what: "KiB".into(),
        early: 7011,
        late,
        grew,
    };
    let figures = SoakFigures {
        seconds: 600,
        resizes: 299,
        uses: vec![
            of("controller", 7012, false),
            of("agent of a", 99_999, true),
        ],
        ..SoakFigures::default()
    };
    let text = table(&result(vec![provisioned(
        "demeter-balloon",
        Provisioning {
            soak: Some(figures),
            ..Provisioning::default()
        },
    )]));
    // Two were looked at, one of which grew.
    for expected in [" 299 ", " 7011 ", " 7012\n", " 2 ", " 1 "] {
        assert!(text.contains(expected), "{expected} in {text}");
    }
}

#[test]
fn each_vm_of_a_run_is_drawn() {
    let vm = |name: &str| WorkloadResult {
        name: name.into(),
        series: (0..5u32)
            .map(|index| Point {
                t_s: f64::from(index),
                speed: Some(1.0),
                fast_bytes: Some(100 << 20),
                ..Point::default()
            })
            .collect(),
        ..WorkloadResult::default()
    };
    let run = |vms| SystemResult {
        workloads: vms,
        ..provisioned("wss", Provisioning::default())
    };
    let page = html(&result(vec![run(vec![vm("left"), vm("<b>")])]));
    assert!(page.contains("wss: fast memory over time of each VM"));
    assert!(page.contains("left") && !page.contains("<b>"));
    let alone = html(&result(vec![run(vec![])]));
    // Throughput and memory of the VMs, each for wide and for narrow windows.
    assert_eq!(pictures(&page).len(), pictures(&alone).len() + 4);
}
