//! Pages with the keys of the TOML files, generated from the Rust types.

use std::collections::{BTreeSet, VecDeque};
use std::fmt::Write;

use anyhow::Context;
use syn::{ItemEnum, ItemStruct, Type};

use super::source::{Found, Source, doc, generic, key, name, payload, serde, variant_name};
use crate::shell;

/// A page of the book.
pub struct Page {
    /// Its path in the repository.
    pub path: &'static str,
    pub text: String,
}

struct Subject {
    path: &'static str,
    title: &'static str,
    about: &'static str,
    /// A sentence about its keys.
    keys: &'static str,
    krate: &'static str,
    root: &'static str,
}

/// A note for pages of input files.
const READ: &str = "A key without a default must be given.";

const SUBJECTS: [Subject; 4] = [
    Subject {
        path: "docs/src/reference/guest.md",
        title: "guest.toml",
        about: "The agent's configuration: `demeter guest --config guest.toml`. Flags of the same names go \
                before. `packaging/guest.toml` is an example. Editors check a file by its \
                [JSON Schema](guest.schema.json): see [Editors](../scenarios.md#editors).",
        keys: READ,
        krate: "guest",
        root: "Config",
    },
    Subject {
        path: "docs/src/reference/host.md",
        title: "host.toml",
        about: "The controller's configuration: `demeter host --config host.toml`. `packaging/host.toml` is \
                an example. Editors check a file by its [JSON Schema](host.schema.json): see \
                [Editors](../scenarios.md#editors). Sizes and policy are where a VM begins: what was set later, over the API, is \
                kept in the state file and goes before.",
        keys: READ,
        krate: "host-api",
        root: "Config",
    },
    Subject {
        path: "docs/src/reference/scenario.md",
        title: "Scenario files",
        about: "`demeter run SCENARIO`. `scenarios/` has examples. Editors check a file by its \
                [JSON Schema](scenario.schema.json): see [Editors](../scenarios.md#editors). Beside the keys below, `extends` names a \
                file that this one changes; see [Scenarios](../scenarios.md).",
        keys: READ,
        krate: "scenario",
        root: "Scenario",
    },
    Subject {
        path: "docs/src/reference/results.md",
        title: "Result files",
        about: "`demeter run --json FILE` writes JSON. Units are in the names: `_s` seconds, `_ns` nanoseconds, \
                `bytes_` bytes; a speed names its own. Shares go from 0 to 1. Within one version keys may be added, \
                never changed; readers ignore unknown keys.",
        keys: "`null` or a missing key means that it was not measured.",
        krate: "outcome",
        root: "RunResult",
    },
];

/// The pages for the present code.
///
/// # Errors
/// A source cannot be read, or a type or default is of an unsupported kind.
pub fn pages() -> anyhow::Result<Vec<Page>> {
    let crates = shell::root().join("crates");
    let source = Source::read(
        &crates,
        &["policy", "outcome", "scenario", "guest", "host-api"],
    )?;
    let page = |subject: &Subject| {
        Ok(Page {
            path: subject.path,
            text: text(&source, subject)
                .with_context(|| format!("cannot make {}", subject.path))?,
        })
    };
    SUBJECTS.iter().map(page).collect()
}

fn text(source: &Source, subject: &Subject) -> anyhow::Result<String> {
    let mut page = format!(
        "# {}\n\nMade by `cargo xtask docs` from the code; nothing here is written by hand.\n\n{}\n\n{}\n",
        subject.title, subject.about, subject.keys
    );
    let mut sections = Sections {
        source,
        waiting: VecDeque::new(),
        described: BTreeSet::new(),
    };
    sections.add(String::new(), source.root(subject.krate, subject.root)?);
    while let Some((paths, found)) = sections.waiting.pop_front() {
        page += &sections.section(&paths, &found)?;
    }
    Ok(page)
}

/// Tables that are not yet described, each with its possible paths.
struct Sections<'a> {
    source: &'a Source,
    waiting: VecDeque<(Vec<String>, Found<'a, ItemStruct>)>,
    /// Types whose kinds have sections already.
    described: BTreeSet<String>,
}

impl<'a> Sections<'a> {
    /// Adds a table. Pending tables of the same type share a section.
    fn add(&mut self, path: String, found: Found<'a, ItemStruct>) {
        let is_same = |other: &&mut (Vec<String>, Found<'a, ItemStruct>)| {
            std::ptr::eq(other.1.item, found.item)
        };
        match self.waiting.iter_mut().find(is_same) {
            Some((paths, _)) => paths.push(path),
            None => self.waiting.push_back((vec![path], found)),
        }
    }

    fn section(
        &mut self,
        paths: &[String],
        found: &Found<'a, ItemStruct>,
    ) -> anyhow::Result<String> {
        let mut text = String::new();
        if !paths[0].is_empty() {
            let titles: Vec<_> = paths.iter().map(|path| format!("`{path}`")).collect();
            write!(
                text,
                "\n## {}\n\n{}\n",
                titles.join(", "),
                doc(&found.item.attrs)
            )?;
        }
        text += "\n| key | type | default | meaning |\n|---|---|---|---|\n";
        let mut values = String::new();
        for field in &found.item.fields {
            let key = key(field)?;
            let default = match self.source.default_of(found, field)? {
                None => String::new(),
                Some(value) if value.is_empty() => "none".into(),
                Some(value) if value == "see there" => value,
                Some(value) => format!("`{value}`"),
            };
            let path = below(&paths[0], &key);
            let kind = self.kind(&path, &key, &field.ty, found, &mut values)?;
            let meaning = doc(&field.attrs).replace('|', "\\|");
            writeln!(text, "| `{key}` | {kind} | {default} | {meaning} |")?;
        }
        Ok(text + &values)
    }

    /// The name of a key's type. Subtables get a section, and enums a list in `values`.
    fn kind(
        &mut self,
        path: &str,
        key: &str,
        ty: &Type,
        of: &Found<'a, ItemStruct>,
        values: &mut String,
    ) -> anyhow::Result<String> {
        if let Some(inner) = generic(ty, "Option") {
            return self.kind(path, key, inner, of, values);
        }
        if let Some(inner) = generic(ty, "Vec") {
            let path = format!("[[{}]]", path.trim_matches(['[', ']']));
            return Ok(format!(
                "list of {}",
                self.kind(&path, key, inner, of, values)?
            ));
        }
        if let Some(inner) = generic(ty, "BTreeMap") {
            let path = format!("[{}.NAME]", path.trim_matches(['[', ']']));
            return Ok(format!(
                "by name: {}",
                self.kind(&path, key, inner, of, values)?
            ));
        }
        if let Type::Tuple(tuple) = ty {
            let kinds = tuple.elems.iter();
            let kinds: anyhow::Result<Vec<String>> = kinds
                .map(|ty| self.kind(path, key, ty, of, values))
                .collect();
            return Ok(format!("({})", kinds?.join(", ")));
        }
        let name = name(ty)?;
        if name == "Self" {
            return Ok("table as this one".into());
        }
        if let Some(plain) = plain(&name) {
            return Ok(plain.into());
        }
        if let Some(found) = self.source.find_enum(of.file, &name) {
            if serde(&found.item.attrs, "tag")?.is_some() {
                if self.described.insert(name) {
                    self.tagged(path, &found)?;
                }
                return Ok("table by `kind`".into());
            }
            write!(values, "\n`{key}` is one of\n\n")?;
            self.values(path, &found, values)?;
            return Ok("one of those below".into());
        }
        let found = self.source.find_struct(of.file, &name);
        let found =
            found.with_context(|| format!("{path}: nothing is known of its type {name}"))?;
        if found.item.fields.iter().any(|field| field.ident.is_none()) {
            // A text that is validated when read.
            return Ok("text".into());
        }
        self.add(table(path), found);
        Ok("table".into())
    }

    /// Lists an enum's values.
    fn values(
        &mut self,
        path: &str,
        found: &Found<'a, ItemEnum>,
        text: &mut String,
    ) -> anyhow::Result<()> {
        for variant in &found.item.variants {
            let name = variant_name(found.item, variant)?;
            let about = doc(&variant.attrs);
            let Some(inner) = payload(variant) else {
                writeln!(text, "- `\"{name}\"`: {about}")?;
                continue;
            };
            let inner_name = super::source::name(inner)?;
            if serde(&variant.attrs, "untagged")?.is_some() {
                let inner = self.source.find_enum(found.file, &inner_name);
                let inner = inner.with_context(|| format!("{inner_name} is no enum"))?;
                self.values(path, &inner, text)?;
                continue;
            }
            let kind = match plain(&inner_name) {
                Some(plain) => plain,
                None => {
                    let inner = self.source.find_struct(found.file, &inner_name);
                    let inner = inner.with_context(|| format!("{inner_name} is no struct"))?;
                    self.add(table(&below(path, &name)), inner);
                    "table"
                }
            };
            writeln!(text, "- `{{ {name} = .. }}` ({kind}): {about}")?;
        }
        Ok(())
    }

    /// Adds a section for each table type that a `kind` selects.
    fn tagged(&mut self, path: &str, found: &Found<'a, ItemEnum>) -> anyhow::Result<()> {
        for variant in &found.item.variants {
            let kind = variant_name(found.item, variant)?;
            let inner = payload(variant).context("a kind without parameters")?;
            let inner = self.source.find_struct(found.file, &name(inner)?);
            let inner = inner.with_context(|| format!("{kind} is no struct"))?;
            self.add(format!("{} kind = \"{kind}\"", table(path)), inner);
        }
        Ok(())
    }
}

/// A path as a table's heading.
fn table(path: &str) -> String {
    if path.starts_with('[') {
        path.into()
    } else {
        format!("[{path}]")
    }
}

/// The path of a key in a table.
fn below(table: &str, key: &str) -> String {
    let table = table
        .split(' ')
        .next()
        .unwrap_or_default()
        .trim_matches(['[', ']']);
    if table.is_empty() {
        key.into()
    } else {
        format!("{table}.{key}")
    }
}

/// Names of types other than tables.
fn plain(name: &str) -> Option<&'static str> {
    Some(match name {
        "u16" | "u32" | "u64" | "usize" => "integer",
        "f64" => "number",
        "bool" => "`true` or `false`",
        "String" => "text",
        "PathBuf" => "path",
        "SocketAddr" => "address and port",
        "Tiers" => "nodes by tier",
        "Table" => "table",
        "System" => "[system](../scenarios.md#systems)",
        _ => return None,
    })
}
