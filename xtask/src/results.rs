//! Stores results, and generates the tables of documents from them.

use std::fs;
use std::path::PathBuf;
use std::process::Command;

use anyhow::{Context, ensure};
use serde_json::{Value, json};

use crate::docs::WRITE;
use crate::shell;

/// Folder of stored results. `crates/demeter/tests/results.rs` describes the format and makes the tables.
const FOLDER: &str = "results";

/// Generates the tables of the documents from `results/`.
#[derive(clap::Args)]
pub struct Args {
    /// Store this first: a result file (of `demeter run --json`), without the parts that no table needs, or another
    /// command's output (FILE.txt)
    #[arg(long, value_name = "FILE")]
    add: Option<PathBuf>,
    /// Its name [default: the scenario's]
    #[arg(long, requires = "add")]
    name: Option<String>,
    /// The command that made it, required for a command's output [default: `demeter run scenarios/SCENARIO.toml --on
    /// WHERE`]
    #[arg(long, requires = "add")]
    command: Option<String>,
    /// The commit that made it [default: the last one]
    #[arg(long, requires = "add")]
    commit: Option<String>,
    /// The machine that made it [default: this one; none for the simulator, whose results are equal everywhere]
    #[arg(long, requires = "add")]
    machine: Option<String>,
}

/// Stores the given result, and generates the tables.
pub fn results(args: &Args) -> anyhow::Result<()> {
    if args.add.is_some() {
        add(args)?;
    }
    let mut tables = shell::cargo("test --locked --quiet --package demeter --test results");
    tables.env(WRITE, "1");
    shell::run(tables)
}

/// Stores a result.
fn add(args: &Args) -> anyhow::Result<()> {
    let file = args.add.as_deref().context("no result file")?;
    let text =
        fs::read_to_string(file).with_context(|| format!("cannot read {}", file.display()))?;
    let added = match file.extension() {
        Some(extension) if extension == "txt" => Added::printed(text, args)?,
        _ => Added::result(&text, args)
            .with_context(|| format!("{} is no result file", file.display()))?,
    };
    let name = added.name;
    ensure!(
        name.chars().all(|c| c.is_ascii_alphanumeric() || c == '-'),
        "{name:?}: a result's name has letters, digits and hyphens only"
    );
    let commit = match &args.commit {
        Some(commit) => commit.clone(),
        None => said(shell::program("git", "rev-parse --short=7 HEAD"))?,
    };
    let machine = match &args.machine {
        Some(machine) => machine.clone(),
        None if added.is_simulated => "the same on every machine".into(),
        None => machine()?,
    };
    let stored = json!({
        "command": added.command,
        "commit": commit,
        "machine": machine,
        "result": added.result,
    });
    let path = shell::root().join(FOLDER).join(format!("{name}.json"));
    let text = serde_json::to_string_pretty(&stored)? + "\n";
    fs::write(&path, text).with_context(|| format!("cannot write {}", path.display()))?;
    eprintln!("wrote {FOLDER}/{name}.json");
    Ok(())
}

/// A result with its origin.
struct Added {
    name: String,
    command: String,
    is_simulated: bool,
    /// A result file's content, or another command's output as a string.
    result: Value,
}

impl Added {
    fn result(text: &str, args: &Args) -> anyhow::Result<Self> {
        let mut result: Value = serde_json::from_str(text)?;
        let word = |key: &str| result[key].as_str().with_context(|| format!("no {key}"));
        let (scenario, on) = (word("scenario")?, word("on")?);
        let usual = || format!("demeter run scenarios/{scenario}.toml --on {on}");
        let (name, command, is_simulated) = (
            args.name.clone().unwrap_or_else(|| scenario.to_owned()),
            args.command.clone().unwrap_or_else(usual),
            on == "sim",
        );
        shorten(&mut result);
        Ok(Self {
            name,
            command,
            is_simulated,
            result,
        })
    }

    fn printed(text: String, args: &Args) -> anyhow::Result<Self> {
        Ok(Self {
            name: args.name.clone().context("give it a --name")?,
            command: args
                .command
                .clone()
                .context("say with --command what printed it")?,
            is_simulated: false,
            result: Value::String(text),
        })
    }
}

/// Removes the parts that no table needs. These are estimates, all counters except those of a nested host's KVM, and the
/// series except its end, which shows the length of the run.
fn shorten(value: &mut Value) {
    match value {
        Value::Object(fields) => {
            for key in ["cpu_s", "estimate", "other_settings"] {
                fields.remove(key);
            }
            if let Some(Value::Object(counters)) = fields.get_mut("counters") {
                let has_kvm = counters.keys().any(|name| name.starts_with("kvm_"));
                let is_shown = |name: &str| name.starts_with("kvm_") || name == "pgmigrate_success";
                counters.retain(|name, _| has_kvm && is_shown(name));
                if counters.is_empty() {
                    fields.remove("counters");
                }
            }
            if let Some(Value::Array(points)) = fields.get_mut("series") {
                points.drain(..points.len().saturating_sub(1));
            }
            fields.values_mut().for_each(shorten);
        }
        Value::Array(values) => values.iter_mut().for_each(shorten),
        _ => {}
    }
}

/// A short description of this machine.
fn machine() -> anyhow::Result<String> {
    let text = fs::read_to_string("/proc/cpuinfo").context("cannot read /proc/cpuinfo")?;
    let model = text.lines().find_map(|line| {
        let (key, model) = line.split_once(':')?;
        (key.trim() == "model name").then(|| model.trim().to_owned())
    });
    let model = model.context("/proc/cpuinfo names no model; give --machine")?;
    // All cores, including those that this process may not use.
    let cores = text.lines().filter(|line| line.starts_with("processor"));
    Ok(format!("{model}, {} cores", cores.count()))
}

/// A program's output.
fn said(mut command: Command) -> anyhow::Result<String> {
    let output = command.output().context("cannot run git")?;
    ensure!(
        output.status.success(),
        "git names no commit; give --commit"
    );
    Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn figures_stay_and_series_go() {
        let point = |t_s: f64| json!({ "t_s": t_s, "speed": 1.0 });
        let mut result = json!({
            "systems": [{
                "speed": { "mean": 1.5 },
                "cpu_s": { "kswapd": 1.0 },
                "counters": { "a": 1, "pgmigrate_success": 2 },
                "other_settings": [{ "name": "linux" }],
                "workloads": [{ "series": [point(1.0)] }],
                "series": [point(1.0), point(2.0)],
            }, { "series": [], "counters": { "kvm_exits": 1, "pgmigrate_success": 2, "a": 3 } }],
        });
        shorten(&mut result);
        let want = json!({
            "systems": [{
                "speed": { "mean": 1.5 },
                "workloads": [{ "series": [point(1.0)] }],
                "series": [point(2.0)],
            }, { "series": [], "counters": { "kvm_exits": 1, "pgmigrate_success": 2 } }],
        });
        assert_eq!(result, want);
    }
}
