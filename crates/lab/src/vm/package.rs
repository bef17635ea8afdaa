//! Packages of the distribution, taken apart without being installed.

use std::fs;
use std::path::Path;
use std::process::Command;

use super::tool;
use crate::error::Error;

/// Downloads the package and unpacks its files below `into`.
pub fn unpack(package: &str, into: &Path, mend: &str) -> Result<(), Error> {
    let work = tempfile::tempdir_in(into).map_err(Error::io("create a folder in", into))?;
    let mut download = Command::new("apt-get");
    download
        .args(["-q", "download", package])
        .current_dir(work.path());
    // SAFETY: takes nothing and cannot fail.
    if unsafe { libc::geteuid() } == 0 {
        // As root, apt would step down to a user that cannot write to our folder.
        download.args(["-o", "APT::Sandbox::User=root"]);
    }
    tool::output(&mut download, mend)?;
    let archive = fs::read_dir(work.path())
        .map_err(Error::io("list", work.path()))?
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|extension| extension == "deb"))
        .ok_or_else(|| Error::Missing {
            what: format!("apt-get downloaded no package {package}"),
            mend: mend.into(),
        })?;
    tool::output(
        Command::new("dpkg").arg("-x").arg(archive).arg(into),
        "install dpkg, or set DEMETER_KERNEL",
    )?;
    Ok(())
}
