//! Follows the README on a fresh Debian: clones the project into a minimal root file system, and runs its two commands.

pub mod archive;
pub mod root;

use std::collections::BTreeSet;
use std::fs;
use std::process::Command;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::time::{Duration, Instant};

use anyhow::{Context, bail};
use clap::ValueEnum;
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::shell;
use archive::Source;
use root::Root;

/// Packages that a newcomer needs before the clone, besides Rust.
const NEEDED: &str = "git make ca-certificates";
/// The clone's path in the root.
pub const CLONE: &str = "root/demeter";

/// Options of `cargo xtask fresh`.
#[derive(clap::Args)]
pub struct Args {
    /// The Debian release
    #[arg(value_enum)]
    pub release: Release,
    /// Run `make demo` only, without `make test`
    #[arg(long)]
    pub demo_only: bool,
    /// Keep the root file system, and print its path
    #[arg(long)]
    pub keep: bool,
}

/// Supported releases.
#[derive(Debug, Clone, Copy, PartialEq, Eq, ValueEnum)]
pub enum Release {
    /// Debian 12: QEMU 7.2
    Bookworm,
    /// Debian 13: QEMU 10.0
    Trixie,
    /// The next release
    Forky,
    /// The newest packages
    Sid,
}

impl Release {
    /// Its name in apt's lists.
    pub fn codename(self) -> &'static str {
        match self {
            Self::Bookworm => "bookworm",
            Self::Trixie => "trixie",
            Self::Forky => "forky",
            Self::Sid => "sid",
        }
    }
}

/// Runs the steps, and prints their durations.
pub fn fresh(args: &Args) -> anyhow::Result<()> {
    in_root(args.release, &[], args.keep, |root, steps| {
        newcomer(root, steps, args)
    })
}

/// Runs `work` in a temporary root file system of the release and further suites. Returns the reason if that is not
/// possible.
pub fn in_root(
    release: Release,
    suites: &[&str],
    keep: bool,
    work: impl FnOnce(&Root, &mut Steps) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let release = release.codename();
    if !root::is_root() {
        println!("skipped: only root can make a root file system; try again with sudo");
        return Ok(());
    }
    let mut sources = archive::sources(release);
    let Some(mirror) = sources.iter().position(|source| source.suite == release) else {
        println!("skipped: this machine's apt knows no archive of Debian");
        return Ok(());
    };
    let others = suites.iter().map(|suite| sources[mirror].other(suite));
    let others: Vec<Source> = others.collect();
    sources.extend(others);
    if !shell::succeeds(shell::program("which", "debootstrap unshare git")) {
        bail!(
            "missing: debootstrap, unshare or git; get them with: apt-get install debootstrap util-linux git"
        );
    }
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop)).context("cannot catch signals")?;
    }
    let root = Root::new(stop)?;
    let done = settle(&root, &sources[mirror], &sources, work);
    if keep {
        println!("kept: {}", root.keep().display());
    } else {
        root.remove()?;
    }
    done
}

/// All steps in an empty root.
fn settle(
    root: &Root,
    mirror: &Source,
    sources: &[Source],
    work: impl FnOnce(&Root, &mut Steps) -> anyhow::Result<()>,
) -> anyhow::Result<()> {
    let mut steps = Steps::default();
    let Some(()) = steps.time("debootstrap", || archive::debootstrap(root, mirror))? else {
        println!("skipped: the archive cannot be reached");
        return Ok(());
    };
    archive::configure(root, sources)?;
    work(root, &mut steps)?;
    for (name, took) in &steps.0 {
        println!("{name:26} {:6.0} s", took.as_secs_f64());
    }
    Ok(())
}

/// Clones the committed state into the root, at [`CLONE`].
pub fn clone(root: &Root) -> anyhow::Result<()> {
    if !shell::succeeds(shell::program("git", "diff --quiet HEAD")) {
        eprintln!("uncommitted changes are not in the clone");
    }
    let mut clone = Command::new("git");
    clone.args(["clone", "--quiet", "--no-hardlinks"]);
    clone.arg(shell::root()).arg(root.path().join(CLONE));
    shell::run(clone)
}

/// A newcomer's steps in a minimal root.
fn newcomer(root: &Root, steps: &mut Steps, args: &Args) -> anyhow::Result<()> {
    let release = args.release.codename();
    let bare = packages(root)?;
    let install = format!(
        "apt-get -qq update && apt-get -qq -y --no-install-recommends install {NEEDED} >/dev/null"
    );
    steps.time(NEEDED, || root.run(&install))?;
    let prepared = packages(root)?;

    steps.time("git clone", || clone(root))?;
    steps.time("make demo", || {
        root.run(&format!("cd /{CLONE} && make demo"))
    })?;
    let to_table: Duration = steps.0.iter().rev().take(2).map(|(_, took)| *took).sum();
    let with_demo = packages(root)?;
    if !args.demo_only {
        steps.time("make test", || {
            root.run(&format!("cd /{CLONE} && make test"))
        })?;
    }

    println!("\nOn a fresh {release}:");
    println!(
        "from the clone to the demo's table: {:.1} minutes",
        to_table.as_secs_f64() / 60.0
    );
    for (who, before, after) in [
        ("before", &bare, &prepared),
        ("by make", &prepared, &with_demo),
    ] {
        let new: BTreeSet<_> = after.difference(before).collect();
        let asked: Vec<_> = new
            .iter()
            .filter(|p| !p.automatic)
            .map(|p| &*p.name)
            .collect();
        let names = asked.join(" ");
        println!(
            "installed {who}: {names}, and {} packages that they need",
            new.len() - asked.len()
        );
    }
    Ok(())
}

/// Finished steps with their durations.
#[derive(Default)]
pub struct Steps(Vec<(&'static str, Duration)>);

impl Steps {
    /// Runs a step, and records its duration.
    pub fn time<T>(
        &mut self,
        name: &'static str,
        step: impl FnOnce() -> anyhow::Result<T>,
    ) -> anyhow::Result<T> {
        eprintln!("== {name}");
        let start = Instant::now();
        let done = step()?;
        self.0.push((name, start.elapsed()));
        Ok(done)
    }
}

/// An installed package.
#[derive(PartialEq, Eq, PartialOrd, Ord)]
struct Package {
    name: String,
    /// Whether it was installed only as a dependency.
    automatic: bool,
}

/// The packages that dpkg lists, and apt's marks of them.
fn packages(root: &Root) -> anyhow::Result<BTreeSet<Package>> {
    let read = |name: &str| {
        let path = root.path().join(name);
        fs::read_to_string(&path).with_context(|| format!("cannot read {}", path.display()))
    };
    let states = read("var/lib/apt/extended_states").unwrap_or_default();
    let automatic: BTreeSet<&str> = states
        .split("\n\n")
        .filter(|entry| entry.contains("Auto-Installed: 1"))
        .filter_map(package_name)
        .collect();
    let status = read("var/lib/dpkg/status")?;
    let packages = status
        .split("\n\n")
        .filter_map(package_name)
        .map(|name| Package {
            name: name.to_owned(),
            automatic: automatic.contains(name),
        });
    Ok(packages.collect())
}

fn package_name(entry: &str) -> Option<&str> {
    entry
        .lines()
        .find_map(|line| line.strip_prefix("Package: "))
}
