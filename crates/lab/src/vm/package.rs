//! Downloads packages of the distribution and unpacks them without installing.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::tool;
use crate::error::Error;

/// Downloads packages and unpacks their files below `into`.
pub fn unpack(packages: &[&str], into: &Path, hint: &str) -> Result<(), Error> {
    let work = tempfile::tempdir_in(into).map_err(Error::io("create a folder in", into))?;
    let mut download = Command::new("apt-get");
    download
        .args(["-q", "download"])
        .args(packages)
        .current_dir(work.path());
    // SAFETY: it has no arguments and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        // As root, apt would switch to a user that cannot write to our folder.
        download.args(["-o", "APT::Sandbox::User=root"]);
    }
    tool::output(&mut download, hint)?;
    let archives: Vec<_> = fs::read_dir(work.path())
        .map_err(Error::io("list", work.path()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .filter(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .collect();
    if archives.is_empty() {
        return Err(Error::Missing {
            what: format!("apt-get downloaded nothing for {}", packages.join(" ")),
            hint: hint.into(),
        });
    }
    for archive in archives {
        tool::output(
            Command::new("dpkg").arg("-x").arg(archive).arg(into),
            "install dpkg",
        )?;
    }
    Ok(())
}

/// The packages on which a package depends.
pub fn dependencies(package: &str, hint: &str) -> Result<Vec<String>, Error> {
    let listing = tool::output(
        Command::new("apt-cache").args(["depends", "--important", package]),
        hint,
    )?;
    let names = listing.lines().filter_map(|line| {
        let line = line.trim().trim_start_matches('|');
        line.strip_prefix("Depends: ")
            .or_else(|| line.strip_prefix("PreDepends: "))
    });
    // Virtual packages are in angle brackets.
    let names = names.filter(|name| !name.starts_with('<'));
    Ok(names.map(str::to_owned).collect())
}
