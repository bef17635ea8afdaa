//! The emulator on this machine: its version, and whether it loads our plugin.

use std::path::Path;
use std::process::Command;

use super::quoted::quoted;
use super::tool;
use crate::error::Error;

/// A release of QEMU, major and minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

/// Oldest QEMU with all required features (`hmat`, `-plugin file=`, `-accel tcg`).
const VERSION_MIN: Version = Version(7, 0);

/// The word behind the version of our own emulator: PKGVERSION in xtask/src/emulator.rs.
const EXACT: &str = "(demeter)";

/// The way to get an emulator.
pub const HINT: &str =
    "apt-get install qemu-system-x86, or set DEMETER_QEMU to a qemu-system-x86_64";

/// The way to get a user-mode emulator.
const HINT_USER: &str = "apt-get install qemu-user, or set DEMETER_QEMU_USER to a qemu-x86_64";

/// Checks that the emulator exists and is recent enough.
pub fn check_version(qemu: &Path) -> Result<Version, Error> {
    version(qemu, HINT)
}

/// Checks the user-mode emulator. Debian 13 builds its own without plugins.
pub fn check_user_version(qemu: &Path) -> Result<Version, Error> {
    let version = version(qemu, HINT_USER)?;
    let help = tool::output(Command::new(qemu).arg("-help"), HINT_USER)?;
    match help.contains("-plugin") {
        true => Ok(version),
        false => Err(Error::NoPlugins {
            qemu: qemu.to_owned(),
        }),
    }
}

fn version(qemu: &Path, hint: &str) -> Result<Version, Error> {
    let said = tool::output(Command::new(qemu).arg("--version"), hint)?;
    let what = match parse_version(&said) {
        Some(version) if version >= VERSION_MIN => return Ok(version),
        Some(Version(major, minor)) => format!(
            "{} is version {major}.{minor}, the lab needs {}.{}",
            qemu.display(),
            VERSION_MIN.0,
            VERSION_MIN.1
        ),
        None => format!("{} does not report its version", qemu.display()),
    };
    let hint = hint.into();
    Err(Error::Missing { what, hint })
}

/// Whether this is our own emulator, whose CPUs have a sampling unit.
pub fn is_exact(qemu: &Path) -> Result<bool, Error> {
    let said = tool::output(Command::new(qemu).arg("--version"), HINT)?;
    Ok(says_exact(&said))
}

fn says_exact(said: &str) -> bool {
    said.lines().next().is_some_and(|line| line.contains(EXACT))
}

fn parse_version(said: &str) -> Option<Version> {
    let (_, number) = said.lines().next()?.split_once("version ")?;
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    Some(Version(
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
    ))
}

/// Checks that the emulator loads our plugin, without a VM.
pub fn check_loads(qemu: &Path, plugin: &Path) -> Result<(), Error> {
    let mut command = Command::new(qemu);
    command
        .args(["-machine", "none", "-accel", "tcg", "-display", "none"])
        .args(["-nodefaults", "-no-user-config", "-plugin"])
        .arg(format!("file={},check=on", quoted(plugin)));
    let hint = "the lab needs a QEMU built with TCG plugins, from 7.0 to 11.1: set DEMETER_QEMU to \
                such a qemu-system-x86_64";
    tool::output(&mut command, hint).map(drop)
}

/// Checks that the user-mode emulator loads our plugin. The plugin then prevents it from running anything.
pub fn check_user_loads(qemu: &Path, plugin: &Path) -> Result<(), Error> {
    let mut command = Command::new(qemu);
    command
        .arg("-plugin")
        .arg(format!("{},check=on", plugin.display()))
        .arg("/proc/self/exe");
    tool::output(&mut command, HINT_USER).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_packagers_print() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright";
        assert_eq!(parse_version(debian), Some(Version(7, 2)));
        assert_eq!(
            parse_version("QEMU emulator version 10.0.50\n"),
            Some(Version(10, 0))
        );
        assert_eq!(parse_version("no emulator"), None);
        assert!(!says_exact(debian));
        let ours = "QEMU emulator version 7.2.22 (demeter)\nCopyright";
        assert_eq!(parse_version(ours), Some(Version(7, 2)));
        assert!(says_exact(ours));
    }

    #[test]
    fn a_missing_emulator_is_told_with_its_hint() {
        let said = check_version(Path::new("/nonexistent/qemu"))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("/nonexistent/qemu") && said.contains("apt-get install"),
            "{said}"
        );
    }
}
