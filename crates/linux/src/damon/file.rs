//! Files of DAMON in sysfs: reading, writing, and their errors.

use std::fmt::Display;
use std::fs::{self, File};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::Duration;

use super::DamonError;

/// Retries of a command while the kernel answers EBUSY.
const BUSY_RETRIES: u32 = 20;
const BUSY_WAIT: Duration = Duration::from_millis(10);

pub(super) fn read(path: &Path) -> Result<String, DamonError> {
    let text = fs::read_to_string(path).map_err(|source| io_error("read", path, source))?;
    Ok(text.trim().into())
}

pub(super) fn write(path: &Path, value: &str) -> Result<(), DamonError> {
    let mut result = Ok(());
    for _ in 0..BUSY_RETRIES {
        result = File::options()
            .write(true)
            .open(path)
            .and_then(|file| file.write_all_at(line(value).as_bytes(), 0));
        match &result {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(BUSY_WAIT);
            }
            _ => break,
        }
    }
    result.map_err(|source| io_error(&format!("write {value:?} to"), path, source))
}

/// Opens a file for writing. A missing file is not created.
pub(super) fn open(path: &Path) -> Result<File, DamonError> {
    let file = File::options().write(true).open(path);
    file.map_err(|source| io_error("open", path, source))
}

/// A value as a line, which ends it whatever follows: sysfs needs no truncation, which costs time.
pub(super) fn line(value: impl Display) -> String {
    format!("{value}\n")
}

pub(super) fn io_error(what: &str, path: &Path, source: io::Error) -> DamonError {
    DamonError::Io {
        what: format!("{what} {}", path.display()),
        source,
    }
}

pub(super) fn unavailable(why: String, hint: &str) -> DamonError {
    DamonError::Unavailable {
        why,
        hint: hint.into(),
    }
}
