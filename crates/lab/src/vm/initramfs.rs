//! The VM's only file system: our own programs, their libraries and the job.

use std::collections::BTreeSet;
use std::fs::{self, File};
use std::io::{self, BufWriter, Read, Write};
use std::path::{Path, PathBuf};

use cpio::NewcBuilder;

use super::elf::needed_files;
use crate::error::Error;

const DIRECTORY: u32 = 0o040_755;
const PROGRAM: u32 = 0o100_755;
const FILE: u32 = 0o100_644;

/// What goes into an archive, by path in the VM without the leading slash.
#[derive(Debug, Default)]
pub struct Initramfs {
    programs: Vec<(String, PathBuf)>,
    texts: Vec<(String, String)>,
}

impl Initramfs {
    /// Adds a program and, if it is dynamic, its loader and libraries under their own names.
    pub fn add_program(&mut self, name: &str, from: &Path) -> Result<(), Error> {
        self.programs.push((name.into(), from.into()));
        for file in needed_files(from)? {
            let name = file.to_string_lossy().trim_start_matches('/').to_owned();
            if !self.programs.iter().any(|(known, _)| *known == name) {
                self.programs.push((name, file));
            }
        }
        Ok(())
    }

    /// Adds a file as it is.
    pub fn add_file(&mut self, name: &str, from: &Path) {
        self.programs
            .push((name.trim_start_matches('/').into(), from.into()));
    }

    /// Adds a text.
    pub fn add_text(&mut self, name: &str, text: String) {
        self.texts.push((name.trim_start_matches('/').into(), text));
    }

    /// Bytes that the files take in the VM.
    pub fn size_bytes(&self) -> Result<u64, Error> {
        let texts: u64 = self.texts.iter().map(|(_, text)| text.len() as u64).sum();
        self.programs.iter().try_fold(texts, |sum, (_, from)| {
            Ok(sum + fs::metadata(from).map_err(Error::io("read", from))?.len())
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
        for (name, from) in &self.programs {
            let content = File::open(from)?;
            let length = content.metadata()?.len();
            archive = append(archive, name, PROGRAM, content, length)?;
        }
        for (name, text) in &self.texts {
            archive = append(archive, name, FILE, text.as_bytes(), text.len() as u64)?;
        }
        cpio::newc::trailer(archive)?.flush()
    }

    /// Mount points, and every folder that some file lies in; parents come first.
    fn directories(&self) -> BTreeSet<String> {
        let mut found: BTreeSet<String> = ["dev", "proc", "run", "sys", "tmp"]
            .map(String::from)
            .into();
        let names = self
            .programs
            .iter()
            .map(|(n, _)| n)
            .chain(self.texts.iter().map(|(n, _)| n));
        for name in names {
            found.extend(name.match_indices('/').map(|(at, _)| name[..at].to_owned()));
        }
        found
    }
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
        assert_eq!(initramfs.size_bytes().unwrap(), 20);
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
