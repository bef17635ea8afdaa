//! Kernel modules from the initramfs.

use std::ffi::CString;
use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::Path;

use crate::fault::Fault;
use crate::link::{EARLY_MODULES_DIR, MODULES_DIR};

/// The kernel's policy for hotplugged memory.
const ONLINE_POLICY: &str = "sys/devices/system/memory/auto_online_blocks";

/// Loads every module in [`MODULES_DIR`], in name order. Hotplugged memory becomes movable, since kernel allocations in
/// it would prevent unplugging.
pub fn load_all(root: &Path) -> Result<(), Fault> {
    let dir = root.join(MODULES_DIR.trim_start_matches('/'));
    let Ok(entries) = fs::read_dir(&dir) else {
        return Ok(());
    };
    let policy = root.join(ONLINE_POLICY);
    fs::write(&policy, "online_movable").map_err(Fault::io("write", &policy))?;
    load_each(&dir, entries)
}

/// Loads the modules that the link needs. Returns whether there were any.
pub fn load_early(root: &Path) -> Result<bool, Fault> {
    let dir = root.join(EARLY_MODULES_DIR.trim_start_matches('/'));
    match fs::read_dir(&dir) {
        Ok(entries) => load_each(&dir, entries).map(|()| true),
        Err(_) => Ok(false),
    }
}

fn load_each(dir: &Path, entries: fs::ReadDir) -> Result<(), Fault> {
    let paths = entries.map(|entry| entry.map(|entry| entry.path()));
    let paths: io::Result<Vec<_>> = paths.collect();
    let mut paths = paths.map_err(Fault::io("list", dir))?;
    paths.sort();
    for path in paths {
        load(&path).map_err(Fault::io("load", &path))?;
    }
    Ok(())
}

/// Makes memory hotplugged from now on usable for everything. That includes the balloon driver; most distributions do
/// the same.
pub fn online_for_all(root: &Path) -> Result<(), Fault> {
    let policy = root.join(ONLINE_POLICY);
    fs::write(&policy, "online_kernel").map_err(Fault::io("write", &policy))
}

/// finit_module(2) without parameters.
fn load(path: &Path) -> io::Result<()> {
    let file = File::open(path)?;
    let parameters = CString::default();
    // SAFETY: the descriptor is open and the string is zero-terminated; both outlive the call.
    let failed = unsafe {
        libc::syscall(
            libc::SYS_finit_module,
            file.as_raw_fd(),
            parameters.as_ptr(),
            0,
        )
    };
    if failed != 0 {
        Err(io::Error::last_os_error())
    } else {
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_machine_without_modules_needs_nothing() {
        let root = tempfile::tempdir().unwrap();
        load_all(root.path()).unwrap();
        assert!(!load_early(root.path()).unwrap());
    }

    #[test]
    fn what_is_no_module_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        let dir = root.path().join("lib/modules");
        fs::create_dir_all(&dir).unwrap();
        fs::write(dir.join("bad.ko"), "no module").unwrap();
        let policy = root.path().join(ONLINE_POLICY);
        fs::create_dir_all(policy.parent().unwrap()).unwrap();
        fs::write(&policy, "offline").unwrap();
        let said = load_all(root.path()).unwrap_err().to_string();
        assert!(said.contains("bad.ko"), "{said}");
        assert_eq!(fs::read_to_string(policy).unwrap(), "online_movable");
    }
}
