//! Generates pages of the book, and the book itself.

mod reference;
mod source;

use std::fs;

use anyhow::{Context, ensure};

use crate::shell;

/// If set, tests of `crates/demeter/tests` write the pages that they otherwise compare.
pub const WRITE: &str = "DEMETER_WRITE_DOCS";

/// Writes the generated pages, and the book into `target/book` if mdbook is installed.
pub fn docs() -> anyhow::Result<()> {
    for page in reference::pages()? {
        let path = shell::root().join(page.path);
        fs::create_dir_all(path.parent().context("a page lies in a folder")?)?;
        fs::write(&path, page.text).with_context(|| format!("cannot write {}", page.path))?;
        eprintln!("wrote {}", page.path);
    }
    let schemas = "run --locked --quiet --package demeter-schema -- docs/src/reference";
    shell::run(shell::cargo(schemas))?;
    let mut metrics = shell::cargo("test --locked --quiet --package demeter --test metrics");
    metrics.env(WRITE, "1");
    shell::run(metrics)?;
    if !shell::succeeds(shell::program("mdbook", "--version")) {
        eprintln!(
            "skipped: mdbook is not installed (cargo install mdbook), so there is no target/book"
        );
        return Ok(());
    }
    shell::run(shell::program("mdbook", "build docs"))?;
    ensure!(
        shell::root().join("target/book/index.html").exists(),
        "mdbook wrote no target/book/index.html"
    );
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;
    use std::path::Path;

    use super::*;

    #[test]
    fn the_reference_says_what_the_code_says() {
        for page in reference::pages().unwrap() {
            let stored = fs::read_to_string(shell::root().join(page.path)).unwrap_or_default();
            assert!(
                stored == page.text,
                "{} is out of date: run `cargo xtask docs`",
                page.path
            );
        }
    }

    /// The targets of a page's links within the repository: a file (empty for the page itself) and a heading.
    fn links(text: &str) -> impl Iterator<Item = (&str, Option<&str>)> {
        let targets = text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        let own = targets.filter(|target| !target.contains("://"));
        own.map(|target| match target.split_once('#') {
            Some((file, heading)) => (file, Some(heading)),
            None => (target, None),
        })
    }

    /// Anchors of a page's headings.
    fn headings(text: &str) -> BTreeSet<String> {
        let lines = text.lines().filter(|line| line.starts_with('#'));
        let titles = lines.map(|line| line.trim_start_matches('#').trim().to_lowercase());
        let kept = |c: &char| c.is_alphanumeric() || [' ', '-', '_'].contains(c);
        titles
            .map(|title| {
                title
                    .chars()
                    .filter(kept)
                    .collect::<String>()
                    .replace(' ', "-")
            })
            .collect()
    }

    fn pages_below(folder: &Path) -> Vec<std::path::PathBuf> {
        let mut found = vec![];
        for entry in fs::read_dir(folder).unwrap() {
            let path = entry.unwrap().path();
            if path.is_dir() {
                found.extend(pages_below(&path));
            } else if path.extension().is_some_and(|kind| kind == "md") {
                found.push(path);
            }
        }
        found
    }

    #[test]
    fn links_lead_to_files_and_every_page_is_in_the_summary() {
        let book = shell::root().join("docs/src");
        let summary = fs::read_to_string(book.join("SUMMARY.md")).unwrap();
        let named: BTreeSet<_> = links(&summary).map(|(file, _)| book.join(file)).collect();
        let mut pages = pages_below(&book);
        assert!(pages.len() > 10, "{pages:?}");
        for page in &pages {
            let is_named = named.contains(page) || page.ends_with("SUMMARY.md");
            assert!(is_named, "SUMMARY.md lacks {}", page.display());
        }
        for name in [
            "README.md",
            "ARCHITECTURE.md",
            "CONTRIBUTING.md",
            "SECURITY.md",
        ] {
            pages.push(shell::root().join(name));
        }
        for page in pages {
            let text = fs::read_to_string(&page).unwrap();
            for (file, heading) in links(&text) {
                let target = match file {
                    "" => page.clone(),
                    file => page.with_file_name("").join(file),
                };
                assert!(target.exists(), "{}: no {file}", page.display());
                if let Some(heading) = heading {
                    let has = headings(&fs::read_to_string(&target).unwrap());
                    assert!(
                        has.contains(heading),
                        "{}: no {file}#{heading}",
                        page.display()
                    );
                }
            }
        }
    }

    #[test]
    fn documents_are_short() {
        let read = |path: &str| fs::read_to_string(shell::root().join(path)).unwrap();
        assert!(read("README.md").lines().count() <= 110);
        for (path, most) in [
            ("ARCHITECTURE.md", 3000),
            ("docs/src/results.md", 1500),
            ("docs/src/limits.md", 700),
        ] {
            let words = read(path).split_whitespace().count();
            assert!(words <= most, "{path} has {words} words, more than {most}");
        }
    }
}
