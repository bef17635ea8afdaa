//! `demeter tune`: searches for a rival's best settings in the lab.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, bail};
use clap::builder::{PossibleValuesParser, TypedValueParser};
use demeter_lab::{Lab, Repetition, Search};
use demeter_outcome::{RunResult, SystemResult};
use demeter_scenario::{Scenario, Settings, System};

use super::run;
use crate::output;
use crate::signals;

/// Longest search, minutes.
const MINUTES_MAX: u64 = 24 * 60;

/// Arguments of `demeter tune`.
#[derive(clap::Args)]
pub struct Args {
    /// The rival to tune
    #[arg(value_parser = PossibleValuesParser::new(["linux", "damon"])
        .try_map(|name| name.parse::<System>()))]
    rival: System,
    /// Scenario file
    scenario: PathBuf,
    /// Time limit, minutes [default: until all parameters have been tried]
    #[arg(long, value_name = "MINUTES", value_parser = clap::value_parser!(u64).range(1..=MINUTES_MAX))]
    time: Option<u64>,
    /// Length of the timed phase instead of the scenario's, seconds
    #[arg(long, value_name = "S")]
    duration: Option<u64>,
    /// Write all tried settings to this file, the best first
    #[arg(long, value_name = "FILE")]
    json: Option<PathBuf>,
}

/// Searches, and prints the best settings.
pub fn tune(args: Args) -> Result<()> {
    let mut scenario = Scenario::load(&args.scenario)?;
    scenario.duration_s = args.duration.unwrap_or(scenario.duration_s);
    scenario.systems = vec![args.rival];
    scenario.settings.clear();
    scenario.check()?;
    if scenario.provision.is_some() {
        bail!(
            "{} runs VMs side by side, which have no settings; tune a scenario of one VM",
            args.scenario.display()
        );
    }
    let search = Search::new(
        args.rival,
        Duration::from_secs(scenario.duration_s),
        args.time.map(|minutes| Duration::from_secs(minutes * 60)),
    );
    output::say(search.promise()?);
    let stop = signals::stop_flag()?;
    let lab = Lab::from_env()?;
    let found = search.run(&mut |settings| {
        output::say(format_args!("{}: {}", args.rival, settings.name));
        let mut scenario = scenario.clone();
        scenario.settings = vec![settings.clone()];
        let run = demeter_lab::run(
            &scenario,
            Repetition::default(),
            &lab,
            &stop,
            &mut run::show,
        );
        Ok::<_, demeter_lab::Error>(run.whole()?.systems.pop())
    })?;
    let Some((settings, result)) = found else {
        bail!("{} was measured nothing of", args.rival);
    };
    let result = RunResult {
        systems: vec![result],
        ..scenario.empty_result("lab")
    };
    if let Some(path) = &args.json {
        result.save(path)?;
    }
    output::print(as_text(&result.systems[0], &settings)?)
}

/// The tried settings, the best first, and the lines for a scenario.
fn as_text(best: &SystemResult, settings: &Settings) -> Result<String> {
    let figure = |result: &SystemResult| match (result.elapsed_s, &result.speed) {
        (Some(s), _) => format!("{s:.1} s"),
        (None, Some(speed)) => {
            let figure = |value: Option<f64>| value.map_or("-".into(), |v| format!("{v:.4}"));
            let (mean, end) = (figure(speed.mean), figure(speed.steady));
            format!("{mean} {}, at the end {end}", speed.unit)
        }
        (None, None) => "see the result file".into(),
    };
    let mut text = String::new();
    for result in std::iter::once(best).chain(&best.other_settings) {
        let name = result.settings.as_deref().unwrap_or_default();
        let mark = if result.metadata.is_disturbed() {
            "  (disturbed by the host)"
        } else {
            ""
        };
        text.push_str(&format!("{name:<60}  {}{mark}\n", figure(result)));
    }
    let toml = toml::to_string(settings).context("cannot write the settings")?;
    Ok(format!(
        "{text}\nThe best, for a scenario:\n\n[[settings]]\n{toml}"
    ))
}
