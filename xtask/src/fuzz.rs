//! The fuzz targets in fuzz/, a minute each. They need a nightly compiler and cargo-fuzz; where
//! those are missing, the property tests over the same code stand alone.

use std::collections::VecDeque;
use std::fs;
use std::process::Command;
use std::sync::Mutex;
use std::thread;

use anyhow::{Context, bail};

use crate::shell;

const SECONDS: u32 = 60;

/// Builds all fuzz targets and runs them, as many at a time as there are cores.
pub fn fuzz() -> anyhow::Result<()> {
    if !shell::root().join("fuzz/Cargo.toml").exists() {
        return Ok(());
    }
    if !shell::succeeds(cargo_fuzz("--version")) {
        eprintln!(
            "no nightly compiler with cargo-fuzz here: the fuzz targets do not run, only the \
             property tests over the same code; get them with: rustup toolchain install nightly \
             && cargo install cargo-fuzz"
        );
        return Ok(());
    }
    shell::run(cargo_fuzz("build"))?;
    let targets = targets()?;
    let workers = thread::available_parallelism()
        .map_or(1, usize::from)
        .min(targets.len());
    eprintln!("fuzzing {} for {SECONDS} s each", targets.join(", "));
    let queue = Mutex::new(VecDeque::from(targets));
    let next = || queue.lock().ok()?.pop_front();
    let worker = || {
        while let Some(target) = next() {
            fuzz_one(&target)?;
        }
        Ok(())
    };
    thread::scope(|scope| {
        let workers: Vec<_> = (0..workers).map(|_| scope.spawn(worker)).collect();
        // Joins all of them, whatever the first one says.
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

fn targets() -> anyhow::Result<Vec<String>> {
    let output = cargo_fuzz("list")
        .output()
        .context("cannot run cargo fuzz list")?;
    if !output.status.success() {
        bail!(
            "cargo fuzz list: {}",
            String::from_utf8_lossy(&output.stderr).trim()
        );
    }
    Ok(String::from_utf8_lossy(&output.stdout)
        .lines()
        .map(str::to_owned)
        .collect())
}

fn fuzz_one(target: &str) -> anyhow::Result<()> {
    // New inputs go under target/; the corpus in the tree stays as small as it is.
    let found = format!("target/fuzz-corpus/{target}");
    let kept = format!("fuzz/corpus/{target}");
    fs::create_dir_all(shell::root().join(&found)).context("cannot make target/fuzz-corpus")?;
    let kept = if shell::root().join(&kept).is_dir() {
        kept
    } else {
        String::new()
    };
    let limits = format!("-max_total_time={SECONDS} -timeout=10 -rss_limit_mb=2048");
    let output = cargo_fuzz(&format!("run {target} {found} {kept} -- {limits}"))
        .output()
        .with_context(|| format!("cannot fuzz {target}"))?;
    if !output.status.success() {
        eprintln!("{}", String::from_utf8_lossy(&output.stderr));
        bail!("fuzz target {target} found a failure; its input is in fuzz/artifacts/{target}");
    }
    Ok(())
}

/// `cargo +nightly fuzz`: by rustup's cargo, which alone knows `+nightly`.
fn cargo_fuzz(args: &str) -> Command {
    shell::program("cargo", &format!("+nightly fuzz {args}"))
}
