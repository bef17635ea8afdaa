//! `demeter run --random N`: new random scenarios.

use std::hash::{BuildHasher, RandomState};
use std::path::Path;

use anyhow::{Context, ensure};
use demeter_outcome::write_file;
use demeter_scenario::Scenario;

use super::cases::{Cases, SCENARIOS_MAX};
use crate::output;

/// The first `count` random scenarios of a seed, changed by `adapt` and kept in the folder `keep`.
///
/// Without a seed, a random one is drawn.
pub fn cases(
    count: u64,
    seed: Option<u64>,
    keep: Option<&Path>,
    adapt: impl Fn(&mut Scenario),
) -> anyhow::Result<Cases> {
    ensure!(
        (1..=SCENARIOS_MAX as u64).contains(&count),
        "--random {count}: give 1 to {SCENARIOS_MAX} cases"
    );
    let seed = seed.unwrap_or_else(draw);
    output::say(format_args!("random scenarios of --seed {seed}"));
    let mut scenarios = vec![];
    for index in 0..count {
        let mut scenario = Scenario::random(seed, index);
        adapt(&mut scenario);
        scenario.check()?;
        scenarios.push(scenario);
    }
    if let Some(folder) = keep {
        self::keep(folder, &scenarios)?;
    }
    Ok(Cases {
        name: "random".into(),
        seed,
        scenarios,
    })
}

/// A seed of 32 bits, short enough to read out, from the kernel's randomness behind every hasher.
fn draw() -> u64 {
    RandomState::new().hash_one(()) >> 32
}

/// Writes each scenario to its own file.
fn keep(folder: &Path, scenarios: &[Scenario]) -> anyhow::Result<()> {
    std::fs::create_dir_all(folder)
        .with_context(|| format!("cannot make the folder {}", folder.display()))?;
    for scenario in scenarios {
        let text = toml::to_string(scenario).context("cannot write the scenario as TOML")?;
        let path = folder.join(format!("{}.toml", scenario.name));
        write_file(&path, text.as_bytes())?;
    }
    Ok(())
}
