//! All runs of a scenario (cases, systems, seeds) and the figures derived from them.

use std::num::NonZeroU32;

use demeter_outcome::{Case, Published, RunResult, SystemResult, best, together};
use demeter_scenario::{self as scenario, Scenario, Settings};

use crate::error::SimError;
use crate::parallel_runs::{PlannedRun, RunLimits, RunProgress, run_jobs};
use crate::{provision, resizable};

/// Runs all cases and systems of a scenario. Each system runs under each of its settings, with `repeats` seeds. Seeds
/// count up from the scenario's. Of the repeats, the median run is kept, and of the settings, the best. `tell` receives
/// progress. The result does not depend on the number of workers.
///
/// # Errors
/// As [`run_jobs`], or when the scenario's cases are invalid.
pub fn run_all(
    scenario: &Scenario,
    repeats: NonZeroU32,
    limits: RunLimits<'_>,
    tell: &(dyn Fn(RunProgress<'_>) + Sync),
) -> Result<RunResult, SimError> {
    let variants = provision::variants(scenario);
    if variants.len() > 1 {
        // Before the first run starts.
        resizable::check(scenario)?;
        let mut all = scenario.empty_result("sim");
        for (name, one) in variants {
            let found = run_all(&one, repeats, limits, tell)?.systems;
            let named = |found| SystemResult {
                name: name.clone(),
                ..found
            };
            all.systems.extend(found.into_iter().map(named));
        }
        return Ok(all);
    }
    let cases = scenario.cases()?;
    let settings = |case: &scenario::Case| case.point.scenario.settings_to_run().collect();
    let settings: Vec<Vec<Settings>> = cases.iter().map(settings).collect();
    let jobs = cases.iter().zip(&settings).flat_map(|(case, settings)| {
        let seed = case.point.scenario.seed;
        settings.iter().flat_map(move |under| {
            (0..repeats.get()).map(move |n| PlannedRun {
                point: &case.point,
                system: under.system,
                under: (!under.name.is_empty()).then_some(under),
                seed: seed.wrapping_add(n.into()),
            })
        })
    });
    let jobs: Vec<PlannedRun<'_>> = jobs.collect();
    let mut results = run_jobs(&jobs, limits, tell)?.into_iter();
    let mut runs_of = settings.iter().map(|s| s.len() * repeats.get() as usize);
    let mut systems_of = |_: &scenario::Case| {
        let runs = runs_of.next().unwrap_or(0);
        let middles = together(results.by_ref().take(runs), repeats);
        let of_systems = middles.chunk_by(|a, b| a.name == b.name);
        of_systems.filter_map(|runs| best(runs.to_vec())).collect()
    };
    let mut result = scenario.empty_result("sim");
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

/// Tells whether settings belong to a case.
type IsCase<'a> = dyn Fn(&[(String, String)]) -> bool + 'a;

/// A published figure and ours; ours is none if its case or system was not run.
fn beside_ours(published: &scenario::Published, result: &RunResult) -> Published {
    let of = |system: scenario::System, is_case: &IsCase<'_>| {
        let case = result.cases.iter().find(|c| is_case(&c.settings));
        let systems = case.map_or(&result.systems, |case| &case.systems);
        let name = system.to_string();
        published
            .figure
            .of(systems.iter().find(|s| s.name == name)?)
    };
    let ours = of(published.system, &|case| published.is_about(case));
    let ours = match published.over {
        None => ours,
        Some(over) => ours
            .zip(of(over, &|case| published.is_over(case)))
            .map(|(ours, over)| ours / over),
    };
    // The case label gives the settings that all cases share.
    let others = published.over_case.iter();
    let others = others.filter(|(key, value)| published.case.get(*key) != Some(*value));
    let others: String = others
        .map(|(key, value)| format!(" {key}={value}"))
        .collect();
    Published {
        figure: published.figure.to_string(),
        system: published.system.to_string(),
        over: published.over.map(|over| format!("{over}{others}")),
        case: published.case.clone().into_iter().collect(),
        value: published.value,
        ours: ours.filter(|ours| ours.is_finite()),
        within: published.within,
        source: published.source.clone(),
    }
}

#[cfg(test)]
mod tests;
