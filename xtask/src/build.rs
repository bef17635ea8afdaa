//! Release binaries that run everywhere, in the lab's initramfs too: .cargo/config.toml has them
//! linked statically. Cargo leaves them in a folder named after the target; here they come to
//! target/release, where everything looks for them.

use std::fs;

use anyhow::Context;

use crate::shell;

/// The command, and the workloads that it expects beside itself.
pub const BINARIES: [&str; 8] = [
    "demeter", "forks", "graph", "gups", "kvload", "memlat", "mix", "sweep",
];

/// Builds the binaries and puts them into target/release.
pub fn build() -> anyhow::Result<()> {
    let mut cargo = shell::cargo("build --locked --release --target-dir target --bins");
    cargo.args(["--package", "demeter", "--package", "demeter-lab"]);
    // It would take the place of the configuration's.
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
        // A new file takes the name: a program of the same name may be running.
        let (new, place) = (release.join(format!(".{name}.new")), release.join(name));
        fs::copy(&built, &new)
            .and_then(|_| fs::rename(&new, &place))
            .with_context(|| format!("cannot copy {} to target/release", built.display()))?;
    }
    Ok(())
}
