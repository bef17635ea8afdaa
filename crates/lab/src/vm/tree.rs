//! Unpacked packages with all shared libraries of their programs, cached as a tree of files.

use std::collections::hash_map::DefaultHasher;
use std::collections::{BTreeSet, VecDeque};
use std::fs;
use std::hash::{Hash, Hasher};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::elf::{self, Needed};
use super::{package, tool};
use crate::error::Error;

/// Maximum number of files in a tree.
const FILES_MAX: usize = 100_000;

/// Maximum number of packages searched for libraries.
const SEARCHED_MAX: usize = 100;

/// Folders of packages that programs do not need.
const LEFT_OUT: [&str; 7] = [
    "usr/share/bash-completion",
    "usr/share/doc",
    "usr/share/info",
    "usr/share/lintian",
    "usr/share/locale",
    "usr/share/man",
    "usr/lib/systemd",
];

const HINT: &str = "check the names in packages and run `apt-get update`";

/// Unpacked packages.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Tree {
    root: PathBuf,
}

impl Tree {
    /// The tree of these packages, from `cache` or the package archive.
    pub fn of(cache: &Path, packages: &BTreeSet<&str>) -> Result<Self, Error> {
        fs::create_dir_all(cache).map_err(Error::io("create", cache))?;
        let versions = tool::output(Command::new("apt-cache").arg("policy").args(packages), HINT)?;
        let candidates: Vec<&str> = versions
            .lines()
            .filter_map(|line| line.trim().strip_prefix("Candidate: "))
            .collect();
        let mut hasher = DefaultHasher::new();
        (packages, candidates).hash(&mut hasher);
        let root = cache.join(format!("packages-{:016x}", hasher.finish()));
        if !root.exists() {
            let names: Vec<&str> = packages.iter().copied().collect();
            tracing::info!(
                "downloading {} once; kept in {}",
                names.join(", "),
                cache.display()
            );
            let made =
                tempfile::tempdir_in(cache).map_err(Error::io("create a folder in", cache))?;
            package::unpack(&names, made.path(), HINT)?;
            complete(&Self::at(made.path()), &names)?;
            let made = made.keep();
            fs::rename(&made, &root).map_err(Error::io("create", &root))?;
        }
        Ok(Self { root })
    }

    /// The tree below `root`.
    pub fn at(root: &Path) -> Self {
        Self { root: root.into() }
    }

    /// Current path of a packaged file, given its installed path.
    pub fn file(&self, path: &Path) -> Option<PathBuf> {
        let file = self.at_root(path);
        file.is_file().then_some(file)
    }

    /// Current path of any entry of the packages, given its installed path; none if it is absent.
    pub fn at_root(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Installed path of one of its files; none for other files.
    pub fn place(&self, file: &Path) -> Option<PathBuf> {
        Some(Path::new("/").join(file.strip_prefix(&self.root).ok()?))
    }

    /// All files and symbolic links that a program may need, in any order.
    pub fn files(&self) -> Result<Vec<PathBuf>, Error> {
        let mut found = vec![];
        let mut todo = vec![self.root.clone()];
        while let Some(dir) = todo.pop() {
            for entry in fs::read_dir(&dir).map_err(Error::io("list", &dir))? {
                let entry = entry.map_err(Error::io("list", &dir))?;
                let (path, kind) = (entry.path(), entry.file_type());
                if kind.map_err(Error::io("read", &path))?.is_dir() {
                    if !LEFT_OUT.iter().any(|out| path == self.root.join(out)) {
                        todo.push(path);
                    }
                } else {
                    found.push(path);
                }
            }
            if found.len() > FILES_MAX {
                return Err(Error::Missing {
                    what: format!("the packages hold more than {FILES_MAX} files"),
                    hint: "name fewer".into(),
                });
            }
        }
        Ok(found)
    }

    /// Folders with shared libraries.
    pub fn library_dirs(&self) -> Result<Vec<PathBuf>, Error> {
        let is_library = |file: &&PathBuf| {
            let name = file.file_name().unwrap_or_default().to_string_lossy();
            name.contains(".so.") || name.ends_with(".so")
        };
        let files = self.files()?;
        let dirs = files.iter().filter(is_library).filter_map(|f| f.parent());
        let dirs: BTreeSet<&Path> = dirs.collect();
        Ok(dirs.into_iter().map(Path::to_owned).collect())
    }

    /// Programs that need a loader.
    pub fn dynamic_programs(&self) -> Result<Vec<PathBuf>, Error> {
        let is_program = |file: &PathBuf| {
            // The target of a link is listed itself.
            fs::symlink_metadata(file)
                .is_ok_and(|meta| meta.is_file() && meta.permissions().mode() & 0o111 != 0)
                && fs::read(file).is_ok_and(|image| elf::is_dynamic(&image))
        };
        Ok(self.files()?.into_iter().filter(is_program).collect())
    }
}

/// Adds packages to the tree until its programs find all libraries. It adds library packages on which the named ones
/// depend, level by level, unless this machine has them.
fn complete(tree: &Tree, packages: &[&str]) -> Result<(), Error> {
    let mut next: VecDeque<String> = packages.iter().map(|&name| name.into()).collect();
    let mut seen: BTreeSet<String> = next.iter().cloned().collect();
    let mut searched = 0;
    for program in tree.dynamic_programs()? {
        while let Needed {
            missing: Some(library),
            ..
        } = elf::needed(&program, &tree.library_dirs()?)?
        {
            let Some(package) = next.pop_front().filter(|_| searched < SEARCHED_MAX) else {
                let program = tree.place(&program).unwrap_or(program);
                return Err(Error::Missing {
                    what: format!(
                        "{} of {} needs {library}, which no package has that it depends on",
                        program.display(),
                        packages.join(", ")
                    ),
                    hint: "add the library's package to packages".into(),
                });
            };
            searched += 1;
            let mut wanted = package::dependencies(&package, HINT)?;
            wanted.retain(|name| name.starts_with("lib") && seen.insert(name.clone()));
            next.extend(wanted.iter().cloned());
            wanted.retain(|name| !is_installed(name));
            if !wanted.is_empty() {
                let wanted: Vec<&str> = wanted.iter().map(String::as_str).collect();
                package::unpack(&wanted, &tree.root, HINT)?;
            }
        }
    }
    Ok(())
}

/// Whether a package is installed: dpkg keeps a list of its files.
fn is_installed(package: &str) -> bool {
    let list = |name: &str| Path::new("/var/lib/dpkg/info").join(format!("{name}.list"));
    list(package).exists() || list(&format!("{package}:amd64")).exists()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_tree_is_walked_without_its_manuals_and_links_stay_links() {
        let root = tempfile::tempdir().unwrap();
        for name in [
            "usr/bin/x",
            "usr/share/doc/x/README",
            "usr/lib/libx.so.1.2",
            "usr/share/x/data",
        ] {
            let path = root.path().join(name);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, "").unwrap();
        }
        std::os::unix::fs::symlink("x", root.path().join("usr/bin/y")).unwrap();
        let tree = Tree::at(root.path());
        let mut places: Vec<PathBuf> = tree
            .files()
            .unwrap()
            .iter()
            .map(|file| tree.place(file).unwrap())
            .collect();
        places.sort();
        let expected = ["bin/x", "bin/y", "lib/libx.so.1.2", "share/x/data"];
        assert_eq!(places, expected.map(|name| Path::new("/usr").join(name)));
        assert_eq!(tree.library_dirs().unwrap(), [root.path().join("usr/lib")]);
        assert!(tree.file(Path::new("/usr/bin/y")).is_some());
        assert_eq!(tree.file(Path::new("/usr/bin/z")), None);
        assert_eq!(tree.place(Path::new("/elsewhere")), None);
    }
}
