//! Tests that figures in documents are those of stored results. `cargo xtask results` writes them.
//!
//! A result is `results/NAME.json`: the command that made it, the commit, the machine, and the result file without its
//! series, or another command's output. A document has its figures between a mark and `<!-- end -->`:
//!
//! - `<!-- result NAME [PART] -->`: a table, with command, commit and machine. PART is one of [`Part`].
//! - `<!-- ratios NAME.. -->`: results of the same cases as one table of speeds, as multiples of none's.
//! - `<!-- times NAME [CASE | worst] SYSTEM OVER -->`: one figure within a sentence or a table.
//! - `<!-- command NAME -->`: the command that made it.
//!
//! `docs/src/tables.md` has all tables of all results.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use demeter_outcome::RunResult;
use demeter_report::{Of, Part, part, ratios, times};
use serde::Deserialize;
use serde_json::Value;
use strum::VariantNames;

const FOLDER: &str = "results";
const BOOK: &str = "docs/src";
const README: &str = "README.md";
/// The page that has all tables.
const ALL: &str = "docs/src/tables.md";

const MARKS: [&str; 4] = ["result ", "ratios ", "times ", "command "];
const START: &str = "<!-- ";
const END: &str = "<!-- end -->";

/// Maximum size of a stored result, bytes: enough for the tables of a folder of scenarios.
const BYTES_MAX: u64 = 128 << 10;

/// `results/NAME.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    command: String,
    commit: String,
    machine: String,
    /// A result file's content, or another command's output as a string.
    result: Value,
}

impl Stored {
    fn read(name: &str) -> Result<Self, String> {
        let path = format!("{FOLDER}/{name}.json");
        let text = fs::read_to_string(root().join(&path)).map_err(|e| format!("{path}: {e}"))?;
        serde_json::from_str(&text).map_err(|e| format!("{path}: {e}"))
    }

    /// The result file; an error if another command printed it.
    fn run(&self) -> Result<RunResult, String> {
        RunResult::from_json(&self.result.to_string()).map_err(|e| e.to_string())
    }

    /// A table of the result; empty if the result has none.
    fn table(&self, which: Part) -> Result<String, String> {
        match (&self.result, which) {
            (Value::String(printed), Part::Figures) => Ok(printed.clone()),
            (Value::String(_), _) => Ok(String::new()),
            _ => Ok(part(&self.run()?, which)),
        }
    }

    /// The lines below its tables.
    fn origin(&self, name: &str) -> String {
        let (command, commit, machine) = (&self.command, &self.commit, &self.machine);
        format!("```\n{command}\n```\n\nCommit {commit}; {machine}; `{FOLDER}/{name}.json`.\n")
    }
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// The text for a mark.
fn content(mark: &str) -> Result<String, String> {
    let words: Vec<&str> = mark.split(' ').collect();
    match words[..] {
        ["result", name] => block(name, Part::Figures),
        ["result", name, which] => {
            let parts = || format!("{mark}: the parts of a result are {:?}", Part::VARIANTS);
            block(name, which.parse().map_err(|_| parts())?)
        }
        ["ratios", ref names @ ..] => {
            let stored: Result<Vec<_>, _> = names.iter().map(|name| Stored::read(name)).collect();
            let stored = stored?;
            let runs: Result<Vec<_>, _> = stored.iter().map(Stored::run).collect();
            let origins = stored.iter().zip(names).map(|(s, name)| s.origin(name));
            let origins: Vec<String> = origins.collect();
            Ok(format!(
                "\n```\n{}```\n\n{}",
                ratios(&runs?),
                origins.join("\n")
            ))
        }
        ["times", name, system, over] => figure(mark, name, Of::Whole, system, over),
        ["times", name, "worst", system, over] => figure(mark, name, Of::Worst, system, over),
        ["times", name, case, system, over] => figure(mark, name, Of::Case(case), system, over),
        ["command", name] => Ok(format!("`{}`", Stored::read(name)?.command)),
        _ => Err(format!("{mark}: no such mark")),
    }
}

fn block(name: &str, which: Part) -> Result<String, String> {
    let stored = Stored::read(name)?;
    let table = stored.table(which)?;
    if table.is_empty() {
        return Err(format!("{name}: there is nothing to show"));
    }
    Ok(format!("\n```\n{table}```\n\n{}", stored.origin(name)))
}

fn figure(mark: &str, name: &str, of: Of, system: &str, over: &str) -> Result<String, String> {
    let times = times(&Stored::read(name)?.run()?, of, system, over);
    let times = times.ok_or_else(|| format!("{mark}: there is no such figure"))?;
    Ok(format!("{times:.2}"))
}

/// A page with new text for all of its marks.
fn filled(page: &str) -> Result<String, String> {
    let mut text = String::new();
    let mut rest = page;
    while let Some(at) = rest.find(START) {
        let (before, mark) = rest.split_at(at);
        text += before;
        let inner = &mark[START.len()..];
        if !MARKS.iter().any(|kind| inner.starts_with(kind)) {
            text += START;
            rest = inner;
            continue;
        }
        let (mark, after) = inner
            .split_once(" -->")
            .ok_or("the mark of a result has no end")?;
        let (_, after) = after
            .split_once(END)
            .ok_or_else(|| format!("{mark}: {END} is missing"))?;
        text += &format!("{START}{mark} -->{}{END}", content(mark)?);
        rest = after;
    }
    Ok(text + rest)
}

/// The names of all stored results.
fn names() -> BTreeSet<String> {
    let entries = fs::read_dir(root().join(FOLDER)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    names
        .map(|name| name.trim_end_matches(".json").to_owned())
        .collect()
}

/// The page that has all tables.
fn all() -> Result<String, String> {
    let mut page = "# All tables\n\nMade by `cargo xtask results` from `results/`. \
                    [Results](results.md) explains the columns.\n"
        .to_owned();
    for name in names() {
        let stored = Stored::read(&name)?;
        page += &format!("\n## {name}\n\n");
        for which in [Part::Figures, Part::Kvm, Part::Published] {
            let table = stored.table(which).map_err(|e| format!("{name}: {e}"))?;
            if !table.is_empty() {
                page += &format!("```\n{table}```\n\n");
            }
        }
        page += &stored.origin(&name);
    }
    Ok(page)
}

/// The pages that may have marks.
fn pages() -> Vec<String> {
    let entries = fs::read_dir(root().join(BOOK)).unwrap();
    let names = entries.map(|entry| entry.unwrap().file_name().into_string().unwrap());
    let pages = names.filter(|name| name.ends_with(".md"));
    let mut pages: Vec<String> = pages.map(|name| format!("{BOOK}/{name}")).collect();
    pages.retain(|path| path != ALL);
    pages.push(README.into());
    pages
}

#[test]
fn figures_are_those_of_the_stored_results() {
    let mut made = vec![(ALL.to_owned(), all().unwrap())];
    for path in pages() {
        let text = filled(&read(&path)).unwrap_or_else(|e| panic!("{path}: {e}"));
        made.push((path, text));
    }
    for (path, text) in made {
        let is_current = fs::read_to_string(root().join(&path)).is_ok_and(|page| page == text);
        if is_current {
            continue;
        }
        assert!(
            std::env::var_os("DEMETER_WRITE_DOCS").is_some(),
            "{path} is out of date: run `cargo xtask results`"
        );
        // Another test reads the page meanwhile, so the new file is renamed when complete.
        let new = root().join(format!("{path}.new"));
        fs::write(&new, text).unwrap();
        fs::rename(new, root().join(path)).unwrap();
    }
}

#[test]
fn every_stored_result_is_small() {
    for name in names() {
        let path = root().join(format!("{FOLDER}/{name}.json"));
        assert!(fs::metadata(path).unwrap().len() <= BYTES_MAX, "{name}");
    }
}

#[test]
fn a_wrong_mark_is_an_error() {
    for (page, want) in [
        ("<!-- result gups", "has no end"),
        ("<!-- result gups -->\nx", "is missing"),
        (
            "<!-- result nothing -->\n<!-- end -->\n",
            "results/nothing.json",
        ),
        ("<!-- result gups all -->\n<!-- end -->\n", "figures"),
        (
            "<!-- result gups published -->\n<!-- end -->\n",
            "nothing to show",
        ),
        (
            "<!-- result gups brief x -->\n<!-- end -->\n",
            "no such mark",
        ),
        (
            "<!-- times gups nobody none -->1<!-- end -->",
            "no such figure",
        ),
        ("<!-- times gups -->1<!-- end -->", "no such mark"),
    ] {
        let why = filled(page).unwrap_err();
        assert!(why.contains(want), "{why}");
    }
}

#[test]
fn a_mark_is_filled_and_the_rest_of_the_page_stays() {
    let page = filled("a\n<!-- note -->\n<!-- result gups -->\nold\n<!-- end -->\nb\n").unwrap();
    assert!(page.starts_with("a\n<!-- note -->\n<!-- result gups -->\n```\n"));
    assert!(page.ends_with("`results/gups.json`.\n<!-- end -->\nb\n") && !page.contains("old"));
    assert_eq!(
        filled("is <!-- times gups oracle oracle -->x<!-- end --> of it").unwrap(),
        "is <!-- times gups oracle oracle -->1.00<!-- end --> of it"
    );
    let command = filled("<!-- command rack --><!-- end -->").unwrap();
    assert!(command.contains("`demeter run scenarios/rack.toml --on sim`"));
}
