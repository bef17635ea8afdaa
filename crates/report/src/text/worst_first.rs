//! Many scenarios, one line each: a system beside yardsticks and rivals, the worst first.

use demeter_outcome::{Case, NONE, RunResult, SystemResult};

use crate::OURS;
use crate::measure::Measure;
use crate::shape::case_title;
use crate::text::clean;
use crate::text::grid::{Column, Row, Table, wrap};
use crate::text::number::short;
use crate::text::table::table;

/// Bytes of a MiB and of a GiB.
const MIB: f64 = (1u64 << 20) as f64;
const GIB: f64 = (1u64 << 30) as f64;

/// The system that knows the hot set.
pub(crate) const ORACLE: &str = "oracle";

const EXPLANATION: &str = "Speed as a share of an oracle that had the hot set in fast memory from the start or, where \
     there is none, of memory left alone (none): over the whole run, and over its last third (end). The best rival by \
     its mean, and how many times as fast we are. t90: when 90 % of the hot set was in fast memory. CPU: management, in \
     % of one CPU. Memory: what the system kept for itself.";

/// A result of cases as lines of text: a table for each of our systems, its worst case first.
pub fn worst_first(result: &RunResult) -> String {
    match &figures(result)[..] {
        [] => table(result),
        tables => {
            let tables = tables.iter().map(Table::text);
            let parts: Vec<String> = tables.chain([wrap(EXPLANATION)]).collect();
            parts.join("\n")
        }
    }
}

/// The tables of a result.
pub(crate) fn figures(result: &RunResult) -> Vec<Table> {
    let tables = managed(result).into_iter();
    tables.map(|name| figures_of(result, name)).collect()
}

/// Whether a system is ours.
fn is_ours(name: &str) -> bool {
    let rest = name.strip_prefix(OURS);
    rest.is_some_and(|rest| rest.is_empty() || rest.starts_with('-'))
}

/// Our systems, in order.
pub(crate) fn managed(result: &RunResult) -> Vec<&str> {
    let mut names: Vec<&str> = vec![];
    for system in result.cases.iter().flat_map(|case| &case.systems) {
        if is_ours(&system.name) && !names.contains(&system.name.as_str()) {
            names.push(&system.name);
        }
    }
    names
}

/// Speed of a system relative to another: mean and last third.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(crate) struct Beside {
    pub mean: Option<f64>,
    pub end: Option<f64>,
}

impl Beside {
    /// A system of a case relative to another; `None` if one of them did not run.
    pub(crate) fn of(case: &Case, name: &str, yardstick: &str) -> Option<Self> {
        let named = |name: &str| case.systems.iter().find(|s| s.name == name);
        let (ours, theirs) = (named(name)?, named(yardstick)?);
        let steady = || {
            let (ours, theirs) = (ours.speed.as_ref()?, theirs.speed.as_ref()?);
            Measure::Speed(ours.unit.clone()).times(ours.steady?, theirs.steady?)
        };
        Some(Self {
            mean: Measure::of(case.systems.iter()).speed(ours, theirs),
            end: steady(),
        })
    }

    /// The lower of both.
    pub(crate) fn least(self) -> f64 {
        let both = self.mean.into_iter().chain(self.end);
        both.fold(f64::INFINITY, f64::min)
    }
}

fn figures_of(result: &RunResult, name: &str) -> Table {
    let columns = [
        ("", "scenario", true),
        ("share", "of", true),
        ("share", "mean", false),
        ("share", "end", false),
        ("best rival", "", true),
        ("best rival", "times", false),
        ("t90", "s", false),
        ("moved", "GiB", false),
        ("CPU %", "mean", false),
        ("CPU %", "end", false),
        ("memory", "MiB", false),
    ];
    let column = |(group, title, is_name): (&str, &str, bool)| Column {
        group: group.into(),
        title: title.into(),
        is_name,
    };
    let mut lines: Vec<_> = (result.cases.iter())
        .filter_map(|case| line(case, name))
        .collect();
    lines.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let rows = lines.into_iter().map(|(_, cells)| Row { cells, class: "" });
    Table {
        heading: clean::name(name),
        columns: columns.map(column).into(),
        rows: rows.collect(),
        left_out: 0,
    }
}

/// The line of a case, with its sort key; `None` if the system did not run.
fn line(case: &Case, name: &str) -> Option<(f64, Vec<String>)> {
    let ours = case.systems.iter().find(|s| s.name == name)?;
    let yardsticks = [ORACLE, NONE].into_iter();
    let share = yardsticks
        .filter_map(|of| Some((of, Beside::of(case, name, of)?)))
        .next();
    let (of, share) = share.unzip();
    let rival = best_rival(case, ours);
    let known = |value: Option<String>| value.unwrap_or_else(|| "-".into());
    let times = |value: Option<f64>| known(value.map(|times| format!("{times:.3}")));
    let percent = |cores: Option<f64>| known(cores.map(|cores| short(cores * 100.0)));
    let bytes = |bytes: Option<u64>, unit: f64| known(bytes.map(|b| short(b as f64 / unit)));
    let cells = vec![
        case_title(case),
        known(of.map(String::from)),
        times(share.and_then(|share| share.mean)),
        times(share.and_then(|share| share.end)),
        known(rival.map(|(_, rival)| clean::name(&rival.name))),
        times(rival.map(|(times, _)| times)),
        known(ours.t90_s.map(|s| format!("{s:.1}"))),
        bytes(ours.bytes_moved(), GIB),
        percent(ours.cores_managing()),
        percent(ours.cores_managing_steady()),
        bytes(ours.memory_overhead_bytes, MIB),
    ];
    Some((share.map_or(f64::INFINITY, Beside::least), cells))
}

/// The fastest rival, and our speedup over it. Rivals are neither ours nor yardsticks.
fn best_rival<'a>(case: &'a Case, ours: &SystemResult) -> Option<(f64, &'a SystemResult)> {
    let measure = Measure::of(case.systems.iter());
    let is_rival = |s: &&SystemResult| ![NONE, ORACLE].contains(&s.name.as_str());
    let rivals = case.systems.iter().filter(is_rival);
    rivals
        .filter(|s| !is_ours(&s.name))
        .filter_map(|s| Some((measure.speed(ours, s)?, s)))
        .min_by(|(a, _), (b, _)| a.total_cmp(b))
}

#[cfg(test)]
pub(crate) mod tests {
    use demeter_outcome::{Point, Speed, Unit};

    use super::*;

    pub(crate) fn system(name: &str, mean: f64, end: f64) -> SystemResult {
        SystemResult {
            name: name.into(),
            speed: Some(Speed::new(Unit::MOPS, mean, Some(end))),
            bytes_promoted: Some(3 << 29),
            bytes_demoted: Some(1 << 29),
            mgmt_cpu_s: Some(0.6),
            mgmt_cpu_steady_s: Some(0.1),
            series: vec![Point {
                t_s: 60.0,
                ..Point::default()
            }],
            ..SystemResult::default()
        }
    }

    pub(crate) fn case(name: &str, systems: Vec<SystemResult>) -> Case {
        Case {
            group: 0,
            settings: vec![("scenario".into(), name.into())],
            systems,
        }
    }

    fn result(cases: Vec<Case>) -> RunResult {
        RunResult {
            duration_s: 60,
            cases,
            ..RunResult::default()
        }
    }

    fn words(line: &str) -> Vec<&str> {
        line.split_whitespace().collect()
    }

    #[test]
    fn the_worst_comes_first_beside_its_yardstick_and_its_best_rival() {
        let result = result(vec![
            case(
                "good",
                vec![system(NONE, 1.0, 1.0), system("demeter", 2.0, 2.0)],
            ),
            case(
                "bad",
                vec![
                    system(NONE, 1.0, 1.0),
                    system("linux", 0.5, 0.5),
                    system("memtis", 0.8, 0.8),
                    system("demeter", 1.0, 0.6),
                    system("demeter-damon", 0.9, 1.0),
                ],
            ),
            case(
                "known",
                vec![
                    system(NONE, 1.0, 1.0),
                    system(ORACLE, 4.0, 4.0),
                    system("demeter", 3.0, 3.2),
                ],
            ),
            case("not run", vec![system(NONE, 1.0, 1.0)]),
        ]);
        let text = worst_first(&result);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines[0], "demeter");
        let figures = ["-", "2.00", "1.00", "0.500", "-"];
        let row = |start: [&'static str; 6]| [&start[..], &figures[..]].concat();
        assert_eq!(
            words(lines[3]),
            row(["bad", "none", "1.000", "0.600", "memtis", "1.250"])
        );
        assert_eq!(
            words(lines[4]),
            row(["known", "oracle", "0.750", "0.800", "-", "-"])
        );
        assert_eq!(
            words(lines[5]),
            row(["good", "none", "2.000", "2.000", "-", "-"])
        );
        // Another system of ours has its own table, and is no rival.
        assert_eq!(lines[7], "demeter-damon");
        assert_eq!(words(lines[10])[..3], ["bad", "none", "0.900"]);
        assert!(lines.iter().all(|line| line.len() <= 100), "{text}");
    }

    #[test]
    fn without_a_system_of_ours_it_is_a_table_of_all() {
        let text = worst_first(&result(vec![case("a", vec![system("linux", 1.0, 1.0)])]));
        assert!(text.contains("linux"), "{text}");
    }
}
