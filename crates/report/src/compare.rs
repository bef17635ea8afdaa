//! Two results of one scenario side by side: does the simulator say what the lab measured?

use crate::columns::aligned;
use crate::schema::{RunResult, SystemResult};
use crate::summary::steady_of_oracle;
use crate::text;

/// Length of an epoch of the agent, seconds.
const EPOCH_S: f64 = 0.5;

/// How far apart two figures may be and still agree.
#[derive(Debug, Clone, Copy)]
enum Limit {
    /// As a share of the second one.
    Share(f64),
    /// In the figure's own unit.
    Absolute(f64),
}

struct Figure {
    title: &'static str,
    of: fn(&RunResult, &SystemResult) -> Option<f64>,
    limit: Limit,
    show: fn(f64) -> String,
}

/// What must agree, and how closely.
const FIGURES: [Figure; 4] = [
    Figure {
        title: "steady, of oracle",
        of: |result, system| steady_of_oracle(&result.systems, system),
        limit: Limit::Share(0.15),
        show: |share| format!("{share:.3}"),
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

/// Why two results cannot be compared.
#[derive(Debug, PartialEq, Eq, thiserror::Error)]
pub enum CompareError {
    /// They are of different scenarios.
    #[error("one result is of the scenario {0}, the other of {1}; compare runs of one scenario")]
    Scenarios(String, String),
    /// They have no system in common.
    #[error("the two results have no system in common; run the same ones")]
    Systems,
}

/// Both results' figures for each system that both have, as lines of text: the figures, their
/// difference relative to the second result (or in seconds), and whether they agree.
///
/// # Errors
/// When there is nothing to compare.
pub fn compare(first: &RunResult, second: &RunResult) -> Result<String, CompareError> {
    if first.scenario != second.scenario {
        let name = |result: &RunResult| text::name(&result.scenario);
        return Err(CompareError::Scenarios(name(first), name(second)));
    }
    let mut rows: Vec<Vec<String>> = Vec::new();
    let (mut agree, mut all) = (0, 0);
    for a in &first.systems {
        let Some(b) = second.systems.iter().find(|b| b.name == a.name) else {
            continue;
        };
        for figure in &FIGURES {
            let (of_a, of_b) = ((figure.of)(first, a), (figure.of)(second, b));
            let Some(verdict) = verdict(of_a, of_b, figure.limit) else {
                continue;
            };
            all += 1;
            agree += usize::from(verdict.agrees);
            let show = |value: Option<f64>| value.map_or("-".into(), figure.show);
            rows.push(vec![
                text::name(&a.name),
                figure.title.into(),
                show(of_a),
                show(of_b),
                verdict.difference,
                if verdict.agrees { "yes" } else { "NO" }.into(),
            ]);
        }
    }
    if rows.is_empty() {
        return Err(CompareError::Systems);
    }
    let heading = [
        "system",
        "figure",
        &heading(first, second),
        &heading(second, first),
        "difference",
        "agree",
    ];
    rows.insert(0, heading.map(String::from).into());
    Ok(format!(
        "{}\n{agree} of {all} figures agree: steady throughput (or latency) relative to the oracle \
         within 15 %, t90\nwithin two epochs ({:.0} s), bytes moved within 30 %. A figure that only \
         one result has does not agree.\n",
        aligned(&rows, 2),
        2.0 * EPOCH_S,
    ))
}

/// Where a result is from; with its seed where that alone tells it from the other.
fn heading(result: &RunResult, other: &RunResult) -> String {
    let on = text::name(&result.on);
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

/// Nothing where neither has the figure.
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
            // As exact as it is shown: to a tenth.
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

    fn result(on: &str, steady: f64, t90_s: Option<f64>, moved: u64) -> RunResult {
        let system = |name: &str, steady_mops, t90_s, moved| SystemResult {
            name: name.into(),
            steady_mops: Some(steady_mops),
            mean_mops: Some(steady_mops),
            t90_s,
            bytes_promoted: Some(moved),
            bytes_demoted: Some(moved),
            ..SystemResult::default()
        };
        RunResult {
            schema: crate::SCHEMA,
            scenario: "gups".into(),
            on: on.into(),
            seed: 1,
            duration_s: 60,
            shift_at_s: None,
            systems: vec![
                system("oracle", 2.0, Some(0.0), 0),
                system("demeter", steady, t90_s, moved),
            ],
            cases: vec![],
            published: vec![],
        }
    }

    /// The verdicts on demeter's figures.
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
    fn columns_say_where_the_results_are_from() {
        let lab = result("lab", 1.8, None, 0);
        let first = |a: &RunResult| compare(a, &lab).unwrap().lines().next().unwrap().to_owned();
        assert!(first(&result("sim", 1.8, None, 0)).contains("sim"));
        assert!(first(&lab).contains("lab, seed 1"));
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
