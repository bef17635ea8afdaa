//! The VM's only file system: our programs, their libraries and the job.

use std::collections::{BTreeMap, BTreeSet};
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use cpio::NewcBuilder;

use super::elf::needed;
use crate::error::Error;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;
const LINK: u32 = 0o120_777;

/// Content of an archive, by path in the VM without the leading slash. The first entry of a path wins.
#[derive(Debug, Default)]
pub struct Initramfs {
    entries: BTreeMap<String, Entry>,
    folders: BTreeSet<String>,
}

#[derive(Debug)]
enum Entry {
    /// A local file.
    File(PathBuf),
    /// A symbolic link and its target.
    Link(String),
    /// A text.
    Text(String),
}

impl Initramfs {
    /// Adds a program. If it is dynamic, also adds its loader and libraries at their own paths.
    pub fn add_program(&mut self, name: &str, from: &Path) -> Result<(), Error> {
        self.add_file(name, from);
        let needed = needed(from, &[])?;
        if let Some(missing) = needed.missing {
            return Err(Error::Missing {
                what: format!("{} needs {missing}, which is missing", from.display()),
                hint: "build it again".into(),
            });
        }
        for file in needed.files {
            self.add_file(&file.to_string_lossy(), &file);
        }
        Ok(())
    }

    /// Adds a file unchanged.
    pub fn add_file(&mut self, name: &str, from: &Path) {
        self.add(name, Entry::File(from.into()));
    }

    /// Adds a symbolic link.
    pub fn add_link(&mut self, name: &str, target: &str) {
        self.add(name, Entry::Link(target.into()));
    }

    /// Adds a text file.
    pub fn add_text(&mut self, name: &str, text: String) {
        self.add(name, Entry::Text(text));
    }

    /// Adds a folder, which may be empty.
    pub fn add_folder(&mut self, name: &str) {
        self.folders.insert(name.trim_start_matches('/').into());
    }

    fn add(&mut self, name: &str, entry: Entry) {
        let name = name.trim_start_matches('/').to_owned();
        self.entries.entry(name).or_insert(entry);
    }

    /// Total size of the files in the VM, bytes.
    pub fn size_bytes(&self) -> Result<u64, Error> {
        self.entries.values().try_fold(0, |sum, entry| {
            Ok(sum
                + match entry {
                    Entry::File(from) => fs::metadata(from).map_err(Error::io("read", from))?.len(),
                    Entry::Link(text) | Entry::Text(text) => text.len() as u64,
                })
        })
    }

    /// Writes the archive (cpio, new ASCII format) to `path`.
    pub fn write(&self, path: &Path) -> Result<(), Error> {
        self.write_archive(path).map_err(Error::io("write", path))
    }

    fn write_archive(&self, path: &Path) -> io::Result<()> {
        let mut archive = BufWriter::new(File::create(path)?);
        for directory in self.directories() {
            archive = append(archive, &directory, DIRECTORY, io::empty(), 0)?;
        }
        for (name, entry) in &self.entries {
            archive = match entry {
                Entry::File(from) => {
                    let content = File::open(from)?;
                    let length = content.metadata()?.len();
                    append(archive, name, PROGRAM, content, length)?
                }
                Entry::Link(text) => append_text(archive, name, LINK, text)?,
                Entry::Text(text) => append_text(archive, name, FILE, text)?,
            };
        }
        cpio::newc::trailer(archive)?.flush()
    }

    /// Mount points and all parent folders of files; parents come first.
    fn directories(&self) -> BTreeSet<String> {
        let mut found: BTreeSet<String> = ["dev", "proc", "run", "sys", "tmp"]
            .map(String::from)
            .into();
        for name in self.entries.keys().chain(&self.folders) {
            found.extend(name.match_indices('/').map(|(at, _)| name[..at].to_owned()));
        }
        found.extend(self.folders.iter().cloned());
        found
    }
}

fn append_text<W: Write>(archive: W, name: &str, mode: u32, text: &str) -> io::Result<W> {
    append(archive, name, mode, text.as_bytes(), text.len() as u64)
}

fn append<W: Write>(
    archive: W,
    name: &str,
    mode: u32,
    content: impl Read,
    length: u64,
) -> io::Result<W> {
    let length_u32 = u32::try_from(length)
        .map_err(|_| io::Error::other(format!("{name} is larger than an archive can hold")))?;
    let mut entry = NewcBuilder::new(name).mode(mode).write(archive, length_u32);
    io::copy(&mut content.take(length), &mut entry)?;
    entry.finish()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_archive_holds_folders_before_files_and_every_byte() {
        let dir = tempfile::tempdir().unwrap();
        let program = dir.path().join("gups");
        fs::write(&program, "#!not an ELF file\n").unwrap();
        let mut initramfs = Initramfs::default();
        initramfs.add_program("bin/gups", &program).unwrap();
        initramfs.add_text("/etc/demeter/job.json", "{}".into());
        initramfs.add_link("usr/bin/g", "../../bin/gups");
        initramfs.add_link("bin/gups", "what comes later does not count");
        assert_eq!(initramfs.size_bytes().unwrap(), 34);
        let path = dir.path().join("initramfs");
        initramfs.write(&path).unwrap();

        let mut archive = File::open(path).unwrap();
        let mut names = Vec::new();
        loop {
            let mut reader = cpio::NewcReader::new(archive).unwrap();
            if reader.entry().is_trailer() {
                break;
            }
            let mut content = String::new();
            reader.read_to_string(&mut content).unwrap();
            let entry = reader.entry();
            match entry.name() {
                "bin/gups" => {
                    assert_eq!(content, "#!not an ELF file\n");
                    assert_eq!(entry.mode(), PROGRAM);
                }
                "usr/bin/g" => {
                    assert_eq!(content, "../../bin/gups");
                    assert_eq!(entry.mode(), LINK);
                }
                "etc/demeter/job.json" => assert_eq!(content, "{}"),
                _ => assert_eq!(entry.mode(), DIRECTORY),
            }
            names.push(entry.name().to_owned());
            archive = reader.finish().unwrap();
        }
        let place = |name: &str| names.iter().position(|n| n == name).expect("an entry");
        assert!(place("etc") < place("etc/demeter"));
        assert!(place("etc/demeter") < place("etc/demeter/job.json"));
        assert!(place("bin") < place("bin/gups"));
        assert!(place("proc") < names.len());
    }
}
