//! Boots the kernels of Debian's archive in the lab, and tests each.
//!
//! A separate apt below target/kernels searches the packages of all releases and unpacks them there; nothing is
//! installed. One scenario runs under each system that depends on the kernel.

use std::collections::BTreeMap;
use std::fmt::Write;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use anyhow::{Context, bail};
use serde_json::Value;

use crate::fresh::archive;
use crate::{build, shell};

/// Folder of the packages.
const DIR: &str = "target/kernels";
/// The page with the table.
const PAGE: &str = "docs/src/kernels.md";
/// The program that each kernel runs.
const SCENARIO: &str = "scenarios/gups.toml";

/// Releases whose kernels are tested, the oldest first. Releases that the mirror lacks are skipped.
const SUITES: [&str; 7] = [
    "bullseye",
    "bookworm",
    "bookworm-backports",
    "trixie",
    "trixie-backports",
    "forky",
    "sid",
];

/// Tested series besides the newest: those of Debian's releases, and the first long-term one with DAMON_STAT.
const SERIES: [&str; 4] = ["5.10", "6.1", "6.12", "6.18"];

/// Length of the timed phase, instead of the scenario's.
const SECONDS: &str = "30";

/// Suffix of kernel releases for virtual machines.
const FLAVOUR: &str = "-cloud-amd64";

/// The systems, each with the feature that it tests.
const SYSTEMS: [(&str, &str); 2] = [
    ("demeter", "the agent on the emulator's samples"),
    ("demeter-damon", "the agent on DAMON"),
];

/// Share of the hot memory that must be in fast memory at the end.
const HOT_IN_FAST_MIN: f64 = 0.8;

/// The word for a system that works.
const WORKS: &str = "works";

/// Options of `cargo xtask kernels`.
#[derive(clap::Args)]
pub struct Args {
    /// Test only kernels whose release starts with this, such as 6.12 or 7; may be given several times
    #[arg(long, value_name = "RELEASE")]
    only: Vec<String>,
    /// Boot these images instead of the archive's: unpacked or installed, with their modules in the same tree
    #[arg(long, value_name = "FILE")]
    image: Vec<PathBuf>,
}

/// A kernel of the archive.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Kernel {
    /// As in `uname -r`.
    release: String,
    /// The packages with its image and modules.
    packages: Vec<String>,
}

/// Downloads and boots the kernels, prints the table and writes the page.
pub fn kernels(args: &Args) -> anyhow::Result<()> {
    build::build()?;
    let mut images = args.image.clone();
    if images.is_empty() {
        let Some(apt) = Apt::new()? else {
            println!("skipped: this machine's apt knows no archive of Debian");
            return Ok(());
        };
        let is_wanted = |kernel: &Kernel| {
            args.only.is_empty() || args.only.iter().any(|it| kernel.release.starts_with(it))
        };
        for kernel in chosen(&apt.kernels()?).into_iter().filter(is_wanted) {
            match apt.unpack(&kernel) {
                Ok(image) => images.push(image),
                Err(error) => eprintln!("{}: {error:#}", kernel.release),
            }
        }
    }
    if images.is_empty() {
        println!("skipped: no kernel is available");
        return Ok(());
    }
    let rows: Vec<_> = images
        .iter()
        .map(|image| row(image))
        .collect::<Result<_, _>>()?;
    let table = table(&rows);
    println!("\n{table}");
    if args.only.is_empty() && args.image.is_empty() {
        let page = shell::root().join(PAGE);
        fs::write(&page, page_of(&table)).with_context(|| format!("cannot write {PAGE}"))?;
    }
    Ok(())
}

/// Downloads and boots the newest kernel.
///
/// # Errors
/// A system does not work on it.
pub fn newest() -> anyhow::Result<()> {
    build::build()?;
    let Some(apt) = Apt::new()? else {
        println!("skipped: this machine's apt knows no archive of Debian");
        return Ok(());
    };
    let Some(kernel) = chosen(&apt.kernels()?).pop() else {
        println!("skipped: no kernel is available");
        return Ok(());
    };
    let row = row(&apt.unpack(&kernel)?)?;
    let outcomes = SYSTEMS.iter().zip(&row.outcomes);
    let broke = outcomes.filter(|(_, outcome)| !outcome.starts_with(WORKS));
    let broke = broke.map(|((_, what), outcome)| format!("{what}: {outcome}"));
    let broke: Vec<String> = broke.collect();
    if !broke.is_empty() {
        bail!("{}: {}", row.release, broke.join("; "));
    }
    println!("{}: {}", row.release, row.outcomes.join("; "));
    Ok(())
}

/// A separate apt with all releases, which does not change the system.
struct Apt {
    dir: PathBuf,
}

impl Apt {
    fn new() -> anyhow::Result<Option<Self>> {
        shell::need(&[("apt-get", "apt"), ("dpkg", "dpkg"), ("xz", "xz-utils")])?;
        let sources = archive::sources(SUITES[0]);
        let Some(mirror) = sources.iter().find(|source| source.suite == SUITES[0]) else {
            return Ok(None);
        };
        let dir = shell::root().join(DIR);
        for folder in ["apt/state/lists/partial", "apt/cache/archives/partial"] {
            fs::create_dir_all(dir.join(folder)).context("cannot make target/kernels")?;
        }
        let dir = dir.canonicalize().context("cannot find target/kernels")?;
        let lines = SUITES.map(|suite| mirror.other(suite).line() + "\n");
        fs::write(dir.join("apt/sources.list"), lines.concat()).context("cannot write a list")?;
        let apt = Self { dir };
        // Fails for a release that no longer exists; the others are updated all the same.
        let _ = apt.command("apt-get", "-q update").output();
        Ok(Some(apt))
    }

    fn command(&self, name: &str, args: &str) -> Command {
        let mut command = Command::new(name);
        let apt = self.dir.join("apt").display().to_string();
        for option in [
            format!("Dir::State={apt}/state"),
            format!("Dir::Cache={apt}/cache"),
            format!("Dir::Etc::sourcelist={apt}/sources.list"),
            "Dir::Etc::sourceparts=-".into(),
            "Acquire::Languages=none".into(),
            // As root, apt would switch to a user that cannot write here.
            "APT::Sandbox::User=root".into(),
        ] {
            command.arg("-o").arg(option);
        }
        command.args(args.split_whitespace());
        command
    }

    /// All kernels for virtual machines.
    fn kernels(&self) -> anyhow::Result<Vec<Kernel>> {
        let names = format!("^linux-(image|binary|modules)-[0-9].*{FLAVOUR}$");
        let mut search = self.command("apt-cache", "search --names-only");
        let output = search.arg(names).output().context("cannot run apt-cache")?;
        Ok(parse(&String::from_utf8_lossy(&output.stdout)))
    }

    /// Downloads and unpacks a kernel. Returns its image.
    fn unpack(&self, kernel: &Kernel) -> anyhow::Result<PathBuf> {
        let dir = self.dir.join(&kernel.release);
        if let Some(image) = image_in(&dir, &kernel.release) {
            return Ok(image);
        }
        fs::create_dir_all(&dir).with_context(|| format!("cannot make {}", dir.display()))?;
        let mut download = self.command("apt-get", "-q download");
        shell::run({
            download.args(&kernel.packages).current_dir(&dir);
            download
        })?;
        for entry in fs::read_dir(&dir).with_context(|| format!("cannot list {}", dir.display()))? {
            let file = entry.context("cannot list a folder")?.path();
            if file.extension().is_some_and(|extension| extension == "deb") {
                let mut dpkg = Command::new("dpkg");
                dpkg.arg("-x").arg(&file).arg(&dir);
                shell::run(dpkg)?;
            }
        }
        image_in(&dir, &kernel.release).context("its packages hold no image")
    }
}

/// Parses the kernels in apt's list of packages. Since Linux 7.1 image and modules are separate packages.
fn parse(listed: &str) -> Vec<Kernel> {
    let mut kernels: BTreeMap<String, Vec<String>> = BTreeMap::new();
    for name in listed
        .lines()
        .filter_map(|line| line.split_whitespace().next())
    {
        let mut parts = name.splitn(3, '-');
        let (Some("linux"), Some(_kind), Some(release)) =
            (parts.next(), parts.next(), parts.next())
        else {
            continue;
        };
        // Names without a full version are metapackages for the newest kernel.
        if version(release).len() > 2 {
            kernels.entry(release.into()).or_default().push(name.into());
        }
    }
    let kernel = |(release, mut packages): (String, Vec<String>)| {
        let is_split = packages
            .iter()
            .any(|name| name.starts_with("linux-modules-"));
        let has_binary = packages
            .iter()
            .any(|name| name.starts_with("linux-binary-"));
        packages.retain(|name| (is_split || has_binary) != name.starts_with("linux-image-"));
        Kernel { release, packages }
    };
    kernels.into_iter().map(kernel).collect()
}

/// The newest kernel of each tested series, and the newest of all, the oldest first.
fn chosen(kernels: &[Kernel]) -> Vec<Kernel> {
    let newest_of = |numbers: &[u64]| {
        let of_series = kernels
            .iter()
            .filter(|it| version(&it.release).starts_with(numbers));
        of_series
            .max_by_key(|kernel| version(&kernel.release))
            .cloned()
    };
    let mut chosen: Vec<_> = SERIES
        .iter()
        .filter_map(|series| newest_of(&version(series)))
        .collect();
    chosen.extend(newest_of(&[]));
    chosen.sort_by_key(|kernel| version(&kernel.release));
    chosen.dedup();
    chosen
}

/// The numbers in a release, in order.
fn version(name: &str) -> Vec<u64> {
    let name = name.trim_end_matches(FLAVOUR);
    let digits = name.split(|c: char| !c.is_ascii_digit());
    digits.filter_map(|digits| digits.parse().ok()).collect()
}

fn image_in(dir: &Path, release: &str) -> Option<PathBuf> {
    let places = [
        dir.join(format!("boot/vmlinuz-{release}")),
        dir.join(format!("usr/lib/modules/{release}/vmlinuz")),
    ];
    places.into_iter().find(|image| image.is_file())
}

/// The result of a kernel.
struct Row {
    release: String,
    /// One for each of [`SYSTEMS`].
    outcomes: Vec<String>,
}

fn row(image: &Path) -> anyhow::Result<Row> {
    let outcomes = SYSTEMS.iter().map(|(system, _)| run(image, system));
    Ok(Row {
        release: release(image),
        outcomes: outcomes.collect::<Result<_, _>>()?,
    })
}

/// The kernel release in an image's path.
fn release(image: &Path) -> String {
    let name = |path: &Path| {
        path.file_name()
            .map(|name| name.to_string_lossy().into_owned())
    };
    match name(image).as_deref() {
        Some("vmlinuz") => image.parent().and_then(name),
        Some(other) => Some(other.trim_start_matches("vmlinuz-").to_owned()),
        None => None,
    }
    .unwrap_or_default()
}

/// Runs the scenario under a system on a kernel. Returns the outcome in a few words.
fn run(image: &Path, system: &str) -> anyhow::Result<String> {
    let dir = tempfile::tempdir().context("cannot make a folder")?;
    let (result, logs) = (dir.path().join("result.json"), dir.path().join("logs"));
    let mut demeter = shell::program(shell::root().join("target/release/demeter"), "run --on lab");
    demeter
        .env("DEMETER_KERNEL", image)
        .arg(SCENARIO)
        .args(["--system", system]);
    demeter.args(["--duration", SECONDS]);
    demeter
        .arg("--json")
        .arg(&result)
        .arg("--keep-logs")
        .arg(&logs);
    eprintln!("== {}: {system}", release(image));
    let output = demeter
        .output()
        .context("cannot run target/release/demeter")?;
    let said = String::from_utf8_lossy(&output.stderr);
    let agent_said = agent_log(&logs);
    // A rejected command line is a bug of ours, not of the kernel.
    if output.status.code() == Some(2) {
        bail!("demeter run: {said}");
    }
    if !output.status.success() {
        // The agent's own reason is more precise.
        let error = |text: &str| {
            text.lines()
                .rfind(|it| it.starts_with("error:"))
                .map(in_a_cell)
        };
        let why = error(&agent_said).or_else(|| error(&said));
        let why = why.as_deref().unwrap_or("it ended without a word");
        return Ok(format!("no: {why}"));
    }
    let text = fs::read_to_string(&result).context("cannot read a result")?;
    let outcome = judge(&serde_json::from_str(&text).context("a result is no JSON")?)?;
    Ok(match agent_said.contains("DAMON_STAT is off") {
        true => outcome + "; DAMON_STAT off meanwhile",
        false => outcome,
    })
}

/// The log of a run's agent; empty if there is none.
fn agent_log(logs: &Path) -> String {
    let logs = fs::read_dir(logs).into_iter().flatten().flatten();
    let is_agents = |path: &PathBuf| path.to_string_lossy().ends_with("agent.log");
    let log = logs.map(|log| log.path()).find(is_agents);
    log.and_then(|log| fs::read_to_string(log).ok())
        .unwrap_or_default()
}

/// Checks that hot memory was moved to fast memory, and that no data were lost.
fn judge(result: &Value) -> anyhow::Result<String> {
    let system = &result["systems"][0];
    let (Some(hot), Some(errors)) = (
        system["hot_in_fast_final"].as_f64(),
        system["verify_errors"].as_u64(),
    ) else {
        bail!("a result without figures");
    };
    Ok(match (errors, hot >= HOT_IN_FAST_MIN) {
        (0, true) => format!(
            "{WORKS}: {:.0} % of the hot set in fast memory",
            hot * 100.0
        ),
        (0, false) => format!(
            "runs, but only {:.0} % of the hot set in fast memory",
            hot * 100.0
        ),
        (errors, _) => format!("no: {errors} words lost"),
    })
}

/// An error formatted for a table's cell.
fn in_a_cell(error: &str) -> String {
    error.trim_start_matches("error:").trim().replace('|', "/")
}

fn table(rows: &[Row]) -> String {
    let mut table = String::from("| kernel |");
    for (_, what) in SYSTEMS {
        let _ = write!(table, " {what} |");
    }
    table += "\n|---|";
    table += &"---|".repeat(SYSTEMS.len());
    table.push('\n');
    for row in rows {
        let _ = writeln!(table, "| {} | {} |", row.release, row.outcomes.join(" | "));
    }
    table
}

fn page_of(table: &str) -> String {
    format!(
        "# Kernels\n\n\
         <!-- Made by `cargo xtask kernels`. -->\n\n\
         Each kernel was booted in the lab with `{SCENARIO}`: two nodes, 100 MiB of hot memory that begin in slow memory, \
         {SECONDS} seconds. The kernels are those of Debian's archive for virtual machines (flavour `cloud-amd64`). \
         `cargo xtask kernels` makes this page again.\n\n{table}"
    )
}

#[cfg(test)]
mod tests {
    use super::*;

    const LISTED: &str = "\
linux-image-6.1-cloud-amd64 - Linux for x86-64 cloud (meta-package)
linux-image-6.1.0-50-cloud-amd64 - Linux 6.1 for x86-64 cloud (signed)
linux-image-6.1.0-47-cloud-amd64 - Linux 6.1 for x86-64 cloud (signed)
linux-image-6.12.99+deb13-cloud-amd64 - Linux 6.12 for x86-64 cloud (signed)
linux-image-6.12.117+deb13-cloud-amd64 - Linux 6.12 for x86-64 cloud (signed)
linux-binary-7.3.4+deb13-cloud-amd64 - Linux 7.3.4 for x86-64 cloud (kernel image)
linux-image-7.3.4+deb13-cloud-amd64 - Linux 7.3.4 for x86-64 cloud
linux-modules-7.3.4+deb13-cloud-amd64 - Linux 7.3.4 for x86-64 cloud (modules)
";

    #[test]
    fn the_newest_of_each_series_and_of_all_is_chosen() {
        let chosen = chosen(&parse(LISTED));
        let releases: Vec<_> = chosen.iter().map(|kernel| &*kernel.release).collect();
        assert_eq!(
            releases,
            [
                "6.1.0-50-cloud-amd64",
                "6.12.117+deb13-cloud-amd64",
                "7.3.4+deb13-cloud-amd64"
            ]
        );
        assert_eq!(chosen[0].packages, ["linux-image-6.1.0-50-cloud-amd64"]);
        assert_eq!(
            chosen[2].packages,
            [
                "linux-binary-7.3.4+deb13-cloud-amd64",
                "linux-modules-7.3.4+deb13-cloud-amd64"
            ]
        );
        assert_eq!(parse("no package\n\nlinux\n"), []);
    }

    #[test]
    fn an_image_is_named_by_its_release() {
        for image in [
            "/boot/vmlinuz-6.1.0-50",
            "/x/usr/lib/modules/6.1.0-50/vmlinuz",
        ] {
            assert_eq!(release(Path::new(image)), "6.1.0-50");
        }
    }

    #[test]
    fn lost_words_are_worse_than_pages_that_stayed() {
        let result = |hot: f64, errors: u64| {
            let system = serde_json::json!({"hot_in_fast_final": hot, "verify_errors": errors});
            judge(&serde_json::json!({ "systems": [system] })).unwrap()
        };
        assert!(result(0.97, 0).starts_with("works: 97 %"));
        assert!(result(0.2, 0).starts_with("runs, but only 20 %"));
        assert!(result(0.97, 3).starts_with("no: 3 words"));
        assert!(judge(&serde_json::json!({})).is_err());
    }
}
