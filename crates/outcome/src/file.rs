//! Reads, checks and writes result files.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::schema::{RunResult, SCHEMA};
use crate::schema_1;

/// Maximum size of a result file, bytes: a thousand systems with an hour of seconds each.
pub const FILE_BYTES_MAX: u64 = 512 << 20;

/// An error with a result file.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read result file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// The file's content is no result.
    #[error("result file {}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// The error in its content.
        source: ContentError,
    },
}

/// An error in a result's content.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// It is not JSON.
    #[error("not JSON ({0}); write it with `demeter run SCENARIO --json FILE`")]
    Json(serde_json::Error),
    /// It is JSON without a result's structure.
    #[error("not a result ({0}); write it with `demeter run SCENARIO --json FILE`")]
    Shape(serde_json::Error),
    /// The schema's version is unknown.
    #[error(
        "schema version {found}, but this demeter knows only 1 to {SCHEMA}; \
         use the demeter that wrote the file, or run the scenario again"
    )]
    Schema {
        /// The file's version.
        found: u64,
    },
    /// A value is impossible.
    #[error("{place} is {value}; it must be {rule}")]
    Value {
        /// The value's path.
        place: String,
        /// The value.
        value: f64,
        /// The rule that it breaks.
        rule: &'static str,
    },
}

impl From<serde_json::Error> for ContentError {
    fn from(error: serde_json::Error) -> Self {
        if error.is_data() {
            Self::Shape(error)
        } else {
            Self::Json(error)
        }
    }
}

impl RunResult {
    /// Reads and checks a result file.
    ///
    /// # Errors
    /// [`Error::Read`]: it cannot be read or is longer than [`FILE_BYTES_MAX`]. [`Error::Content`]: it is no result of
    /// a version up to [`SCHEMA`], or fails [`RunResult::check`].
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = read_bounded(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        Self::from_json(&text).map_err(|source| Error::Content {
            path: path.into(),
            source,
        })
    }

    /// Parses and checks a result.
    ///
    /// # Errors
    /// Like [`RunResult::load`], without those of the file.
    pub fn from_json(text: &str) -> Result<Self, ContentError> {
        // The version first, because another version may have another structure.
        #[derive(Deserialize)]
        struct Version {
            schema: u64,
        }
        let Version { schema: found } = serde_json::from_str(text)?;
        let result: Self = match found {
            1 => serde_json::from_value(schema_1::upgrade(serde_json::from_str(text)?))?,
            2 => serde_json::from_str(text)?,
            _ => return Err(ContentError::Schema { found }),
        };
        result.check()?;
        Ok(result)
    }

    /// Checks and writes the result atomically, see [`write_file`].
    ///
    /// # Errors
    /// [`Error::Content`]: the result fails [`RunResult::check`] (JSON has no NaN). [`Error::Write`]: the file cannot
    /// be written.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        self.check().map_err(|source| Error::Content {
            path: path.into(),
            source,
        })?;
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| Error::Write {
            path: path.into(),
            source: error.into(),
        })?;
        text.push(b'\n');
        write_file(path, &text)
    }
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("longer than {} MiB", FILE_BYTES_MAX >> 20),
        ));
    }
    Ok(text)
}

/// Writes a file atomically, through a temporary file in the same directory.
///
/// Pipes, devices and other special files are written directly.
///
/// # Errors
/// [`Error::Write`]: the file cannot be written; an existing file is unchanged.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| file.write_all(bytes)),
        // A symbolic link stays, and its target is replaced.
        Ok(metadata) => path.canonicalize().and_then(|target| {
            write_then_rename(&target, bytes, metadata.permissions().mode() & 0o777)
        }),
        Err(_) => write_then_rename(path, bytes, 0o666),
    };
    written.map_err(|source| Error::Write {
        path: path.into(),
        source,
    })
}

/// The process's umask applies to `mode`.
fn write_then_rename(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new()
        .prefix(".demeter-")
        .permissions(fs::Permissions::from_mode(mode))
        .tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
