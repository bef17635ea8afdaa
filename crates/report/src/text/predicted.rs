//! Compares the slowdown that agents predict with the measured one.
//!
//! The cases of a result are programs, each with several sizes of fast memory. The largest size is the yardstick: there
//! all memory should be fast. The agent's estimate in the case with the middle size predicts the others.

use demeter_outcome::{Case, Estimate, RunResult, SystemResult};

use crate::shape::value;
use crate::text::clean;
use crate::text::grid::{Row, Table};

/// The setting that differs between the cases of a program.
const SIZE: &str = "machine.fast.usable_mib";

/// The setting that names a program.
const PROGRAM: &str = "workload";

/// A prediction and the measured value: slowdowns, percent.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Compared {
    measured: f64,
    predicted: [f64; 2],
}

impl Compared {
    /// Percentage points between the measured slowdown and the predicted interval.
    fn off(&self) -> f64 {
        let [low, high] = self.predicted;
        (low - self.measured).max(self.measured - high).max(0.0)
    }
}

/// A line for each system, program and size; `None` without predictions.
pub(crate) fn table(result: &RunResult) -> Option<Table> {
    let mut rows = vec![];
    let mut programs: Vec<&str> = vec![];
    for case in &result.cases {
        let program = value(case, PROGRAM);
        if !programs.contains(&program) {
            programs.push(program);
        }
    }
    for program in programs {
        let is_of = |case: &&Case| value(case, PROGRAM) == program;
        let cases: Vec<&Case> = result.cases.iter().filter(is_of).collect();
        for system in &cases.first()?.systems {
            for (size, compared) in compare(&cases, &system.name) {
                let [low, high] = compared.predicted.map(|percent| format!("{percent:.1}"));
                let cells = vec![
                    name(program),
                    system.name.clone(),
                    size,
                    format!("{:.1}", compared.measured),
                    match low == high {
                        true => low,
                        false => format!("{low} to {high}"),
                    },
                    format!("{:.1}", compared.off()),
                ];
                rows.push(Row { cells, class: "" });
            }
        }
    }
    let titles = [
        "program",
        "system",
        "fast MiB",
        "slower %",
        "predicted %",
        "off",
    ];
    (!rows.is_empty()).then(|| Table::plain(titles.map(String::from).to_vec(), 2, rows))
}

/// A program's kind, from its settings as written.
fn name(program: &str) -> String {
    let kind = program
        .split_once("kind = \"")
        .and_then(|(_, rest)| rest.split_once('"'));
    clean::name(kind.map_or(program, |(kind, _)| kind))
}

/// A program's slowdown at each size but the largest, with the estimate that the middle size made.
fn compare(cases: &[&Case], system: &str) -> Vec<(String, Compared)> {
    let of = |case: &&'_ Case| -> Option<(String, SystemResult)> {
        let found = case.systems.iter().find(|of| of.name == system)?;
        found.estimate.as_ref()?;
        let size = case.settings.iter().find(|(key, _)| key == SIZE);
        Some((size?.1.clone(), found.clone()))
    };
    let mut runs: Vec<(String, SystemResult)> = cases.iter().filter_map(of).collect();
    let owned = |run: &SystemResult| run.estimate.as_ref().map_or(0, |of| of.fast_bytes);
    runs.sort_by_key(|(_, run)| owned(run));
    let Some((_, all_fast)) = runs.pop() else {
        return vec![];
    };
    let predictor: Option<Estimate> = runs
        .get(runs.len() / 2)
        .and_then(|(_, run)| run.estimate.clone());
    let compared = |(size, run): &(String, SystemResult)| {
        let [low, high] = predictor.as_ref()?.slowdown(owned(run))?;
        let percent = |slowdown: f64| (slowdown - 1.0) * 100.0;
        Some((
            size.clone(),
            Compared {
                measured: percent(all_fast.steady()? / run.steady()?),
                predicted: [percent(low), percent(high)],
            },
        ))
    };
    runs.iter().filter_map(compared).collect()
}

#[cfg(test)]
mod tests {
    use demeter_outcome::{EstimatePoint, Speed, Unit};

    use super::*;

    fn case(mib: u64, steady: f64, points: &[(u64, f64, f64)]) -> Case {
        let point = |&(fast_bytes, slowdown_min, slowdown_max): &(u64, f64, f64)| EstimatePoint {
            fast_bytes,
            slowdown_min,
            slowdown_max,
        };
        Case {
            group: 0,
            settings: vec![
                (SIZE.into(), mib.to_string()),
                (PROGRAM.into(), "{ kind = \"silo\", size_mib = 9 }".into()),
            ],
            systems: vec![SystemResult {
                name: "demeter".into(),
                speed: Some(Speed::new(Unit::MOPS, steady, steady)),
                estimate: Some(Estimate {
                    fast_bytes: mib,
                    points: points.iter().map(point).collect(),
                }),
                ..SystemResult::default()
            }],
        }
    }

    #[test]
    fn the_middle_size_predicts_the_others() {
        let lie = [(0, 9.0, 9.0)];
        let result = RunResult {
            cases: vec![
                case(400, 2.0, &lie),
                case(100, 1.0, &lie),
                case(300, 1.6, &lie),
                case(200, 1.25, &[(100, 1.5, 1.8), (300, 1.2, 1.3)]),
            ],
            ..RunResult::default()
        };
        let text = table(&result).unwrap().text();
        let lines: Vec<Vec<&str>> = text
            .lines()
            .map(|line| line.split_whitespace().collect())
            .collect();
        // Twice as slow as measured with 400, and 80 % by the estimate.
        assert_eq!(
            lines[1],
            [
                "silo", "demeter", "100", "100.0", "50.0", "to", "80.0", "20.0"
            ]
        );
        assert_eq!(
            lines[2],
            [
                "silo", "demeter", "200", "60.0", "35.0", "to", "55.0", "5.0"
            ]
        );
        assert_eq!(
            lines[3],
            [
                "silo", "demeter", "300", "25.0", "20.0", "to", "30.0", "0.0"
            ]
        );
        assert_eq!(lines.len(), 4);
        assert!(table(&RunResult::default()).is_none());
    }
}
