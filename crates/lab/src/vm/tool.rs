//! Runs other programs.

use std::io;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

use crate::error::Error;

/// Finds a program on the user's path or in the system's folders.
pub fn find(program: &Path) -> Option<PathBuf> {
    let path = std::env::var_os("PATH").unwrap_or_default();
    let folders = std::env::split_paths(&path).chain(["/usr/sbin".into()]);
    folders
        .map(|folder| folder.join(program))
        .find(|file| file.is_file())
}

/// Runs `command` and returns what it printed.
///
/// A missing or failing program becomes an error with this hint.
pub fn output(command: &mut Command, hint: &str) -> Result<String, Error> {
    let program = command.get_program().to_string_lossy().into_owned();
    let output = command
        .stdin(Stdio::null())
        .output()
        .map_err(|source| match source.kind() {
            io::ErrorKind::NotFound => Error::Missing {
                what: format!("{program} is not installed"),
                hint: hint.into(),
            },
            _ => Error::Io {
                what: format!("run {program}"),
                source,
            },
        })?;
    if output.status.success() {
        return Ok(String::from_utf8_lossy(&output.stdout).into_owned());
    }
    let stderr = String::from_utf8_lossy(&output.stderr);
    let said = stderr.lines().rfind(|line| !line.trim().is_empty());
    Err(Error::Tool {
        said: said.map_or_else(|| output.status.to_string(), str::to_owned),
        program,
        hint: hint.into(),
    })
}
