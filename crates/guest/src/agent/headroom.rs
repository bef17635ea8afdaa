//! Whether a process's cgroups let it grow.
//!
//! The kernel allocates a huge page before it frees the small pages, and it fills their holes. In a cgroup near its
//! limit this would make the kernel reclaim or swap the program's own memory.

use std::fs;
use std::path::Path;

use demeter_policy::{ByteCount, Pid};

/// Levels of the cgroup hierarchy that are checked.
const DEPTH_MAX: usize = 32;

/// Whether a process could use `more` bytes within `memory.high` and `memory.max` of all its cgroups (v2).
pub(super) fn allows(root: &Path, pid: Pid, more: ByteCount) -> bool {
    let groups = fs::read_to_string(root.join(format!("proc/{pid}/cgroup"))).unwrap_or_default();
    let Some(path) = groups.lines().find_map(|line| line.strip_prefix("0::/")) else {
        return true;
    };
    // The process's cgroup lies outside the agent's cgroup namespace, so its limits cannot be read.
    if path.starts_with("..") {
        return false;
    }
    let top = root.join("sys/fs/cgroup");
    let group = top.join(path);
    let mut levels = group.ancestors().take_while(|level| *level != top);
    levels
        .by_ref()
        .take(DEPTH_MAX)
        .all(|level| is_below(level, more))
}

fn is_below(cgroup: &Path, more: ByteCount) -> bool {
    let bytes = |file| -> Option<u64> {
        fs::read_to_string(cgroup.join(file))
            .ok()?
            .trim()
            .parse()
            .ok()
    };
    let Some(current) = bytes("memory.current") else {
        return true;
    };
    let after = current.saturating_add(more.0);
    // A file without a limit contains "max".
    ["memory.high", "memory.max"]
        .into_iter()
        .all(|limit| bytes(limit).is_none_or(|limit| after <= limit))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_lowest_limit_of_all_levels_counts() {
        let root = tempfile::tempdir().unwrap();
        let write = |file: &str, text: &str| {
            let file = root.path().join(file);
            fs::create_dir_all(file.parent().unwrap()).unwrap();
            fs::write(file, text).unwrap();
        };
        let allows = |more| allows(root.path(), Pid(7), ByteCount(more));
        assert!(allows(100), "no cgroups");
        write("proc/7/cgroup", "1:name=systemd:/x\n0::/a/b\n");
        assert!(allows(100), "no memory controller");
        for (file, text) in [
            ("a/memory.current", "500\n"),
            ("a/memory.high", "1000\n"),
            ("a/memory.max", "max\n"),
            ("a/b/memory.current", "100\n"),
            ("a/b/memory.high", "max\n"),
            ("a/b/memory.max", "800\n"),
        ] {
            write(&format!("sys/fs/cgroup/{file}"), text);
        }
        assert!(allows(500) && !allows(501), "by memory.high above");
        write("sys/fs/cgroup/a/b/memory.max", "400\n");
        assert!(allows(300) && !allows(301), "by its own memory.max");
        write("proc/7/cgroup", "0::/../elsewhere\n");
        assert!(!allows(1));
    }
}
