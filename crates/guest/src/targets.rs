//! Which processes the agent looks after.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};

use demeter_policy::{ByteCount, PAGE_SIZE, Pid};

/// The most processes at once. Beyond it the largest are taken.
pub const TARGETS_MAX: usize = 64;

/// The most cgroups below the one that was named.
const CGROUPS_MAX: usize = 4096;

/// What the person asked for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum TargetSpec {
    /// These processes and the descendants that they have.
    Pids(Vec<Pid>),
    /// The processes of a cgroup (v2) and of those below it.
    Cgroup(PathBuf),
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
    /// Its command's name.
    pub comm: String,
}

/// Why there are no targets.
#[derive(Debug, thiserror::Error)]
pub enum TargetsError {
    /// None of the processes named is there.
    #[error("process {0} is not there; give the pid of a running process")]
    NoProcess(Pid),
    /// The cgroup is not there.
    #[error("{path} is no cgroup v2 directory ({source}); see /sys/fs/cgroup for those there are")]
    NoCgroup {
        /// What was named.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// /proc cannot be listed.
    #[error("cannot list {path}: {source}")]
    Proc {
        /// The directory.
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
}

impl TargetFinder {
    /// A finder that never returns the agent itself.
    pub fn new(root: &Path, spec: TargetSpec) -> Self {
        Self {
            root: root.into(),
            spec,
            own_pid: Pid(std::process::id()),
        }
    }

    /// The targets that are there now, by pid, at most [`TARGETS_MAX`]. Kernel threads and
    /// processes that end meanwhile are passed over.
    ///
    /// With [`TargetSpec::Pids`] it is an error when none is left: whoever named them waits for
    /// nothing else.
    pub fn find(&self) -> Result<Vec<Target>, TargetsError> {
        let pids = match &self.spec {
            TargetSpec::Pids(pids) => self.with_descendants(pids),
            TargetSpec::Cgroup(path) => self.in_cgroup(path)?,
            TargetSpec::All { .. } => self.everyone()?,
        };
        let resident_min = match self.spec {
            TargetSpec::All { resident_min } => resident_min,
            _ => ByteCount(PAGE_SIZE),
        };
        let mut sized: Vec<(u64, Target)> = pids
            .into_iter()
            .filter(|&pid| pid != self.own_pid)
            .filter_map(|pid| {
                let resident = self.resident(pid)?;
                (resident >= resident_min).then_some((resident.0, self.target(pid)?))
            })
            .collect();
        if let (TargetSpec::Pids(pids), true) = (&self.spec, sized.is_empty()) {
            return Err(TargetsError::NoProcess(
                pids.first().copied().unwrap_or(Pid(0)),
            ));
        }
        sized.sort_unstable_by(|a, b| b.cmp(a));
        sized.truncate(TARGETS_MAX);
        let mut targets: Vec<Target> = sized.into_iter().map(|(_, target)| target).collect();
        targets.sort_unstable();
        Ok(targets)
    }

    fn proc(&self, pid: Pid, file: &str) -> PathBuf {
        self.root.join(format!("proc/{pid}/{file}"))
    }

    /// Resident memory (statm's second field); none for kernel threads and who has gone.
    fn resident(&self, pid: Pid) -> Option<ByteCount> {
        let statm = std::fs::read_to_string(self.proc(pid, "statm")).ok()?;
        let pages: u64 = statm.split_ascii_whitespace().nth(1)?.parse().ok()?;
        Some(ByteCount(pages.saturating_mul(PAGE_SIZE)))
    }

    fn target(&self, pid: Pid) -> Option<Target> {
        let stat = std::fs::read_to_string(self.proc(pid, "stat")).ok()?;
        let (comm, start_ticks) = parse_stat(&stat)?;
        Some(Target {
            pid,
            start_ticks,
            comm,
        })
    }

    /// `pids` and all their descendants that are there, by `/proc/PID/task/TID/children`
    /// (CONFIG_PROC_CHILDREN; without it, the processes alone).
    fn with_descendants(&self, pids: &[Pid]) -> BTreeSet<Pid> {
        let mut found = BTreeSet::new();
        let mut todo: Vec<Pid> = pids.to_vec();
        while let Some(pid) = todo.pop() {
            if found.len() >= 16 * TARGETS_MAX || !found.insert(pid) {
                continue;
            }
            for thread in numbers_in(&self.proc(pid, "task")) {
                let children = self.proc(pid, &format!("task/{thread}/children"));
                let text = std::fs::read_to_string(children).unwrap_or_default();
                todo.extend(
                    text.split_ascii_whitespace()
                        .filter_map(|w| w.parse().ok())
                        .map(Pid),
                );
            }
        }
        found
    }

    fn in_cgroup(&self, path: &Path) -> Result<BTreeSet<Pid>, TargetsError> {
        let top = self.root.join(path.strip_prefix("/").unwrap_or(path));
        let procs = |dir: &Path| std::fs::read_to_string(dir.join("cgroup.procs"));
        let text = procs(&top).map_err(|source| TargetsError::NoCgroup {
            path: path.into(),
            source,
        })?;
        let mut found: BTreeSet<Pid> = parse_pids(&text);
        let mut todo = vec![top];
        for _ in 0..CGROUPS_MAX {
            let Some(dir) = todo.pop() else { break };
            for entry in std::fs::read_dir(&dir).into_iter().flatten().flatten() {
                if entry.file_type().is_ok_and(|t| t.is_dir()) {
                    found.extend(parse_pids(&procs(&entry.path()).unwrap_or_default()));
                    todo.push(entry.path());
                }
            }
        }
        Ok(found)
    }

    fn everyone(&self) -> Result<BTreeSet<Pid>, TargetsError> {
        let path = self.root.join("proc");
        std::fs::metadata(&path).map_err(|source| TargetsError::Proc {
            path: path.clone(),
            source,
        })?;
        Ok(numbers_in(&path).map(Pid).collect())
    }
}

/// The process's name and start time, from proc(5)'s stat. The name is in parentheses and may
/// itself contain them, and spaces.
fn parse_stat(stat: &str) -> Option<(String, u64)> {
    let (open, close) = (stat.find('(')?, stat.rfind(')')?);
    let comm = stat.get(open + 1..close)?.to_owned();
    // What follows the name begins with field 3; the start time is field 22.
    let start_ticks = stat
        .get(close + 1..)?
        .split_ascii_whitespace()
        .nth(19)?
        .parse()
        .ok()?;
    Some((comm, start_ticks))
}

fn parse_pids(text: &str) -> BTreeSet<Pid> {
    text.split_ascii_whitespace()
        .filter_map(|w| w.parse().ok())
        .map(Pid)
        .collect()
}

/// Names in a directory that are numbers; none if it cannot be read.
fn numbers_in(dir: &Path) -> impl Iterator<Item = u32> {
    std::fs::read_dir(dir)
        .into_iter()
        .flatten()
        .flatten()
        .filter_map(|entry| entry.file_name().to_str()?.parse().ok())
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    struct FakeProc(tempfile::TempDir);

    impl FakeProc {
        fn new() -> Self {
            let dir = tempfile::tempdir().unwrap();
            fs::create_dir_all(dir.path().join("proc/self")).unwrap();
            Self(dir)
        }

        fn add(&self, pid: u32, comm: &str, resident_pages: u64, children: &str) {
            let dir = self.0.path().join(format!("proc/{pid}"));
            fs::create_dir_all(dir.join(format!("task/{pid}"))).unwrap();
            let fields = "0 ".repeat(18);
            fs::write(
                dir.join("stat"),
                format!("{pid} ({comm}) S {fields}{} 0", pid * 10),
            )
            .unwrap();
            fs::write(
                dir.join("statm"),
                format!("9999 {resident_pages} 0 0 0 0 0"),
            )
            .unwrap();
            fs::write(dir.join(format!("task/{pid}/children")), children).unwrap();
        }

        fn find(&self, spec: TargetSpec) -> Vec<u32> {
            let finder = TargetFinder::new(self.0.path(), spec);
            finder.find().unwrap().iter().map(|t| t.pid.0).collect()
        }
    }

    #[test]
    fn pids_with_their_descendants() {
        let p = FakeProc::new();
        p.add(10, "parent", 5, "11 12 ");
        p.add(11, "a (b) c", 5, "13");
        p.add(12, "kernel thread", 0, "");
        p.add(13, "grandchild", 5, "10");
        p.add(14, "stranger", 5, "");
        assert_eq!(p.find(TargetSpec::Pids(vec![Pid(10)])), [10, 11, 13]);
        let found = TargetFinder::new(p.0.path(), TargetSpec::Pids(vec![Pid(11)]))
            .find()
            .unwrap();
        assert_eq!(
            (found[0].comm.as_str(), found[0].start_ticks),
            ("parent", 100)
        );
        assert_eq!(
            (found[1].comm.as_str(), found[1].start_ticks),
            ("a (b) c", 110)
        );
    }

    #[test]
    fn a_pid_that_is_gone_and_a_cgroup_that_is_not_there_are_errors() {
        let p = FakeProc::new();
        let find = |spec| {
            TargetFinder::new(p.0.path(), spec)
                .find()
                .unwrap_err()
                .to_string()
        };
        assert!(find(TargetSpec::Pids(vec![Pid(77)])).contains("process 77 is not there"));
        let text = find(TargetSpec::Cgroup("/sys/fs/cgroup/none".into()));
        assert!(
            text.starts_with("/sys/fs/cgroup/none is no cgroup"),
            "{text}"
        );
    }

    #[test]
    fn a_cgroup_with_those_below_it() {
        let p = FakeProc::new();
        p.add(1, "one", 5, "");
        p.add(2, "two", 5, "");
        p.add(3, "elsewhere", 5, "");
        let below = p.0.path().join("sys/fs/cgroup/a/b/c");
        fs::create_dir_all(&below).unwrap();
        fs::write(p.0.path().join("sys/fs/cgroup/a/cgroup.procs"), "1\n").unwrap();
        fs::write(below.join("cgroup.procs"), "2\n4\n").unwrap();
        assert_eq!(
            p.find(TargetSpec::Cgroup("/sys/fs/cgroup/a".into())),
            [1, 2]
        );
    }

    #[test]
    fn all_above_a_size_and_the_largest_when_too_many() {
        let p = FakeProc::new();
        for i in 1..=TARGETS_MAX as u32 + 5 {
            p.add(i, "x", u64::from(i), "");
        }
        let all = |pages| TargetSpec::All {
            resident_min: ByteCount(pages * PAGE_SIZE),
        };
        assert_eq!(p.find(all(67)), [67, 68, 69]);
        let found = p.find(all(1));
        assert_eq!((found.len(), found[0]), (TARGETS_MAX, 6));
    }
}
