//! Builds static release binaries, which also run in the lab's initramfs.
//!
//! .cargo/config.toml sets static linking. Cargo writes the binaries to a folder named after the target; this module
//! moves them to target/release, where all other code expects them.

use std::fs;

use anyhow::Context;

use crate::shell;

/// The command, and the workloads that it expects in its own folder.
pub const BINARIES: [&str; 8] = [
    "demeter", "forks", "graph", "gups", "kvload", "memlat", "mix", "sweep",
];

/// Builds the binaries and puts them into target/release.
pub fn build() -> anyhow::Result<()> {
    let mut cargo = shell::cargo("build --locked --release --target-dir target --bins");
    cargo.args(["--package", "demeter", "--package", "demeter-lab"]);
    // RUSTFLAGS would replace the configuration's flags.
    cargo.env_remove("RUSTFLAGS");
    shell::run(cargo)?;

    let target = shell::root().join("target");
    let tuple = shell::program("rustc", "--print host-tuple").output();
    let tuple = tuple.context("cannot run rustc")?.stdout;
    let tuple = String::from_utf8_lossy(&tuple).trim().to_owned();
    let release = target.join("release");
    fs::create_dir_all(&release).with_context(|| format!("cannot make {}", release.display()))?;
    for name in BINARIES {
        let built = target.join(&tuple).join("release").join(name);
        // Renamed into place, because a running program's file cannot be overwritten.
        let (new, place) = (release.join(format!(".{name}.new")), release.join(name));
        fs::copy(&built, &new)
            .and_then(|_| fs::rename(&new, &place))
            .with_context(|| format!("cannot copy {} to target/release", built.display()))?;
    }
    Ok(())
}
