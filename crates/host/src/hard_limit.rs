//! A hard limit: `memory.max` of the VM's own cgroup (v2) follows what the VM owns.
//!
//! The kernel then stops a VM that takes back memory that it returned. The limit is raised before
//! the VM is asked to grow, and lowered after memory was returned. It is never lowered below the
//! cgroup's unreclaimable use: that would kill an honest VM. The operator's own limit stays the
//! upper bound, and it is restored when this value is dropped.
//!
//! The operator's limit is kept in an extended attribute of the cgroup, which lives exactly as long
//! as the cgroup. So a controller that restarts after a kill finds it again.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use demeter_policy::{ByteCount, Pid, Tier, TierBytes};
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;

use crate::controller::{Observation, Order};
use crate::process::PeerProcess;

/// Extended attribute with the operator's `memory.max`. Kernels support it since 5.7.
const FORMER: &str = "user.demeter.memory_max";

/// Maximum number of cgroups below the VM's own one.
const CGROUPS_MAX: usize = 256;

/// Reason why a configured hard limit cannot be applied.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HardLimitError {
    /// The limit would also apply to other processes.
    #[error(
        "hard_limit_extra_mib: process {pid} {why}; start the VM in a cgroup v2 of its own (libvirt, or \
         systemd-run --scope), or leave the key out"
    )]
    NotOwn {
        /// The hypervisor's process.
        pid: Pid,
        /// The fault of its cgroup.
        why: String,
    },
    /// A file of the cgroup cannot be used.
    #[error(
        "hard_limit_extra_mib: cannot {what} {path}: {source}; run as root, with ProtectControlGroups=no in \
         the unit, or leave the key out"
    )]
    File {
        /// The failed operation.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
}

/// A limit in bytes; `None` means unlimited.
type Limit = Option<u64>;

/// Memory that a VM may be using.
#[derive(Debug, Clone, Copy, Default)]
struct MayHave {
    /// Verified owned memory.
    owned: TierBytes,
    /// The last target; the VM may still be on its way there.
    told: TierBytes,
}

/// The hard limit of one VM. Dropping it restores the operator's limit.
#[derive(Debug)]
pub(crate) struct HardLimit {
    cgroup: PathBuf,
    process: PeerProcess,
    extra: ByteCount,
    former: Limit,
    written: Limit,
    /// `None` while the VM may use all the memory that it was started with.
    may_have: Option<MayHave>,
}

impl HardLimit {
    /// Finds and checks the cgroup of a VM's process, without limiting it yet. `root` is the parent
    /// of /proc and /sys; `extra` is memory that the process may use beyond what the VM owns.
    pub(crate) fn find(
        root: &Path,
        process: PeerProcess,
        extra: ByteCount,
    ) -> Result<Self, HardLimitError> {
        let cgroup = own_cgroup(root, process.pid)?;
        if !process.is_there() {
            return Err(not_own(process.pid, "has ended"));
        }
        let written = parse(&read(&cgroup, "memory.max")?);
        let mut kept = [0; 32];
        let former = match getxattr(&cgroup, FORMER, &mut kept[..]) {
            Ok(len) => parse(&String::from_utf8_lossy(&kept[..len])),
            Err(Errno::NODATA) => {
                let text = text(written);
                setxattr(&cgroup, FORMER, text.as_bytes(), XattrFlags::empty())
                    .map_err(file("set an attribute of", &cgroup))?;
                written
            }
            Err(error) => return Err(file("read an attribute of", &cgroup)(error)),
        };
        let mut limit = Self {
            cgroup,
            process,
            extra,
            former,
            written,
            may_have: None,
        };
        // Fail now if the file cannot be written.
        limit.write(former)?;
        Ok(limit)
    }

    /// Whether this limit belongs to `process`.
    pub(crate) fn is_of(&self, process: PeerProcess) -> bool {
        self.process == process
    }

    /// Raises the limit for an order that is about to be sent.
    pub(crate) fn before(&mut self, order: Order) -> Result<bool, HardLimitError> {
        if let (Some(may_have), Order::Set { tier, target }) = (&mut self.may_have, order) {
            let told = may_have.told.get_mut(tier);
            *told = target.max(*told);
        }
        self.settle()
    }

    /// Updates the limit after an order.
    pub(crate) fn after(
        &mut self,
        order: Order,
        observation: &Observation,
    ) -> Result<bool, HardLimitError> {
        match (order, observation) {
            (_, Observation::Owned { owned, .. }) => {
                self.may_have.get_or_insert_default().owned = *owned;
            }
            (Order::Set { tier, target }, Observation::Moved { owned, .. }) => {
                if let Some(may_have) = &mut self.may_have {
                    *may_have.owned.get_mut(tier) = *owned;
                    *may_have.told.get_mut(tier) = target;
                }
            }
            // Keep the old limit if the result is unknown.
            _ => {}
        }
        self.settle()
    }

    /// Restores the operator's limit until the VM's owned memory is known.
    pub(crate) fn lift(&mut self) -> Result<bool, HardLimitError> {
        self.may_have = None;
        self.settle()
    }

    /// Writes the limit that is due. Returns false while the VM uses more than that limit.
    pub(crate) fn settle(&mut self) -> Result<bool, HardLimitError> {
        let wanted = self.wanted();
        if wanted == self.written {
            return Ok(true);
        }
        let most = wanted.unwrap_or(u64::MAX);
        if most < self.written.unwrap_or(u64::MAX) && self.fixed_use()? > most {
            return Ok(false);
        }
        self.write(wanted)?;
        Ok(true)
    }

    fn wanted(&self) -> Limit {
        let Some(MayHave { owned, told }) = self.may_have else {
            return self.former;
        };
        let parts = Tier::ALL.map(|tier| owned.get(tier).max(told.get(tier)).0);
        let sum = parts.into_iter().fold(self.extra.0, u64::saturating_add);
        Some(sum.min(self.former.unwrap_or(u64::MAX)))
    }

    /// Memory use of the cgroup without file cache, which the kernel can drop.
    fn fixed_use(&self) -> Result<u64, HardLimitError> {
        let current = parse(&read(&self.cgroup, "memory.current")?).unwrap_or(u64::MAX);
        let stat = read(&self.cgroup, "memory.stat")?;
        // Shared memory is on the anonymous lists, so it is not subtracted here.
        let cached = stat.lines().filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            let is_cache = ["active_file", "inactive_file"].contains(&key);
            is_cache.then(|| value.parse::<u64>().ok())?
        });
        Ok(cached.fold(current, u64::saturating_sub))
    }

    fn write(&mut self, limit: Limit) -> Result<(), HardLimitError> {
        let path = self.cgroup.join("memory.max");
        // Never create the file: it exists exactly as long as the cgroup.
        let mut options = OpenOptions::new();
        let opened = options.write(true).truncate(true).open(&path);
        opened
            .and_then(|mut file| file.write_all(text(limit).as_bytes()))
            .map_err(file("write", &path))?;
        self.written = limit;
        Ok(())
    }
}

impl Drop for HardLimit {
    fn drop(&mut self) {
        // The cgroup ends with its VM.
        if !self.cgroup.exists() {
            return;
        }
        let former = self.former;
        match self.write(former) {
            Ok(()) => drop(removexattr(&self.cgroup, FORMER)),
            Err(error) => tracing::warn!("{error}; memory.max stays {}", text(self.written)),
        }
    }
}

/// The cgroup whose `memory.max` limits a process. No other process may be in it, except libvirt's
/// helpers.
fn own_cgroup(root: &Path, pid: Pid) -> Result<PathBuf, HardLimitError> {
    let path = root.join(format!("proc/{pid}/cgroup"));
    let text = fs::read_to_string(&path).map_err(file("read", &path))?;
    let within = text.lines().find_map(|line| line.strip_prefix("0::/"));
    let within = Path::new(within.ok_or_else(|| not_own(pid, "is in no cgroup v2"))?);
    let is_plain = |part| matches!(part, Component::Normal(_));
    if !within.components().all(is_plain) {
        return Err(not_own(
            pid,
            "is in a cgroup outside of this cgroup namespace",
        ));
    }
    let mount = root.join("sys/fs/cgroup");
    // Threaded cgroups, which libvirt makes for virtual CPUs, have no limits.
    let own = within
        .ancestors()
        .filter(|within| !within.as_os_str().is_empty())
        .find(|within| mount.join(within).join("memory.max").exists())
        .ok_or_else(|| not_own(pid, "is in no cgroup v2 with memory.max"))?;
    let cgroup = mount.join(own);
    // systemd-machined's name for a VM's cgroup, which also contains the VM's helpers.
    let is_machine = own.components().any(|part| {
        let name = part.as_os_str().to_string_lossy();
        name.starts_with("machine-") && name.ends_with(".scope")
    });
    if !is_machine {
        alone(&cgroup, pid)?;
    }
    Ok(cgroup)
}

/// Checks that a process is the only one in a cgroup and its descendants.
fn alone(cgroup: &Path, pid: Pid) -> Result<(), HardLimitError> {
    let mut cgroups = vec![cgroup.to_owned()];
    let mut seen = 0;
    while let Some(cgroup) = cgroups.pop() {
        seen += 1;
        if seen > CGROUPS_MAX {
            return Err(not_own(
                pid,
                "is in a cgroup with too many cgroups below it",
            ));
        }
        let procs = cgroup.join("cgroup.procs");
        let pids = match fs::read_to_string(&procs) {
            Ok(pids) => pids,
            // A threaded cgroup: the cgroup above lists its processes.
            Err(error) if Errno::from_io_error(&error) == Some(Errno::OPNOTSUPP) => String::new(),
            Err(error) => return Err(file("read", &procs)(error)),
        };
        if let Some(other) = pids.lines().find(|line| *line != pid.to_string()) {
            let why = format!("shares its cgroup {} with {other}", cgroup.display());
            return Err(not_own(pid, why));
        }
        for entry in fs::read_dir(&cgroup).map_err(file("read", &cgroup))? {
            let entry = entry.map_err(file("read", &cgroup))?;
            if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
                cgroups.push(entry.path());
            }
        }
    }
    Ok(())
}

fn read(cgroup: &Path, name: &str) -> Result<String, HardLimitError> {
    let path = cgroup.join(name);
    fs::read_to_string(&path).map_err(file("read", &path))
}

/// Parses `memory.max`: a number, or `max`.
fn parse(text: &str) -> Limit {
    text.trim().parse().ok()
}

fn text(limit: Limit) -> String {
    limit.map_or("max".into(), |bytes| bytes.to_string())
}

fn not_own(pid: Pid, why: impl Into<String>) -> HardLimitError {
    let why = why.into();
    HardLimitError::NotOwn { pid, why }
}

fn file<E: Into<io::Error>>(what: &'static str, path: &Path) -> impl FnOnce(E) -> HardLimitError {
    let path = path.to_owned();
    move |error| HardLimitError::File {
        what,
        path,
        source: error.into(),
    }
}

#[cfg(test)]
pub(crate) mod tests;
