//! Tests that the recipes of ARCHITECTURE.md name exactly the files of their examples.

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};

/// Folders of code in which every file that names an example must be in the recipe.
const CODE: [&str; 4] = ["crates", "fuzz", "python", "xtask"];

/// A section `## To add a ...`.
struct Recipe<'a> {
    title: &'a str,
    /// The value of NAME in the example.
    name: &'a str,
    /// An identifier in the example's code.
    identifier: &'a str,
    files: Vec<File>,
}

/// A file of a recipe, or a folder if it ends with a slash.
struct File {
    path: String,
    is_always_needed: bool,
}

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("..")
}

/// Words in backquotes.
fn quoted(text: &str) -> Vec<&str> {
    text.split('`').skip(1).step_by(2).collect()
}

impl<'a> Recipe<'a> {
    fn all(page: &'a str) -> Vec<Self> {
        page.split("\n## To add a ")
            .skip(1)
            .map(Self::new)
            .collect()
    }

    fn new(section: &'a str) -> Self {
        let section = section.split("\n## ").next().unwrap_or_default();
        let (title, text) = section.split_once('\n').expect("a title");
        let example = text
            .lines()
            .find(|line| line.contains("NAME is `"))
            .unwrap_or_else(|| panic!("{title}: no example"));
        let (_, example) = example.split_once("NAME is ").expect("an example");
        let &[name, identifier] = &quoted(example)[..] else {
            panic!("{title}: the example has a name and an identifier");
        };
        let mut files = vec![];
        for line in text.lines().filter(|line| line.starts_with("| `")) {
            let cells: Vec<&str> = line.trim_matches('|').split('|').map(str::trim).collect();
            for path in quoted(cells[0]) {
                files.push(File {
                    path: path.replace("NAME", name),
                    is_always_needed: cells[2] == "always",
                });
            }
        }
        Self {
            title,
            name,
            identifier,
            files,
        }
    }

    fn has(&self, path: &str) -> bool {
        let is_it = |file: &File| match file.path.ends_with('/') {
            true => path.starts_with(&file.path),
            false => path == file.path,
        };
        self.files.iter().any(is_it)
    }
}

/// Source files below a folder, by path, without test files.
fn sources(folder: &str, found: &mut BTreeMap<String, String>) {
    for entry in fs::read_dir(root().join(folder)).unwrap() {
        let entry = entry.unwrap();
        let name = entry.file_name().into_string().unwrap();
        let path = format!("{folder}/{name}");
        if entry.file_type().unwrap().is_dir() {
            if !["target", "tests", "testing", "benches"].contains(&name.as_str()) {
                sources(&path, found);
            }
        } else if name.ends_with(".rs") && name != "tests.rs" {
            let text = fs::read_to_string(entry.path()).unwrap();
            found.insert(path, code(&text));
        }
    }
}

/// A source without comments and without the tests at its end.
fn code(text: &str) -> String {
    let text = text
        .split("#[cfg(test)]\nmod tests {")
        .next()
        .unwrap_or_default();
    let lines = text
        .lines()
        .filter(|line| !line.trim_start().starts_with("//"));
    lines.collect::<Vec<_>>().join("\n")
}

/// Whether a text contains a word as a whole.
fn names(text: &str, word: &str) -> bool {
    let is_part = |c: char| c.is_alphanumeric() || c == '_';
    text.match_indices(word).any(|(at, _)| {
        let before = text[..at].chars().next_back();
        let after = text[at + word.len()..].chars().next();
        !before.is_some_and(is_part) && !after.is_some_and(is_part)
    })
}

/// The text of a file, or of all files in a folder.
fn text_of(path: &str) -> Option<String> {
    let full = root().join(path);
    if !full.is_dir() {
        return fs::read_to_string(full).ok();
    }
    let mut text = String::new();
    for entry in fs::read_dir(full).ok()? {
        let below = format!(
            "{}/{}",
            path.trim_end_matches('/'),
            entry.ok()?.file_name().to_str()?
        );
        text += &text_of(&below)?;
    }
    Some(text)
}

fn complaints(recipe: &Recipe, sources: &BTreeMap<String, String>) -> Vec<String> {
    let title = recipe.title;
    let mut complaints = vec![];
    for file in &recipe.files {
        let Some(text) = text_of(&file.path) else {
            // A condition that does not apply to the example.
            if file.is_always_needed || !file.path.contains(recipe.name) {
                complaints.push(format!("{title}: there is no {}", file.path));
            }
            continue;
        };
        let is_named = names(&text, recipe.name) || names(&text, recipe.identifier);
        if file.is_always_needed && !is_named {
            complaints.push(format!("{title}: {} does not name it", file.path));
        }
    }
    for (path, code) in sources {
        if names(code, recipe.identifier) && !recipe.has(path) {
            complaints.push(format!("{title}: {path} is missing"));
        }
    }
    complaints
}

#[test]
fn recipes_name_the_files_that_their_examples_are_in() {
    let page = fs::read_to_string(root().join("ARCHITECTURE.md")).unwrap();
    let mut code = BTreeMap::new();
    CODE.iter().for_each(|folder| sources(folder, &mut code));
    let recipes = Recipe::all(&page);
    let titles: Vec<&str> = recipes.iter().map(|recipe| recipe.title).collect();
    assert_eq!(
        titles,
        [
            "system",
            "rival",
            "workload",
            "tracker",
            "hypervisor",
            "figure",
            "picture"
        ]
    );
    let complaints: Vec<String> = (recipes.iter())
        .flat_map(|recipe| complaints(recipe, &code))
        .collect();
    assert!(complaints.is_empty(), "{}", complaints.join("\n"));
}

#[test]
fn a_recipe_that_is_wrong_is_told() {
    let recipe = |rows: &str| {
        format!("x\n## To add a thing\n\nExample: NAME is `build`, its type `Task`.\n\n{rows}\n")
    };
    let sources = BTreeMap::from([("crates/a.rs".to_owned(), "struct Task;".to_owned())]);
    let told = |rows: &str| {
        let page = recipe(rows);
        complaints(&Recipe::all(&page)[0], &sources)
    };
    assert_eq!(
        told("| `xtask/src/NAME.rs` | a | always |\n| `crates/NAME.rs` | b | always |"),
        [
            "thing: there is no crates/build.rs",
            "thing: crates/a.rs is missing"
        ]
    );
    assert_eq!(
        told("| `xtask/src/arm.rs` | a | always |\n| `crates/` | b | if needed |"),
        ["thing: xtask/src/arm.rs does not name it"]
    );
}
