//! Resource usage of a process, as far as growth is visible.

use std::fs;
use std::io;
use std::path::Path;

use demeter_policy::Pid;
use serde::{Deserialize, Serialize};

/// Resource usage of a process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct ProcessUsage {
    /// Resident memory, KiB (`VmRSS` of proc_pid_status(5)).
    pub resident_kib: u64,
    /// Number of open files.
    pub descriptors: u64,
    /// Number of threads.
    pub threads: u64,
}

impl ProcessUsage {
    /// The usage of a process; /proc is below `root`.
    pub fn of(root: &Path, pid: Pid) -> io::Result<Self> {
        let process = root.join(format!("proc/{pid}"));
        let status = fs::read_to_string(process.join("status"))?;
        let (resident_kib, threads) = (figure(&status, "VmRSS:")?, figure(&status, "Threads:")?);
        let descriptors = fs::read_dir(process.join("fd"))?.count() as u64;
        Ok(Self {
            resident_kib,
            descriptors,
            threads,
        })
    }
}

/// Unreclaimable memory of the kernel itself, KiB: objects (`SUnreclaim` of proc_meminfo(5)), per-CPU memory, and
/// vmalloc mappings.
pub fn kernel_kib(root: &Path) -> io::Result<u64> {
    let meminfo = fs::read_to_string(root.join("proc/meminfo"))?;
    let parts = ["SUnreclaim:", "Percpu:", "VmallocUsed:"].map(|name| figure(&meminfo, name));
    parts.into_iter().sum()
}

/// The number after `name`.
fn figure(text: &str, name: &str) -> io::Result<u64> {
    let line = text.lines().find_map(|line| line.strip_prefix(name));
    line.and_then(|rest| rest.split_whitespace().next()?.parse().ok())
        .ok_or_else(|| io::Error::other(format!("there is no {name}")))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_opened_is_seen() {
        let us = || ProcessUsage::of(Path::new("/"), Pid(std::process::id())).unwrap();
        let before = us();
        assert!(before.resident_kib > 100 && before.threads > 0);
        // Other tests open and close some files, but fewer than this.
        let files: Vec<_> = (0..200)
            .map(|_| fs::File::open("/dev/null").unwrap())
            .collect();
        assert!(us().descriptors >= before.descriptors + 100, "{before:?}");
        drop(files);
        assert!(kernel_kib(Path::new("/")).unwrap() > 1000);
        assert!(kernel_kib(Path::new("/nonexistent")).is_err());
    }
}
