//! Finds the loader and libraries of a program.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::tool;
use crate::error::Error;

const HINT: &str = "a library of the program is damaged: install it again";

/// Program header type of the loader's path (elf(5)).
const PT_INTERP: u32 = 3;

/// Files that a program needs to start.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Needed {
    /// Its loader and libraries; for a script its interpreter, and that program's files.
    pub files: Vec<PathBuf>,
    /// The first missing library; its own dependencies are unknown.
    pub missing: Option<String>,
}

/// Files that the program needs; none if it is static. Libraries are searched in `library_dirs` first, then in this
/// machine's folders.
pub fn needed(program: &Path, library_dirs: &[PathBuf]) -> Result<Needed, Error> {
    let image = fs::read(program).map_err(Error::io("read", program))?;
    if let Some(interpreter) = script_interpreter(&image) {
        let mut needed = match Path::new(&interpreter).exists() {
            true => self::needed(Path::new(&interpreter), library_dirs)?,
            false => Needed {
                missing: Some(interpreter.clone()),
                ..Needed::default()
            },
        };
        needed.files.push(interpreter.into());
        return Ok(needed);
    }
    let Some(loader) = interpreter(&image) else {
        return Ok(Needed::default());
    };
    if !Path::new(&loader).exists() {
        return Ok(Needed {
            missing: Some(loader),
            ..Needed::default()
        });
    }
    let mut list = Command::new(&loader);
    if !library_dirs.is_empty() {
        let dirs = library_dirs.iter().map(|dir| dir.display().to_string());
        list.args(["--library-path", &dirs.collect::<Vec<_>>().join(":")]);
    }
    let listing = match tool::output(list.arg("--list").arg(program), HINT) {
        Ok(listing) => listing,
        Err(Error::Tool { said, .. }) if missing_library(&said).is_some() => {
            return Ok(Needed {
                files: vec![],
                missing: missing_library(&said),
            });
        }
        Err(error) => return Err(error),
    };
    let mut files = vec![PathBuf::from(loader)];
    // Lines such as `libc.so.6 => /lib/x86_64-linux-gnu/libc.so.6 (0x...)`.
    files.extend(
        listing
            .lines()
            .filter_map(|line| line.split_once(" => ")?.1.split_whitespace().next())
            .filter(|path| path.starts_with('/'))
            .map(PathBuf::from),
    );
    files.sort();
    files.dedup();
    Ok(Needed {
        files,
        missing: None,
    })
}

/// The library that the loader did not find. It prints `PROGRAM: error while loading shared libraries: LIBRARY: cannot
/// open shared object file: ...`.
fn missing_library(said: &str) -> Option<String> {
    let (_, behind) = said.split_once("error while loading shared libraries: ")?;
    let (library, why) = behind.split_once(": ")?;
    why.starts_with("cannot open").then(|| library.to_owned())
}

/// The interpreter in a script's first line.
fn script_interpreter(image: &[u8]) -> Option<String> {
    let line = image.strip_prefix(b"#!")?;
    let line = line.split(|&byte| byte == b'\n').next()?;
    let name = std::str::from_utf8(line).ok()?.split_whitespace().next()?;
    // The interpreter must not be a script: the kernel limits such chains.
    (name.starts_with('/') && !name.contains("..")).then(|| name.to_owned())
}

/// Whether a file is a program that needs a loader.
pub fn is_dynamic(image: &[u8]) -> bool {
    interpreter(image).is_some()
}

/// The loader named in a 64-bit little-endian ELF file.
fn interpreter(image: &[u8]) -> Option<String> {
    if !image.starts_with(b"\x7fELF\x02\x01") {
        return None;
    }
    let bytes = |at: usize, count: usize| image.get(at..at.checked_add(count)?);
    let u16_at = |at| Some(u16::from_le_bytes(bytes(at, 2)?.try_into().ok()?));
    let u32_at = |at| Some(u32::from_le_bytes(bytes(at, 4)?.try_into().ok()?));
    let u64_at = |at| Some(u64::from_le_bytes(bytes(at, 8)?.try_into().ok()?));
    let table = usize::try_from(u64_at(0x20)?).ok()?;
    let entry_bytes = usize::from(u16_at(0x36)?);
    let entries = usize::from(u16_at(0x38)?);
    (0..entries).find_map(|i| {
        let header = table.checked_add(i * entry_bytes)?;
        if u32_at(header)? != PT_INTERP {
            return None;
        }
        let start = usize::try_from(u64_at(header + 8)?).ok()?;
        let length = usize::try_from(u64_at(header + 0x20)?).ok()?;
        let name = bytes(start, length)?.split(|&byte| byte == 0).next()?;
        String::from_utf8(name.to_vec()).ok()
    })
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn a_dynamic_program_needs_its_loader_and_its_libraries() {
        // Test programs are usually dynamic; a static one needs no files.
        let this = std::env::current_exe().unwrap();
        let needed = needed(&this, &[]).unwrap();
        assert_eq!(needed.missing, None);
        assert!(needed.files.iter().all(|f| f.exists()), "{needed:?}");
        if is_dynamic(&fs::read(this).unwrap()) {
            assert!(
                needed
                    .files
                    .iter()
                    .any(|f| f.to_string_lossy().contains("libc.so")),
                "{needed:?}"
            );
        }
    }

    #[test]
    fn what_is_no_program_needs_nothing() {
        assert_eq!(interpreter(b""), None);
        assert_eq!(script_interpreter(b"no script"), None);
    }

    #[test]
    fn a_script_needs_its_interpreter_and_what_that_needs() {
        assert_eq!(
            script_interpreter(b"#! /bin/sh -e\n"),
            Some("/bin/sh".into())
        );
        let dir = tempfile::tempdir().unwrap();
        let script = dir.path().join("script");
        fs::write(&script, "#!/bin/sh\n").unwrap();
        let found = needed(&script, &[]).unwrap();
        assert!(found.files.contains(&"/bin/sh".into()), "{found:?}");
        fs::write(&script, "#!/nowhere/sh\n").unwrap();
        let found = needed(&script, &[]).unwrap();
        assert_eq!(found.missing, Some("/nowhere/sh".into()));
    }

    #[test]
    fn the_loader_names_what_it_does_not_find() {
        let said = "./t: error while loading shared libraries: libfoo.so.1: cannot open shared \
                    object file: No such file or directory";
        assert_eq!(missing_library(said), Some("libfoo.so.1".into()));
        assert_eq!(missing_library("./t: Permission denied"), None);
    }

    proptest! {
        /// A damaged file counts as a file without a loader.
        #[test]
        fn damage_does_no_harm(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for (byte, magic) in bytes.iter_mut().zip(b"\x7fELF\x02\x01") {
                *byte = *magic;
            }
            interpreter(&bytes);
        }
    }
}
