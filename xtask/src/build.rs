//! Builds static release binaries, which also run in the lab's initramfs.
//!
//! .cargo/config.toml sets static linking. Cargo writes the binaries to a folder named after the target; this module
//! moves them to target/release, where all other code expects them.

use std::ffi::OsStr;
use std::fs;

use anyhow::Context;

use crate::shell;

/// The sources of the workload programs, one file each.
const PROGRAMS: &str = "crates/workload/src/bin";

/// Where the full command is put.
pub const RELEASE: &str = "target/release";

/// Where the command without the feature `study` is put.
pub const OPERATE: &str = "target/operate";

/// The full command, and the workload programs that it expects in its own folder.
pub fn binaries() -> anyhow::Result<Vec<String>> {
    let folder = shell::root().join(PROGRAMS);
    let cannot = || format!("cannot read {}", folder.display());
    let mut names = vec!["demeter".to_owned()];
    for entry in fs::read_dir(&folder).with_context(cannot)? {
        let path = entry.with_context(cannot)?.path();
        if path.extension().is_some_and(|kind| kind == "rs") {
            let name = path.file_stem().and_then(OsStr::to_str);
            names.extend(name.map(str::to_owned));
        }
    }
    Ok(names)
}

/// Builds the full command and the workloads, and puts them into target/release.
pub fn build() -> anyhow::Result<()> {
    cargo("--bins --package demeter --package demeter-workload")?;
    put(&binaries()?, RELEASE)
}

/// Builds the command that operates machines and studies none, and puts it into target/operate.
pub fn operate() -> anyhow::Result<()> {
    cargo("--bin demeter --package demeter --no-default-features")?;
    put(&["demeter".to_owned()], OPERATE)
}

fn cargo(what: &str) -> anyhow::Result<()> {
    let mut cargo = shell::cargo("build --locked --release --target-dir target");
    cargo.args(what.split_whitespace());
    // RUSTFLAGS would replace the configuration's flags.
    cargo.env_remove("RUSTFLAGS");
    shell::run(cargo)
}

/// Copies what cargo has just built.
fn put(names: &[String], folder: &str) -> anyhow::Result<()> {
    let tuple = shell::program("rustc", "--print host-tuple").output();
    let tuple = tuple.context("cannot run rustc")?.stdout;
    let tuple = String::from_utf8_lossy(&tuple).trim().to_owned();
    let built = shell::root().join("target").join(tuple).join("release");
    let to = shell::root().join(folder);
    fs::create_dir_all(&to).with_context(|| format!("cannot make {}", to.display()))?;
    for name in names {
        let built = built.join(name);
        // Renamed into place, because a running program's file cannot be overwritten.
        let (new, place) = (to.join(format!(".{name}.new")), to.join(name));
        fs::copy(&built, &new)
            .and_then(|_| fs::rename(&new, &place))
            .with_context(|| format!("cannot copy {} to {folder}", built.display()))?;
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;

    /// Crates that only the full command may link: root runs the other one.
    const STUDY: [&str; 7] = [
        "demeter-lab",
        "demeter-report",
        "demeter-scenario",
        "demeter-sim",
        "demeter-workload",
        "maud",
        "parquet",
    ];

    /// Crates that workload programs do not need: they know nothing of agents, controllers and servers.
    const SERVING: [&str; 8] = [
        "axum",
        "demeter-guest",
        "demeter-host",
        "demeter-host-api",
        "demeter-http",
        "demeter-lab",
        "hyper",
        "tokio",
    ];

    /// The crates that a package links.
    fn linked(package: &str) -> BTreeSet<String> {
        let mut tree = shell::cargo("tree --locked --edges normal --prefix none --package");
        let tree = tree.args(package.split_whitespace()).output().unwrap();
        let errors = String::from_utf8_lossy(&tree.stderr);
        assert!(tree.status.success(), "cargo tree: {errors}");
        let text = String::from_utf8(tree.stdout).unwrap();
        let names = text.lines().filter_map(|line| line.split(' ').next());
        names.map(str::to_owned).collect()
    }

    #[test]
    fn the_command_that_operates_links_nothing_of_the_studies() {
        let (full, small) = (linked("demeter"), linked("demeter --no-default-features"));
        for name in STUDY {
            assert!(full.contains(name), "the full command has no {name}");
            assert!(
                !small.contains(name),
                "cargo tree --no-default-features -p demeter -i {name}"
            );
        }
        for name in ["demeter-guest", "demeter-host", "demeter-dirtylog"] {
            assert!(small.contains(name), "{name}: {small:?}");
        }
        // Only `crates/schema` makes schemas.
        let is_other = |name: &&String| name.starts_with("arrow") || name.starts_with("schemars");
        assert_eq!(small.iter().find(is_other), None);
    }

    #[test]
    fn workload_programs_link_no_server() {
        let programs = linked("demeter-workload");
        assert!(programs.contains("demeter-scenario"), "{programs:?}");
        for name in SERVING {
            assert!(
                !programs.contains(name),
                "cargo tree -p demeter-workload -i {name}"
            );
        }
    }
}
