//! Errors of the TOML parser, in the words of people who write the file.
//!
//! The parser names types of Rust and gives no hint. Here each error becomes one line: file, line, key,
//! fault and hint.

use std::path::Path;

use serde::de::DeserializeOwned;
use toml::de::{DeTable, DeValue};

use super::error::{At, ConfigError};

/// Expectations of the parser, and how to say them.
const EXPECTED: [(&str, &str); 12] = [
    ("u8", WHOLE),
    ("u16", WHOLE),
    ("u32", "a whole number from 0 to 4294967295"),
    ("u64", WHOLE),
    ("usize", WHOLE),
    ("a string", TEXT),
    ("string", TEXT),
    ("path string", TEXT),
    ("string or table", TEXT),
    ("socket address", ADDRESS),
    ("a sequence", "a list in [ ]"),
    ("a map", TABLE),
];
const WHOLE: &str = "a whole number from 0 on, without quotes";
const TEXT: &str = "a text in quotes";
const TABLE: &str = "a table: KEY = VALUE in { }, or below a line [KEY]";
const ADDRESS: &str = "an address and a port, such as \"127.0.0.1:9100\"";

/// Largest number of edits between a mistyped name and the one that is suggested.
const EDITS_MAX: usize = 3;

/// Longest name that suggestions are looked for. A comparison takes time by its square.
const NAME_BYTES_MAX: usize = 64;

/// Checks that a file's text can be read as `T`.
pub(super) fn check_text<T: DeserializeOwned>(path: &Path, text: &str) -> Result<(), ConfigError> {
    let read = toml::from_str::<T>(text);
    read.map(drop)
        .map_err(|error| unreadable(path, text, &error))
}

/// The error for a file of this text.
fn unreadable(path: &Path, text: &str, error: &toml::de::Error) -> ConfigError {
    let start = error.span().map(|span| span.start.min(text.len()));
    let line = start.and_then(|start| Some(text.get(..start)?.matches('\n').count() + 1));
    let key = start.and_then(|start| key_at(text, start));
    let (what, hint) = said(key.as_deref(), error.message());
    ConfigError::Parse {
        at: At::new(path, line),
        what,
        hint,
    }
}

/// Fault and hint. `key` is the place of the error, if the text is TOML.
fn said(key: Option<&str>, message: &str) -> (String, String) {
    // Names in the file may have control characters.
    let message: String = message
        .chars()
        .map(|c| if c.is_control() { ' ' } else { c })
        .collect();
    let Some(key) = key else {
        let hint = "write KEY = VALUE, with texts in quotes; packaging/host.toml is an example";
        return (message, hint.into());
    };
    if let Some(rest) = message.strip_prefix("missing field ") {
        let missing = rest.trim_matches('`');
        return (format!("{key}.{missing} is missing"), "add it".into());
    }
    if let Some(Unknown {
        is_key,
        name,
        known,
    }) = unknown(&message)
    {
        let hint = match nearest(name, &known) {
            Some(name) => format!("did you mean `{name}`?"),
            None if known.is_empty() => "remove it".into(),
            None => format!("here are: {}", known.join(", ")),
        };
        if !is_key {
            return (format!("{key} = {name:?} is unknown"), hint);
        }
        // The place may be a key below the unknown one, as in [vmm.db].
        let end = key
            .rfind(name)
            .map_or(key.len(), |start| start + name.len());
        return (format!("{} is no key of this table", &key[..end]), hint);
    }
    if let Some((fault, expected)) = message.rsplit_once(", expected ") {
        let plain = EXPECTED.iter().find(|(ours, _)| *ours == expected);
        let plain = match plain {
            Some((_, plain)) => plain,
            None if expected.starts_with("struct ") => TABLE,
            None => expected,
        };
        return (
            format!("{key} is {}", found(fault)),
            format!("give {plain}"),
        );
    }
    if message.contains("socket address") {
        return (format!("{key}: {message}"), format!("give {ADDRESS}"));
    }
    match message.split_once("; ") {
        Some((fault, hint)) => (format!("{key}: {fault}"), hint.into()),
        None => (
            format!("{key}: {message}"),
            "docs/src/reference/host.md lists all keys".into(),
        ),
    }
}

/// The value of a message: `invalid type: integer `7`` is `7`.
fn found(fault: &str) -> String {
    let value = fault.strip_prefix("invalid type: ");
    let value = value.or_else(|| fault.strip_prefix("invalid value: "));
    match value {
        Some("sequence") => "a list".into(),
        Some("map") => "a table".into(),
        Some(value) => match value.split_once('`') {
            Some((_, number)) if !value.starts_with("string") => {
                number.trim_end_matches('`').into()
            }
            _ => value.strip_prefix("string ").unwrap_or(value).into(),
        },
        None => format!("wrong ({fault})"),
    }
}

/// A name that the parser does not know.
struct Unknown<'a> {
    /// Whether it is a key, or else a value.
    is_key: bool,
    name: &'a str,
    /// The names that there are.
    known: Vec<&'a str>,
}

fn unknown(message: &str) -> Option<Unknown<'_>> {
    let key = message.strip_prefix("unknown field `");
    let rest = key.or_else(|| message.strip_prefix("unknown variant `"))?;
    let (name, known) = rest.split_once("`, ")?;
    Some(Unknown {
        is_key: key.is_some(),
        name,
        known: known.split('`').skip(1).step_by(2).collect(),
    })
}

/// The known name that differs least, if a person may have meant it.
fn nearest<'a>(name: &str, known: &[&'a str]) -> Option<&'a str> {
    if name.len() > NAME_BYTES_MAX {
        return None;
    }
    let most = EDITS_MAX.min(name.len().div_ceil(2));
    let all = known.iter().map(|of| (edits(name, of), *of));
    let near = all.filter(|(edits, _)| *edits <= most);
    near.min().map(|(_, of)| of)
}

/// Number of characters to insert, remove or replace between two names (Levenshtein).
fn edits(from: &str, to: &str) -> usize {
    let to: Vec<char> = to.chars().collect();
    let mut row: Vec<usize> = (0..=to.len()).collect();
    for (line, a) in from.chars().enumerate() {
        let mut diagonal = std::mem::replace(&mut row[0], line + 1);
        for (column, b) in to.iter().enumerate() {
            let replaced = diagonal + usize::from(a != *b);
            diagonal = row[column + 1];
            row[column + 1] = replaced.min(row[column] + 1).min(diagonal + 1);
        }
    }
    row[to.len()]
}

/// Path of the innermost key at a place of the text: `vm.db.fast.size_mib`.
fn key_at(text: &str, at: usize) -> Option<String> {
    let document = DeTable::parse(text).ok()?;
    let mut path = vec![];
    descend(document.get_ref(), at, &mut path);
    (!path.is_empty()).then(|| path.join("."))
}

/// Extends the path by the keys at a place. The parser bounds how deep tables are.
fn descend(table: &DeTable<'_>, at: usize, path: &mut Vec<String>) -> bool {
    for (key, value) in table.iter() {
        path.push(key.get_ref().to_string());
        let is_inside = match value.get_ref() {
            DeValue::Table(inner) => descend(inner, at, path),
            DeValue::Array(items) => items.iter().enumerate().any(|(index, item)| {
                path.push(index.to_string());
                let is_inside = match item.get_ref() {
                    DeValue::Table(inner) => descend(inner, at, path),
                    _ => false,
                };
                let found = is_inside || item.span().contains(&at);
                if !found {
                    path.pop();
                }
                found
            }),
            _ => false,
        };
        if is_inside || key.span().contains(&at) || value.span().contains(&at) {
            return true;
        }
        path.pop();
    }
    false
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mistyped_name_is_recognised() {
        let known = ["share", "slowdown_max_percent", "oom_mib", "qmp"];
        for (name, want) in [
            ("shares", Some("share")),
            ("sahre", Some("share")),
            ("oom-mib", Some("oom_mib")),
            ("qpm", Some("qmp")),
            ("x", None),
            ("", None),
            ("colour", None),
        ] {
            assert_eq!(nearest(name, &known), want, "{name}");
        }
        assert_eq!(nearest(&"x".repeat(1000), &known), None);
        assert_eq!((edits("", "abc"), edits("kitten", "sitting")), (3, 3));
    }

    #[test]
    fn messages_of_the_parser_are_put_in_plain_words() {
        for (message, want) in [
            (
                "invalid type: integer `7`, expected a string",
                "k is 7; give a text in quotes",
            ),
            (
                "invalid type: string \"a`b\", expected u64",
                "k is \"a`b\"; give a whole number from 0 on, without quotes",
            ),
            (
                "invalid type: map, expected a sequence",
                "k is a table; give a list in [ ]",
            ),
            ("odd, expected even", "k is wrong (odd); give even"),
            (
                "unknown variant `wsss`, expected `wss`",
                "k = \"wsss\" is unknown; did you mean `wss`?",
            ),
            (
                "unknown field `k`, there are no fields",
                "k is no key of this table; remove it",
            ),
            ("missing field `x`", "k.x is missing; add it"),
            (
                "bad\nthing",
                "k: bad thing; docs/src/reference/host.md lists all keys",
            ),
        ] {
            let (what, hint) = said(Some("k"), message);
            assert_eq!(format!("{what}; {hint}"), want);
        }
    }

    #[test]
    fn the_key_at_a_place_is_found() {
        let text = "a = 1\n[vm.x]\nb = { c = [1, { d = 2 }] }\n";
        for (part, want) in [("1\n", "a"), ("2 }", "vm.x.b.c.1.d"), ("1,", "vm.x.b.c.0")] {
            assert_eq!(
                key_at(text, text.find(part).unwrap()).as_deref(),
                Some(want)
            );
        }
        assert_eq!(key_at("no toml", 1), None);
    }
}
