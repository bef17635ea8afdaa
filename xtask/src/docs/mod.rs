//! The book's pages that are made, and the book.

mod reference;
mod source;

use std::fs;

use anyhow::{Context, ensure};

use crate::shell;

/// Set, tests of `crates/demeter/tests` write the pages that they otherwise compare.
pub const WRITE: &str = "DEMETER_WRITE_DOCS";

/// Writes what is made, and the book into `target/book` where mdbook is installed.
pub fn docs() -> anyhow::Result<()> {
    for page in reference::pages()? {
        let path = shell::root().join(page.path);
        fs::create_dir_all(path.parent().context("a page lies in a folder")?)?;
        fs::write(&path, page.text).with_context(|| format!("cannot write {}", page.path))?;
        eprintln!("wrote {}", page.path);
    }
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

    /// The targets of a page's links to files.
    fn links(text: &str) -> impl Iterator<Item = &str> {
        let targets = text
            .split("](")
            .skip(1)
            .filter_map(|rest| rest.split(')').next());
        let files = targets.filter(|target| !target.contains("://") && !target.starts_with('#'));
        files.map(|target| target.split('#').next().unwrap_or_default())
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
        let named: BTreeSet<_> = links(&summary).map(|target| book.join(target)).collect();
        let mut pages = pages_below(&book);
        assert!(pages.len() > 10, "{pages:?}");
        for page in &pages {
            let is_named = named.contains(page) || page.ends_with("SUMMARY.md");
            assert!(is_named, "SUMMARY.md lacks {}", page.display());
        }
        pages.push(shell::root().join("README.md"));
        for page in pages {
            let text = fs::read_to_string(&page).unwrap();
            for target in links(&text) {
                let file = page.with_file_name("").join(target);
                assert!(file.exists(), "{}: no {target}", page.display());
            }
        }
    }

    #[test]
    fn the_readme_is_short() {
        let readme = fs::read_to_string(shell::root().join("README.md")).unwrap();
        assert!(readme.lines().count() <= 110);
    }
}
