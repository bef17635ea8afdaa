//! Reads TOML files that people write: configurations and scenarios. Errors are one line with file, line, key, fault and
//! hint.

mod plain;

use std::io;
use std::path::{Path, PathBuf};

use serde::de::DeserializeOwned;
use toml::Table;
use toml::de::{DeTable, DeValue};

/// Reason why a file cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum FileError {
    /// The file cannot be read.
    #[error("cannot read {kind} {path}: {source}; {hint}")]
    Read {
        /// The kind of file, such as `configuration`.
        kind: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
        /// How to name a file.
        hint: &'static str,
    },
    /// Not TOML, an unknown key or a wrong type.
    #[error("{place}: {what}; {hint}")]
    Parse {
        /// The file, and the line if it is known.
        place: String,
        /// The key's path and the fault.
        what: String,
        /// The text to write instead.
        hint: String,
    },
}

/// A kind of file that people write.
#[derive(Debug, Clone, Copy)]
pub struct Kind {
    /// Its name in errors: `configuration`.
    pub name: &'static str,
    /// How to name one: `give --config the path of a TOML file`.
    pub hint: &'static str,
    /// A file that shows how it is written: `packaging/host.toml`.
    pub example: &'static str,
    /// The page that lists its keys.
    pub reference: &'static str,
}

/// The text of a file.
#[derive(Debug, Clone)]
pub struct TomlFile {
    kind: &'static Kind,
    path: PathBuf,
    text: String,
}

impl TomlFile {
    /// Reads a file.
    ///
    /// # Errors
    /// The file cannot be read.
    pub fn read(kind: &'static Kind, path: &Path) -> Result<Self, FileError> {
        let text = std::fs::read_to_string(path).map_err(|source| FileError::Read {
            kind: kind.name,
            path: path.into(),
            source,
            hint: kind.hint,
        })?;
        Ok(Self {
            kind,
            path: path.into(),
            text,
        })
    }

    /// A text that comes from no file; errors say `name`.
    pub fn from_text(kind: &'static Kind, name: &str, text: &str) -> Self {
        Self {
            kind,
            path: name.into(),
            text: text.into(),
        }
    }

    /// Its text.
    pub fn text(&self) -> &str {
        &self.text
    }

    /// Its values.
    ///
    /// # Errors
    /// The file is no TOML, has an unknown key or a value of a wrong type.
    pub fn parse<T: DeserializeOwned>(&self) -> Result<T, FileError> {
        toml::from_str(&self.text).map_err(|error| {
            let start = error.span().map(|span| span.start);
            let line = start.and_then(|start| line_at(&self.text, start.min(self.text.len())));
            let path = self.path.display();
            let place = match line {
                Some(line) => format!("{path}:{line}"),
                None => path.to_string(),
            };
            let (what, hint) = plain::of_text(self.kind, &self.text, &error);
            FileError::Parse { place, what, hint }
        })
    }

    /// The values of a table that was made from the file's. Errors have no line.
    ///
    /// # Errors
    /// The table has an unknown key or a value of a wrong type.
    pub fn parse_table<T: DeserializeOwned>(&self, table: Table) -> Result<T, FileError> {
        table.try_into().map_err(|error| {
            let (what, hint) = plain::of_table(self.kind, &error);
            let place = self.path.display().to_string();
            FileError::Parse { place, what, hint }
        })
    }
}

/// The values of a table that is not one file's.
///
/// # Errors
/// The table has an unknown key or a value of a wrong type: key, fault and hint.
pub fn parse_table<T: DeserializeOwned>(kind: &Kind, table: Table) -> Result<T, String> {
    table.try_into().map_err(|error| {
        let (what, hint) = plain::of_table(kind, &error);
        format!("{what}; {hint}")
    })
}

/// The line of a position, from 1.
fn line_at(text: &str, at: usize) -> Option<usize> {
    Some(text.get(..at)?.matches('\n').count() + 1)
}

/// The line of the key that a message begins with, or of the nearest table around it, from 1. `text` is the file's.
pub fn line_of(text: &str, what: &str) -> Option<usize> {
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
    line_at(text, found?)
}

#[cfg(test)]
mod tests {
    use super::*;

    const KIND: Kind = Kind {
        name: "list",
        hint: "give a list",
        example: "list.toml",
        reference: "keys.md",
    };

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
    }

    #[test]
    fn a_fault_is_one_line_with_file_line_and_key() {
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Outer {
            #[expect(dead_code, reason = "only read")]
            inner: Inner,
        }
        #[derive(Debug, serde::Deserialize)]
        #[serde(deny_unknown_fields)]
        struct Inner {
            #[expect(dead_code, reason = "only read")]
            size: u64,
        }
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("a.toml");
        let read = || TomlFile::read(&KIND, &path);
        let said = |error: FileError| {
            let said = error.to_string();
            said.replace(&*folder.path().to_string_lossy(), "")
        };
        let missing = said(read().unwrap_err());
        assert!(
            missing.starts_with("cannot read list /a.toml: "),
            "{missing}"
        );
        assert!(missing.ends_with("; give a list"), "{missing}");
        for (text, want) in [
            (
                "[inner]\nsiez = 1",
                "/a.toml:2: inner.siez is no key of this table; did you mean `size`?",
            ),
            (
                "\n[inner]\nsize = \"1\"",
                "/a.toml:3: inner.size is \"1\"; give a whole number from 0 on, without quotes",
            ),
            ("\n[inner]", "/a.toml:2: inner.size is missing; add it"),
            ("", "/a.toml:1: inner is missing; add it"),
            (
                "colour = 1",
                "/a.toml:1: colour is no key of this table; here are: inner",
            ),
        ] {
            std::fs::write(&path, text).unwrap();
            let error = said(read().unwrap().parse::<Outer>().unwrap_err());
            assert_eq!(error, want, "{text}");
        }
        std::fs::write(&path, "inner =").unwrap();
        let error = said(read().unwrap().parse::<Outer>().unwrap_err());
        assert!(
            error.starts_with("/a.toml:1: ") && error.ends_with("; list.toml is an example"),
            "{error}"
        );
        std::fs::write(&path, "[inner]\nsiez = 1").unwrap();
        let file = read().unwrap();
        let table = file.parse::<Table>().unwrap();
        let error = said(file.parse_table::<Outer>(table).unwrap_err());
        assert_eq!(
            error,
            "/a.toml: inner.siez is no key of this table; did you mean `size`?"
        );
    }
}
