//! Errors of a configuration, each with its file, line, key and hint.

use std::fmt;
use std::path::{Path, PathBuf};

use demeter_toml_file::{FileError, line_of};

/// Reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read or parsed.
    #[error(transparent)]
    File(#[from] FileError),
    /// A value that is invalid, alone or together with others.
    #[error("{at}{what}; {hint}")]
    Value {
        /// File and line.
        at: At,
        /// The value and its fault. Begins with the key's path.
        what: String,
        /// The value to write instead.
        hint: &'static str,
    },
}

/// File and line of an error, if known.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct At {
    file: Option<PathBuf>,
    /// Counted from 1.
    line: Option<usize>,
}

impl fmt::Display for At {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match (&self.file, self.line) {
            (Some(file), Some(line)) => write!(f, "{}:{line}: ", file.display()),
            (Some(file), None) => write!(f, "{}: ", file.display()),
            (None, _) => f.write_str("configuration: "),
        }
    }
}

impl At {
    /// A place in a file.
    pub(super) fn new(file: &Path, line: Option<usize>) -> Self {
        Self {
            file: Some(file.into()),
            line,
        }
    }
}

impl ConfigError {
    /// The error without its place, for a value that is in no file.
    pub fn bare(&self) -> String {
        match self {
            Self::Value { what, hint, .. } => format!("{what}; {hint}"),
            other => other.to_string(),
        }
    }

    /// This error with the place of its key in the file of this text.
    pub(super) fn located(self, path: &Path, text: &str) -> Self {
        match self {
            Self::Value { what, hint, .. } => Self::Value {
                at: At::new(path, line_of(text, &what)),
                what,
                hint,
            },
            other => other,
        }
    }
}

/// An error about a value. `what` begins with its key.
pub(super) fn wrong(what: impl Into<String>, hint: &'static str) -> ConfigError {
    ConfigError::Value {
        at: At::default(),
        what: what.into(),
        hint,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_located_error_has_file_and_line() {
        let error = wrong("policy is bad", "fix it").located("/h.toml".as_ref(), "\npolicy = 1");
        assert_eq!(error.to_string(), "/h.toml:2: policy is bad; fix it");
    }
}
