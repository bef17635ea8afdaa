//! Release binaries that run everywhere, in the lab's initramfs too: linked statically.

use std::fs;

use anyhow::Context;

use crate::shell;

const TARGET: &str = "x86_64-unknown-linux-gnu";
/// The command, and the workloads that it expects beside itself.
const BINARIES: [&str; 6] = ["demeter", "graph", "gups", "kvload", "memlat", "sweep"];

/// Builds the binaries and puts them into target/release.
pub fn build() -> anyhow::Result<()> {
    let mut cargo = shell::cargo("build --locked --release --target-dir target --bins");
    cargo.args([
        "--target",
        TARGET,
        "--package",
        "demeter",
        "--package",
        "demeter-lab",
    ]);
    cargo.env("RUSTFLAGS", "-Ctarget-feature=+crt-static");
    shell::run(cargo)?;

    let target = shell::root().join("target");
    let release = target.join("release");
    fs::create_dir_all(&release).with_context(|| format!("cannot make {}", release.display()))?;
    for name in BINARIES {
        let built = target.join(TARGET).join("release").join(name);
        // A new file takes the name: a program of the same name may be running.
        let (new, place) = (release.join(format!(".{name}.new")), release.join(name));
        fs::copy(&built, &new)
            .and_then(|_| fs::rename(&new, &place))
            .with_context(|| format!("cannot copy {} to target/release", built.display()))?;
    }
    Ok(())
}
