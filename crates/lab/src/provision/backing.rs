//! Host memory behind a VM, measured from the emulator's files independently of the host controller.

use std::collections::BTreeMap;
use std::fs;
use std::io;
use std::os::unix::fs::MetadataExt;
use std::path::Path;

use crate::error::Error;

/// Unit of `st_blocks`, bytes (stat(2)).
const BLOCK_BYTES: u64 = 512;

/// Maximum number of an emulator's descriptors that are checked.
const DESCRIPTORS_MAX: usize = 4096;

/// Name prefix of QEMU's `memory-backend-memfd` files (memfd_create(2)) below /proc/PID/fd.
const MEMFD: &str = "/memfd:memory-backend-memfd";

/// Bytes of memory that back the emulator `pid`, below `root` (`/` on a host).
pub fn backed_bytes(root: &Path, pid: u32) -> Result<u64, Error> {
    let dir = root.join(format!("proc/{pid}/fd"));
    let mut files = BTreeMap::new();
    for entry in fs::read_dir(&dir)
        .map_err(Error::io("list", &dir))?
        .take(DESCRIPTORS_MAX)
    {
        let path = entry.map_err(Error::io("list", &dir))?.path();
        match is_memory(&path).and_then(|is| Ok(is.then_some(fs::metadata(&path)?))) {
            // A file may be open several times.
            Ok(Some(file)) => {
                files.insert(file.ino(), file.blocks() * BLOCK_BYTES);
            }
            Ok(None) => {}
            // Closed meanwhile.
            Err(e) if e.kind() == io::ErrorKind::NotFound => {}
            Err(e) => return Err(Error::io("look at", &path)(e)),
        }
    }
    Ok(files.values().sum())
}

fn is_memory(descriptor: &Path) -> io::Result<bool> {
    let target = fs::read_link(descriptor)?;
    Ok(target.to_string_lossy().starts_with(MEMFD))
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::fs::File;
    use std::os::fd::{AsRawFd, FromRawFd};

    use super::*;

    fn memfd(name: &CStr, bytes: usize) -> File {
        // SAFETY: the name is a C string; only this code owns the new descriptor.
        let file = unsafe {
            let fd = libc::memfd_create(name.as_ptr(), libc::MFD_CLOEXEC);
            assert!(fd >= 0);
            File::from_raw_fd(fd)
        };
        use std::io::Write;
        (&file).write_all(&vec![1; bytes]).unwrap();
        file
    }

    #[test]
    fn only_guest_memory_counts_once_and_without_its_holes() {
        let us = std::process::id();
        let before = backed_bytes(Path::new("/"), us).unwrap();
        let memory = memfd(c"memory-backend-memfd", 8 << 20);
        let _twice = memory.try_clone().unwrap();
        let _other = memfd(c"something else", 1 << 20);
        let backed = || backed_bytes(Path::new("/"), us).unwrap() - before;
        assert_eq!(backed(), 8 << 20);
        let mode = libc::FALLOC_FL_PUNCH_HOLE | libc::FALLOC_FL_KEEP_SIZE;
        // SAFETY: changes our own file only.
        let failed = unsafe { libc::fallocate(memory.as_raw_fd(), mode, 2 << 20, 4 << 20) };
        assert_eq!(failed, 0);
        assert_eq!(backed(), 4 << 20);
    }
}
