//! A program's cgroup (v2): creation, memory usage, removal.

use std::fs::{self, File};
use std::io;
use std::os::fd::AsRawFd;
use std::path::{Path, PathBuf};

use demeter_policy::NodeId;

use crate::fault::Fault;

/// File that enables the kernel's memory accounting of a cgroup.
const CONTROLLERS: &str = "cgroup.subtree_control";

/// Lines of `memory.numa_stat` with a program's memory; `file` includes shared memory.
const KINDS: [&str; 2] = ["anon", "file"];

/// A cgroup of our own. Dropping it removes it, once it is empty.
#[derive(Debug)]
pub struct OwnCgroup {
    dir: PathBuf,
    fast: Vec<NodeId>,
}

impl OwnCgroup {
    /// Creates the cgroup at `path` below `root`; `fast` are the nodes of the fast tier.
    pub fn make(root: &Path, path: &Path, fast: &[NodeId]) -> Result<Self, Fault> {
        let dir = root.join(path.strip_prefix("/").unwrap_or(path));
        let top = dir.parent().unwrap_or(root).join(CONTROLLERS);
        fs::write(&top, "+memory").map_err(Fault::io("write +memory to", &top))?;
        fs::create_dir(&dir).map_err(Fault::io("create", &dir))?;
        Ok(Self {
            dir,
            fast: fast.to_vec(),
        })
    }

    /// Allows its processes these nodes alone, as the kernel lists nodes.
    pub fn allow_nodes(&self, nodes: &str) -> Result<(), Fault> {
        let top = self.dir.parent().unwrap_or(&self.dir).join(CONTROLLERS);
        fs::write(&top, "+cpuset").map_err(Fault::io("write +cpuset to", &top))?;
        let mems = self.dir.join("cpuset.mems");
        fs::write(&mems, nodes).map_err(Fault::io("write", &mems))
    }

    /// Opens the file for [`join`].
    pub fn open(&self) -> Result<File, Fault> {
        let procs = self.dir.join("cgroup.procs");
        let opened = File::options().write(true).open(&procs);
        opened.map_err(Fault::io("open", &procs))
    }

    /// Its fast memory, bytes; none if the kernel does not report it. The kernel's counts lag by at most 64 pages per
    /// CPU.
    pub fn fast_bytes(&self) -> Option<u64> {
        let text = fs::read_to_string(self.dir.join("memory.numa_stat")).ok()?;
        self.fast.iter().map(|node| bytes_on(&text, *node)).sum()
    }
}

impl Drop for OwnCgroup {
    fn drop(&mut self) {
        // It fails while a process is in it; that process is then to blame.
        let _ = fs::remove_dir(&self.dir);
    }
}

/// Moves this process into the cgroup with this `cgroup.procs`. Safe between fork and exec.
pub fn join(procs: &File) -> io::Result<()> {
    // SAFETY: one system call on an open file and a constant.
    match unsafe { libc::write(procs.as_raw_fd(), c"0".as_ptr().cast(), 1) } {
        1 => Ok(()),
        _ => Err(io::Error::last_os_error()),
    }
}

/// Bytes on a node, from `memory.numa_stat` (Documentation/admin-guide/cgroup-v2.rst), with lines like `anon N0=4096
/// N1=0`.
fn bytes_on(text: &str, node: NodeId) -> Option<u64> {
    let node = format!("N{node}");
    let of = |kind: &&str| -> Option<u64> {
        let line = text.lines().find_map(|line| {
            let (name, nodes) = line.split_once(' ')?;
            (name == *kind).then_some(nodes)
        })?;
        let mut nodes = line
            .split_whitespace()
            .filter_map(|word| word.split_once('='));
        let (_, bytes) = nodes.find(|(name, _)| *name == node)?;
        bytes.parse().ok()
    };
    KINDS
        .iter()
        .map(of)
        .try_fold(0u64, |sum, bytes| sum.checked_add(bytes?))
}

#[cfg(test)]
mod tests {
    use super::*;

    const STAT: &str = "anon N0=4096 N1=8192\nfile N0=100 N10=7 N1=200\nfile_mapped N0=9 N1=9\n";

    #[test]
    fn bytes_are_those_of_the_node() {
        assert_eq!(bytes_on(STAT, NodeId(0)), Some(4196));
        assert_eq!(bytes_on(STAT, NodeId(1)), Some(8392));
        assert_eq!(bytes_on(STAT, NodeId(10)), None, "no anon there");
        assert_eq!(bytes_on("anon N0=x\nfile N0=1\n", NodeId(0)), None);
        let most = u64::MAX;
        let text = format!("anon N0={most}\nfile N0={most}\n");
        assert_eq!(bytes_on(&text, NodeId(0)), None);
    }

    #[test]
    fn it_is_made_joined_and_gone() {
        let root = tempfile::tempdir().unwrap();
        let top = root.path().join("sys/fs/cgroup");
        let path = Path::new("/sys/fs/cgroup/db");
        let refused = OwnCgroup::make(root.path(), path, &[NodeId(1)]).unwrap_err();
        assert!(refused.to_string().contains(CONTROLLERS), "{refused}");
        fs::create_dir_all(&top).unwrap();
        let cgroup = OwnCgroup::make(root.path(), path, &[NodeId(1)]).unwrap();
        assert_eq!(fs::read(top.join(CONTROLLERS)).unwrap(), b"+memory");
        assert_eq!(cgroup.fast_bytes(), None);
        let put = |name: &str, text: &str| fs::write(top.join("db").join(name), text).unwrap();
        put("memory.numa_stat", STAT);
        put("cgroup.procs", "");
        assert_eq!(cgroup.fast_bytes(), Some(8392));
        join(&cgroup.open().unwrap()).unwrap();
        assert_eq!(fs::read(top.join("db/cgroup.procs")).unwrap(), b"0");
        // Removing a real cgroup also removes its files.
        for name in ["memory.numa_stat", "cgroup.procs"] {
            fs::remove_file(top.join("db").join(name)).unwrap();
        }
        drop(cgroup);
        assert!(!top.join("db").exists());
    }
}
