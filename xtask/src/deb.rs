//! Debian packages: `demeter` (what operates a machine: a small command, units), `demeter-lab` (the full command, workloads,
//! scenarios) and `demeter-balloon-dkms`.
//!
//! Both commands are static and called `demeter`: alternatives of Debian, of which the full one takes precedence. Units start
//! the small one.
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

/// The command of each package: its name here, and the folder that it is built into.
const COMMANDS: [(&str, &str); 2] = [("operate", build::OPERATE), ("study", build::RELEASE)];

/// Shells that have completion scripts.
const SHELLS: [&str; 3] = ["bash", "zsh", "fish"];

/// The folder of the packages.
pub fn folder() -> PathBuf {
    shell::root().join("target/deb")
}

/// Builds the packages into target/deb, and checks them with lintian if it is installed.
pub fn deb() -> anyhow::Result<()> {
    shell::need(&NEEDED)?;
    build::operate()?;
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
    for name in build::binaries()? {
        let program = root.join(build::RELEASE).join(&name);
        copy(&program, &tree.join("study").join(name))?;
    }
    let small = root.join(build::OPERATE).join("demeter");
    copy(&small, &tree.join("operate/demeter"))?;
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

    for (name, folder) in COMMANDS {
        document(tree, name, &root.join(folder).join("demeter"))?;
    }
    leave_out_common_pages(&tree.join("man"))
}

/// Writes manual pages and completion scripts of the command called `name`.
fn document(tree: &Path, name: &str, demeter: &Path) -> anyhow::Result<()> {
    let pages = tree.join("man").join(name);
    shell::run({
        let mut man = shell::program(demeter, "man");
        man.arg(&pages);
        man
    })?;
    // Both packages have a page of the command as a whole, and an alternative chooses.
    let whole = (
        pages.join("demeter.1"),
        pages.join(format!("demeter-{name}.1")),
    );
    fs::rename(&whole.0, &whole.1)
        .with_context(|| format!("cannot rename {}", whole.0.display()))?;
    for kind in SHELLS {
        let script = shell::program(demeter, &format!("completions {kind}")).output();
        let script = script.with_context(|| format!("cannot run {}", demeter.display()))?;
        if !script.status.success() {
            bail!("demeter completions {kind}: {}", script.status);
        }
        let path = tree.join("completions").join(name).join(kind);
        write(&path, &String::from_utf8_lossy(&script.stdout))?;
    }
    Ok(())
}

/// Removes the pages of `demeter-lab` that `demeter` has, on which it depends.
fn leave_out_common_pages(man: &Path) -> anyhow::Result<()> {
    let (operate, study) = (man.join("operate"), man.join("study"));
    for page in
        fs::read_dir(&operate).with_context(|| format!("cannot read {}", operate.display()))?
    {
        let common = study.join(page?.file_name());
        if common.exists() {
            fs::remove_file(&common)
                .with_context(|| format!("cannot remove {}", common.display()))?;
        }
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
    fn pages_that_both_commands_have_are_packed_once() {
        let man = tempfile::tempdir().unwrap();
        for page in [
            "operate/demeter-guest.1",
            "study/demeter-guest.1",
            "study/demeter-run.1",
        ] {
            write(&man.path().join(page), "").unwrap();
        }
        leave_out_common_pages(man.path()).unwrap();
        let exists = |page: &str| man.path().join(page).exists();
        assert!(exists("operate/demeter-guest.1") && exists("study/demeter-run.1"));
        assert!(!exists("study/demeter-guest.1"));
    }

    #[test]
    fn units_start_the_small_command() {
        for unit in UNITS {
            let unit = read(&shell::root().join(format!("packaging/{unit}.service"))).unwrap();
            let starts = unit.lines().filter(|line| line.starts_with("Exec"));
            let starts: Vec<&str> = starts.filter(|line| line.contains("demeter ")).collect();
            assert!(!starts.is_empty());
            for line in starts {
                assert!(line.contains("/usr/lib/demeter/demeter "), "{line}");
            }
        }
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
