//! Tables in documents are those of stored results. `cargo xtask results` writes them.
//!
//! A result is `results/NAME.json`: the command that made it, the commit, the machine, and the result file
//! without its series, or what another command printed. A document has it between `<!-- result NAME -->` and
//! `<!-- end -->`; behind the name may stand which of a result file's tables: `published`, `worst-first` or `kvm`.

use std::collections::BTreeSet;
use std::fs;
use std::path::{Path, PathBuf};

use demeter_outcome::RunResult;
use demeter_report::{Part, part};
use serde::Deserialize;
use serde_json::Value;
use strum::VariantNames;

const FOLDER: &str = "results";
const PAGES: [&str; 2] = ["README.md", "docs/src/results.md"];

const START: &str = "<!-- result ";
const END: &str = "<!-- end -->\n";

/// The largest that a stored result may be, bytes: what the tables of a folder of scenarios need, no more.
const BYTES_MAX: u64 = 96 << 10;

/// `results/NAME.json`.
#[derive(Deserialize)]
#[serde(deny_unknown_fields)]
struct Stored {
    command: String,
    commit: String,
    machine: String,
    /// A result file's content, or a string: what another command printed.
    result: Value,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("../..")
}

fn read(path: &str) -> String {
    fs::read_to_string(root().join(path)).unwrap_or_else(|e| panic!("{path}: {e}"))
}

/// What stands between the marks of a result. `what` is its name, and its part if there are several.
fn block(what: &str) -> Result<String, String> {
    let (name, which) = what.split_once(' ').unwrap_or((what, "figures"));
    let which: Part = which
        .parse()
        .map_err(|_| format!("{what}: the parts of a result are {:?}", Part::VARIANTS))?;
    let path = format!("{FOLDER}/{name}.json");
    let text = fs::read_to_string(root().join(&path)).map_err(|e| format!("{path}: {e}"))?;
    let stored: Stored = serde_json::from_str(&text).map_err(|e| format!("{path}: {e}"))?;
    let table = match &stored.result {
        Value::String(printed) => printed.clone(),
        result => {
            let result = RunResult::from_json(&result.to_string());
            part(&result.map_err(|e| format!("{path}: {e}"))?, which)
        }
    };
    if table.is_empty() {
        return Err(format!("{what}: there is nothing to show in {path}"));
    }
    let Stored {
        command,
        commit,
        machine,
        ..
    } = stored;
    Ok(format!(
        "```\n{table}```\n\n```\n{command}\n```\n\nCommit {commit}; {machine}; `{path}`.\n"
    ))
}

/// A page with all its blocks made anew, and which results they are of.
fn filled(page: &str) -> Result<(String, BTreeSet<String>), String> {
    let mut pieces = page.split(START);
    let mut text = pieces.next().unwrap_or_default().to_owned();
    let mut names = BTreeSet::new();
    for piece in pieces {
        let (what, rest) = piece
            .split_once(" -->\n")
            .ok_or("the mark of a result has no end")?;
        let (_, rest) = rest
            .split_once(END)
            .ok_or_else(|| format!("{what}: {END} is missing"))?;
        text += &format!("{START}{what} -->\n{}{END}{rest}", block(what)?);
        names.extend(what.split(' ').next().map(str::to_owned));
    }
    Ok((text, names))
}

#[test]
fn tables_are_those_of_the_stored_results() {
    for path in PAGES {
        let page = read(path);
        let (filled, _) = filled(&page).unwrap_or_else(|e| panic!("{path}: {e}"));
        if std::env::var_os("DEMETER_WRITE_DOCS").is_some() {
            // Another test reads the page meanwhile: the new one takes its name when it is whole.
            let new = root().join(format!("{path}.new"));
            fs::write(&new, filled).unwrap();
            fs::rename(new, root().join(path)).unwrap();
        } else {
            assert!(
                filled == page,
                "{path} is out of date: run `cargo xtask results`"
            );
        }
    }
}

#[test]
fn every_stored_result_is_small_and_shown() {
    let shown: BTreeSet<String> = PAGES
        .iter()
        .flat_map(|path| filled(&read(path)).unwrap().1)
        .collect();
    let mut stored = BTreeSet::new();
    for entry in fs::read_dir(root().join(FOLDER)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        assert!(entry.metadata().unwrap().len() <= BYTES_MAX, "{name}");
        stored.insert(name.trim_end_matches(".json").to_owned());
    }
    assert_eq!(shown, stored);
}

#[test]
fn a_mark_that_is_wrong_is_told() {
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
    ] {
        let why = filled(page).unwrap_err();
        assert!(why.contains(want), "{why}");
    }
    let (page, names) = filled("a\n<!-- result gups -->\nold\n<!-- end -->\nb\n").unwrap();
    assert!(page.starts_with("a\n<!-- result gups -->\n```\n") && !page.contains("old"));
    assert!(page.ends_with("`results/gups.json`.\n<!-- end -->\nb\n"));
    assert_eq!(names, BTreeSet::from(["gups".into()]));
}
