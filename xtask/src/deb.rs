//! Debian packages: `demeter` (everything static, units, manual pages) and `demeter-balloon-dkms`.
//!
//! debhelper builds them from a staged tree, so that maintainer scripts, units and DKMS are handled as Debian's present
//! tools do it.

use std::fs;
use std::path::{Path, PathBuf};

use anyhow::{Context, bail};

use crate::{build, shell};

/// Programs needed for the build, with their Debian packages.
const NEEDED: [(&str, &str); 4] = [
    ("dpkg-buildpackage", "dpkg-dev"),
    ("dh", "debhelper"),
    ("dh_dkms", "dh-dkms"),
    ("fakeroot", "fakeroot"),
];

/// Units, as named in packaging/.
const UNITS: [&str; 3] = ["demeter-guest", "demeter-host", "demeter-relay"];

/// Completion scripts: the shell, and the file name that it expects.
const COMPLETIONS: [(&str, &str); 3] = [
    ("bash", "demeter"),
    ("zsh", "_demeter"),
    ("fish", "demeter.fish"),
];

/// The folder of the packages.
pub fn folder() -> PathBuf {
    shell::root().join("target/deb")
}

/// Builds both packages into target/deb, and checks them with lintian if it is installed.
pub fn deb() -> anyhow::Result<()> {
    shell::need(&NEEDED)?;
    build::build()?;
    let version = env!("CARGO_PKG_VERSION");
    let out = folder();
    if out.exists() {
        fs::remove_dir_all(&out).with_context(|| format!("cannot empty {}", out.display()))?;
    }
    let tree = out.join(format!("demeter-{version}"));
    stage(&tree, version)?;
    let mut package = shell::program(
        "dpkg-buildpackage",
        "--build=binary -us -uc --no-check-builddeps",
    );
    package.current_dir(&tree);
    shell::run(package)?;
    fs::remove_dir_all(&tree).with_context(|| format!("cannot remove {}", tree.display()))?;

    let packages = packages(&out)?;
    if shell::succeeds(shell::program("lintian", "--version")) {
        let mut lintian =
            shell::program("lintian", "--fail-on error,warning --tag-display-limit 0");
        shell::run({
            lintian.args(&packages);
            lintian
        })?;
    } else {
        eprintln!("lintian is not installed: the packages are not checked here");
    }
    for package in packages {
        println!("{}", package.display());
    }
    Ok(())
}

/// The packages in a folder.
pub fn packages(out: &Path) -> anyhow::Result<Vec<PathBuf>> {
    let entries = fs::read_dir(out).with_context(|| format!("cannot read {}", out.display()))?;
    let mut packages: Vec<PathBuf> = entries
        .flatten()
        .map(|entry| entry.path())
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    packages.sort();
    Ok(packages)
}

/// Creates the tree from which the packages are built.
fn stage(tree: &Path, version: &str) -> anyhow::Result<()> {
    let root = shell::root();
    let packaging = root.join("packaging");
    let debian = tree.join("debian");
    copy_folder(&packaging.join("debian"), &debian)?;
    for unit in UNITS {
        // debhelper's name for a unit that is named differently from its package.
        copy(
            &packaging.join(format!("{unit}.service")),
            &debian.join(format!("demeter.{unit}.service")),
        )?;
    }
    write(&debian.join("changelog"), &changelog(version)?)?;
    let copyright = read(&debian.join("copyright"))?;
    let mit = indented(&read(&root.join("LICENSE-MIT"))?);
    write(
        &debian.join("copyright"),
        &copyright.replace("@MIT@\n", &mit),
    )?;

    for name in ["guest.toml", "host.toml"] {
        copy(&packaging.join(name), &tree.join(name))?;
    }
    for name in [
        "README.md",
        "ARCHITECTURE.md",
        "CONTRIBUTING.md",
        "SECURITY.md",
    ] {
        copy(&root.join(name), &tree.join(name))?;
    }
    copy_folder(&root.join("docs"), &tree.join("docs"))?;
    for name in ["grafana", "prometheus"] {
        copy_folder(&packaging.join(name), &tree.join(name))?;
    }
    copy(&root.join("CHANGELOG.md"), &tree.join("CHANGELOG.md"))?;
    copy_folder(&root.join("scenarios"), &tree.join("scenarios"))?;
    for name in build::BINARIES {
        copy(
            &root.join("target/release").join(name),
            &tree.join("bin").join(name),
        )?;
    }
    let driver = root.join("kernel/demeter_balloon");
    for entry in
        fs::read_dir(&driver).with_context(|| format!("cannot read {}", driver.display()))?
    {
        let path = entry?.path();
        let name = path.file_name().unwrap_or_default();
        let is_source = path
            .extension()
            .is_some_and(|kind| kind == "c" || kind == "h");
        if is_source || name == "Makefile" {
            copy(&path, &tree.join("balloon").join(name))?;
        } else if name == "dkms.conf" {
            copy(&path, &tree.join(name))?;
        }
    }
    write(
        &tree.join("demeter-balloon.conf"),
        "# Demeter's balloon driver; without a port of its host it does nothing.\ndemeter_balloon\n",
    )?;

    let demeter = root.join("target/release/demeter");
    shell::run({
        let mut man = shell::program(&demeter, "man");
        man.arg(tree.join("man"));
        man
    })?;
    for (name, file) in COMPLETIONS {
        let script = shell::program(&demeter, &format!("completions {name}")).output();
        let script = script.with_context(|| format!("cannot run {}", demeter.display()))?;
        if !script.status.success() {
            bail!("demeter completions {name}: {}", script.status);
        }
        let path = tree.join("completions").join(name).join(file);
        write(&path, &String::from_utf8_lossy(&script.stdout))?;
    }
    Ok(())
}

/// A Debian changelog with one entry, dated like the last commit.
fn changelog(version: &str) -> anyhow::Result<String> {
    let date = shell::program("git", "log -1 --format=%cD").output();
    let date = date.context("cannot run git")?.stdout;
    let date = String::from_utf8_lossy(&date).trim().to_owned();
    if date.is_empty() {
        bail!("git knows no last commit, so the packages would have no date: build in a clone");
    }
    let control = read(&shell::root().join("packaging/debian/control"))?;
    let maintainer = control
        .lines()
        .find_map(|line| line.strip_prefix("Maintainer: "))
        .context("packaging/debian/control names no maintainer")?;
    Ok(format!(
        "demeter ({version}) unstable; urgency=medium\n\n  \
         * For changes see /usr/share/doc/demeter/NEWS of the package demeter.\n\n \
         -- {maintainer}  {date}\n"
    ))
}

/// Text for a field of a control file: indented, with dots for empty lines.
fn indented(text: &str) -> String {
    text.lines()
        .map(|line| match line.trim_end() {
            "" => " .\n".to_owned(),
            line => format!(" {line}\n"),
        })
        .collect()
}

fn read(path: &Path) -> anyhow::Result<String> {
    fs::read_to_string(path).with_context(|| format!("cannot read {}", path.display()))
}

fn write(path: &Path, text: &str) -> anyhow::Result<()> {
    path.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::write(path, text))
        .with_context(|| format!("cannot write {}", path.display()))
}

fn copy(from: &Path, to: &Path) -> anyhow::Result<()> {
    to.parent()
        .map_or(Ok(()), fs::create_dir_all)
        .and_then(|()| fs::copy(from, to))
        .map(drop)
        .with_context(|| format!("cannot copy {} to {}", from.display(), to.display()))
}

fn copy_folder(from: &Path, to: &Path) -> anyhow::Result<()> {
    for entry in fs::read_dir(from).with_context(|| format!("cannot read {}", from.display()))? {
        let entry = entry?;
        let (path, to) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy_folder(&path, &to)?;
        } else {
            copy(&path, &to)?;
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_licence_fits_into_a_control_file() {
        assert_eq!(indented("one\n\n  two \n"), " one\n .\n   two\n");
    }

    #[test]
    fn every_unit_is_packed() {
        let folder = shell::root().join("packaging");
        let mut units: Vec<String> = fs::read_dir(folder)
            .unwrap()
            .filter_map(|entry| entry.unwrap().file_name().into_string().ok())
            .filter_map(|name| Some(name.strip_suffix(".service")?.to_owned()))
            .collect();
        units.sort();
        assert_eq!(units, UNITS);
    }
}
