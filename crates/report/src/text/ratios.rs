//! Speedups of one system over another.

use demeter_outcome::{Case, NONE, RunResult};

use crate::shape::case_title;
use crate::text::grid::{Column, Row, Table};
use crate::text::worst_first::Beside;

/// The run that a ratio is taken from.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Of<'a> {
    /// The only one.
    Whole,
    /// A case, by its title.
    Case(&'a str),
    /// The case with the smallest ratio.
    Worst,
}

/// Speedup of `system` over `over`; `None` if one of them did not run.
pub fn times(result: &RunResult, of: Of, system: &str, over: &str) -> Option<f64> {
    let times = |case: &Case| Beside::of(case, system, over)?.mean;
    match of {
        Of::Whole => times(&Case {
            group: 0,
            settings: vec![],
            systems: result.systems.clone(),
        }),
        Of::Case(title) => times(result.cases.iter().find(|case| case_title(case) == title)?),
        Of::Worst => result.cases.iter().filter_map(times).min_by(f64::total_cmp),
    }
}

/// Several results of the same cases as one table: each system's speedup over none, a line for each case, the worst
/// first.
pub fn ratios(results: &[RunResult]) -> String {
    let mut columns = vec![Column {
        group: String::new(),
        title: "case".into(),
        is_name: true,
    }];
    let mut systems: Vec<(&RunResult, &str)> = vec![];
    for result in results {
        let names = result.cases.first().into_iter().flat_map(|c| &c.systems);
        for name in names.map(|system| system.name.as_str()) {
            if name != NONE {
                systems.push((result, name));
                columns.push(Column {
                    group: result.on.clone(),
                    title: name.into(),
                    is_name: false,
                });
            }
        }
    }
    let titles = results.first().into_iter().flat_map(|r| &r.cases);
    let mut lines: Vec<(f64, Vec<String>)> = titles
        .map(|case| {
            let title = case_title(case);
            let figures = systems
                .iter()
                .map(|(result, name)| times(result, Of::Case(&title), name, NONE));
            let figures: Vec<Option<f64>> = figures.collect();
            let worst = figures
                .iter()
                .flatten()
                .fold(f64::INFINITY, |a, b| a.min(*b));
            let shown = figures
                .iter()
                .map(|times| times.map_or("-".into(), |times| format!("{times:.2}")));
            let cells = [title.clone()].into_iter().chain(shown).collect();
            (worst, cells)
        })
        .collect();
    lines.sort_by(|(a, _), (b, _)| a.total_cmp(b));
    let rows = lines.into_iter().map(|(_, cells)| Row { cells, class: "" });
    Table {
        heading: String::new(),
        columns,
        rows: rows.collect(),
        left_out: 0,
    }
    .text()
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::worst_first::tests::{case, system};

    fn result(on: &str, name: &str, speeds: [f64; 2]) -> RunResult {
        let systems = |speed| vec![system(NONE, 2.0, 2.0), system(name, speed, speed)];
        RunResult {
            on: on.into(),
            cases: vec![case("a", systems(speeds[0])), case("b", systems(speeds[1]))],
            ..RunResult::default()
        }
    }

    #[test]
    fn a_ratio_is_of_a_case_or_of_the_worst_one() {
        let mut result = result("sim", "demeter", [3.0, 1.0]);
        let of = |result: &RunResult, of| times(result, of, "demeter", NONE);
        assert_eq!(of(&result, Of::Case("a")), Some(1.5));
        assert_eq!(of(&result, Of::Worst), Some(0.5));
        assert_eq!(of(&result, Of::Case("c")), None);
        assert_eq!(of(&result, Of::Whole), None);
        result.systems = result.cases[0].systems.clone();
        assert_eq!(of(&result, Of::Whole), Some(1.5));
    }

    #[test]
    fn several_results_become_one_table_with_the_worst_first() {
        let text = ratios(&[
            result("sim", "demeter", [3.0, 1.9]),
            result("lab", "demeter-damon", [4.0, 1.0]),
        ]);
        let words =
            |line: &str| -> Vec<String> { line.split_whitespace().map(String::from).collect() };
        let lines: Vec<Vec<String>> = text.lines().map(words).collect();
        assert_eq!(lines[0], ["sim", "lab"]);
        assert_eq!(lines[1], ["case", "demeter", "demeter-damon"]);
        assert_eq!(lines[2], ["b", "0.95", "0.50"]);
        assert_eq!(lines[3], ["a", "1.50", "2.00"]);
        assert_eq!(ratios(&[]).lines().count(), 1);
    }
}
