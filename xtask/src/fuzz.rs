//! Runs the fuzz targets in fuzz/ by libFuzzer, on the project's own compiler.
//!
//! Coverage is an option of stable compilers (sancov), and the engine is a crate that needs a C++ compiler. There is no
//! address sanitizer, since the fuzzed code is safe Rust.

use std::collections::VecDeque;
use std::fs;
use std::path::Path;
use std::process::{Command, Output};
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, bail};

use crate::shell;

/// Fuzzes all decoders of sockets, rings and files.
#[derive(clap::Args)]
pub struct Args {
    /// Inputs for each target
    #[arg(long, default_value_t = 1_000_000)]
    runs: u64,
    /// Time limit for each target, seconds
    #[arg(long, default_value_t = 3600)]
    seconds: u32,
    /// Random seed, to repeat a run; 0 is a new one each time
    #[arg(long, default_value_t = 0)]
    seed: u32,
    /// Only these targets
    #[arg(value_name = "TARGET")]
    targets: Vec<String>,
}

impl Args {
    /// The arguments of `make test`: always the same runs, within the time limit.
    pub const SHORT: Self = Self {
        runs: 1_000_000,
        seconds: 3,
        seed: 1,
        targets: vec![],
    };
}

/// A target that must fail; if it does not, the other targets' results are worthless.
const CANARY: &str = "canary";

/// Runs to find the canary; about 100,000 are needed.
const CANARY_RUNS: u64 = 20_000_000;

/// Coverage by counters at every edge, and of comparisons.
const FLAGS: &str = "--cfg fuzzing -Cpasses=sancov-module \
    -Cllvm-args=-sanitizer-coverage-level=4 \
    -Cllvm-args=-sanitizer-coverage-inline-8bit-counters \
    -Cllvm-args=-sanitizer-coverage-pc-table -Cllvm-args=-sanitizer-coverage-trace-compares";

/// Builds all fuzz targets and runs them, as many in parallel as there are cores.
pub fn fuzz(args: &Args) -> anyhow::Result<()> {
    let mut build = shell::cargo("build --release --locked --manifest-path fuzz/Cargo.toml");
    // The folder is given, so that no personal setting changes it.
    build.args(["--target-dir", "fuzz/target"]);
    shell::run(with_flags(build))?;
    let all = targets()?;
    if let Some(unknown) = args.targets.iter().find(|target| !all.contains(target)) {
        bail!(
            "there is no fuzz target {unknown}; there are: {}",
            all.join(", ")
        );
    }
    find_the_canary()?;
    let wanted = |target: &String| {
        target != CANARY && (args.targets.is_empty() || args.targets.contains(target))
    };
    let chosen: VecDeque<String> = all.into_iter().filter(wanted).collect();
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(chosen.len());
    let queue = Mutex::new(chosen);
    let next = || queue.lock().ok()?.pop_front();
    let worker = || {
        while let Some(target) = next() {
            fuzz_one(&target, args)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        // Waits for all of them, even if the first one fails.
        let results: Vec<anyhow::Result<()>> = workers
            .into_iter()
            .map(|worker| {
                worker
                    .join()
                    .unwrap_or_else(|_| bail!("a fuzz worker panicked"))
            })
            .collect();
        results.into_iter().collect()
    })
}

fn with_flags(mut command: Command) -> Command {
    let flags: Vec<_> = FLAGS.split_whitespace().collect();
    command.env("CARGO_ENCODED_RUSTFLAGS", flags.join("\u{1f}"));
    command
}

fn targets() -> anyhow::Result<Vec<String>> {
    let folder = shell::root().join("fuzz/fuzz_targets");
    let mut targets = vec![];
    for entry in fs::read_dir(&folder).context("cannot list fuzz/fuzz_targets")? {
        let path = entry?.path();
        let name = path.file_stem().and_then(|name| name.to_str());
        targets.extend(name.map(str::to_owned));
    }
    targets.sort();
    Ok(targets)
}

fn find_the_canary() -> anyhow::Result<()> {
    let folder = shell::root().join("target/fuzz-canary");
    fs::create_dir_all(&folder).context("cannot make target/fuzz-canary")?;
    let canary = Args {
        runs: CANARY_RUNS,
        seconds: 120,
        ..Args::SHORT
    };
    let output = run(CANARY, &[], &canary, &folder)?;
    let said = String::from_utf8_lossy(&output.stderr);
    if output.status.success() || !said.contains("the canary was found") {
        bail!("the fuzz engine does not find the canary, so it would find nothing else: {said}");
    }
    eprintln!("fuzz {CANARY}: found, as it must be");
    Ok(())
}

fn fuzz_one(target: &str, args: &Args) -> anyhow::Result<()> {
    let root = shell::root();
    // New inputs go under target/, so that the tree's corpus stays small.
    let found = format!("target/fuzz-corpus/{target}");
    fs::create_dir_all(root.join(&found)).context("cannot make target/fuzz-corpus")?;
    let mut corpus = vec![found];
    let kept = format!("fuzz/corpus/{target}");
    if root.join(&kept).is_dir() {
        corpus.push(kept);
    }
    let artifacts = root.join(format!("fuzz/artifacts/{target}"));
    fs::create_dir_all(&artifacts).context("cannot make fuzz/artifacts")?;
    let output = run(target, &corpus, args, &artifacts)?;
    let said = String::from_utf8_lossy(&output.stderr);
    if !output.status.success() {
        eprintln!("{said}");
        bail!("fuzz target {target} found a failure; its input is in fuzz/artifacts/{target}");
    }
    let done = said.lines().rev().find(|line| line.starts_with("Done "));
    let done = done.with_context(|| format!("fuzz target {target} does not say what it did"))?;
    let count = done
        .split_whitespace()
        .nth(1)
        .and_then(|n| n.parse::<u64>().ok());
    if count.is_none_or(|count| count == 0) {
        bail!("fuzz target {target} did nothing: {done}");
    }
    eprintln!("fuzz {target}: {done}");
    Ok(())
}

/// Runs a target over a corpus; new inputs go into the first folder.
fn run(target: &str, corpus: &[String], args: &Args, artifacts: &Path) -> anyhow::Result<Output> {
    let built = shell::root().join("fuzz/target");
    // Cargo uses a folder named after the target if one is configured.
    let program = [format!("{}/release", host()), "release".into()]
        .map(|folder| built.join(folder).join(target))
        .into_iter()
        .find(|path| path.exists())
        .with_context(|| format!("fuzz target {target} was not built"))?;
    let mut command = shell::program(&program, "-timeout=60 -rss_limit_mb=2048");
    command
        .arg(format!("-runs={}", args.runs))
        .arg(format!("-max_total_time={}", args.seconds))
        .arg(format!("-seed={}", args.seed))
        .arg(format!("-artifact_prefix={}/", artifacts.display()))
        .args(corpus);
    command
        .output()
        .with_context(|| format!("cannot run fuzz target {target}"))
}

/// The target triple of this program, for which cargo builds.
fn host() -> String {
    let output = shell::program("rustc", "-vV").output();
    let text = output.map(|output| String::from_utf8_lossy(&output.stdout).into_owned());
    let line = text.unwrap_or_default();
    let host = line.lines().find_map(|line| line.strip_prefix("host: "));
    host.unwrap_or_default().to_owned()
}
