//! The emulator with a sampling unit of its own: a released QEMU with the patches of crates/lab/emulator.
//!
//! The source is the distribution's package, whose checksums apt verifies. The result is kept below target/emulator, named
//! after source and patches.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

use anyhow::{Context, bail};

use crate::fresh::archive;
use crate::shell;

/// The patches, in the order of their names.
const PATCHES: &str = "crates/lab/emulator";

/// Everything that is fetched or built.
const DIR: &str = "target/emulator";

/// The emulator's name, there and in its build.
const NAME: &str = "qemu-system-x86_64";

/// The word behind its version in `--version`. The lab looks for it: `EXACT` in crates/lab/src/vm/qemu_check.rs.
const PKGVERSION: &str = "demeter";

/// Programs that the build needs, and their packages.
const TOOLS: [(&str, &str); 7] = [
    ("apt-get", "apt"),
    ("dpkg-source", "dpkg-dev"),
    ("patch", "patch"),
    ("gcc", "gcc"),
    ("meson", "meson"),
    ("ninja", "ninja-build"),
    ("pkg-config", "pkg-config"),
];

/// Headers of libraries, as the compiler finds them, and their packages.
const HEADERS: [(&str, &str); 4] = [
    ("glib-2.0/glib.h", "libglib2.0-dev"),
    ("pixman-1/pixman.h", "libpixman-1-dev"),
    ("libfdt.h", "libfdt-dev"),
    ("zlib.h", "zlib1g-dev"),
];

/// x86-64 system emulation with plugins, and nothing optional. Firmware is the distribution's.
const CONFIGURE: &str = "--target-list=x86_64-softmmu --without-default-features --enable-tcg \
                         --enable-plugins --disable-docs --disable-debug-info --disable-werror \
                         --meson=/usr/bin/meson --firmwarepath=/usr/share/qemu:/usr/share/seabios";

/// Python and its modules are those that the distribution's meson uses.
const PATH: &str = "/usr/sbin:/usr/bin:/sbin:/bin";

/// Builds the emulator, or says where it is.
pub fn emulator() -> anyhow::Result<()> {
    need()?;
    let dir = shell::root().join(DIR);
    fs::create_dir_all(&dir).with_context(|| format!("cannot make {DIR}"))?;
    let dir = dir.canonicalize().context("cannot find target/emulator")?;
    let source = fetch(&dir)?;
    let patches = patches()?;
    let built = dir.join(key(&source, &patches)?);
    if !built.join(NAME).is_file() {
        build(&source, &patches, &built)?;
    }
    let place = dir.join(NAME);
    // A new link takes the name: an emulator may be starting.
    let new = dir.join(".new");
    let _ = fs::remove_file(&new);
    std::os::unix::fs::symlink(built.join(NAME), &new)
        .and_then(|()| fs::rename(&new, &place))
        .with_context(|| format!("cannot link {}", place.display()))?;
    println!("{DIR}/{NAME} is ready: demeter run --emulator exact");
    Ok(())
}

/// Fails where a tool or a library is missing, and says which packages have them.
fn need() -> anyhow::Result<()> {
    let folders = ["/usr/include", "/usr/include/x86_64-linux-gnu"];
    let is_there = |header: &str| folders.iter().any(|it| Path::new(it).join(header).exists());
    let tools = shell::need(&TOOLS).err().map(|error| error.to_string());
    let missing: Vec<_> = HEADERS
        .iter()
        .filter(|(header, _)| !is_there(header))
        .map(|(_, package)| *package)
        .collect();
    let libraries = (!missing.is_empty()).then(|| {
        let packages = missing.join(" ");
        format!("missing: {packages}; get them with: apt-get install {packages}")
    });
    match [tools, libraries].into_iter().flatten().collect::<Vec<_>>() {
        said if said.is_empty() => Ok(()),
        said => bail!("{}", said.join("; ")),
    }
}

/// The description (.dsc) of the source package, with its files beside it. An apt of its own fetches
/// the newest; without the archive an older download will do.
fn fetch(dir: &Path) -> anyhow::Result<PathBuf> {
    let sources = dir.join("source");
    fs::create_dir_all(&sources).context("cannot make a folder for the source")?;
    let fetched = download(dir, &sources);
    let mut found: Vec<_> = fs::read_dir(&sources)
        .context("cannot list the source's folder")?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|it| it == "dsc"))
        .collect();
    found.sort_by_key(|path| path.metadata().and_then(|it| it.modified()).ok());
    match (found.pop(), fetched) {
        (Some(source), Ok(())) => Ok(source),
        (Some(source), Err(error)) => {
            eprintln!("{error:#}; the source that was fetched before is used");
            Ok(source)
        }
        (None, Err(error)) => Err(error),
        (None, Ok(())) => bail!("the archive has no source of qemu; add a deb-src line to apt's"),
    }
}

fn download(dir: &Path, sources: &Path) -> anyhow::Result<()> {
    let apt = dir.join("apt");
    for folder in ["state/lists/partial", "cache/archives/partial"] {
        fs::create_dir_all(apt.join(folder)).context("cannot make a folder for apt")?;
    }
    let release = fs::read_to_string("/etc/os-release").unwrap_or_default();
    let codename = codename(&release).context("this is no Debian: /etc/os-release names none")?;
    let lines: String = archive::sources(codename)
        .iter()
        .map(|source| source.line().replacen("deb ", "deb-src ", 1) + "\n")
        .collect();
    if lines.is_empty() {
        bail!("this machine's apt knows no archive of Debian");
    }
    fs::write(apt.join("sources.list"), lines).context("cannot write a list for apt")?;
    shell::run(apt_get(&apt, "-q update"))?;
    let mut source = apt_get(&apt, "-q source --download-only --only-source qemu");
    source.current_dir(sources);
    shell::run(source).context("cannot fetch the source of qemu")
}

fn apt_get(apt: &Path, args: &str) -> Command {
    let mut command = Command::new("apt-get");
    let apt = apt.display();
    for option in [
        format!("Dir::State={apt}/state"),
        format!("Dir::Cache={apt}/cache"),
        format!("Dir::Etc::sourcelist={apt}/sources.list"),
        "Dir::Etc::sourceparts=-".into(),
        "Acquire::Languages=none".into(),
        // As root it would step down to a user that cannot write here.
        "APT::Sandbox::User=root".into(),
    ] {
        command.arg("-o").arg(option);
    }
    command.args(args.split_whitespace());
    command
}

/// The release's name in /etc/os-release.
fn codename(release: &str) -> Option<&str> {
    release
        .lines()
        .find_map(|line| line.strip_prefix("VERSION_CODENAME="))
}

/// The patches, sorted.
fn patches() -> anyhow::Result<Vec<PathBuf>> {
    let folder = shell::root().join(PATCHES);
    let folder = folder.canonicalize().context("cannot find the patches")?;
    let mut patches: Vec<_> = fs::read_dir(&folder)
        .context("cannot list the patches")?
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|it| it == "patch"))
        .collect();
    patches.sort();
    Ok(patches)
}

/// A name for what is built of these: the release, and a checksum of all and of how it is configured.
fn key(source: &Path, patches: &[PathBuf]) -> anyhow::Result<String> {
    let mut all = fs::read(source).with_context(|| format!("cannot read {}", source.display()))?;
    for patch in patches {
        all.extend(fs::read(patch).with_context(|| format!("cannot read {}", patch.display()))?);
    }
    all.extend(CONFIGURE.bytes());
    let file = tempfile::NamedTempFile::new().context("cannot make a file")?;
    fs::write(file.path(), all).context("cannot write a file")?;
    let sum = Command::new("sha256sum").arg(file.path()).output();
    let sum = sum.context("cannot run sha256sum")?.stdout;
    let sum = String::from_utf8_lossy(&sum);
    let release = source.file_stem().unwrap_or_default().to_string_lossy();
    Ok(format!(
        "{release}-{}",
        sum.get(..12).context("sha256sum says nothing")?
    ))
}

fn build(source: &Path, patches: &[PathBuf], built: &Path) -> anyhow::Result<()> {
    eprintln!(
        "building {}: about five minutes on two idle cores, and 700 MB of disk meanwhile",
        source.display()
    );
    let began = Instant::now();
    let work = tempfile::Builder::new()
        .prefix("build-")
        .tempdir_in(built.parent().unwrap_or(Path::new(".")))
        .context("cannot make a folder for the build")?;
    let tree = work.path().join("qemu");
    let mut unpack = Command::new("dpkg-source");
    unpack.args(["--no-check", "-x"]).arg(source).arg(&tree);
    unpack.env("PATH", PATH);
    quietly(unpack, work.path(), "dpkg-source")?;
    for patch in patches {
        let mut apply = Command::new("patch");
        apply.args(["-p1", "--forward", "--batch", "-i"]).arg(patch);
        apply.current_dir(&tree);
        let name = patch.file_name().unwrap_or_default().to_string_lossy();
        quietly(apply, work.path(), &name).with_context(|| {
            let source = source.file_stem().unwrap_or_default().to_string_lossy();
            format!(
                "{PATCHES}/{name} does not apply to {source}; it must be adapted to this release"
            )
        })?;
    }
    let out = tree.join("out");
    fs::create_dir(&out).context("cannot make a folder for the build")?;
    let mut configure = Command::new("../configure");
    configure.args(CONFIGURE.split_whitespace());
    configure.arg(format!("--with-pkgversion={PKGVERSION}"));
    configure.current_dir(&out).env("PATH", PATH);
    quietly(configure, work.path(), "configure")?;
    let mut ninja = Command::new("nice");
    ninja
        .args(["ninja", NAME])
        .current_dir(&out)
        .env("PATH", PATH);
    quietly(ninja, work.path(), "ninja")?;
    fs::create_dir_all(built).with_context(|| format!("cannot make {}", built.display()))?;
    let mut strip = Command::new("strip");
    let new = built.join(".new");
    strip.arg("-o").arg(&new).arg(out.join(NAME));
    quietly(strip, work.path(), "strip")?;
    fs::rename(&new, built.join(NAME)).context("cannot name the emulator")?;
    eprintln!("built in {} min", began.elapsed().as_secs().div_ceil(60));
    Ok(())
}

/// Runs a step whose output nobody reads unless it fails.
fn quietly(mut step: Command, folder: &Path, what: &str) -> anyhow::Result<()> {
    let output = step
        .output()
        .with_context(|| format!("cannot run {what}"))?;
    if output.status.success() {
        return Ok(());
    }
    let text = [output.stdout, output.stderr].concat();
    // The build's folder goes; its last words stay.
    let log = folder.with_file_name("failed.log");
    fs::write(&log, &text).with_context(|| format!("cannot write {}", log.display()))?;
    bail!("{what}: {}; see {}", output.status, log.display())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_release_is_read_as_debian_writes_it() {
        let debian = "PRETTY_NAME=\"Debian GNU/Linux 12 (bookworm)\"\nVERSION_CODENAME=bookworm\nID=debian\n";
        assert_eq!(codename(debian), Some("bookworm"));
        assert_eq!(codename("ID=other\n"), None);
    }

    #[test]
    fn another_patch_is_another_emulator() {
        let dir = tempfile::tempdir().unwrap();
        let (source, patch) = (dir.path().join("qemu_1.dsc"), dir.path().join("1.patch"));
        fs::write(&source, "source").unwrap();
        fs::write(&patch, "one").unwrap();
        let patches = [patch.clone()];
        let first = key(&source, &patches).unwrap();
        assert_eq!(first, key(&source, &patches).unwrap());
        fs::write(&patch, "two").unwrap();
        assert_ne!(first, key(&source, &patches).unwrap());
        assert!(first.starts_with("qemu_1-"), "{first}");
    }

    #[test]
    fn every_patch_says_its_licence_and_its_reason() {
        let patches = patches().unwrap();
        assert!(!patches.is_empty());
        for patch in patches {
            let text = fs::read_to_string(&patch).unwrap();
            let (header, _) = text.split_once("\ndiff --git ").unwrap();
            assert!(
                header.contains("SPDX-License-Identifier: GPL-2.0"),
                "{patch:?}"
            );
            assert!(header.lines().count() > 4, "{patch:?}");
        }
    }

    #[test]
    fn a_step_that_fails_names_its_log() {
        let dir = tempfile::tempdir().unwrap();
        let folder = dir.path().join("build");
        let mut step = Command::new("sh");
        step.args(["-c", "echo why; exit 3"]);
        let error = quietly(step, &folder, "step").unwrap_err().to_string();
        assert!(
            error.contains("step") && error.contains("failed.log"),
            "{error}"
        );
        let log = fs::read_to_string(dir.path().join("failed.log")).unwrap();
        assert_eq!(log, "why\n");
    }
}
