//! Runs many scenarios as the cases of one result.

use std::collections::BTreeSet;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};
use demeter_outcome::{Case, RunResult, SystemResult};
use demeter_scenario::Scenario;

use crate::output;

/// Maximum number of scenarios.
pub const SCENARIOS_MAX: usize = 1000;

/// Several scenarios of one result.
pub struct Cases {
    /// Name of the result.
    pub name: String,
    /// The seed that identifies these cases.
    pub seed: u64,
    /// At least one.
    pub scenarios: Vec<Scenario>,
}

impl Cases {
    /// Loads files and folders; `adapt` changes each scenario.
    pub fn load(paths: &[PathBuf], adapt: impl Fn(&mut Scenario)) -> anyhow::Result<Self> {
        let mut scenarios = vec![];
        for path in files(paths)? {
            let mut scenario = Scenario::load(&path)?;
            adapt(&mut scenario);
            scenario.check()?;
            if !scenario.vary.is_empty() {
                bail!("{} has cases ([[vary]]): run it by itself", path.display());
            }
            scenarios.push(scenario);
        }
        let first = paths
            .first()
            .map(PathBuf::as_path)
            .unwrap_or(Path::new("."));
        let Some(seed) = scenarios.first().map(|scenario| scenario.seed) else {
            bail!("there is no scenario (*.toml) in {}", first.display());
        };
        // Several files are named after their folder.
        let folder = match first.is_dir() {
            true => Some(first),
            false => first.parent().filter(|folder| folder.file_name().is_some()),
        };
        let name = folder
            .and_then(Path::file_name)
            .unwrap_or("scenarios".as_ref());
        Ok(Self {
            name: name.to_string_lossy().into_owned(),
            seed,
            scenarios,
        })
    }

    /// Runs all scenarios by `run`. Writes the result to `json` after each, so that a later failure loses nothing.
    pub fn run(
        &self,
        on: &str,
        json: Option<&Path>,
        mut run: impl FnMut(&Scenario) -> anyhow::Result<Vec<SystemResult>>,
    ) -> anyhow::Result<RunResult> {
        let durations_s = self.scenarios.iter().map(|scenario| scenario.duration_s);
        let mut result = RunResult {
            scenario: self.name.clone(),
            on: on.into(),
            seed: self.seed,
            duration_s: durations_s.max().unwrap_or(0),
            ..RunResult::default()
        };
        let count = self.scenarios.len();
        let differ_in_size = self.differ_in_size();
        for (scenario, n) in self.scenarios.iter().zip(1..) {
            let name = &scenario.name;
            output::say(format_args!("{name} ({n} of {count}) {}", scenario.about));
            let systems = run(scenario).with_context(|| name.clone())?;
            let mut settings = vec![("scenario".into(), name.clone())];
            if differ_in_size {
                let mib = scenario.footprint_mib().to_string();
                settings.push(("workload.size_mib".into(), mib));
            }
            result.cases.push(Case {
                group: 0,
                settings,
                systems,
            });
            if let Some(path) = json {
                result.save(path)?;
            }
        }
        Ok(result)
    }
}

impl Cases {
    /// Whether there are several that differ only in size.
    fn differ_in_size(&self) -> bool {
        let mut others = self.scenarios.iter();
        let Some(first) = others.next().map(Scenario::without_size) else {
            return false;
        };
        let sizes: BTreeSet<u64> = self.scenarios.iter().map(Scenario::footprint_mib).collect();
        sizes.len() > 1
            && sizes.len() == self.scenarios.len()
            && others.all(|other| other.without_size() == first)
    }
}

/// The files, and the folders' scenario files, by name.
fn files(paths: &[PathBuf]) -> anyhow::Result<Vec<PathBuf>> {
    let mut files = vec![];
    for path in paths {
        if path.is_dir() {
            files.extend(files_of(path)?);
        } else {
            files.push(path.clone());
        }
    }
    if files.len() > SCENARIOS_MAX {
        bail!(
            "{} scenarios are more than {SCENARIOS_MAX}: run fewer at a time",
            files.len()
        );
    }
    Ok(files)
}

fn files_of(folder: &Path) -> anyhow::Result<Vec<PathBuf>> {
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
