//! Compares two results of one scenario, such as simulator and lab.

use std::collections::{BTreeMap, VecDeque};

use demeter_outcome::{RunResult, SystemResult};

use crate::shape;
use crate::text::clean;
use crate::text::grid::{Row, Table};
use crate::text::number::short;
use crate::text::summary::steady_of_oracle;

/// Length of an epoch of the agent, seconds.
const EPOCH_S: f64 = 0.5;

/// Maximum number of named cases that only one result has.
const ONLY_MAX: usize = 3;

/// The difference up to which two figures agree.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// As a share of the second figure.
    Share(f64),
    /// In the figure's own unit.
    Absolute(f64),
}

struct Figure {
    title: &'static str,
    /// The figure of a system among others under equal conditions.
    of: fn(&[SystemResult], &SystemResult) -> Option<f64>,
    limit: Limit,
    show: fn(f64) -> String,
}

/// Title of throughput or latency in its own unit.
const STEADY: &str = "steady";

/// The figures that must agree, and how closely.
const FIGURES: [Figure; 5] = [
    Figure {
        title: "steady, of oracle",
        of: steady_of_oracle,
        limit: Limit::Share(0.15),
        show: |share| format!("{share:.3}"),
    },
    Figure {
        title: STEADY,
        of: steady_without_oracle,
        limit: Limit::Share(0.15),
        show: short,
    },
    Figure {
        title: "t90, s",
        of: |_, system| system.t90_s,
        limit: Limit::Absolute(2.0 * EPOCH_S),
        show: |seconds| format!("{seconds:.1}"),
    },
    Figure {
        title: "t90 after shift, s",
        of: |_, system| system.t90_after_shift_s,
        limit: Limit::Absolute(2.0 * EPOCH_S),
        show: |seconds| format!("{seconds:.1}"),
    },
    Figure {
        title: "moved, MiB",
        of: |_, system| Some(system.bytes_promoted? as f64 + system.bytes_demoted? as f64),
        limit: Limit::Share(0.30),
        show: |bytes| format!("{:.0}", bytes / f64::from(1 << 20)),
    },
];

/// Steady throughput or latency in its own unit, where there is no oracle to relate it to.
fn steady_without_oracle(systems: &[SystemResult], system: &SystemResult) -> Option<f64> {
    let has_oracle = systems.iter().any(|system| system.name == "oracle");
    system.steady().filter(|_| !has_oracle)
}

/// Why two results cannot be compared.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// They belong to different scenarios.
    #[error("one result is of the scenario {0}, the other of {1}; compare runs of one scenario")]
    Scenarios(String, String),
    /// They have no case in common.
    #[error(
        "the two results have no case in common; run both with the same settings ([[vary]] or --set)"
    )]
    Cases,
    /// They have no system in common.
    #[error("the two results have no system in common; run the same ones")]
    Systems,
}

/// Compares both results' figures for each common system and case, as lines of text.
///
/// A line has the figures, their difference relative to the second result (or in seconds), and whether they agree.
///
/// # Errors
/// There is nothing to compare.
pub fn compare(first: &RunResult, second: &RunResult) -> Result<String, CompareError> {
    if first.scenario != second.scenario {
        let name = |result: &RunResult| clean::name(&result.scenario);
        return Err(CompareError::Scenarios(name(first), name(second)));
    }
    let matched = Matched::of(first, second);
    if matched.pairs.is_empty() {
        return Err(CompareError::Cases);
    }
    let mut rows = vec![];
    let mut agree = 0;
    for pair in &matched.pairs {
        for a in pair.first {
            let Some(b) = pair.second.iter().find(|b| b.name == a.name) else {
                continue;
            };
            for figure in &FIGURES {
                let (of_a, of_b) = ((figure.of)(pair.first, a), (figure.of)(pair.second, b));
                let Some(verdict) = verdict(of_a, of_b, figure.limit) else {
                    continue;
                };
                agree += usize::from(verdict.agrees);
                let show = |value: Option<f64>| value.map_or("-".into(), figure.show);
                let cells = [
                    pair.case.clone(),
                    clean::name(&a.name),
                    figure.title.into(),
                    show(of_a),
                    show(of_b),
                    verdict.difference,
                    if verdict.agrees { "yes" } else { "NO" }.into(),
                ];
                rows.push(Row {
                    cells: cells.into(),
                    class: "",
                });
            }
        }
    }
    if rows.is_empty() {
        return Err(CompareError::Systems);
    }
    let (first, second) = (heading(first, second), heading(second, first));
    let titles = [
        "case",
        "system",
        "figure",
        &first,
        &second,
        "difference",
        "agree",
    ];
    let all = rows.len();
    let relation = match rows.iter().any(|row| row.cells[2] == STEADY) {
        true => "in its own unit",
        false => "relative to the oracle",
    };
    Ok(format!(
        "{}\n{agree} of {all} figures agree: steady throughput (or latency) {relation} \
         within 15 %, t90\nwithin two epochs ({:.0} s), bytes moved within 30 %. A figure that only \
         one result has does not agree.\n{}",
        Table::plain(titles.map(String::from).to_vec(), 3, rows).text(),
        2.0 * EPOCH_S,
        matched.left_out(),
    ))
}

/// Keys and values of a case's settings.
type Settings = [(String, String)];

/// The common cases of two results. A result without cases is one case without settings.
struct Matched<'a> {
    pairs: Vec<Pair<'a>>,
    /// Cases that only the first result has, and only the second.
    only: [Vec<String>; 2],
}

/// Systems of both results under equal conditions.
struct Pair<'a> {
    case: String,
    first: &'a [SystemResult],
    second: &'a [SystemResult],
}

impl<'a> Matched<'a> {
    fn of(first: &'a RunResult, second: &'a RunResult) -> Self {
        let mut matched = Self {
            pairs: vec![],
            only: [vec![], vec![]],
        };
        let of_second = cases(second);
        let mut waiting: BTreeMap<_, VecDeque<usize>> = BTreeMap::new();
        for (index, (settings, _)) in of_second.iter().enumerate() {
            let same = waiting.entry(sorted(settings)).or_default();
            same.push_back(index);
        }
        for (settings, systems) in cases(first) {
            let case = shape::settings(settings);
            let same = waiting.get_mut(&sorted(settings));
            match same.and_then(VecDeque::pop_front) {
                Some(index) => matched.pairs.push(Pair {
                    case,
                    first: systems,
                    second: of_second[index].1,
                }),
                None => matched.only[0].push(case),
            }
        }
        let mut left: Vec<usize> = waiting.into_values().flatten().collect();
        left.sort_unstable();
        let left = left.into_iter().map(|index| of_second[index].0);
        matched.only[1] = left.map(shape::settings).collect();
        matched
    }

    /// A line about cases that only one result has; empty if there are none.
    fn left_out(&self) -> String {
        let sides = self.only.iter().zip(["first", "second"]);
        let sides = sides.filter(|(cases, _)| !cases.is_empty());
        let sides = sides.map(|(cases, side)| {
            let more = cases.len().saturating_sub(ONLY_MAX);
            let named = &cases[..cases.len() - more];
            let more = Some(format!("{more} more")).filter(|_| more > 0);
            let named: Vec<_> = named.iter().cloned().chain(more).collect();
            format!("only the {side} result has {}", named.join("; "))
        });
        let sides: Vec<_> = sides.collect();
        if sides.is_empty() {
            return String::new();
        }
        format!("Cases not compared: {}.\n", sides.join("; "))
    }
}

/// A result's cases: settings and systems of each.
fn cases(result: &RunResult) -> Vec<(&Settings, &[SystemResult])> {
    if result.cases.is_empty() {
        return vec![(&[], &result.systems)];
    }
    let cases = result.cases.iter();
    cases
        .map(|case| (&case.settings[..], &case.systems[..]))
        .collect()
}

/// Settings by key, since `demeter sweep` keeps the order in which they were given.
fn sorted(settings: &Settings) -> Vec<&(String, String)> {
    let mut settings: Vec<_> = settings.iter().collect();
    settings.sort();
    settings
}

/// The origin of a result; with its seed if only that distinguishes it from the other.
fn heading(result: &RunResult, other: &RunResult) -> String {
    let on = clean::name(&result.on);
    if result.on == other.on {
        format!("{on}, seed {}", result.seed)
    } else {
        on
    }
}

struct Verdict {
    difference: String,
    agrees: bool,
}

/// `None` if neither result has the figure.
fn verdict(a: Option<f64>, b: Option<f64>, limit: Limit) -> Option<Verdict> {
    let (a, b) = match (a, b) {
        (Some(a), Some(b)) => (a, b),
        (None, None) => return None,
        _ => {
            return Some(Verdict {
                difference: "-".into(),
                agrees: false,
            });
        }
    };
    Some(match limit {
        Limit::Absolute(most) => Verdict {
            difference: format!("{:+.1} s", a - b),
            // As exact as it is printed: to a tenth.
            agrees: ((a - b).abs() * 10.0).round() <= most * 10.0,
        },
        Limit::Share(_) if a == b => Verdict {
            difference: "+0.0 %".into(),
            agrees: true,
        },
        Limit::Share(most) => Verdict {
            difference: match b {
                0.0 => "from 0".into(),
                b => format!("{:+.1} %", (a - b) / b * 100.0),
            },
            agrees: (a - b).abs() <= most * b,
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use demeter_outcome::{Case, Speed, Unit};

    fn result(on: &str, steady: f64, t90_s: Option<f64>, moved: u64) -> RunResult {
        let system = |name: &str, steady_mops: f64, t90_s, moved| SystemResult {
            name: name.into(),
            speed: Some(Speed::new(Unit::MOPS, steady_mops, steady_mops)),
            t90_s,
            bytes_promoted: Some(moved),
            bytes_demoted: Some(moved),
            ..SystemResult::default()
        };
        RunResult {
            scenario: "gups".into(),
            on: on.into(),
            seed: 1,
            duration_s: 60,
            systems: vec![
                system("oracle", 2.0, Some(0.0), 0),
                system("demeter", steady, t90_s, moved),
            ],
            ..RunResult::default()
        }
    }

    /// The verdicts on Demeter's figures.
    fn verdicts(a: &RunResult, b: &RunResult) -> Vec<bool> {
        let text = compare(a, b).unwrap();
        let lines = text.lines().filter(|line| line.starts_with("demeter"));
        lines.map(|line| line.ends_with("yes")).collect()
    }

    #[test]
    fn figures_agree_within_their_limits() {
        let lab = result("lab", 1.8, Some(4.0), 1000);
        let agrees = |steady, t90_s, moved| verdicts(&result("sim", steady, t90_s, moved), &lab);
        assert_eq!(agrees(1.8, Some(4.0), 1000), [true; 3]);
        assert_eq!(agrees(1.6, Some(5.0), 1290), [true; 3]);
        assert_eq!(agrees(1.6, Some(5.04), 1290), [true; 3]);
        assert_eq!(agrees(1.5, Some(5.1), 1310), [false; 3]);
        assert_eq!(agrees(2.1, Some(2.9), 690), [false; 3]);
        assert_eq!(agrees(1.8, None, 1000), [true, false, true]);
    }

    #[test]
    fn nothing_moved_on_both_sides_agrees_and_on_one_does_not() {
        let (a, b) = (result("sim", 1.8, None, 0), result("lab", 1.8, None, 0));
        assert_eq!(verdicts(&a, &b), [true; 2]);
        assert_eq!(verdicts(&result("sim", 1.8, None, 5), &b), [true, false]);
    }

    #[test]
    fn without_an_oracle_speeds_themselves_are_compared() {
        let alone = |steady| {
            let mut result = result("sim", steady, Some(4.0), 1);
            result.systems.remove(0);
            result
        };
        let said = compare(&alone(1.0), &alone(1.1)).unwrap();
        assert!(
            said.contains("steady") && !said.contains("of oracle"),
            "{said}"
        );
        assert_eq!(verdicts(&alone(1.0), &alone(1.1)), [true; 3]);
        assert_eq!(verdicts(&alone(1.0), &alone(2.0)), [false, true, true]);
    }

    #[test]
    fn columns_say_where_the_results_are_from() {
        let lab = result("lab", 1.8, None, 0);
        let first = |a: &RunResult| compare(a, &lab).unwrap().lines().next().unwrap().to_owned();
        assert!(first(&result("sim", 1.8, None, 0)).contains("sim"));
        assert!(first(&lab).contains("lab, seed 1"));
    }

    /// A result with these cases, each with a steady throughput.
    fn with_cases(on: &str, cases: &[(&[(&str, &str)], f64)]) -> RunResult {
        let text = |(key, value): &(&str, &str)| ((*key).to_owned(), (*value).to_owned());
        let case = |(settings, steady): &(&[(&str, &str)], f64)| Case {
            group: 0,
            settings: settings.iter().map(text).collect(),
            systems: result(on, *steady, None, 0).systems,
        };
        RunResult {
            systems: vec![],
            cases: cases.iter().map(case).collect(),
            ..result(on, 0.0, None, 0)
        }
    }

    #[test]
    fn cases_are_matched_by_their_settings() {
        let one: &[_] = &[("sim.vms", "1"), ("workload.hot_mib", "10")];
        let turned: &[_] = &[("workload.hot_mib", "10"), ("sim.vms", "1")];
        let two: &[_] = &[("sim.vms", "2"), ("workload.hot_mib", "10")];
        let a = with_cases("sim", &[(one, 1.8), (two, 1.0)]);
        let b = with_cases("lab", &[(two, 1.0), (turned, 1.0)]);
        let text = compare(&a, &b).unwrap();
        let verdict = |case: &str| {
            let row = format!("{case}  demeter  steady, of oracle  ");
            let line = text.lines().find(|line| line.starts_with(&row)).unwrap();
            line.ends_with("yes")
        };
        assert!(!verdict("vms 1, hot mib 10") && verdict("vms 2, hot mib 10"));
        assert!(text.starts_with("case  ") && !text.contains("not compared"));
        assert!(text.contains("9 of 10 figures agree"), "{text}");
    }

    #[test]
    fn cases_of_one_result_are_told_in_one_line() {
        let vms: Vec<[(&str, &str); 1]> = ["1", "2", "3", "4", "5", "6"]
            .map(|n| [("sim.vms", n)])
            .into();
        let of = |on, range: std::ops::Range<usize>| {
            let cases: Vec<_> = vms[range].iter().map(|case| (&case[..], 1.8)).collect();
            with_cases(on, &cases)
        };
        let last = |a: &RunResult, b: &RunResult| {
            let text = compare(a, b).unwrap();
            text.lines().last().unwrap().to_owned()
        };
        assert_eq!(
            last(&of("sim", 0..2), &of("lab", 1..6)),
            "Cases not compared: only the first result has vms 1; \
             only the second result has vms 3; vms 4; vms 5; 1 more."
        );
        assert_eq!(
            last(&of("sim", 0..1), &of("lab", 0..2)),
            "Cases not compared: only the second result has vms 2."
        );
        let apart = compare(&of("sim", 0..2), &of("lab", 2..4));
        assert_eq!(apart, Err(CompareError::Cases));
        let plain = result("lab", 1.8, None, 0);
        assert_eq!(compare(&of("sim", 0..2), &plain), Err(CompareError::Cases));
        assert_eq!(compare(&plain, &of("sim", 0..2)), Err(CompareError::Cases));
    }

    #[test]
    fn equal_settings_are_matched_in_order() {
        // Two tables of one kind have the same settings in a case.
        let workload: &[_] = &[("workload", "btree")];
        let a = with_cases("sim", &[(workload, 1.8), (workload, 1.0)]);
        assert!(compare(&a, &a).unwrap().contains("10 of 10 figures agree"));
    }

    #[test]
    fn other_scenarios_and_systems_are_refused() {
        let lab = result("lab", 1.8, None, 0);
        let mut other = lab.clone();
        other.systems.clear();
        assert_eq!(compare(&other, &lab), Err(CompareError::Systems));
        other.scenario = "memlat".into();
        let said = compare(&other, &lab).unwrap_err().to_string();
        assert!(said.contains("memlat") && said.contains("gups"), "{said}");
    }
}
