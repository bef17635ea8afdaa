//! Errors of a configuration, each with its file, line, key and hint.

use std::fmt;
use std::path::{Path, PathBuf};

use toml::de::{DeTable, DeValue};

/// Reason why a configuration cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum ConfigError {
    /// The file cannot be read.
    #[error("cannot read configuration {path}: {source}; give --config the path of a TOML file")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: std::io::Error,
    },
    /// Not TOML, an unknown key or a wrong type.
    #[error("configuration {path}: {source}")]
    Parse {
        /// The file.
        path: PathBuf,
        /// Position and cause of the error.
        source: Box<toml::de::Error>,
    },
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

impl ConfigError {
    /// The error without its place, for a value that is in no file.
    pub fn bare(&self) -> String {
        match self {
            Self::Value { what, hint, .. } => format!("{what}; {hint}"),
            other => other.to_string(),
        }
    }

    /// The same error with the place of its key in the file of this text.
    pub(super) fn located(self, path: &Path, text: &str) -> Self {
        match self {
            Self::Value { what, hint, .. } => Self::Value {
                at: At {
                    file: Some(path.into()),
                    line: line_of(text, &what),
                },
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

/// The line of the key that a text begins with, or of the nearest table around it.
fn line_of(text: &str, what: &str) -> Option<usize> {
    let is_key = |c: char| c.is_ascii_alphanumeric() || "._-".contains(c);
    let end = what.find(|c| !is_key(c)).unwrap_or(what.len());
    let mut rest = &what[..end];
    let document = DeTable::parse(text).ok()?;
    let mut table = document.get_ref();
    let mut found = None;
    loop {
        // A name may have dots, so the longest key that fits is the right one.
        let fits = |name: &str| {
            let rest = rest.strip_prefix(name)?;
            (rest.is_empty() || rest.starts_with('.')).then(|| rest.trim_start_matches('.'))
        };
        let keys = table.iter();
        let keys = keys.filter_map(|(key, value)| Some((key, value, fits(key.get_ref())?)));
        let Some((key, value, left)) = keys.min_by_key(|(_, _, left)| left.len()) else {
            break;
        };
        found = Some(key.span().start);
        rest = left;
        table = match value.get_ref() {
            DeValue::Table(inner) => inner,
            DeValue::Array(list) => {
                let (index, left) = rest.split_once('.').unwrap_or((rest, ""));
                let item = index.parse().ok().and_then(|at: usize| list.get(at));
                let Some((item, DeValue::Table(inner))) = item.map(|of| (of, of.get_ref())) else {
                    break;
                };
                found = Some(item.span().start);
                rest = left;
                inner
            }
            _ => break,
        };
        if rest.is_empty() {
            break;
        }
    }
    Some(text.get(..found?)?.matches('\n').count() + 1)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_key_is_found_in_its_line() {
        let text = "policy = \"wss\"\n[[pool]]\nname = \"a\"\n[[pool]]\nname = \"b\"\nfast_mib = 1\n\n\
                    [vm.\"x.y\"]\nshare = 0\nfast = { size_mib = 1 }\n";
        for (what, line) in [
            ("policy is bad", Some(1)),
            ("pool.1.fast_mib = 1 is bad", Some(6)),
            ("pool.1.slow_mib is missing", Some(4)),
            ("vm.x.y.share = 0", Some(9)),
            ("vm.x.y.fast.size_mib = 1", Some(10)),
            ("vm.x.y: bad", Some(8)),
            ("the VMs' fast.size_mib", None),
            ("", None),
        ] {
            assert_eq!(line_of(text, what), line, "{what}");
        }
        assert_eq!(line_of("no toml", "policy"), None);
        let error = wrong("policy is bad", "mend it").located("/h.toml".as_ref(), text);
        assert_eq!(error.to_string(), "/h.toml:1: policy is bad; mend it");
    }
}
