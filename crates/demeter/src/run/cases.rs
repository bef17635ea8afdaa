//! `demeter run FOLDER`: every scenario of a folder, and one line of each, worst first.

use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use demeter_outcome::{Case, RunResult, SystemResult};
use demeter_scenario::Scenario;

use crate::output;

/// More scenarios than anybody keeps in a folder.
const SCENARIOS_MAX: usize = 1000;

/// Runs all of them by `run`, each changed as `adapt` says; writes the result to `json` after each,
/// so that what was measured is kept whatever follows.
pub fn run(
    folder: &Path,
    on: &str,
    json: Option<&Path>,
    adapt: impl Fn(&mut Scenario),
    mut run: impl FnMut(&Scenario) -> anyhow::Result<Vec<SystemResult>>,
) -> anyhow::Result<()> {
    let mut scenarios = vec![];
    for path in files(folder)? {
        let mut scenario = Scenario::load(&path)?;
        adapt(&mut scenario);
        scenario.check()?;
        if !scenario.vary.is_empty() {
            bail!("{} has cases ([[vary]]): run it by itself", path.display());
        }
        scenarios.push(scenario);
    }
    let Some(first) = scenarios.first() else {
        bail!("there is no scenario (*.toml) in {}", folder.display());
    };
    let name = folder.file_name().unwrap_or(folder.as_os_str());
    let mut result = RunResult {
        scenario: name.to_string_lossy().into_owned(),
        on: on.into(),
        seed: first.seed,
        duration_s: first.duration_s,
        ..RunResult::default()
    };
    for (n, scenario) in scenarios.iter().enumerate() {
        output::say(format_args!(
            "{} ({} of {})",
            scenario.name,
            n + 1,
            scenarios.len()
        ));
        let systems = run(scenario).with_context(|| scenario.name.clone())?;
        result.cases.push(Case {
            group: 0,
            settings: vec![("scenario".into(), scenario.name.clone())],
            systems,
        });
        if let Some(path) = json {
            result.save(path)?;
        }
    }
    output::print(demeter_report::worst_first(&result))
}

/// The scenario files in a folder, by name.
fn files(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let read = || -> std::io::Result<Vec<PathBuf>> {
        let entries = std::fs::read_dir(folder)?.take(SCENARIOS_MAX);
        let paths = entries.map(|entry| entry.map(|e| e.path()));
        paths.collect()
    };
    let mut paths = read().with_context(|| format!("cannot read {}", folder.display()))?;
    paths.retain(|path| path.extension().is_some_and(|e| e == "toml"));
    paths.sort();
    Ok(paths)
}
