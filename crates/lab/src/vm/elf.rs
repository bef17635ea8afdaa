//! Which files a program needs beside itself to start.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use super::tool;
use crate::error::Error;

/// Program header of the kind that names the program's loader (elf(5)).
const PT_INTERP: u32 = 3;

/// The loader and the libraries of a dynamic program; nothing for a static one.
pub fn needed_files(program: &Path) -> Result<Vec<PathBuf>, Error> {
    let image = fs::read(program).map_err(Error::io("read", program))?;
    let Some(loader) = interpreter(&image) else {
        return Ok(Vec::new());
    };
    let listing = tool::output(
        Command::new(&loader).arg("--list").arg(program),
        "a library of the program is missing: build it again",
    )?;
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
    Ok(files)
}

/// The loader that a 64-bit little-endian ELF file asks for.
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
        // Test programs are dynamic unless somebody builds them static, where nothing is needed.
        let this = std::env::current_exe().unwrap();
        let needed = needed_files(&this).unwrap();
        assert!(needed.iter().all(|file| file.exists()), "{needed:?}");
        if interpreter(&fs::read(this).unwrap()).is_some() {
            assert!(
                needed
                    .iter()
                    .any(|f| f.to_string_lossy().contains("libc.so")),
                "{needed:?}"
            );
        }
    }

    #[test]
    fn what_is_no_program_needs_nothing() {
        assert_eq!(interpreter(b"#!/bin/sh\n"), None);
        assert_eq!(interpreter(b""), None);
    }

    proptest! {
        /// A damaged file is never more than a file without a loader.
        #[test]
        fn damage_does_no_harm(mut bytes in proptest::collection::vec(any::<u8>(), 0..200)) {
            for (byte, magic) in bytes.iter_mut().zip(b"\x7fELF\x02\x01") {
                *byte = *magic;
            }
            interpreter(&bytes);
        }
    }
}
