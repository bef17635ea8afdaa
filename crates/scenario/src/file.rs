//! Reads scenario files. A file may extend another: `extends = "gups.toml"`, relative to its folder.
//!
//! Tables are merged key by key, at every depth. Everything else replaces the extended value: lists as a whole, and
//! tables of another `kind`, whose keys differ.

use std::path::{Path, PathBuf};

use demeter_toml_file::{Kind, TomlFile};
use toml::{Table, Value};

use crate::{Error, Scenario};

/// Scenario files.
pub(crate) const KIND: Kind = Kind {
    name: "scenario",
    hint: "give a path such as scenarios/gups.toml",
    example: "scenarios/gups.toml",
    reference: "docs/src/reference/scenario.md",
};

/// The key that names the extended file.
const EXTENDS: &str = "extends";

/// Maximum number of files in a chain.
const FILES_MAX: usize = 8;

impl Scenario {
    /// Reads and checks a scenario file.
    ///
    /// # Errors
    /// The file, the key and the fix.
    pub fn load(path: &Path) -> Result<Self, Error> {
        let file = TomlFile::read(&KIND, path)?;
        let table: Table = file.parse()?;
        let scenario: Self = if table.contains_key(EXTENDS) {
            file.parse_table(extend(path, table)?)?
        } else {
            // Parsed from the text, so that errors have line numbers.
            file.parse()?
        };
        scenario.check()?;
        Ok(scenario)
    }
}

/// A file's table, merged over the files that it extends.
pub(crate) fn table(path: &Path) -> Result<Table, Error> {
    extend(path, TomlFile::read(&KIND, path)?.parse()?)
}

/// The table of a scenario's text, which extends no file; errors say `name`.
///
/// # Errors
/// It is no TOML.
pub fn table_from_text(name: &str, text: &str) -> Result<Table, Error> {
    Ok(TomlFile::from_text(&KIND, name, text).parse()?)
}

fn extend(path: &Path, mut table: Table) -> Result<Table, Error> {
    let mut files = vec![path.to_owned()];
    let mut above = vec![];
    while let Some(below) = table.remove(EXTENDS) {
        let last = &files[files.len() - 1];
        let fault = |what: String| Error::Invalid {
            name: last.display().to_string(),
            what: format!("{EXTENDS} = {below}: {what}"),
        };
        let name = below
            .as_str()
            .ok_or_else(|| fault("give a file, such as \"gups.toml\"".into()))?;
        let file = last.with_file_name(name);
        if files.iter().any(|other| is_same(other, &file)) {
            return Err(fault(
                "the file extends itself that way; remove a link".into(),
            ));
        }
        if files.len() == FILES_MAX {
            let what = format!("more than {FILES_MAX} files in a row; join some of them");
            return Err(fault(what));
        }
        above.push(std::mem::replace(
            &mut table,
            TomlFile::read(&KIND, &file)?.parse()?,
        ));
        files.push(file);
    }
    // Merges from the end of the chain, so that each file overrides a complete table.
    for over in above.into_iter().rev() {
        merge(&mut table, over);
    }
    Ok(table)
}

/// Merges `over` over `under`.
fn merge(under: &mut Table, over: Table) {
    for (key, value) in over {
        match (under.get_mut(&key), value) {
            (Some(Value::Table(under)), Value::Table(over)) if !is_other_kind(under, &over) => {
                merge(under, over);
            }
            (_, value) => {
                under.insert(key, value);
            }
        }
    }
}

fn is_other_kind(under: &Table, over: &Table) -> bool {
    matches!((under.get("kind"), over.get("kind")), (Some(a), Some(b)) if a != b)
}

fn is_same(a: &Path, b: &Path) -> bool {
    let whole = |path: &Path| path.canonicalize().unwrap_or_else(|_| PathBuf::from(path));
    whole(a) == whole(b)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// A folder with these files.
    fn folder(files: &[(&str, &str)]) -> tempfile::TempDir {
        let dir = tempfile::tempdir().unwrap();
        for (name, text) in files {
            let path = dir.path().join(name);
            std::fs::create_dir_all(path.parent().unwrap()).unwrap();
            std::fs::write(path, text).unwrap();
        }
        dir
    }

    fn refused(files: &[(&str, &str)], first: &str) -> String {
        let dir = folder(files);
        let said = Scenario::load(&dir.path().join(first)).unwrap_err();
        said.to_string().replace(&*dir.path().to_string_lossy(), "")
    }

    #[test]
    fn tables_are_merged_and_all_else_is_replaced() {
        let dir = folder(&[
            (
                "base/machine.toml",
                "duration_s = 9\nlist = [1, 2]\n[machine]\nvcpus = 1\nfast = { mib = 1, ns = 80 }\n\
                 [workload]\nkind = \"gups\"\nsize_mib = 8\nhot_mib = 1",
            ),
            (
                "middle.toml",
                "extends = \"base/machine.toml\"\nlist = [3]\nmachine.fast.mib = 2\n\
                 workload.hot_mib = 4",
            ),
            (
                "same.toml",
                "extends = \"middle.toml\"\nworkload.kind = \"gups\"",
            ),
            (
                "other.toml",
                "extends = \"middle.toml\"\nduration_s = 5\nworkload = { kind = \"memlat\" }",
            ),
        ]);
        let resolved = |name: &str| table(&dir.path().join(name)).unwrap();
        let want = |text: &str| text.parse::<Table>().unwrap();
        let same = want(
            "duration_s = 9\nlist = [3]\n[machine]\nvcpus = 1\nfast = { mib = 2, ns = 80 }\n\
             [workload]\nkind = \"gups\"\nsize_mib = 8\nhot_mib = 4",
        );
        assert_eq!(resolved("middle.toml"), same);
        assert_eq!(resolved("same.toml"), same);
        assert_eq!(
            resolved("other.toml"),
            want(
                "duration_s = 5\nlist = [3]\n[machine]\nvcpus = 1\nfast = { mib = 2, ns = 80 }\n\
                 [workload]\nkind = \"memlat\""
            )
        );
    }

    #[test]
    fn chains_without_end_are_refused_by_name() {
        let said = refused(&[("a.toml", "extends = \"a.toml\"")], "a.toml");
        assert!(said.contains("/a.toml: extends = \"a.toml\""), "{said}");
        let circle = [
            ("a.toml", "extends = \"sub/b.toml\""),
            ("sub/b.toml", "extends = \"../a.toml\""),
        ];
        let said = refused(&circle, "a.toml");
        assert!(
            said.contains("sub/b.toml: extends = \"../a.toml\"") && said.contains("remove a link"),
            "{said}"
        );
        let links: Vec<_> = (0..=FILES_MAX)
            .map(|i| (format!("{i}.toml"), format!("extends = \"{}.toml\"", i + 1)))
            .collect();
        let links: Vec<_> = links
            .iter()
            .map(|(a, b)| (a.as_str(), b.as_str()))
            .collect();
        let said = refused(&links, "0.toml");
        assert!(
            said.contains("7.toml: extends = \"8.toml\": more than 8"),
            "{said}"
        );
    }

    #[test]
    fn what_is_wrong_below_is_told_with_the_file_or_the_key() {
        let said = refused(&[("a.toml", "extends = 1")], "a.toml");
        assert!(said.contains("extends = 1: give a file"), "{said}");
        let said = refused(&[("a.toml", "extends = \"b.toml\"")], "a.toml");
        assert!(said.contains("cannot read scenario /b.toml"), "{said}");
        let below = [
            ("a.toml", "extends = \"b.toml\"\n[lab]\ndilatoin = 1"),
            ("b.toml", "name = \"b\""),
        ];
        let said = refused(&below, "a.toml");
        assert!(
            said.starts_with(
                "/a.toml: lab.dilatoin is no key of this table; did you mean `dilation`?"
            ),
            "{said}"
        );
        let said = refused(&[below[0], ("b.toml", "name = ")], "a.toml");
        assert!(said.starts_with("/b.toml:1: "), "{said}");
    }
}
