//! Tests of results with several cases: the kind of picture, and the place of figures. One file, because all tests draw
//! the same few results.

mod common;

use common::{empty, pictures};
use demeter_outcome::{
    Case, Point, Published, Repeats, RunResult, Speed, SystemResult, Tail, Unit, WorkloadResult,
};
use demeter_report::{html, maps_svg, shares_svg, table, throughput_svg};

fn system(name: &str, elapsed_s: f64) -> SystemResult {
    SystemResult {
        name: name.into(),
        elapsed_s: Some(elapsed_s),
        hot_in_fast_final: Some(0.0),
        mgmt_cpu_s: Some(elapsed_s / 10.0),
        ..SystemResult::default()
    }
}

fn case(settings: &[(&str, &str)], systems: Vec<SystemResult>) -> Case {
    let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
    Case {
        group: 0,
        settings: settings.iter().map(text).collect(),
        systems,
    }
}

fn result(cases: Vec<Case>) -> RunResult {
    RunResult { cases, ..empty() }
}

/// The titles of a page's sections.
fn sections(page: &str) -> Vec<&str> {
    let sections = page.split("<h2>").skip(1);
    sections
        .map(|section| section.split("</h2>").next().unwrap())
        .collect()
}

/// Centres of the dots of a picture.
fn dots(picture: &str) -> Vec<(f64, f64)> {
    let number = |dot: &str, name: &str| -> f64 {
        let (_, value) = dot.split_once(&format!(" {name}=\"")).unwrap();
        value.split('"').next().unwrap().parse().unwrap()
    };
    let dots = picture.split("<circle").skip(1);
    dots.map(|dot| (number(dot, "cx"), number(dot, "cy")))
        .collect()
}

/// The cells of a table's line.
fn cells<'a>(text: &'a str, starts_with: &str) -> Vec<&'a str> {
    let is_it = |line: &&str| line.trim_start().starts_with(starts_with);
    text.lines()
        .find(is_it)
        .unwrap()
        .split_whitespace()
        .collect()
}

#[test]
fn numbers_make_a_line_and_vms_make_one_of_cores_too() {
    let at = |key: &str, value: &str, elapsed_s| {
        case(&[(key, value)], vec![system("demeter", elapsed_s)])
    };
    let page = html(&result(vec![
        at("sim.vms", "9", 50.0),
        at("sim.vms", "1", 100.0),
        at("sim.vms", "5", 75.0),
    ]));
    assert_eq!(
        sections(&page)[..2],
        [
            "Time for the work by vms",
            "Cores spent on management by vms"
        ]
    );
    // Sorted by number, at even distances, and higher for more seconds.
    let dots = dots(pictures(&page)[0]);
    assert_eq!(dots.len(), 3);
    let (first, middle, last) = (dots[0], dots[1], dots[2]);
    assert!(
        (middle.0 - (first.0 + last.0) / 2.0).abs() < 0.2,
        "{dots:?}"
    );
    assert!(first.1 < middle.1 && middle.1 < last.1, "{dots:?}");

    let other = html(&result(vec![
        at("duration_s", "1", 2.0),
        at("duration_s", "2", 3.0),
    ]));
    assert!(sections(&other).contains(&"Time for the work by duration s"));
    assert!(!other.contains("Cores spent"));
}

#[test]
fn words_make_bars_relative_to_none_with_their_geometric_mean() {
    let at = |word: &str, none: f64, ours: f64| {
        let mut ours = system("demeter", ours);
        let elapsed_s = ours.elapsed_s.unwrap();
        ours.repeats = Some(Repeats {
            runs: 3,
            min: elapsed_s / 2.0,
            max: elapsed_s,
        });
        case(&[("workload", word)], vec![system("none", none), ours])
    };
    let page = html(&result(vec![
        at("silo", 80.0, 40.0),
        at("btree", 80.0, 10.0),
    ]));
    assert_eq!(sections(&page)[0], "Speed by workload");
    let bars = pictures(&page)[0];
    for text in ["silo", "btree", "geometric mean", "2.00×", "8.00×", "4.00×"] {
        assert!(bars.contains(&format!(">{text}<")), "{text}");
    }
    // The baseline is a line, not bars; the fastest run is twice as fast as the median.
    assert!(!bars.contains(">none<"));
    assert_eq!(bars.matches("class=\"whisker").count(), 2);
    // With one system, or if a case has no baseline, seconds are shown.
    let alone = |word| case(&[("workload", word)], vec![system("demeter", 7.0)]);
    let page = html(&result(vec![alone("silo"), alone("btree")]));
    assert_eq!(sections(&page)[0], "Time for the work by workload");
    assert!(pictures(&page)[0].contains(">7.00<"));
}

#[test]
fn two_numbers_make_a_heat_map_per_system() {
    let at = |x: &str, y: &str, mops: f64| {
        let rate = |name: &str, mops| SystemResult {
            name: name.into(),
            speed: Some(Speed::new(Unit::MOPS, mops, None)),
            ..SystemResult::default()
        };
        let systems = vec![rate("demeter", mops), rate("other", 10.0)];
        case(&[("agent.y", y), ("agent.x", x)], systems)
    };
    let grid = vec![at("1", "1", 10.0), at("2", "1", 20.0), at("2", "3", 50.0)];
    let page = html(&result(grid));
    assert_eq!(sections(&page)[0], "Throughput by y and x");
    assert!(page.contains("<h3>demeter</h3>") && page.contains("<h3>other</h3>"));
    let map = pictures(&page)[0];
    // The best cell is strongest, and a cell without a run is empty.
    assert!(map.contains("class=\"h8\"") && map.contains("x 2, y 3: 50.0"));
    assert_eq!(map.matches("<rect").count(), 3);
    assert!(map.contains(">-</text>"));
    // All maps share one scale: the other system's cell is as weak as our worst.
    assert_eq!(pictures(&page)[2].matches("class=\"h0\"").count(), 3);
}

#[test]
fn more_systems_than_bars_can_tell_apart_make_one_heat_map() {
    let at = |kind: &str, factor: f64| {
        let rate = |i: u32| SystemResult {
            name: if i == 0 {
                "none".into()
            } else {
                format!("s{i}")
            },
            speed: Some(Speed::new(Unit::MOPS, factor * f64::from(1 + i), None)),
            ..SystemResult::default()
        };
        case(&[("workload", kind)], (0..14).map(rate).collect())
    };
    let both = result(vec![at("gups", 1.0), at("silo", 7.0)]);
    let page = html(&both);
    let map = pictures(&page)[0];
    // Thirteen systems besides the baseline; two programs and their mean.
    assert_eq!(map.matches("<rect").count(), 13 * 3);
    // Multiples of the baseline can be compared between programs, and the best is strongest.
    assert!(map.contains("workload silo, system s13: 14.0"), "{map}");
    assert_eq!(map.matches("class=\"h8\"").count() % 3, 0);
    // The standalone picture has its own background and colours.
    let picture = maps_svg(&both).unwrap();
    assert_eq!(picture.matches("<rect").count(), 1 + 13 * 3);
    assert!(picture.contains("multiples of none") && picture.contains("<style>"));
    assert_eq!(maps_svg(&result(vec![])), None);
}

#[test]
fn more_settings_make_a_table_only() {
    let at = |a: &str, b: &str, c: &str| {
        case(
            &[("a", a), ("b", b), ("c", c)],
            vec![system("demeter", 1.0)],
        )
    };
    let page = html(&result(vec![at("1", "1", "1"), at("2", "2", "2")]));
    assert_eq!(sections(&page), ["Figures", "The run"]);
    assert!(pictures(&page).is_empty());
}

#[test]
fn the_table_has_a_block_of_rows_per_case() {
    let at = |vms: &str, ours| {
        let systems = vec![system("none", 30.0), system("demeter", ours)];
        case(&[("sim.vms", vms), ("machine.thp", "never")], systems)
    };
    let mut other = at("3", 10.0);
    other.group = 1;
    let text = table(&result(vec![at("1", 20.0), at("2", 15.0), other]));
    assert_eq!(cells(&text, "1")[..4], ["1", "none", "30.0", "1.00"]);
    let demeter: Vec<&str> = text
        .lines()
        .filter(|line| line.trim_start().starts_with("demeter"))
        .collect();
    assert_eq!(demeter.len(), 3);
    let second: Vec<&str> = demeter[1].split_whitespace().collect();
    // Seconds, times none, hot share, CPU seconds, cores.
    assert_eq!(second[1..6], ["15.0", "2.00", "0.0", "1.5", "0.100"]);
    // Settings common to all cases of a table are in its heading.
    assert!(text.contains("machine.thp=never\n"));
    assert!(text.contains("sim.vms=3, machine.thp=never\n"), "{text}");
}

#[test]
fn extremes_of_several_runs_stand_beside_the_figure() {
    let mut ours = system("demeter", 20.0);
    ours.repeats = Some(Repeats {
        runs: 5,
        min: 19.0,
        max: 22.5,
    });
    let result = RunResult {
        systems: vec![system("none", 40.0), ours],
        ..empty()
    };
    let text = table(&result);
    assert_eq!(cells(&text, "demeter")[1..3], ["20.0", "19.0..22.5"]);
    let page = html(&result);
    assert_eq!(sections(&page)[0], "Time for the work");
    assert_eq!(pictures(&page)[0].matches("class=\"whisker").count(), 1);
}

#[test]
fn time_ends_with_the_work_where_that_is_fixed() {
    let point = |t_s| Point {
        t_s,
        speed: Some(1.0),
        ..Point::default()
    };
    let mut ours = system("demeter", 20.0);
    ours.series = vec![point(10.0), point(20.0)];
    let result = RunResult {
        systems: vec![ours],
        duration_s: 4000,
        ..empty()
    };
    let svg = throughput_svg(&result);
    assert!(svg.contains(">20 s<") && !svg.contains("000 s<"), "{svg}");
}

#[test]
fn percentiles_are_drawn_by_powers_of_ten() {
    let mut ours = system("demeter", 20.0);
    ours.tail = Some(Tail {
        mean_ns: 300.0,
        p50_ns: 100.0,
        p90_ns: 1000.0,
        p99_ns: 10_000.0,
        p999_ns: 100_000.0,
    });
    let result = RunResult {
        systems: vec![ours],
        ..empty()
    };
    let page = html(&result);
    assert!(sections(&page).contains(&"How long single operations took"));
    let picture = pictures(&page).into_iter().find(|p| p.contains("p99.9"));
    let steps: Vec<f64> = dots(picture.unwrap())
        .windows(2)
        .map(|pair| pair[0].1 - pair[1].1)
        .collect();
    assert_eq!(steps.len(), 3);
    assert!(
        steps.iter().all(|s| (s - steps[0]).abs() < 0.2),
        "{steps:?}"
    );
    let cells = cells(&table(&result), "demeter").join(" ");
    assert!(cells.ends_with("100 10000 100000"), "{cells}");
}

#[test]
fn what_kvm_counted_is_shown_where_there_was_one() {
    let mut history = system("h-history", 20.0);
    let counted = [
        ("kvm_exits", 42),
        ("kvm_tlb_flush", 7),
        ("pgmigrate_success", 9),
    ];
    history.counters = counted.map(|(name, n)| (name.to_owned(), n)).into();
    let result = RunResult {
        systems: vec![system("none", 10.0), history],
        ..empty()
    };
    let text = table(&result);
    let (_, text) = text.split_once("KVM and kernel counted\n").unwrap();
    let rows: Vec<Vec<&str>> = text
        .lines()
        .map(|l| l.split_whitespace().collect())
        .collect();
    assert_eq!(rows[1], ["h-history", "42", "-", "-", "7", "9"], "{text}");
    assert_eq!(rows.len(), 2, "{text}");
    assert!(sections(&html(&result)).contains(&"What the host's KVM and kernel counted"));
    assert!(!table(&empty()).contains("KVM"));
}

#[test]
fn invalidations_are_counted_by_kind() {
    let mut ours = system("demeter", 20.0);
    ours.counters = [
        ("flush_total".to_owned(), 9),
        ("flush_guest_remote".to_owned(), 7),
        ("flush_host_invept".to_owned(), 2),
        ("samples".to_owned(), 4),
    ]
    .into();
    let mut result = RunResult {
        systems: vec![ours.clone()],
        ..empty()
    };
    let text = table(&result);
    assert!(text.contains(
        "system   all  guest remote  host invept\ndemeter    9             7            2\n"
    ));
    let page = html(&result);
    assert!(sections(&page).contains(&"Invalidations of translations"));
    assert!(page.contains("demeter: guest remote 7") && !page.contains("flush_"));
    // With many cases there is a table without bars.
    result.systems.clear();
    let value = |index: usize| index.to_string();
    result.cases = (0..20)
        .map(|index| case(&[("a", &value(index))], vec![ours.clone()]))
        .collect();
    let page = html(&result);
    assert!(page.contains("Invalidations of translations of each case"));
    assert!(!sections(&page).contains(&"Invalidations of translations"));
}

fn published(over: Option<&str>, value: f64, ours: Option<f64>) -> Published {
    Published {
        figure: "counters.flush_total".into(),
        system: "h-tpp".into(),
        over: over.map(Into::into),
        case: vec![("sim.vms".into(), "9".into())],
        value,
        ours,
        within: 0.2,
        source: "the <paper>".into(),
    }
}

#[test]
fn published_figures_stand_beside_ours() {
    let result = RunResult {
        systems: vec![system("h-tpp", 1.0)],
        published: vec![
            published(Some("demeter"), 8.0, Some(7.0)),
            published(None, 8.0, Some(5.0)),
            published(None, 8.0, None),
        ],
        ..empty()
    };
    let text = table(&result);
    let rows: Vec<String> = text
        .lines()
        .filter(|line| line.starts_with("TLB flushes"))
        .map(|line| line.split_whitespace().collect::<Vec<_>>().join(" "))
        .collect();
    assert_eq!(
        rows,
        [
            "TLB flushes h-tpp / demeter vms 9 8.00 7.00 -12.5 % 20 % yes",
            "TLB flushes h-tpp vms 9 8.00 5.00 -37.5 % 20 % NO",
            "TLB flushes h-tpp vms 9 8.00 - - 20 % NO",
        ]
    );
    assert!(text.contains("1 of 3 agree") && text.contains("the <paper>"));
    let page = html(&result);
    assert!(page.contains("1 of 3 agree") && page.contains("the &lt;paper&gt;"));
    assert_eq!(page.matches("class=\"apart\"").count(), 2);
}

#[test]
fn names_in_cases_are_shown_and_never_obeyed() {
    let evil = "</text><script>\"' onload=\"x\u{1b}[31m";
    for other in ["1", "word"] {
        let hostile = result(vec![
            case(&[(evil, evil)], vec![system(evil, 1.0)]),
            case(&[(evil, other)], vec![system(evil, 2.0)]),
        ]);
        let hostile = RunResult {
            published: vec![Published {
                figure: evil.into(),
                system: evil.into(),
                case: vec![(evil.into(), evil.into())],
                source: evil.into(),
                ..published(Some(evil), 1.0, None)
            }],
            ..hostile
        };
        let page = html(&hostile);
        assert!(page.contains("&lt;/text&gt;&lt;script&gt;"));
        assert!(!page.contains("<script") && !page.contains("onload=\""));
        assert!(!table(&hostile).contains('\u{1b}'));
    }
}

#[test]
fn many_cases_stay_small() {
    let name = |index: usize| format!("system-{index}");
    let at = |x: usize, y: usize| {
        let systems = (0..20).map(|index| system(&name(index), (x + y) as f64));
        let (x, y) = (x.to_string(), y.to_string());
        case(&[("x", &x), ("y", &y)], systems.collect())
    };
    let cases: Vec<Case> = (0..32)
        .flat_map(|x| (0..32).map(move |y| (x, y)))
        .map(|(x, y)| at(x, y))
        .collect();
    let grid = result(cases);
    let page = html(&grid);
    assert!(page.len() < 8 << 20, "{} bytes", page.len());
    let lines = table(&grid).lines().count();
    assert!(lines < 1100, "{lines}");
    assert!(table(&grid).contains("and 19480 more rows"));
}

#[test]
fn the_case_that_a_figure_is_of_is_the_one_that_is_drawn() {
    // A later case at the same place is ignored.
    let at = |value: &str, elapsed_s| case(&[("x", value)], vec![system("demeter", elapsed_s)]);
    let once = vec![at("1", 5.0), at("2", 9.0)];
    let twice = [once.clone(), vec![at("2", 1.0)]].concat();
    let drawn = |cases| dots(pictures(&html(&result(cases)))[0]);
    assert_eq!(drawn(once.clone()), drawn(twice));
    assert_eq!(once[1].systems[0].elapsed_s, Some(9.0));
}

#[test]
fn a_workload_that_does_not_say_what_is_hot_has_no_column_for_it() {
    let silent = SystemResult {
        hot_in_fast_final: None,
        ..system("demeter", 20.0)
    };
    let results = [
        RunResult {
            systems: vec![silent.clone()],
            ..empty()
        },
        result(vec![case(&[("x", "1")], vec![silent])]),
    ];
    for result in results {
        let text = table(&result);
        assert!(
            !text.contains("hot in") && !text.contains("fast%"),
            "{text}"
        );
        assert!(!html(&result).contains("of the hot set lies in fast memory"));
    }
}

#[test]
fn a_throughput_of_any_unit_is_shown_with_it() {
    let of = |name: &str, mean| SystemResult {
        name: name.into(),
        speed: Some(Speed::new(Unit::new("requests/s"), mean, mean)),
        series: vec![Point {
            t_s: 1.0,
            speed: Some(mean),
            ..Point::default()
        }],
        ..SystemResult::default()
    };
    let result = RunResult {
        systems: vec![of("none", 500.0), of("demeter", 750.0)],
        ..empty()
    };
    let text = table(&result);
    assert!(text.contains("requests/s"), "{text}");
    assert_eq!(
        cells(&text, "demeter")[..4],
        ["demeter", "750", "750", "1.50"]
    );
    assert!(html(&result).contains("In requests/s, more is better."));
}

#[test]
fn each_of_several_programs_has_its_column_and_its_picture() {
    let of = |name: &str, speed| {
        let program = |name: &str, speed: Option<Speed>| WorkloadResult {
            name: name.into(),
            elapsed_s: Some(30.0),
            series: vec![Point {
                t_s: 1.0,
                speed: speed.as_ref().and_then(|speed| speed.mean),
                ..Point::default()
            }],
            speed,
            ..WorkloadResult::default()
        };
        SystemResult {
            name: name.into(),
            workloads: vec![
                program(
                    "redis",
                    Some(Speed::new(Unit::new("requests/s"), speed, None)),
                ),
                program("<bfs>", None),
            ],
            ..SystemResult::default()
        }
    };
    let result = RunResult {
        systems: vec![of("none", 500.0), of("demeter", 750.0)],
        ..empty()
    };
    let text = table(&result);
    let heading: Vec<&str> = text.lines().take(2).collect();
    assert!(heading[0].contains("redis  <bfs>"), "{text}");
    assert!(
        heading[1].starts_with("system   requests/s      s"),
        "{text}"
    );
    assert_eq!(cells(&text, "demeter")[..3], ["demeter", "750", "30.0"]);
    let page = html(&result);
    assert!(sections(&page).contains(&"redis: throughput over time"));
    assert!(page.contains("&lt;bfs&gt;") && !page.contains("<bfs>"));
    // Nothing was counted for bfs.
    assert!(!page.contains("bfs&gt;: throughput"));
}

#[test]
fn sizes_of_one_program_make_a_line_of_the_share_of_the_oracle() {
    let at = |name: &str, mib: &str, mean: f64| {
        let system = |name: &str, mean: f64| SystemResult {
            name: name.into(),
            speed: Some(Speed::new(Unit::MOPS, mean, None)),
            ..SystemResult::default()
        };
        let systems = vec![system("oracle", 10.0), system("demeter", mean)];
        case(&[("scenario", name), ("workload.size_mib", mib)], systems)
    };
    let cases = vec![at("gups-4g", "4000", 9.0), at("gups-1g", "1000", 5.0)];
    let mut sizes = result(cases);
    let picture = shares_svg(&sizes).unwrap();
    assert!(picture.contains("Share of the oracle by size mib (percent)"));
    assert!(picture.contains("demeter, 1000: 50.0<") && picture.contains("demeter, 4000: 90.0<"));
    // The oracle is the reference and has no line.
    assert!(!picture.contains("oracle, 1000"));
    assert_eq!(
        sections(&html(&sizes))[0],
        "Share of the oracle by size mib"
    );
    // If a case has no oracle, there is no such picture.
    sizes.cases[0].systems.remove(0);
    assert!(shares_svg(&sizes).is_none());
}
