//! Errors of the TOML parser, in the words of people who write the file.
//!
//! The parser names types of Rust and gives no hint. Here each error becomes key, fault and hint.

use toml::Spanned;
use toml::de::{DeTable, DeValue};

use crate::Kind;

/// Expectations of the parser, and how to say them.
const EXPECTED: [(&str, &str); 16] = [
    ("u8", WHOLE),
    ("u16", WHOLE),
    ("u32", "a whole number from 0 to 4294967295"),
    ("u64", WHOLE),
    ("usize", WHOLE),
    ("f32", NUMBER),
    ("f64", NUMBER),
    ("a boolean", TRUTH),
    ("bool", TRUTH),
    ("a string", TEXT),
    ("string", TEXT),
    ("path string", TEXT),
    ("string or table", TEXT),
    ("socket address", ADDRESS),
    ("a sequence", "a list in [ ]"),
    ("a map", TABLE),
];
const WHOLE: &str = "a whole number from 0 on, without quotes";
const NUMBER: &str = "a number, without quotes";
const TRUTH: &str = "true or false, without quotes";
const TEXT: &str = "a text in quotes";
const TABLE: &str = "a table: KEY = VALUE in { }, or below a line [KEY]";
const ADDRESS: &str = "an address and a port, such as \"127.0.0.1:9100\"";

/// Largest number of edits between a mistyped name and the one that is suggested.
const EDITS_MAX: usize = 3;

/// Longest name that suggestions are looked for. A comparison takes time by its square.
const NAME_BYTES_MAX: usize = 64;

/// The place of an error.
enum Place {
    /// The text is no TOML.
    NoToml,
    /// The path of the innermost key there: `vm.db.fast.size_mib`.
    Key(String),
    /// The path of the table that is wrong, or of the value; empty for the whole file.
    Within(String),
}

/// Fault and hint of an error in a file's text.
pub(crate) fn of_text(kind: &Kind, text: &str, error: &toml::de::Error) -> (String, String) {
    let Ok(document) = DeTable::parse(text) else {
        return said(kind, &Place::NoToml, error.message());
    };
    let keys = keys_of(error);
    // The parser places what the whole file lacks at its first key.
    let is_of_file = keys.is_empty() && error.message().starts_with(MISSING);
    let at = error.span().filter(|_| !is_of_file);
    // Unlike the parser's own keys these have the places in lists.
    let key = at.and_then(|span| key_at(&document, span.start));
    let place = key.map_or(Place::Within(keys), Place::Key);
    said(kind, &place, error.message())
}

/// Fault and hint of an error in a table that was made from files.
pub(crate) fn of_table(kind: &Kind, error: &toml::de::Error) -> (String, String) {
    said(kind, &Place::Within(keys_of(error)), error.message())
}

/// The path of the table or value that the parser was in, without places in lists.
fn keys_of(error: &toml::de::Error) -> String {
    let mut error = error.clone();
    // With the text the parser shows the place instead.
    error.set_input(None);
    let whole = error.to_string();
    let keys = whole.strip_prefix(error.message());
    let keys = keys.and_then(|rest| rest.trim().strip_prefix("in `")?.strip_suffix('`'));
    keys.unwrap_or_default().to_owned()
}

const MISSING: &str = "missing field ";

/// Fault and hint of the parser's message.
fn said(kind: &Kind, place: &Place, message: &str) -> (String, String) {
    let without_controls = |text: &str| {
        // Names in the file may have control characters.
        let plain = text.chars().map(|c| if c.is_control() { ' ' } else { c });
        plain.collect::<String>()
    };
    let message = without_controls(message);
    let key = match place {
        Place::NoToml => {
            let hint = format!(
                "write KEY = VALUE, with texts in quotes; {} is an example",
                kind.example
            );
            return (message, hint);
        }
        Place::Key(key) | Place::Within(key) => without_controls(key),
    };
    if let Some(rest) = message.strip_prefix(MISSING) {
        let missing = below(&key, rest.trim_matches('`'));
        return (format!("{missing} is missing"), "add it".into());
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
        // The innermost key may be below the unknown one, as in [vmm.db].
        let start = key.rfind(name).filter(|_| matches!(place, Place::Key(_)));
        let whole = match start {
            Some(start) => key[..start + name.len()].to_owned(),
            None => below(&key, name),
        };
        return (format!("{whole} is no key of this table"), hint);
    }
    if let Some((fault, expected)) = message.rsplit_once(", expected ") {
        let plain = EXPECTED.iter().find(|(ours, _)| *ours == expected);
        let is_table = ["struct ", "internally tagged enum "];
        let plain = match plain {
            Some((_, plain)) => plain,
            None if is_table.iter().any(|of| expected.starts_with(of)) => TABLE,
            None => expected,
        };
        return (
            format!("{key} is {}", found(fault)),
            format!("give {plain}"),
        );
    }
    let of_key = match key.as_str() {
        "" => String::new(),
        key => format!("{key}: "),
    };
    if message.contains("socket address") {
        return (format!("{of_key}{message}"), format!("give {ADDRESS}"));
    }
    match message.split_once("; ") {
        Some((fault, hint)) => (format!("{of_key}{fault}"), hint.into()),
        None => (
            format!("{of_key}{message}"),
            format!("{} lists all keys", kind.reference),
        ),
    }
}

/// The path of a key in a table.
fn below(table: &str, key: &str) -> String {
    match table {
        "" => key.into(),
        table => format!("{table}.{key}"),
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
fn key_at(document: &Spanned<DeTable<'_>>, at: usize) -> Option<String> {
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

    const KIND: Kind = Kind {
        name: "list",
        hint: "give a list",
        example: "a.toml",
        reference: "keys.md",
    };

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
                "invalid type: string \"2\", expected f64",
                "k is \"2\"; give a number, without quotes",
            ),
            ("bad\nthing", "k: bad thing; keys.md lists all keys"),
        ] {
            let (what, hint) = said(&KIND, &Place::Key("k".into()), message);
            assert_eq!(format!("{what}; {hint}"), want);
        }
        let of_file = |message| said(&KIND, &Place::Within(String::new()), message).0;
        assert_eq!(of_file("missing field `x`"), "x is missing");
        assert_eq!(
            of_file("unknown field `x`, expected `y`"),
            "x is no key of this table"
        );
        assert_eq!(of_file("bad"), "bad");
        let (what, _) = said(
            &KIND,
            &Place::Within("lab".into()),
            "unknown field `a`, expected `dilation`",
        );
        assert_eq!(what, "lab.a is no key of this table");
        let (what, hint) = said(&KIND, &Place::NoToml, "bad");
        assert_eq!(
            (what.as_str(), hint.ends_with("; a.toml is an example")),
            ("bad", true)
        );
    }

    #[test]
    fn the_key_at_a_place_is_found() {
        let text = "a = 1\n[vm.x]\nb = { c = [1, { d = 2 }] }\n";
        let document = DeTable::parse(text).unwrap();
        for (part, want) in [("1\n", "a"), ("2 }", "vm.x.b.c.1.d"), ("1,", "vm.x.b.c.0")] {
            let at = text.find(part).unwrap();
            assert_eq!(key_at(&document, at).as_deref(), Some(want));
        }
        assert_eq!(key_at(&document, text.len()), None);
    }
}
