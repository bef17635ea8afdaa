//! `docs/src/systems.md`: the designs, and what they come to beside published figures.

use std::fs;
use std::io::Write;
use std::path::PathBuf;
use std::process::Stdio;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::{build, shell};

/// Where results are kept: `NAME.json`, and in `NAME.made.json` what it was made of and how long that took.
const RESULTS: &str = "target/systems";
const PAGE: &str = "docs/src/systems.md";

/// What an experiment's figures follow from, beside its scenario.
const MODEL: &str = "crates/sim/src crates/policy/src crates/scenario/src crates/outcome/src";

/// Runs the experiments of the seeds and of systems' authors.
#[derive(clap::Args)]
pub struct Args {
    /// Run these only (`paper-colloid`), changed or not, and write no page
    names: Vec<String>,
}

/// What the names of experiments begin with.
const KINDS: [&str; 2] = ["paper-", "seed-"];

/// `scenarios/NAME.toml`.
struct Experiment {
    name: String,
    /// Names what its figures follow from: the same name, the same figures.
    source: String,
    /// The source of the result that is kept, and seconds that it took.
    kept: Option<(String, u64)>,
}

impl Experiment {
    /// Reads what there is.
    fn new(name: String) -> anyhow::Result<Self> {
        let source = source(&name)?;
        let mut it = Self {
            name,
            source,
            kept: None,
        };
        it.kept = it.read_kept();
        Ok(it)
    }

    fn result(&self) -> String {
        format!("{RESULTS}/{}.json", self.name)
    }

    fn made(&self) -> PathBuf {
        shell::root().join(format!("{RESULTS}/{}.made.json", self.name))
    }

    /// Nothing where anything is missing or damaged.
    fn read_kept(&self) -> Option<(String, u64)> {
        let made: Value = serde_json::from_slice(&fs::read(self.made()).ok()?).ok()?;
        let kept = (made["source"].as_str()?.into(), made["took_s"].as_u64()?);
        shell::root().join(self.result()).is_file().then_some(kept)
    }

    fn has_changed(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.0 != self.source)
    }

    /// Runs it, and keeps the result.
    fn run(&self) -> anyhow::Result<()> {
        let (name, result, made) = (&self.name, self.result(), self.made());
        let demeter = shell::root().join("target/release/demeter");
        let run = format!("run scenarios/{name}.toml --on sim --json {result}");
        let began = Instant::now();
        shell::run(shell::program(demeter, &run))?;
        let took_s = began.elapsed().as_secs();
        let text = json!({ "source": self.source, "took_s": took_s }).to_string();
        fs::write(&made, text).with_context(|| format!("cannot write {}", made.display()))
    }
}

/// Runs each experiment on the simulator whose result may have changed, and writes the page.
pub fn systems(args: &Args) -> anyhow::Result<()> {
    let all = names()?;
    if let Some(unknown) = args.names.iter().find(|name| !all.contains(name)) {
        bail!(
            "there is no experiment {unknown}; there are {}",
            all.join(", ")
        );
    }
    let all = all.into_iter().map(Experiment::new);
    let all: Vec<Experiment> = all.collect::<Result<_, _>>()?;
    let is_due = |e: &&Experiment| match args.names.is_empty() {
        true => e.has_changed(),
        false => args.names.contains(&e.name),
    };
    let due: Vec<&Experiment> = all.iter().filter(is_due).collect();
    let known_s: u64 = due.iter().filter_map(|e| Some(e.kept.as_ref()?.1)).sum();
    eprintln!(
        "{} of {} experiments to run; {} of them took {} min last time",
        due.len(),
        all.len(),
        due.iter().filter(|e| e.kept.is_some()).count(),
        known_s.div_ceil(60),
    );
    build::build()?;
    fs::create_dir_all(shell::root().join(RESULTS))
        .with_context(|| format!("cannot make {RESULTS}"))?;
    for (i, experiment) in due.iter().enumerate() {
        eprintln!("experiment {} of {}: {}", i + 1, due.len(), experiment.name);
        experiment.run()?;
    }
    if args.names.is_empty() {
        write_page(&all)?;
    }
    Ok(())
}

/// Writes the page from all results.
fn write_page(all: &[Experiment]) -> anyhow::Result<()> {
    let results: Vec<String> = all.iter().map(Experiment::result).collect();
    let page = format!("systems --markdown {}", results.join(" "));
    let output = shell::program(shell::root().join("target/release/demeter"), &page)
        .output()
        .context("cannot run demeter")?;
    ensure!(
        output.status.success(),
        "demeter {page}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let commit = git("rev-parse --short=7 HEAD", b"")?;
    let commit = format!(
        "\nCommit {}; the same on every machine.\n",
        String::from_utf8_lossy(&commit).trim()
    );
    fs::write(
        shell::root().join(PAGE),
        [output.stdout, commit.into()].concat(),
    )
    .with_context(|| format!("cannot write {PAGE}"))
}

/// The experiments' names, in order.
fn names() -> anyhow::Result<Vec<String>> {
    let scenarios =
        fs::read_dir(shell::root().join("scenarios")).context("cannot read scenarios")?;
    let files = scenarios.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let mut names: Vec<String> = files
        .filter_map(|file| Some(file.strip_suffix(".toml")?.to_owned()))
        .filter(|name| KINDS.iter().any(|kind| name.starts_with(kind)))
        .collect();
    names.sort();
    Ok(names)
}

/// A name for the scenario's and the model's files as they are now, committed or not.
fn source(name: &str) -> anyhow::Result<String> {
    let scenarios = scenarios(name)?.join(" ");
    let files = git(
        &format!("ls-files --cached --others --exclude-standard -- {scenarios} {MODEL}"),
        b"",
    )?;
    let contents = git("hash-object --stdin-paths", &files)?;
    let source = git("hash-object --stdin", &[files, contents].concat())?;
    Ok(String::from_utf8_lossy(&source).trim().to_owned())
}

/// The scenario's file, that which it extends, and so on.
fn scenarios(name: &str) -> anyhow::Result<Vec<String>> {
    let mut files = vec![format!("scenarios/{name}.toml")];
    // More than one after the other can be; none extends itself, or it would not run.
    while let Some(file) = files.last().filter(|_| files.len() < 8) {
        let text = fs::read_to_string(shell::root().join(file));
        let text = text.with_context(|| format!("cannot read {file}"))?;
        let extended = text
            .lines()
            .find_map(|line| line.strip_prefix("extends = \"")?.strip_suffix('"'));
        match extended {
            Some(extended) => files.push(format!("scenarios/{extended}")),
            None => break,
        }
    }
    Ok(files)
}

/// What git says when it is told something.
fn git(args: &str, told: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut command = shell::program("git", args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut git = command.spawn().context("cannot run git")?;
    let mut input = git.stdin.take().context("git reads nothing")?;
    // It may answer before it has heard all.
    let output = std::thread::scope(|scope| {
        scope.spawn(move || input.write_all(told));
        git.wait_with_output()
    });
    let output = output.context("cannot run git")?;
    ensure!(output.status.success(), "git {args}: {}", output.status);
    Ok(output.stdout)
}
