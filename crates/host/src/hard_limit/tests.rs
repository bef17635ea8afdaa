//! Tests of hard limits, on a fake root and on a real cgroup if available.

use std::io::{BufRead, BufReader, Lines};
use std::process::{Child, ChildStdout, Command, Stdio};
use std::sync::atomic::AtomicBool;

use demeter_lab::{Lab, Repetition};
use demeter_policy::MIB;

use super::*;
use crate::controller::Ticket;

const SCOPE: &str = "vms.slice/db.scope";

/// A fake root in which this process has its own cgroup, without a limit.
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

    /// Adds nodes, each with its CPUs.
    pub(crate) fn has_nodes(&self, nodes: &[(u32, &str)]) {
        for (node, cpus) in nodes {
            let folder = self
                .path()
                .join(format!("sys/devices/system/node/node{node}"));
            fs::create_dir_all(&folder).unwrap();
            let meminfo = format!("Node {node} MemTotal: 4194304 kB\nNode {node} MemFree: 1 kB\n");
            fs::write(folder.join("meminfo"), meminfo).unwrap();
            fs::write(folder.join("cpulist"), cpus).unwrap();
            fs::write(folder.join("distance"), "10 10").unwrap();
        }
    }

    /// Removes a node.
    pub(crate) fn lose_node(&self, node: u32) {
        let folder = format!("sys/devices/system/node/node{node}");
        fs::remove_dir_all(self.path().join(folder)).unwrap();
    }

    /// Replaces the process's numa_maps.
    pub(crate) fn has_pages(&self, lines: &[String]) {
        let path = format!("proc/{}/numa_maps", std::process::id());
        let path = self.path().join(path);
        fs::remove_file(&path).unwrap();
        fs::write(path, lines.join("\n") + "\n").unwrap();
    }

    /// Makes every further write to memory.max fail.
    pub(crate) fn break_limit(&self) {
        let path = self.scope().join("memory.max");
        fs::remove_file(&path).unwrap();
        // A folder that does not look like a cgroup.
        std::os::unix::fs::symlink(".", path).unwrap();
    }

    /// `memory.max` in MiB if it is a number.
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
    // The VM may still grow by itself.
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
    // File cache can be dropped.
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
    // Like kill -9.
    std::mem::forget(limit);
    let mut limit = root.find().unwrap();
    limit.after(Order::Ask, &owned(16, 16)).unwrap();
    assert_eq!(root.limit(), "42");
    drop(limit);
    assert_eq!(root.limit(), "100");
    // A limit that the operator sets now is the new original.
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

    // Threads lie in deeper cgroups without limits.
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

    // libvirt's own cgroup, which also contains helpers.
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

/// The test's own name: it starts itself in a child process, and in a VM.
const TEST: &str = "hard_limit::tests::the_kernel_holds_a_process_to_what_it_owns";

/// Environment variable of a child process that allocates memory on command.
const TAKES: &str = "DEMETER_TAKES_MEMORY";

/// A child process in a real cgroup; both end when this is dropped.
struct Limited {
    cgroup: PathBuf,
    child: Child,
    said: Lines<BufReader<ChildStdout>>,
}

impl Limited {
    /// An error if this machine has no cgroup v2 with memory limits, or permission is denied.
    fn start() -> io::Result<Self> {
        let top = Path::new("/sys/fs/cgroup");
        let given = fs::read_to_string(top.join("cgroup.subtree_control"))?;
        if !given.split_whitespace().any(|name| name == "memory") {
            return Err(io::Error::other("cgroups v2 have no memory limits here"));
        }
        let cgroup = top.join(format!("demeter-test-{}", std::process::id()));
        fs::create_dir(&cgroup)?;
        let child = Command::new(std::env::current_exe()?)
            .args(["--exact", TEST, "--nocapture"])
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
        // Otherwise it would be swapped out and survive.
        let _ = fs::write(limited.cgroup.join("memory.swap.max"), "0");
        Ok(limited)
    }

    /// Has the child allocate `mib` more. Returns whether it survives.
    fn takes(&mut self, mib: u64) -> bool {
        let stdin = self.child.stdin.as_mut().unwrap();
        writeln!(stdin, "{mib}").unwrap();
        // The test runner writes output of its own, and starts the line if it has one thread.
        self.said
            .by_ref()
            .map_while(Result::ok)
            .any(|line| line.ends_with(&format!("took {mib}")))
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

/// Allocates as many MiB as each line of its input says.
fn take() {
    let mut taken = vec![];
    for line in io::stdin().lines() {
        let mib: u64 = line.unwrap().parse().unwrap();
        taken.push(vec![1u8; (mib * MIB) as usize]);
        println!("took {mib}");
    }
}

/// Environment variable of the test below: it already runs in a VM.
const IN_VM: &str = "DEMETER_IN_VM";

/// Runs a test of this program in a lab VM, where cgroups v2 have memory limits.
fn passes_in_a_vm(test: &str) {
    let program = std::env::current_exe().unwrap();
    let scenario = format!(
        "name = \"hard-limit\"\nduration_s = 120\nsystems = [\"none\"]\n[machine]\nvcpus = 1\n\
         fast = {{ usable_mib = 300, latency_ns = 80, bandwidth_gbps = 100 }}\n\
         slow = {{ usable_mib = 64, latency_ns = 80, bandwidth_gbps = 100 }}\n\
         [workload]\nkind = \"program\"\n[[workload.program]]\nname = \"test\"\n\
         command = [{program:?}, \"--exact\", {test:?}, \"--nocapture\"]\n\
         env = {{ {IN_VM} = \"1\" }}\ncgroup = {{}}"
    );
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("../..");
    let lab = Lab::of_tree(&root).unwrap();
    let scenario = toml::from_str(&scenario).unwrap();
    let (once, stop) = (Repetition::default(), AtomicBool::new(false));
    let ran = demeter_lab::run(&scenario, once, &lab, &stop, &mut |_, _| ());
    let hint = hint_if_older(&root.join("target/release/demeter"), &program);
    let result = ran.whole().unwrap_or_else(|error| panic!("{error}{hint}"));
    assert!(result.systems[0].elapsed_s.is_some(), "{result:?}{hint}");
}

/// A hint for a failure in a VM whose init, `built`, is older than this test.
fn hint_if_older(built: &Path, test: &Path) -> String {
    let time = |path: &Path| fs::metadata(path).and_then(|about| about.modified()).ok();
    match (time(built), time(test)) {
        (Some(built_at), Some(test_at)) if built_at < test_at => format!(
            "\nthe VM boots {}, which is older than this test: build it again with make",
            built.display()
        ),
        _ => String::new(),
    }
}

#[test]
fn the_kernel_holds_a_process_to_what_it_owns() {
    if std::env::var_os(TAKES).is_some() {
        return take();
    }
    let mut limited = match Limited::start() {
        Ok(limited) => limited,
        Err(error) if std::env::var_os(IN_VM).is_some() => panic!("{error}"),
        Err(_) => {
            return passes_in_a_vm(TEST);
        }
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
    // The VM claims to have returned memory but did not; it must not be killed for that.
    let settled = limit.after(set_fast(16), &moved(16, None)).unwrap();
    assert_eq!((settled, limited.limit().as_str()), (false, "112"));
    assert!(!limited.takes(64), "what it does not own");
    drop(limit);
    assert_eq!(limited.limit(), "max");
}
