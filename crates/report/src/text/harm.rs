//! Counts the cases in which an agent keeps the required speed.

use demeter_outcome::{Case, NONE, RunResult};

use crate::OURS;
use crate::shape::case_title;
use crate::text::worst_first::{Beside, managed};

/// Required speed relative to none: mean and last third. An agent without a PMU may cost one percentage point more.
const LEAST: [f64; 2] = [0.98, 0.99];
const LEAST_WITHOUT_PMU: [f64; 2] = [0.97, 0.98];

/// A line for each of our systems: the number of cases with the required speed, and the worst case.
pub fn harm(result: &RunResult) -> String {
    let lines = managed(result).into_iter();
    lines.filter_map(|name| line(result, name)).collect()
}

fn line(result: &RunResult, name: &str) -> Option<String> {
    let [mean, end] = match name.strip_prefix(OURS)? {
        "-damon" => LEAST_WITHOUT_PMU,
        _ => LEAST,
    };
    let beside = |case| Some((case, Beside::of(case, name, NONE)?));
    let found: Vec<(&Case, Beside)> = result.cases.iter().filter_map(beside).collect();
    let reaches = |figure: Option<f64>, least: f64| figure.is_none_or(|figure| figure >= least);
    let good =
        |(_, beside): &&(&Case, Beside)| reaches(beside.mean, mean) && reaches(beside.end, end);
    let (case, worst) = (found.iter()).min_by(|(_, a), (_, b)| a.least().total_cmp(&b.least()))?;
    let times = |value: Option<f64>| value.map_or("-".into(), |value| format!("{value:.3}"));
    Some(format!(
        "{name}: {} of {} cases at {mean} of none or above, and at {end} in the last third; worst {}: {}, {}\n",
        found.iter().filter(good).count(),
        found.len(),
        case_title(case),
        times(worst.mean),
        times(worst.end),
    ))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::text::worst_first::tests::{case, system};

    #[test]
    fn cases_are_counted_by_both_figures_and_the_worst_is_named() {
        let at = |name: &str, mean: f64, end: f64| {
            let none = system(NONE, 1.0, 1.0);
            let ours = ["demeter", "demeter-damon"].map(|name| system(name, mean, end));
            case(name, [vec![none], ours.to_vec()].concat())
        };
        let result = RunResult {
            cases: vec![
                at("even", 1.0, 1.0),
                at("slow", 0.975, 1.0),
                at("slow at last", 0.985, 0.97),
            ],
            ..RunResult::default()
        };
        let text = harm(&result);
        let lines: Vec<&str> = text.lines().collect();
        assert_eq!(lines.len(), 2);
        assert!(lines[0].starts_with("demeter: 1 of 3 cases at 0.98"));
        assert!(lines[0].ends_with("worst slow at last: 0.985, 0.970"));
        assert!(lines[1].starts_with("demeter-damon: 2 of 3 cases at 0.97"));
    }
}
