//! Generates `docs/src/systems.md`: the designs, with published and measured figures.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::Write;
use std::num::NonZero;
use std::path::PathBuf;
use std::process::Stdio;
use std::sync::atomic::{AtomicUsize, Ordering::Relaxed};
use std::thread;
use std::time::Instant;

use anyhow::{Context, bail, ensure};
use serde_json::{Value, json};

use crate::{build, shell};

/// Folder of results: `NAME.json`, and `NAME.made.json` with its sources and the run time.
const RESULTS: &str = "target/systems";
const PAGE: &str = "docs/src/systems.md";

/// Code that an experiment's figures depend on, besides its scenario.
const MODEL: &str = "crates/sim/src crates/policy/src crates/scenario/src crates/outcome/src";

/// Runs the experiments of the seeds and of systems' authors.
#[derive(clap::Args)]
pub struct Args {
    /// Run only these (`paper-colloid`), changed or not, and renew only their parts of the page
    names: Vec<String>,
}

/// Number of experiments that run side by side, since the last runs of one leave cores idle.
const AT_A_TIME: usize = 2;

/// Prefixes of experiments' names.
const KINDS: [&str; 2] = ["paper-", "seed-"];

/// `scenarios/NAME.toml`.
struct Experiment {
    name: String,
    /// A hash of everything that its figures depend on.
    source: String,
    /// The hash of the kept result's sources, and the run time in seconds.
    kept: Option<(String, u64)>,
}

impl Experiment {
    /// Reads an experiment and its kept result.
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

    /// The path of its log.
    fn log(&self) -> String {
        format!("{RESULTS}/{}.log", self.name)
    }

    fn made(&self) -> PathBuf {
        shell::root().join(format!("{RESULTS}/{}.made.json", self.name))
    }

    /// `None` if anything is missing or damaged.
    fn read_kept(&self) -> Option<(String, u64)> {
        let made: Value = serde_json::from_slice(&fs::read(self.made()).ok()?).ok()?;
        let kept = (made["source"].as_str()?.into(), made["took_s"].as_u64()?);
        shell::root().join(self.result()).is_file().then_some(kept)
    }

    fn has_changed(&self) -> bool {
        self.kept.as_ref().is_none_or(|kept| kept.0 != self.source)
    }

    /// Its last run time in seconds, if known.
    fn known_s(&self) -> Option<u64> {
        Some(self.kept.as_ref()?.1)
    }

    /// Runs it with `jobs` parallel runs, and keeps the result. Returns the run time in seconds.
    fn run(&self, jobs: usize) -> anyhow::Result<u64> {
        let (name, result, made) = (&self.name, self.result(), self.made());
        let log = shell::root().join(self.log());
        let log = File::create(&log).with_context(|| format!("cannot make {}", self.log()))?;
        let demeter = shell::root().join("target/release/demeter");
        let run = format!("run scenarios/{name}.toml --on sim --jobs {jobs} --json {result}");
        let mut command = shell::program(demeter, &run);
        command.stderr(log.try_clone()?).stdout(log);
        let began = Instant::now();
        let status = command.status().context("cannot run demeter")?;
        ensure!(
            status.success(),
            "demeter {run}: {status}, see {}",
            self.log()
        );
        let took_s = began.elapsed().as_secs();
        let text = json!({ "source": self.source, "took_s": took_s }).to_string();
        fs::write(&made, text).with_context(|| format!("cannot write {}", made.display()))?;
        Ok(took_s)
    }
}

/// Runs experiments side by side, in this order. After a failure no further one starts.
fn run_all(experiments: &[&Experiment]) -> anyhow::Result<()> {
    let cores = thread::available_parallelism().map_or(1, NonZero::get);
    let at_a_time = AT_A_TIME.min(cores);
    let next = AtomicUsize::new(0);
    let work = || -> anyhow::Result<()> {
        while let Some(experiment) = experiments.get(next.fetch_add(1, Relaxed)) {
            let name = &experiment.name;
            eprintln!("{name} begins");
            let took_s = experiment.run(cores / at_a_time).inspect_err(|_| {
                next.store(experiments.len(), Relaxed);
            })?;
            eprintln!("{name} is done, {took_s} s");
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..at_a_time).map(|_| scope.spawn(work)).collect();
        workers
            .into_iter()
            .try_for_each(|worker| match worker.join() {
                Ok(done) => done,
                Err(panic) => std::panic::resume_unwind(panic),
            })
    })
}

/// Runs each experiment whose result may have changed, and writes the page.
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
    let mut due: Vec<&Experiment> = all.iter().filter(is_due).collect();
    // The longest first; those of unknown length before them.
    due.sort_by_key(|e| Reverse(e.known_s().unwrap_or(u64::MAX)));
    let known_s: u64 = due.iter().filter_map(|e| e.known_s()).sum();
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
    let began = Instant::now();
    run_all(&due)?;
    eprintln!("all in {:.1} min", began.elapsed().as_secs_f64() / 60.0);
    let file = shell::root().join(PAGE);
    let page = if args.names.is_empty() {
        let all: Vec<&Experiment> = all.iter().collect();
        let (page, commit) = page_of(&all)?;
        format!("{page}\nCommit {commit} where no other is named; the same on every machine.\n")
    } else {
        let old = fs::read_to_string(&file).with_context(|| format!("cannot read {PAGE}"))?;
        let (page, commit) = page_of(&due)?;
        renewed(&old, &page, &commit)
    };
    fs::write(file, page).with_context(|| format!("cannot write {PAGE}"))
}

/// The page of these results, without its last line, and the present commit.
fn page_of(experiments: &[&Experiment]) -> anyhow::Result<(String, String)> {
    let results: Vec<String> = experiments.iter().map(|e| e.result()).collect();
    let page = format!("systems --markdown {}", results.join(" "));
    let output = shell::program(shell::root().join("target/release/demeter"), &page)
        .output()
        .context("cannot run demeter")?;
    ensure!(
        output.status.success(),
        "demeter {page}: {}",
        String::from_utf8_lossy(&output.stderr)
    );
    let page = String::from_utf8(output.stdout).context("demeter prints no text")?;
    let commit = git("rev-parse --short=7 HEAD", b"")?;
    let commit = String::from_utf8_lossy(&commit).trim().to_owned();
    Ok((page, commit))
}

/// Begins an experiment's part of the page.
const PART: &str = "\n## ";

/// The page with the new parts of some experiments. Each tells its commit, and the table of designs counts all parts.
fn renewed(page: &str, new: &str, commit: &str) -> String {
    // The last line is not the last part's.
    let (page, last) = page.rsplit_once("\nCommit ").unwrap_or((page, ""));
    let parts_of = |page: &str| -> Vec<String> {
        let parts = page.split(PART).skip(1);
        parts.map(|part| part.trim_end().to_owned()).collect()
    };
    let name = |part: &str| part.lines().next().unwrap_or_default().to_owned();
    let old = parts_of(page).into_iter().map(|part| (name(&part), part));
    let mut parts: BTreeMap<String, String> = old.collect();
    for part in parts_of(new) {
        parts.insert(name(&part), format!("{part}\n\nCommit {commit}."));
    }
    let head = new.split(PART).next().unwrap_or_default().trim_end();
    let mut renewed: String = head
        .lines()
        .map(|line| counted(line, parts.values()) + "\n")
        .collect();
    for part in parts.values() {
        renewed += &format!("{PART}{part}\n");
    }
    format!("{renewed}\nCommit {last}")
}

/// A line of the page's head. If it is a design's row, its last cell says how many figures of all parts agree.
fn counted<'a>(line: &str, parts: impl Iterator<Item = &'a String>) -> String {
    let row = line
        .strip_prefix("| `")
        .and_then(|row| row.strip_suffix(" |"));
    let cells = row.and_then(|row| row.split_once('`').zip(row.rsplit_once(" | ")));
    let Some(((system, _), (others, _))) = cells else {
        return line.to_owned();
    };
    let figures = parts.flat_map(|part| part.lines()).filter(|figure| {
        let figure = figure.strip_prefix("| ").and_then(|f| f.split_once(" | "));
        figure.is_some_and(|(figure, _)| figure.split(' ').nth(1) == Some(system))
    });
    let agree: Vec<bool> = figures.map(|figure| figure.ends_with("| yes |")).collect();
    match agree.len() {
        0 => format!("| `{others} |  |"),
        all => format!(
            "| `{others} | {} of {all} |",
            agree.iter().filter(|yes| **yes).count()
        ),
    }
}

/// The experiments' names, sorted.
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

/// A hash of the present scenario and model files, committed or not.
fn source(name: &str) -> anyhow::Result<String> {
    let scenario = scenario(name)?;
    let files = format!("ls-files --cached --others --exclude-standard -- {MODEL}");
    let files = git(&files, b"")?;
    let contents = git("hash-object --stdin-paths", &files)?;
    let all = [scenario.into_bytes(), files, contents].concat();
    let source = git("hash-object --stdin", &all)?;
    Ok(String::from_utf8_lossy(&source).trim().to_owned())
}

/// The scenario's text with all files that it extends, without comments.
fn scenario(name: &str) -> anyhow::Result<String> {
    let mut all = String::new();
    let mut next = Some(format!("{name}.toml"));
    // A scenario never extends itself, or it could not run, so the chain is short.
    for _ in 0..8 {
        let Some(file) = next.take() else {
            break;
        };
        let path = shell::root().join("scenarios").join(&file);
        let text = fs::read_to_string(&path);
        let text = text.with_context(|| format!("cannot read scenarios/{file}"))?;
        for line in text.lines().filter(|line| !line.starts_with('#')) {
            all.push_str(line);
            all.push('\n');
            let extended = line.strip_prefix("extends = \"");
            next = next.or(extended.and_then(|e| Some(e.strip_suffix('"')?.to_owned())));
        }
    }
    Ok(all)
}

/// The output of git for this input.
fn git(args: &str, told: &[u8]) -> anyhow::Result<Vec<u8>> {
    let mut command = shell::program("git", args);
    command.stdin(Stdio::piped()).stdout(Stdio::piped());
    let mut git = command.spawn().context("cannot run git")?;
    let mut input = git.stdin.take().context("git reads nothing")?;
    // Git may write output before it has read all input.
    let output = std::thread::scope(|scope| {
        scope.spawn(move || input.write_all(told));
        git.wait_with_output()
    });
    let output = output.context("cannot run git")?;
    ensure!(output.status.success(), "git {args}: {}", output.status);
    Ok(output.stdout)
}

#[cfg(test)]
mod tests {
    use super::*;

    const PAGE: &str = "# Systems\n\n| system | moves | agrees |\n|---|---|---|\n| `a` | up | 1 of 1 |\n| `b` | down |  |\n\
        \n## paper-a\n\nHead.\n\n| figure | case | agrees |\n|---|---|---|\n| mops a / b |  | yes |\n\
        \n## seed-z\n\n| figure | case | agrees |\n|---|---|---|\n| mops b |  | **no** |\n\
        \nCommit 1111111 where no other is named; the same on every machine.\n";

    #[test]
    fn a_part_is_renewed_and_all_are_counted() {
        let new = "# Systems\n\n| system | moves | agrees |\n|---|---|---|\n| `a` | up |  |\n| `b` | down | 0 of 1 |\n\
            | `c` | none | 1 of 1 |\n\n## paper-b\n\n| figure | case | agrees |\n|---|---|---|\n\
            | mops b / a |  | **no** |\n| mops c |  | yes |\n";
        let page = renewed(PAGE, new, "2222222");
        for row in [
            "| `a` | up | 1 of 1 |",
            "| `b` | down | 0 of 2 |",
            "| `c` | none | 1 of 1 |",
        ] {
            assert!(page.contains(row), "{row}: {page}");
        }
        let at = |part: &str| page.find(part).unwrap();
        assert!(at("## paper-a") < at("## paper-b") && at("## paper-b") < at("## seed-z"));
        assert!(
            page.contains("| mops c |  | yes |\n\nCommit 2222222.\n"),
            "{page}"
        );
        let last = "\nCommit 1111111 where no other is named; the same on every machine.\n";
        assert!(page.ends_with(last), "{page}");
        // Again, nothing doubles.
        assert_eq!(renewed(&page, new, "2222222"), page);
    }
}
