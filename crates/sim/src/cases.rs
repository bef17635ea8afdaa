//! All runs of a scenario: its cases, its systems, several seeds; and what follows from them
//! together.

use std::num::NonZeroU32;

use demeter_report::{Case, Published, Repeats, RunResult, SCHEMA, SystemResult, figure};
use demeter_scenario::{self as scenario, Scenario};

use crate::error::SimError;
use crate::pool::{Event, Job, Limits, run_jobs};

/// Runs all cases and systems of a scenario, each with `repeats` seeds: the scenario's and those
/// that follow it. Of these runs the one in the middle is kept. `tell` is told how they come on.
/// The result does not depend on how many run at a time.
///
/// # Errors
/// As [`run_jobs`], or when the scenario's cases cannot be.
pub fn run_all(
    scenario: &Scenario,
    repeats: NonZeroU32,
    limits: Limits<'_>,
    tell: &(dyn Fn(Event<'_>) + Sync),
) -> Result<RunResult, SimError> {
    let cases = scenario.cases()?;
    let jobs = cases.iter().flat_map(|case| {
        let of_case = &case.point.scenario;
        of_case.systems.iter().flat_map(move |&system| {
            (0..repeats.get()).map(move |n| Job {
                point: &case.point,
                system,
                seed: of_case.seed.wrapping_add(n.into()),
            })
        })
    });
    let jobs: Vec<Job<'_>> = jobs.collect();
    let mut results = run_jobs(&jobs, limits, tell)?.into_iter();
    let mut systems_of = |case: &scenario::Case| {
        let runs = case.point.scenario.systems.len() * repeats.get() as usize;
        together(results.by_ref().take(runs), repeats)
    };
    let mut result = RunResult {
        schema: SCHEMA,
        scenario: scenario.name.clone(),
        on: "sim".into(),
        seed: scenario.seed,
        duration_s: scenario.duration_s,
        shift_at_s: scenario.shift_at_s(),
        systems: vec![],
        cases: vec![],
        published: vec![],
    };
    if scenario.vary.is_empty() {
        result.systems = cases.iter().flat_map(systems_of).collect();
    } else {
        let case = |case: &scenario::Case| Case {
            group: case.group,
            settings: case.point.texts(),
            systems: systems_of(case),
        };
        result.cases = cases.iter().map(case).collect();
    }
    result.published = scenario
        .published
        .iter()
        .map(|published| beside_ours(published, &result))
        .collect();
    Ok(result)
}

/// What all runs of one case give together, each system's `repeats` runs next to each other: of
/// each system the run in the middle, its management less that of `none`.
pub fn together(
    mut runs: impl Iterator<Item = SystemResult>,
    repeats: NonZeroU32,
) -> Vec<SystemResult> {
    let repeats = repeats.get() as usize;
    let of_next = || middle(runs.by_ref().take(repeats).collect());
    let mut systems: Vec<SystemResult> = std::iter::from_fn(of_next).collect();
    subtract_none(&mut systems);
    systems
}

/// The figure by which runs of one system are put in order.
fn main_figure(result: &SystemResult) -> Option<f64> {
    result
        .elapsed_s
        .or(result.mean_mops)
        .or(result.mean_latency_ns)
}

/// Of the runs of one system the one in the middle (of an even number, the lower one), with what
/// the others gave. A run whose work did not end has no elapsed time and is left out where others
/// have one.
fn middle(mut runs: Vec<SystemResult>) -> Option<SystemResult> {
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

/// Management is what a system costs on top of what `none` has anyway; unknown without it.
fn subtract_none(systems: &mut [SystemResult]) {
    let none = systems.iter().find(|s| s.name == "none");
    let baseline = none.map(|n| (n.mgmt_cpu_s, n.mgmt_cpu_steady_s));
    let less = |of: Option<f64>, baseline: Option<f64>| Some(of? - baseline?);
    for system in systems {
        let (whole, steady) = baseline.unwrap_or((None, None));
        system.mgmt_cpu_s = less(system.mgmt_cpu_s, whole);
        system.mgmt_cpu_steady_s = less(system.mgmt_cpu_steady_s, steady);
    }
}

/// A published figure with ours; nothing of ours where its case or system was not run.
fn beside_ours(published: &scenario::Published, result: &RunResult) -> Published {
    let case = result
        .cases
        .iter()
        .find(|c| published.is_about(&c.settings));
    let systems = match case {
        Some(case) => &case.systems,
        None => &result.systems,
    };
    let of = |system: scenario::System| {
        let name = system.to_string();
        let system = systems.iter().find(|s| s.name == name)?;
        figure(system, &published.figure)
    };
    let ours = match published.over {
        None => of(published.system),
        Some(over) => of(published.system)
            .zip(of(over))
            .map(|(ours, over)| ours / over),
    };
    Published {
        figure: published.figure.clone(),
        system: published.system.to_string(),
        over: published.over.map(|over| over.to_string()),
        case: published.case.clone().into_iter().collect(),
        value: published.value,
        ours: ours.filter(|ours| ours.is_finite()),
        within: published.within,
        source: published.source.clone(),
    }
}

#[cfg(test)]
mod tests;
