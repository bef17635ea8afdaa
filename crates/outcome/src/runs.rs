//! Combines several runs: the median run, and management relative to `none`.

use std::num::NonZeroU32;

use crate::schema::{Repeats, Speed, SystemResult};

/// The system without memory management.
pub const NONE: &str = "none";

/// Combines all runs of a case; each system's `repeats` runs are adjacent.
///
/// Returns each system's median run, its management less that of `none`.
pub fn together(
    mut runs: impl Iterator<Item = SystemResult>,
    repeats: NonZeroU32,
) -> Vec<SystemResult> {
    let repeats = repeats.get() as usize;
    let of_next = || middle(runs.by_ref().take(repeats).collect());
    let mut systems: Vec<SystemResult> = std::iter::from_fn(of_next).collect();
    less_none(&mut systems);
    systems
}

/// Subtracts the management of `none` from each system's; without `none` it becomes unknown.
pub fn less_none(systems: &mut [SystemResult]) {
    let none = systems.iter().find(|s| s.name == NONE);
    let baseline = none.map(|n| (n.mgmt_cpu_s, n.mgmt_cpu_steady_s));
    let (whole, steady) = baseline.unwrap_or_default();
    let less = |of: Option<f64>, baseline: Option<f64>| Some(of? - baseline?);
    let subtract = |run: &mut SystemResult| {
        run.mgmt_cpu_s = less(run.mgmt_cpu_s, whole);
        run.mgmt_cpu_steady_s = less(run.mgmt_cpu_steady_s, steady);
    };
    for system in systems {
        subtract(system);
        system.other_settings.iter_mut().for_each(subtract);
    }
}

/// The best of a system's runs under different settings, with the others in it.
///
/// The best run finished first, or else was the fastest. The geometric mean of several workloads counts. If nothing was
/// measured, the first run is returned.
pub fn best(mut runs: Vec<SystemResult>) -> Option<SystemResult> {
    let scores: Vec<f64> = runs.iter().map(|run| score(run).unwrap_or(0.0)).collect();
    let ahead = |best: usize, other: usize| {
        if scores[other] > scores[best] {
            other
        } else {
            best
        }
    };
    let best = (0..runs.len()).reduce(ahead)?;
    let mut kept = runs.remove(best);
    kept.other_settings = runs;
    Some(kept)
}

/// A score that compares runs of the same work.
fn score(run: &SystemResult) -> Option<f64> {
    let of = |elapsed_s: Option<f64>, speed: &Option<Speed>| {
        let speed = speed.as_ref();
        let mean = || Some((speed?.mean?, speed?.unit.is_time()));
        let (figure, less_is_better) = elapsed_s.map(|s| (s, true)).or_else(mean)?;
        (figure > 0.0).then(|| if less_is_better { 1.0 / figure } else { figure })
    };
    if run.workloads.is_empty() || run.elapsed_s.is_some() {
        return of(run.elapsed_s, &run.speed);
    }
    let logs = (run.workloads.iter()).map(|w| of(w.elapsed_s, &w.speed).map(f64::ln));
    let sum: f64 = logs.sum::<Option<f64>>()?;
    Some((sum / run.workloads.len() as f64).exp())
}

/// The figure by which a system's runs are sorted.
fn main_figure(result: &SystemResult) -> Option<f64> {
    result.elapsed_s.or(result.mean())
}

/// The median of a system's runs (the lower one of an even number), with the range of all.
///
/// An unfinished run has no elapsed time, and is ignored if others have one.
pub fn middle(mut runs: Vec<SystemResult>) -> Option<SystemResult> {
    if runs.len() > 1 && runs.iter().any(|run| run.elapsed_s.is_some()) {
        runs.retain(|run| run.elapsed_s.is_some());
    }
    let order = |run: &SystemResult| main_figure(run).unwrap_or(f64::MAX);
    runs.sort_by(|a, b| order(a).total_cmp(&order(b)));
    let figures = runs
        .first()
        .and_then(main_figure)
        .zip(runs.last().and_then(main_figure));
    let count = runs.len();
    let mut kept = runs.into_iter().nth(count.checked_sub(1)? / 2)?;
    kept.repeats = figures.filter(|_| count > 1).map(|(min, max)| Repeats {
        runs: count as u32,
        min,
        max,
    });
    Some(kept)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{Speed, Unit, WorkloadResult};

    proptest! {
        #[test]
        fn the_run_in_the_middle_is_kept(
            figures in prop::collection::vec((any::<bool>(), 0.1f64..9.0), 1..9),
        ) {
            let run = |&(ended, figure): &(bool, f64)| SystemResult {
                elapsed_s: ended.then_some(figure),
                speed: Some(Speed::new(Unit::MOPS, figure, None)),
                ..SystemResult::default()
            };
            let kept = middle(figures.iter().map(run).collect()).unwrap();
            let ended = figures.iter().any(|(ended, _)| *ended);
            let mut left: Vec<f64> = figures
                .iter()
                .filter(|f| !ended || f.0)
                .map(|f| f.1)
                .collect();
            left.sort_by(f64::total_cmp);
            prop_assert_eq!(kept.mean(), Some(left[(left.len() - 1) / 2]));
            let repeats = kept.repeats.map(|r| (r.runs as usize, r.min, r.max));
            let expected = (left.len(), left[0], left[left.len() - 1]);
            prop_assert_eq!(repeats, (left.len() > 1).then_some(expected));
        }
    }

    #[test]
    fn management_is_what_comes_on_top_of_none() {
        let system = |name: &str, s: f64| SystemResult {
            name: name.into(),
            mgmt_cpu_s: Some(s),
            mgmt_cpu_steady_s: Some(s / 4.0),
            ..SystemResult::default()
        };
        let mut systems = [system("linux", 5.0), system("none", 1.0)];
        less_none(&mut systems);
        assert_eq!(
            (systems[0].mgmt_cpu_s, systems[0].mgmt_cpu_steady_s),
            (Some(4.0), Some(1.0))
        );
        assert_eq!(systems[1].mgmt_cpu_s, Some(0.0));
        less_none(&mut systems[..1]);
        assert_eq!(
            (systems[0].mgmt_cpu_s, systems[0].mgmt_cpu_steady_s),
            (None, None)
        );
    }

    #[test]
    fn the_best_settings_are_those_of_the_best_run() {
        let run = |settings: &str, elapsed_s, unit: &str, mean| SystemResult {
            settings: Some(settings.into()),
            elapsed_s,
            speed: Some(Speed::new(Unit::new(unit), mean, None)),
            ..SystemResult::default()
        };
        let of = |runs: Vec<SystemResult>| {
            let best = best(runs).unwrap();
            let others: Vec<_> = (best.other_settings.into_iter())
                .map(|other| other.settings.unwrap())
                .collect();
            (best.settings.unwrap(), others.join(" "))
        };
        let told = |best: &str, others: &str| (best.to_owned(), others.to_owned());
        // Throughput, latency, elapsed time, nothing.
        let [a, b, c] = [("a", 1.0), ("b", 3.0), ("c", 2.0)]
            .map(|(name, mean)| ["Mops", "ns"].map(|unit| run(name, None, unit, Some(mean))));
        let unit = |i: usize| [&a, &b, &c].map(|runs| runs[i].clone()).to_vec();
        assert_eq!(of(unit(0)), told("b", "a c"));
        assert_eq!(of(unit(1)), told("a", "b c"));
        let timed = vec![
            run("a", Some(5.0), "Mops", Some(9.0)),
            run("b", Some(4.0), "Mops", None),
        ];
        assert_eq!(of(timed), told("b", "a"));
        let nothing = vec![run("a", None, "Mops", None), run("b", None, "Mops", None)];
        assert_eq!(of(nothing), told("a", "b"));
        // Several workloads: 2 and 2 are better than 1 and 3.
        let several = |settings: &str, means: [f64; 2]| SystemResult {
            settings: Some(settings.into()),
            workloads: (means.iter())
                .map(|&mean| WorkloadResult {
                    speed: Some(Speed::new(Unit::MOPS, mean, None)),
                    ..WorkloadResult::default()
                })
                .collect(),
            ..SystemResult::default()
        };
        let several = vec![several("a", [1.0, 3.0]), several("b", [2.0, 2.0])];
        assert_eq!(of(several), told("b", "a"));
    }
}
