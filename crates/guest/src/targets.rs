//! Which processes the agent looks after.
//!
//! A pid alone is no identity: the system gives it to another process once its own has ended. So a process is its pid
//! and the time when it started, from the moment when a person names it to each batch of pages that moves.

use std::cmp::Reverse;
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::fs::{self, DirEntry};
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::path::{Path, PathBuf};

use demeter_policy::{ByteCount, PAGE_SIZE, Pid};

/// The most processes at once. Beyond it the largest are taken.
pub const TARGETS_MAX: usize = 64;

/// The most processes that are looked at to find those; the kernel's default `pid_max`.
const PROCESSES_MAX: usize = 1 << 15;

/// A process that is looked after counts as larger by this part of its size. Processes of nearly the same size would
/// else change places for ever, and each change loses what is known of them.
const INCUMBENT_PART: u64 = 8;

/// The most cgroups below the one that was named.
const CGROUPS_MAX: usize = 4096;

/// What the person asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetSpec {
    /// These processes and the descendants that they have.
    Pids(Vec<Pid>),
    /// The processes of cgroups (v2) and of those below them.
    Cgroups(Vec<PathBuf>),
    /// All processes with at least so much resident memory.
    All {
        /// The least resident size.
        resident_min: ByteCount,
    },
}

/// A process that stays itself: a pid alone may be given to another one.
#[derive(Debug, Clone, PartialEq, Eq, PartialOrd, Ord)]
pub struct Target {
    /// Its number.
    pub pid: Pid,
    /// When it started, clock ticks after boot.
    pub start_ticks: u64,
    /// Its command's name, made fit to be shown: a process gives itself any bytes for a name.
    pub comm: String,
}

impl Target {
    /// Whether the process is still there, and the pid not another one's.
    pub fn is_there(&self, root: &Path) -> bool {
        let stat = fs::read(root.join(format!("proc/{}/stat", self.pid)));
        let stat = stat.unwrap_or_default();
        parse_stat(&stat).is_some_and(|stat| stat.start_ticks == self.start_ticks)
    }
}

/// Why there are no targets.
#[derive(Debug, thiserror::Error)]
pub enum TargetsError {
    /// None of the processes named is there.
    #[error("process {0} is not there; give the pid of a running process")]
    NoProcess(Pid),
    /// The process may be there, but /proc does not show it.
    #[error(
        "process {pid} is not visible: /proc is mounted with {option}; run as root, grant CAP_SYS_PTRACE, or add \
         the agent to the group of the mount's gid="
    )]
    NotVisible {
        /// Which.
        pid: Pid,
        /// The mount's option.
        option: String,
    },
    /// A kernel thread has no memory of its own.
    #[error("process {0} is a kernel thread and has no memory to move; give the pid of a program")]
    KernelThread(Pid),
    /// The cgroup is not there.
    #[error("{path} is no cgroup v2 directory ({source}); see /sys/fs/cgroup for those there are")]
    NoCgroup {
        /// What was named.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// Something cannot be read, for want of descriptors, memory or /proc. It says nothing of who is
    /// there.
    #[error("cannot read {path}: {source}")]
    Read {
        /// What.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// Finds targets below `root`, again and again while the agent runs.
#[derive(Debug, Clone)]
pub struct TargetFinder {
    root: PathBuf,
    spec: TargetSpec,
    own_pid: Pid,
    /// When the processes that were named had started, of those that were there.
    named: BTreeMap<Pid, u64>,
    /// The targets that were found last, and when they had started.
    before: BTreeMap<Pid, u64>,
}

impl TargetFinder {
    /// A finder that never returns the agent itself, or processes of its own. Pids mean the processes that have them
    /// now.
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

    /// Checks that what the person named is there.
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

    /// Says what /proc does not show, where it hides the processes of others; nothing where all are visible.
    pub fn hidden(&self) -> Option<String> {
        let mounts = fs::read_to_string(self.root.join("proc/mounts")).ok()?;
        let option = hidepid(&mounts)?;
        // Process 1 is always there, and hardly ever the agent's own user's.
        let sees_others = fs::read(self.proc(Pid(1), "statm")).is_ok_and(|statm| !statm.is_empty());
        (!sees_others).then(|| option.to_string())
    }

    /// The targets that are there now, by pid, at most [`TARGETS_MAX`]: the largest. Kernel threads
    /// and processes that end meanwhile are passed over. A cgroup that has gone is an empty one: its
    /// service may be started anew.
    ///
    /// With [`TargetSpec::Pids`] it is an error when none is left: whoever named them waits for
    /// nothing else.
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
                size = size.saturating_add(size / INCUMBENT_PART);
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

    /// Why a process that was named is no target.
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

    /// Resident memory (statm's second field); none for kernel threads and who has gone.
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

    /// `pids` and all their descendants that are there, by `/proc/PID/task/TID/children`
    /// (CONFIG_PROC_CHILDREN; without it, the processes alone). Those named come first, and then
    /// children before grandchildren, so that one that forks without end displaces none of them. A child whose pid
    /// is another one's by now has another parent.
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

    /// The processes of a cgroup (v2) and of those below it.
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

/// The file of a cgroup (v2) that names its processes.
const CGROUP_PROCS: &str = "cgroup.procs";

/// A process as proc(5)'s stat describes it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Stat<'a> {
    /// Its command's name: any bytes.
    pub comm: &'a [u8],
    /// Its parent's pid.
    pub parent: u32,
    /// It has no memory of its own.
    pub is_kernel_thread: bool,
    /// When it started, clock ticks after boot.
    pub start_ticks: u64,
}

/// Reads the text of a stat file. The name is in parentheses, and is any bytes: parentheses, spaces, line feeds, no
/// text at all.
pub fn parse_stat(stat: &[u8]) -> Option<Stat<'_>> {
    /// In the flags of a task (linux/sched.h).
    const PF_KTHREAD: u64 = 0x0020_0000;
    let open = stat.iter().position(|&b| b == b'(')?;
    let close = stat.iter().rposition(|&b| b == b')')?;
    let comm = stat.get(open + 1..close)?;
    // Behind the name follows field 3, the state.
    let rest = stat.get(close + 1..)?.trim_ascii_start();
    let mut fields = numbers(rest.get(1..)?);
    Some(Stat {
        comm,
        parent: fields.next()? as u32,
        is_kernel_thread: fields.nth(4)? & PF_KTHREAD != 0,
        start_ticks: fields.nth(12)?,
    })
}

/// The option by which /proc hides processes of others, in the text of a mounts file.
fn hidepid(mounts: &str) -> Option<&str> {
    let mut options = mounts.lines().filter_map(|line| {
        let mut fields = line.split(' ').skip(1);
        (fields.next()? == "/proc" && fields.next()? == "proc").then(|| fields.next())?
    });
    let all = options.next_back()?.split(',');
    all.filter(|option| option.starts_with("hidepid="))
        .find(|option| !matches!(*option, "hidepid=0" | "hidepid=off"))
}

/// Numbers between white space. One that is no number stands for zero.
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

/// What a file of /proc or of a cgroup says; nothing if it has gone, or is not for us.
fn read(path: &Path) -> Result<Vec<u8>, TargetsError> {
    unless_gone(path, fs::read(path)).map(Option::unwrap_or_default)
}

/// What is in such a directory.
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

/// Nothing is there any more (ENODEV: a cgroup that was removed while it was open), there is none of
/// that kind (EOPNOTSUPP: a cgroup of threads), or it is not for us; all else is an error.
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
