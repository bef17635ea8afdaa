//! Finds the processes to manage.
//!
//! A pid is no identity: the system reuses it after the process has ended. Hence a process is its pid and its start
//! time, from the configuration to each move.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use demeter_policy::{ByteCount, PAGE_SIZE, Pid};

/// Maximum number of targets. Beyond it, the largest are chosen.
pub const TARGETS_MAX: usize = 64;

/// Maximum number of processes that are checked: the kernel's default `pid_max`.
const PROCESSES_MAX: usize = 1 << 15;

/// A managed process counts as larger by this part of its size. Otherwise, processes of nearly equal size would
/// alternate, and each change would lose their heat.
const INCUMBENT_DIVISOR: u64 = 8;

/// Maximum number of cgroups below a named one.
const CGROUPS_MAX: usize = 4096;

/// The targets that the configuration names.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetSpec {
    /// These processes and their descendants.
    Pids(Vec<Pid>),
    /// The processes of cgroups (v2) and of those below them.
    Cgroups(Vec<PathBuf>),
    /// All processes of at least a resident size.
    All {
        /// The least resident size.
        resident_min: ByteCount,
    },
}

/// A target process, identified by pid and start time.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Its pid.
    pub pid: Pid,
    /// When it started, clock ticks after boot.
    pub start_ticks: u64,
    /// Its command's name with special characters replaced, since a process can set any bytes.
    pub comm: String,
}

impl Target {
    /// Whether the process still runs; its pid may have been reused.
    pub fn is_there(&self, root: &Path) -> bool {
        let stat = fs::read(root.join(format!("proc/{}/stat", self.pid)));
        let stat = stat.unwrap_or_default();
        parse_stat(&stat).is_some_and(|stat| stat.start_ticks == self.start_ticks)
    }
}

/// An error in finding targets.
#[derive(Debug, thiserror::Error)]
pub enum TargetsError {
    /// A named process does not exist.
    #[error("process {0} is not there; give the pid of a running process")]
    NoProcess(Pid),
    /// The process may exist, but /proc hides it.
    #[error(
        "process {pid} is not visible: /proc is mounted with {option}; run as root, grant CAP_SYS_PTRACE, or add \
         the agent to the group of the mount's gid="
    )]
    NotVisible {
        /// Its pid.
        pid: Pid,
        /// The mount's option.
        option: String,
    },
    /// The process is a kernel thread, which has no memory of its own.
    #[error("process {0} is a kernel thread and has no memory to move; give the pid of a program")]
    KernelThread(Pid),
    /// The cgroup does not exist.
    #[error("{path} is no cgroup v2 directory ({source}); see /sys/fs/cgroup for those there are")]
    NoCgroup {
        /// The path given.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A file cannot be read, for lack of descriptors, memory or /proc. Processes may still exist.
    #[error("cannot read {path}: {source}")]
    Read {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// Finds targets below `root`, repeatedly.
#[derive(Debug, Clone)]
pub struct TargetFinder {
    root: PathBuf,
    spec: TargetSpec,
    own_pid: Pid,
    /// Start times of named processes that exist.
    named: BTreeMap<Pid, u64>,
    /// Targets found last, with start times.
    before: BTreeMap<Pid, u64>,
}

impl TargetFinder {
    /// Creates a finder. It never returns the agent itself or its children.
    ///
    /// Pids mean the processes that have them now.
    pub fn new(root: &Path, spec: TargetSpec) -> Self {
        let mut finder = Self {
            root: root.into(),
            spec,
            own_pid: Pid(std::process::id()),
            named: BTreeMap::new(),
            before: BTreeMap::new(),
        };
        if let TargetSpec::Pids(pids) = &finder.spec {
            let started = |&pid: &Pid| Some((pid, finder.started(pid)?));
            finder.named = pids.iter().filter_map(started).collect();
        }
        finder
    }

    /// Checks that the named processes or cgroups exist.
    pub fn check(&self) -> Result<(), TargetsError> {
        if let TargetSpec::Cgroups(paths) = &self.spec {
            for path in paths {
                fs::read(self.cgroup(path).join(CGROUP_PROCS)).map_err(|source| {
                    TargetsError::NoCgroup {
                        path: path.clone(),
                        source,
                    }
                })?;
            }
        }
        self.clone().find().map(drop)
    }

    /// Describes how /proc hides other users' processes; `None` if it does not.
    pub fn hidden(&self) -> Option<String> {
        let mounts = fs::read_to_string(self.root.join("proc/mounts")).ok()?;
        let option = hidepid(&mounts)?;
        // Process 1 always exists, and rarely belongs to the agent's user.
        let sees_others = fs::read(self.proc(Pid(1), "statm")).is_ok_and(|statm| !statm.is_empty());
        (!sees_others).then(|| option.to_string())
    }

    /// The present targets, by pid: the largest, at most [`TARGETS_MAX`].
    ///
    /// Kernel threads and processes that end meanwhile are skipped. A removed cgroup counts as empty, since its service
    /// may be restarted. With [`TargetSpec::Pids`] it is an error if all named processes have ended.
    pub fn find(&mut self) -> Result<Vec<Target>, TargetsError> {
        let pids = match &self.spec {
            TargetSpec::Pids(pids) => {
                let is_same = |pid: &&Pid| {
                    let named = self.named.get(pid);
                    named.is_some() && named == self.started(**pid).as_ref()
                };
                let same: Vec<Pid> = pids.iter().filter(is_same).copied().collect();
                self.with_descendants(&same)?
            }
            TargetSpec::Cgroups(paths) => {
                let mut pids = BTreeSet::new();
                for path in paths {
                    pids.extend(self.in_cgroup(path)?);
                }
                pids
            }
            TargetSpec::All { .. } => numbers_in(&self.root.join("proc"))?,
        };
        let resident_min = match self.spec {
            TargetSpec::All { resident_min } => resident_min.0,
            _ => PAGE_SIZE,
        };
        let own = self.with_descendants(&[self.own_pid])?;
        let mut sized = vec![];
        for pid in pids.difference(&own).copied().map(Pid) {
            let Some(mut size) = self.resident(pid)?.map(|resident| resident.0) else {
                continue;
            };
            if self.before.contains_key(&pid) {
                size = size.saturating_add(size / INCUMBENT_DIVISOR);
            }
            if size >= resident_min {
                sized.push((size, pid));
            }
        }
        sized.sort_unstable_by_key(|&(size, pid)| Reverse((size, pid)));
        let mut targets = vec![];
        for (_, pid) in sized {
            targets.extend(self.target(pid)?);
            if targets.len() == TARGETS_MAX {
                break;
            }
        }
        if let (TargetSpec::Pids(pids), true) = (&self.spec, targets.is_empty()) {
            return Err(self.missing(pids.first().copied().unwrap_or(Pid(0))));
        }
        targets.sort_unstable();
        self.before = targets.iter().map(|t| (t.pid, t.start_ticks)).collect();
        Ok(targets)
    }

    /// The reason why a named process is no target.
    fn missing(&self, pid: Pid) -> TargetsError {
        let stat = fs::read(self.proc(pid, "stat")).unwrap_or_default();
        match (parse_stat(&stat), self.hidden()) {
            (Some(stat), _) if stat.is_kernel_thread => TargetsError::KernelThread(pid),
            (None, Some(option)) => TargetsError::NotVisible { pid, option },
            _ => TargetsError::NoProcess(pid),
        }
    }

    fn started(&self, pid: Pid) -> Option<u64> {
        let stat = fs::read(self.proc(pid, "stat")).ok()?;
        Some(parse_stat(&stat)?.start_ticks)
    }

    fn proc(&self, pid: Pid, file: &str) -> PathBuf {
        self.root.join(format!("proc/{pid}/{file}"))
    }

    fn cgroup(&self, path: &Path) -> PathBuf {
        self.root.join(path.strip_prefix("/").unwrap_or(path))
    }

    /// Resident memory (statm's second field); `None` for kernel threads and ended processes.
    fn resident(&self, pid: Pid) -> Result<Option<ByteCount>, TargetsError> {
        let statm = read(&self.proc(pid, "statm"))?;
        let pages = numbers(&statm).nth(1);
        Ok(pages.map(|pages| ByteCount(pages.saturating_mul(PAGE_SIZE))))
    }

    fn target(&self, pid: Pid) -> Result<Option<Target>, TargetsError> {
        let stat = read(&self.proc(pid, "stat"))?;
        let program = parse_stat(&stat).filter(|stat| !stat.is_kernel_thread);
        Ok(program.map(|stat| Target {
            pid,
            start_ticks: stat.start_ticks,
            comm: demeter_proto::shown(&String::from_utf8_lossy(stat.comm)),
        }))
    }

    /// `pids` and their descendants, from `/proc/PID/task/TID/children` (CONFIG_PROC_CHILDREN).
    ///
    /// Without that file, only `pids`. Named processes come first, then children before grandchildren, so that a
    /// process that forks endlessly displaces no other. A child whose pid was reused has another parent.
    fn with_descendants(&self, pids: &[Pid]) -> Result<BTreeSet<u32>, TargetsError> {
        let mut found = BTreeSet::new();
        let mut todo: VecDeque<(u32, Option<u32>)> = pids.iter().map(|pid| (pid.0, None)).collect();
        while let Some((pid, parent)) = todo.pop_front().filter(|_| found.len() < PROCESSES_MAX) {
            if found.contains(&pid) {
                continue;
            }
            if parent.is_some() {
                let stat = read(&self.proc(Pid(pid), "stat"))?;
                if parse_stat(&stat).map(|stat| stat.parent) != parent {
                    continue;
                }
            }
            found.insert(pid);
            for thread in numbers_in(&self.proc(Pid(pid), "task"))? {
                let children = self.proc(Pid(pid), &format!("task/{thread}/children"));
                let children = read(&children)?;
                let children = pids_in(&children).take(PROCESSES_MAX);
                todo.extend(children.map(|child| (child, Some(pid))));
            }
        }
        Ok(found)
    }

    /// Processes of a cgroup (v2) and of the cgroups below it.
    pub fn in_cgroup(&self, path: &Path) -> Result<BTreeSet<u32>, TargetsError> {
        let mut found = BTreeSet::new();
        let mut todo = vec![self.cgroup(path)];
        for _ in 0..CGROUPS_MAX {
            let Some(dir) = todo.pop() else { break };
            found.extend(pids_in(&read(&dir.join(CGROUP_PROCS))?).take(PROCESSES_MAX));
            let is_dir = |entry: &DirEntry| entry.file_type().is_ok_and(|t| t.is_dir());
            todo.extend(entries(&dir)?.filter(is_dir).map(|entry| entry.path()));
        }
        Ok(found)
    }
}

/// The file that lists a cgroup's processes (v2).
const CGROUP_PROCS: &str = "cgroup.procs";

/// A process's stat file, see proc(5).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat<'a> {
    /// Its command's name: any bytes.
    pub comm: &'a [u8],
    /// Its parent's pid.
    pub parent: u32,
    /// It is a kernel thread, which has no memory of its own.
    pub is_kernel_thread: bool,
    /// When it started, clock ticks after boot.
    pub start_ticks: u64,
}

/// Parses a stat file. The name is in parentheses and may contain any bytes, even parentheses and line feeds.
pub fn parse_stat(stat: &[u8]) -> Option<Stat<'_>> {
    /// A kernel thread's flag (linux/sched.h).
    const PF_KTHREAD: u64 = 0x0020_0000;
    let open = stat.iter().position(|&b| b == b'(')?;
    let close = stat.iter().rposition(|&b| b == b')')?;
    let comm = stat.get(open + 1..close)?;
    // After the name comes field 3, the state.
    let rest = stat.get(close + 1..)?.trim_ascii_start();
    let mut fields = numbers(rest.get(1..)?);
    Some(Stat {
        comm,
        parent: fields.next()? as u32,
        is_kernel_thread: fields.nth(4)? & PF_KTHREAD != 0,
        start_ticks: fields.nth(12)?,
    })
}

/// The option in a mounts file with which /proc hides other users' processes.
fn hidepid(mounts: &str) -> Option<&str> {
    let mut options = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        (fields.next()? == "/proc" && fields.next()? == "proc").then(|| fields.next())?
    });
    let all = options.next_back()?.split(',');
    all.filter(|option| option.starts_with("hidepid="))
        .find(|option| !matches!(*option, "hidepid=0" | "hidepid=off"))
}

/// Numbers separated by white space; 0 for other words.
fn numbers(text: &[u8]) -> impl Iterator<Item = u64> {
    let words = text.split(u8::is_ascii_whitespace);
    let words = words.filter(|word| !word.is_empty());
    words.map(|word| {
        str::from_utf8(word)
            .ok()
            .and_then(|word| word.parse().ok())
            .unwrap_or(0)
    })
}

fn pids_in(text: &[u8]) -> impl Iterator<Item = u32> {
    numbers(text)
        .filter_map(|pid| u32::try_from(pid).ok())
        .filter(|&pid| pid > 0)
}

/// Contents of a file in /proc or a cgroup; empty if it is gone or not readable for us.
fn read(path: &Path) -> Result<Vec<u8>, TargetsError> {
    unless_gone(path, fs::read(path)).map(Option::unwrap_or_default)
}

/// Entries of such a directory.
fn entries(dir: &Path) -> Result<impl Iterator<Item = DirEntry>, TargetsError> {
    let entries = unless_gone(dir, fs::read_dir(dir))?;
    Ok(entries.into_iter().flatten().flatten())
}

/// Names in a directory that are numbers.
pub(crate) fn numbers_in(dir: &Path) -> Result<BTreeSet<u32>, TargetsError> {
    let number = |entry: DirEntry| pids_in(entry.file_name().as_bytes()).next();
    Ok(entries(dir)?
        .filter_map(number)
        .take(PROCESSES_MAX)
        .collect())
}

/// Maps "gone" and "not permitted" to `None`; other errors are returned.
///
/// ENODEV: the cgroup was removed while open. EOPNOTSUPP: a threaded cgroup.
fn unless_gone<T>(path: &Path, result: io::Result<T>) -> Result<Option<T>, TargetsError> {
    match result {
        Ok(found) => Ok(Some(found)),
        Err(source) => match source.raw_os_error() {
            Some(
                libc::ENOENT
                | libc::ENOTDIR
                | libc::ESRCH
                | libc::ENODEV
                | libc::EOPNOTSUPP
                | libc::EACCES
                | libc::EPERM,
            ) => Ok(None),
            _ => Err(TargetsError::Read {
                path: path.into(),
                source,
            }),
        },
    }
}

#[cfg(test)]
mod tests;
