//! A hard limit: `memory.max` of the VM's own cgroup (v2) follows what the VM owns, so that the kernel
//! stops it where it takes back memory that it returned.
//!
//! It is raised before the VM is told to take memory, and lowered after memory was returned. It is never
//! lowered below what the cgroup uses and cannot drop: that would kill a VM that does as told. Whatever
//! the operator had set stays the most, and comes back when this value is dropped.
//!
//! What the operator had set is kept in an extended attribute of the cgroup, which lives exactly as long
//! as the cgroup: a controller that was killed finds it again.

use std::fs::{self, OpenOptions};
use std::io::{self, Write};
use std::path::{Component, Path, PathBuf};

use demeter_policy::{ByteCount, Pid, Tier, TierBytes};
use rustix::fs::{XattrFlags, getxattr, removexattr, setxattr};
use rustix::io::Errno;

use crate::controller::{Observation, Order};
use crate::process::PeerProcess;

/// Where `memory.max` is kept as the operator had it. The kernel has these attributes since 5.7.
const FORMER: &str = "user.demeter.memory_max";

/// The most cgroups below the VM's own one.
const CGROUPS_MAX: usize = 256;

/// Why a VM has no hard limit although it is to have one.
#[derive(Debug, thiserror::Error)]
pub(crate) enum HardLimitError {
    /// A limit would be somebody else's, too.
    #[error(
        "hard_limit_extra_mib: process {pid} {why}; start the VM in a cgroup v2 of its own (libvirt, or \
         systemd-run --scope), or leave the key out"
    )]
    NotOwn {
        /// The hypervisor.
        pid: Pid,
        /// What is wrong with its cgroup.
        why: String,
    },
    /// A file of the cgroup cannot be used.
    #[error(
        "hard_limit_extra_mib: cannot {what} {path}: {source}; run as root, with ProtectControlGroups=no in \
         the unit, or leave the key out"
    )]
    File {
        /// What was tried.
        what: &'static str,
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
}

/// A limit, bytes; `None` is none.
type Limit = Option<u64>;

/// What a VM may be using.
#[derive(Debug, Clone, Copy, Default)]
struct MayHave {
    /// What it owns, as it was verified.
    owned: TierBytes,
    /// What it was told to own last: it may still be on its way there.
    told: TierBytes,
}

/// The limit of one VM. The one from before comes back when this is dropped.
#[derive(Debug)]
pub(crate) struct HardLimit {
    cgroup: PathBuf,
    process: PeerProcess,
    extra: ByteCount,
    former: Limit,
    written: Limit,
    /// `None` where it may be using all that it was started with.
    may_have: Option<MayHave>,
}

impl HardLimit {
    /// Takes hold of the cgroup of a VM's process; `root` is where /proc and /sys are below, `extra` what
    /// the VM may use beyond its memory. There is no limit yet.
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
        // Shows that it can be written, too.
        limit.write(former)?;
        Ok(limit)
    }

    /// Whether it is this process's.
    pub(crate) fn is_of(&self, process: PeerProcess) -> bool {
        self.process == process
    }

    /// Makes room for what the VM is about to be told.
    pub(crate) fn before(&mut self, order: Order) -> Result<bool, HardLimitError> {
        if let (Some(may_have), Order::Set { tier, target }) = (&mut self.may_have, order) {
            let told = may_have.told.get_mut(tier);
            *told = target.max(*told);
        }
        self.settle()
    }

    /// Takes in what came of an order.
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
            // What is not known stays as it was allowed.
            _ => {}
        }
        self.settle()
    }

    /// Leaves the VM what it was started with, until it is known what it owns.
    pub(crate) fn lift(&mut self) -> Result<bool, HardLimitError> {
        self.may_have = None;
        self.settle()
    }

    /// Brings the file to what it should say, and says whether it does. It does not where the VM uses
    /// more than it may.
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

    /// What the cgroup uses but for cached files, which the kernel drops where there is a limit.
    fn fixed_use(&self) -> Result<u64, HardLimitError> {
        let current = parse(&read(&self.cgroup, "memory.current")?).unwrap_or(u64::MAX);
        let stat = read(&self.cgroup, "memory.stat")?;
        // Memory files count as anonymous in these lists.
        let cached = stat.lines().filter_map(|line| {
            let (key, value) = line.split_once(' ')?;
            let is_cache = ["active_file", "inactive_file"].contains(&key);
            is_cache.then(|| value.parse::<u64>().ok())?
        });
        Ok(cached.fold(current, u64::saturating_sub))
    }

    fn write(&mut self, limit: Limit) -> Result<(), HardLimitError> {
        let path = self.cgroup.join("memory.max");
        // Never made: a cgroup that has gone stays gone.
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
        // With its VM the cgroup goes.
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

/// The cgroup with a limit of its own that a process lies in, and nobody else but what libvirt puts
/// beside it.
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
    // systemd-machined's name for a VM, in which the VM's helpers lie as well.
    let is_machine = own.components().any(|part| {
        let name = part.as_os_str().to_string_lossy();
        name.starts_with("machine-") && name.ends_with(".scope")
    });
    if !is_machine {
        alone(&cgroup, pid)?;
    }
    Ok(cgroup)
}

/// Checks that a process is the only one of a cgroup and of those below.
fn alone(cgroup: &Path, pid: Pid) -> Result<(), HardLimitError> {
    let mut cgroups = vec![cgroup.to_owned()];
    let mut seen = 0;
    while let Some(cgroup) = cgroups.pop() {
        seen += 1;
        if seen > CGROUPS_MAX {
            return Err(not_own(pid, "is in a cgroup with very many below it"));
        }
        let procs = cgroup.join("cgroup.procs");
        let pids = match fs::read_to_string(&procs) {
            Ok(pids) => pids,
            // A threaded one: its processes are those of the cgroup above.
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

/// What `memory.max` says: a number, or `max`.
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
pub(crate) mod tests {
    use std::io::{BufRead, BufReader, Lines};
    use std::process::{Child, ChildStdout, Command, Stdio};

    use demeter_policy::MIB;

    use super::*;
    use crate::controller::Ticket;

    const SCOPE: &str = "vms.slice/db.scope";

    /// A root in which this process lies in a cgroup of its own, without a limit.
    pub(crate) struct FakeRoot(tempfile::TempDir);

    impl FakeRoot {
        pub(crate) fn new() -> Self {
            let root = Self(tempfile::tempdir().unwrap());
            let pid = std::process::id();
            let proc = root.path().join(format!("proc/{pid}"));
            fs::create_dir_all(&proc).unwrap();
            for entry in fs::read_dir(format!("/proc/{pid}")).unwrap() {
                let entry = entry.unwrap();
                if entry.file_name() != "cgroup" {
                    std::os::unix::fs::symlink(entry.path(), proc.join(entry.file_name())).unwrap();
                }
            }
            root.lie_in(SCOPE);
            fs::create_dir_all(root.scope()).unwrap();
            root.put("cgroup.procs", &pid.to_string());
            root.put("memory.max", "max\n");
            root.put("memory.stat", "anon 1\nactive_file 0\n");
            root.uses_mib(0);
            root
        }

        pub(crate) fn path(&self) -> &Path {
            self.0.path()
        }

        fn scope(&self) -> PathBuf {
            self.path().join("sys/fs/cgroup").join(SCOPE)
        }

        fn lie_in(&self, cgroup: &str) {
            let path = format!("proc/{}/cgroup", std::process::id());
            let text = format!("4:memory:/elsewhere\n0::/{cgroup}\n");
            fs::write(self.path().join(path), text).unwrap();
        }

        pub(crate) fn put(&self, name: &str, text: &str) {
            fs::write(self.scope().join(name), text).unwrap();
        }

        fn uses_mib(&self, mib: u64) {
            self.put("memory.current", &(mib * MIB).to_string());
        }

        /// Makes every further write to memory.max fail.
        pub(crate) fn break_limit(&self) {
            let path = self.scope().join("memory.max");
            fs::remove_file(&path).unwrap();
            // A folder, but none that passes for a cgroup.
            std::os::unix::fs::symlink(".", path).unwrap();
        }

        /// `memory.max`, MiB where it is a number.
        pub(crate) fn limit(&self) -> String {
            let text = fs::read_to_string(self.scope().join("memory.max")).unwrap();
            parse(&text).map_or(text.trim().into(), |bytes| (bytes / MIB).to_string())
        }

        fn find(&self) -> Result<HardLimit, HardLimitError> {
            let own = PeerProcess::running(Pid(std::process::id()), 0).unwrap();
            HardLimit::find(self.path(), own, ByteCount(10 * MIB))
        }
    }

    fn owned(fast: u64, slow: u64) -> Observation {
        Observation::Owned {
            ticket: Ticket(1),
            owned: TierBytes {
                fast: ByteCount(fast * MIB),
                slow: ByteCount(slow * MIB),
            },
        }
    }

    fn set_fast(mib: u64) -> Order {
        Order::Set {
            tier: Tier::Fast,
            target: ByteCount(mib * MIB),
        }
    }

    fn moved(mib: u64, reason: Option<&str>) -> Observation {
        Observation::Moved {
            ticket: Ticket(1),
            owned: ByteCount(mib * MIB),
            reason: reason.map(Into::into),
        }
    }

    #[test]
    fn it_is_raised_before_memory_is_given_and_lowered_after_it_came_back() {
        let root = FakeRoot::new();
        let mut limit = root.find().unwrap();
        assert_eq!(root.limit(), "max", "nothing is known yet");
        limit.before(Order::Ask).unwrap();
        assert_eq!(root.limit(), "max");
        assert!(limit.after(Order::Ask, &owned(64, 128)).unwrap());
        assert_eq!(root.limit(), "202");

        limit.before(set_fast(32)).unwrap();
        assert_eq!(root.limit(), "202", "not before it has returned anything");
        limit.after(set_fast(32), &moved(48, Some("busy"))).unwrap();
        assert_eq!(root.limit(), "186");
        limit.after(set_fast(32), &moved(32, None)).unwrap();
        assert_eq!(root.limit(), "170");

        limit.before(set_fast(64)).unwrap();
        assert_eq!(root.limit(), "202", "before it is told");
        // It may go on by itself.
        limit.after(set_fast(64), &moved(40, Some("slow"))).unwrap();
        limit.after(Order::Ask, &owned(40, 128)).unwrap();
        assert_eq!(root.limit(), "202");
        let failed = Observation::Failed {
            ticket: Ticket(1),
            reason: "no".into(),
        };
        limit.before(set_fast(16)).unwrap();
        limit.after(set_fast(16), &failed).unwrap();
        assert_eq!(root.limit(), "202", "who knows what became of it");
        limit.lift().unwrap();
        assert_eq!(root.limit(), "max");
    }

    #[test]
    fn it_kills_nobody_who_has_not_returned_memory_yet() {
        let root = FakeRoot::new();
        let mut limit = root.find().unwrap();
        root.uses_mib(203);
        assert!(!limit.after(Order::Ask, &owned(64, 128)).unwrap());
        assert_eq!(root.limit(), "max");
        assert!(!limit.settle().unwrap());
        // Cached files give way.
        let stat = format!("active_file {}\ninactive_file 0\nshmem 9\n", 2 * MIB);
        root.put("memory.stat", &stat);
        assert!(limit.settle().unwrap());
        assert_eq!(root.limit(), "202");
    }

    #[test]
    fn the_operators_own_limit_is_the_most_and_comes_back_even_after_a_kill() {
        let root = FakeRoot::new();
        root.put("memory.max", &(100 * MIB).to_string());
        let mut limit = root.find().unwrap();
        limit.after(Order::Ask, &owned(64, 128)).unwrap();
        assert_eq!(root.limit(), "100");
        limit.after(Order::Ask, &owned(16, 32)).unwrap();
        assert_eq!(root.limit(), "58");
        // As by kill -9.
        std::mem::forget(limit);
        let mut limit = root.find().unwrap();
        limit.after(Order::Ask, &owned(16, 16)).unwrap();
        assert_eq!(root.limit(), "42");
        drop(limit);
        assert_eq!(root.limit(), "100");
        // What is set from now on counts.
        root.put("memory.max", "max\n");
        drop(root.find().unwrap());
        assert_eq!(root.limit(), "max");
    }

    #[test]
    fn a_cgroup_that_is_not_the_vms_own_is_refused() {
        let root = FakeRoot::new();
        let refused = |want: &str| {
            let said = root.find().unwrap_err().to_string();
            assert!(said.contains(want) && !said.contains('\n'), "{said}");
            assert_eq!(root.limit(), "max");
        };
        root.lie_in("");
        refused("no cgroup v2 with memory.max");
        root.lie_in("other.slice/a.service");
        refused("no cgroup v2 with memory.max");
        root.lie_in("../vms.slice/db.scope");
        refused("outside of this cgroup namespace");

        // Threads lie deeper, where there is no limit.
        let deeper = root.scope().join("vcpu0");
        fs::create_dir(&deeper).unwrap();
        fs::write(deeper.join("cgroup.procs"), "").unwrap();
        root.lie_in(&format!("{SCOPE}/vcpu0"));
        drop(root.find().unwrap());
        fs::write(deeper.join("cgroup.procs"), "1\n").unwrap();
        refused("vcpu0 with 1;");
        fs::write(deeper.join("cgroup.procs"), "").unwrap();
        root.put("cgroup.procs", &format!("{}\n1\n", std::process::id()));
        refused("db.scope with 1;");

        // libvirt's own, with its helpers.
        let machine = "machine.slice/machine-qemu\\x2d1\\x2ddb.scope";
        let folder = root.path().join("sys/fs/cgroup").join(machine);
        fs::create_dir_all(folder.join("libvirt/emulator")).unwrap();
        fs::write(folder.join("libvirt/memory.max"), "max").unwrap();
        root.lie_in(&format!("{machine}/libvirt/emulator"));
        assert!(root.find().unwrap().cgroup.ends_with("libvirt"));

        let own = format!("proc/{}/cgroup", std::process::id());
        fs::write(root.path().join(own), "4:memory:/vm\n").unwrap();
        refused("is in no cgroup v2;");
    }

    #[test]
    fn a_limit_that_cannot_be_written_is_refused() {
        let root = FakeRoot::new();
        root.break_limit();
        let said = root.find().unwrap_err().to_string();
        assert!(
            said.contains("memory.max: ") && said.contains("ProtectControlGroups"),
            "{said}"
        );
    }

    /// In a process's environment: it takes memory as it is told.
    const TAKES: &str = "DEMETER_TAKES_MEMORY";

    /// A process of ours in a cgroup of the kernel's own, both of which end with this.
    struct Limited {
        cgroup: PathBuf,
        child: Child,
        said: Lines<BufReader<ChildStdout>>,
    }

    impl Limited {
        /// Nothing where this machine has no cgroup v2 with memory limits, or we have no right to it.
        fn start() -> io::Result<Self> {
            let top = Path::new("/sys/fs/cgroup");
            let given = fs::read_to_string(top.join("cgroup.subtree_control"))?;
            if !given.split_whitespace().any(|name| name == "memory") {
                return Err(io::Error::other("cgroups v2 have no memory limits here"));
            }
            let cgroup = top.join(format!("demeter-test-{}", std::process::id()));
            fs::create_dir(&cgroup)?;
            let child = Command::new(std::env::current_exe()?)
                .args(["--exact", "hard_limit::tests::taker", "--nocapture"])
                .env(TAKES, "1")
                .stdin(Stdio::piped())
                .stdout(Stdio::piped())
                .spawn();
            let mut child = child.inspect_err(|_| drop(fs::remove_dir(&cgroup)))?;
            let said = BufReader::new(child.stdout.take().unwrap()).lines();
            let limited = Self {
                cgroup,
                child,
                said,
            };
            let pid = limited.child.id().to_string();
            fs::write(limited.cgroup.join("cgroup.procs"), pid)?;
            // Else it would be swapped out and live on.
            let _ = fs::write(limited.cgroup.join("memory.swap.max"), "0");
            Ok(limited)
        }

        /// Has it take so much more, and says whether it lives.
        fn takes(&mut self, mib: u64) -> bool {
            let stdin = self.child.stdin.as_mut().unwrap();
            writeln!(stdin, "{mib}").unwrap();
            // The runner says things of its own.
            self.said
                .by_ref()
                .map_while(Result::ok)
                .any(|line| line == format!("took {mib}"))
        }

        fn limit(&self) -> String {
            let text = fs::read_to_string(self.cgroup.join("memory.max")).unwrap();
            parse(&text).map_or(text.trim().into(), |bytes| (bytes / MIB).to_string())
        }
    }

    impl Drop for Limited {
        fn drop(&mut self) {
            // It may have ended.
            let _ = self.child.kill();
            let _ = self.child.wait();
            fs::remove_dir(&self.cgroup).unwrap();
        }
    }

    /// Takes memory, where the environment says so; a test only by name.
    #[test]
    fn taker() {
        if std::env::var_os(TAKES).is_none() {
            return;
        }
        let mut taken = vec![];
        for line in io::stdin().lines() {
            let mib: u64 = line.unwrap().parse().unwrap();
            taken.push(vec![1u8; (mib * MIB) as usize]);
            println!("took {mib}");
        }
    }

    #[test]
    fn the_kernel_holds_a_process_to_what_it_owns() {
        let mut limited = match Limited::start() {
            Ok(limited) => limited,
            Err(error) => return eprintln!("skipped: {error}"),
        };
        let process = PeerProcess::running(Pid(limited.child.id()), 0).unwrap();
        let extra = ByteCount(32 * MIB);
        let mut limit = HardLimit::find(Path::new("/"), process, extra).unwrap();
        assert_eq!(limited.limit(), "max");
        limit.after(Order::Ask, &owned(16, 16)).unwrap();
        assert_eq!(limited.limit(), "64");
        assert!(limited.takes(32), "what it owns");
        limit.before(set_fast(64)).unwrap();
        assert_eq!(limited.limit(), "112");
        assert!(
            limited.takes(48),
            "what it was given, before it is known to have it"
        );
        // It returned nothing, whatever it says: it is not killed for that.
        let settled = limit.after(set_fast(16), &moved(16, None)).unwrap();
        assert_eq!((settled, limited.limit().as_str()), (false, "112"));
        assert!(!limited.takes(64), "what it does not own");
        drop(limit);
        assert_eq!(limited.limit(), "max");
    }
}
