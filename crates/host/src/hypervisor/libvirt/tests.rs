//! Tests of the client against invalid servers, and against a real libvirtd if one is installed.

use std::os::unix::process::CommandExt;
use std::path::Path;
use std::process::{Child, Command, Output};
use std::time::Duration;

use demeter_policy::{ByteCount, MIB, Tier, TierBytes};
use tokio::io::{AsyncReadExt, AsyncWriteExt};
use tokio::net::UnixListener;
use tokio::time::{sleep, timeout};

use super::*;
use crate::hypervisor::{Event, Hypervisor};
use crate::memory::{HostFiles, LiveBacking};
use crate::outside::Outside;
use crate::testing::FakeVm;

const NODES: PerTier<NodeId> = PerTier {
    fast: NodeId(0),
    slow: NodeId(1),
};

const SIZE: TierBytes = TierBytes {
    fast: ByteCount(4 * MIB),
    slow: ByteCount(8 * MIB),
};

async fn connected(libvirt: &Libvirt, name: &str) -> Result<Connection<Qemu>, LibvirtError> {
    connect(
        libvirt,
        &Outside::default(),
        name,
        ProvisionerKind::DemeterBalloon,
        NODES,
    )
    .await
}

async fn refused(libvirt: &Libvirt, name: &str) -> String {
    let said = connected(libvirt, name).await.unwrap_err().to_string();
    assert_eq!(said.lines().count(), 1, "{said}");
    said
}

async fn soon<T>(future: impl Future<Output = T>) -> T {
    timeout(Duration::from_secs(20), future)
        .await
        .expect("in time")
}

/// The error for a server that answers every question with the error `words`, or sends `bytes` if
/// `words` is empty.
async fn said_of(words: &'static str, bytes: &'static [u8]) -> String {
    let folder = tempfile::tempdir().unwrap();
    let socket = folder.path().join("sock");
    let listener = UnixListener::bind(&socket).unwrap();
    let server = tokio::spawn(async move {
        let (mut stream, _) = listener.accept().await.unwrap();
        // Read the whole question: unread data would break the connection instead of ending it.
        let mut question = [0; 28];
        stream.read_exact(&mut question).await.unwrap();
        let error = Message {
            procedure: Procedure::AUTH_LIST,
            kind: REPLY,
            serial: 0,
            status: 1,
            body: Writer::default().i32(1).i32(1).u32(1).text(words).0,
        };
        let said = if words.is_empty() {
            bytes.to_vec()
        } else {
            error.bytes()
        };
        let _ = stream.write_all(&said).await;
    });
    let libvirt = Libvirt {
        socket: Some(socket),
        ..Libvirt::default()
    };
    let said = refused(&libvirt, "db").await;
    server.await.unwrap();
    said
}

#[tokio::test]
async fn who_is_no_libvirt_or_refuses_is_told_on_one_line() {
    for (words, bytes, want) in [
        ("", &b"{\"QMP\": {}}\r\n"[..], "not libvirt's protocol"),
        ("", b"", "it closed it"),
        ("access denied", b"", "access denied"),
        ("unknown procedure: 66", b"", "too old"),
    ] {
        let said = said_of(words, bytes).await;
        assert!(said.contains(want), "{want}: {said}");
    }
    let nobody = Libvirt {
        socket: Some("/nonexistent/sock".into()),
        ..Libvirt::default()
    };
    let said = refused(&nobody, "db").await;
    assert!(said.contains("does libvirtd"), "{said}");
    let vm = FakeVm::new(SIZE);
    let said = refused(&vm.libvirt(true), "other").await;
    assert!(said.contains("Domain not found: other"), "{said}");
}

#[tokio::test]
async fn a_domain_without_a_process_is_refused() {
    let vm = FakeVm::new(SIZE);
    let libvirt = vm.libvirt(true);
    let file = vm.folder().join("qemu/db.pid");
    for (text, want) in [
        ("", "invalid"),
        ("4000000000", "No such"),
        ("-1", "invalid"),
    ] {
        std::fs::write(&file, text).unwrap();
        let said = refused(&libvirt, "db").await;
        assert!(said.contains("db.pid") && said.contains(want), "{said}");
    }
    std::fs::remove_file(&file).unwrap();
    let said = refused(&libvirt, "db").await;
    assert!(said.contains("keeps no"), "{said}");
}

/// A libvirtd of an unprivileged user in its own folder; its domains end with it.
struct Daemon {
    folder: tempfile::TempDir,
    process: Child,
}

/// User of the daemon if the test runs as root, because libvirt would use the system's folders
/// then.
const NOBODY: u32 = 65534;

fn as_user(folder: &Path, program: &str) -> Command {
    let mut command = Command::new(program);
    command
        .current_dir(folder)
        .stdin(std::process::Stdio::null());
    for name in [
        "HOME",
        "XDG_RUNTIME_DIR",
        "XDG_CONFIG_HOME",
        "XDG_CACHE_HOME",
        "XDG_DATA_HOME",
    ] {
        command.env(name, folder);
    }
    // No daemon but the test's own.
    command.env("LIBVIRT_AUTOSTART", "0");
    if rustix::process::geteuid().is_root() {
        command.uid(NOBODY).gid(NOBODY);
    }
    command
}

impl Daemon {
    /// `None` where libvirt is not installed.
    fn new() -> Option<Self> {
        let programs = ["libvirtd", "virsh", "qemu-system-x86_64", "patch"];
        let there = |name: &str| {
            Command::new("which")
                .arg(name)
                .output()
                .is_ok_and(|o| o.status.success())
        };
        if let Some(missing) = programs.into_iter().find(|name| !there(name)) {
            println!("skipped: there is no {missing} here");
            return None;
        }
        let folder = tempfile::tempdir().unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder.path(), Some(NOBODY), Some(NOBODY)).unwrap();
        }
        std::fs::create_dir(folder.path().join("libvirt")).unwrap();
        // Without virtlogd, which would outlive the test.
        std::fs::write(
            folder.path().join("libvirt/qemu.conf"),
            "stdio_handler = \"file\"\n",
        )
        .unwrap();
        if rustix::process::geteuid().is_root() {
            std::os::unix::fs::chown(folder.path().join("libvirt"), Some(NOBODY), Some(NOBODY))
                .unwrap();
        }
        let process = Self::start(folder.path());
        Some(Self { folder, process })
    }

    fn start(folder: &Path) -> Child {
        let log = std::fs::File::create(folder.join("log")).unwrap();
        as_user(folder, "libvirtd").stderr(log).spawn().unwrap()
    }

    async fn is_up(&self) {
        soon(async {
            while self.virsh(&["list"]).is_err() {
                sleep(Duration::from_millis(50)).await;
            }
        })
        .await;
    }

    async fn restart(&mut self) {
        self.stop();
        self.process = Self::start(self.folder.path());
        self.is_up().await;
    }

    fn stop(&mut self) {
        let pid = rustix::process::Pid::from_child(&self.process);
        rustix::process::kill_process(pid, rustix::process::Signal::TERM).unwrap();
        self.process.wait().unwrap();
    }

    fn libvirt(&self) -> Libvirt {
        Libvirt {
            socket: Some(self.folder.path().join("libvirt/libvirt-sock")),
            uri: Some("qemu:///session".into()),
            owner_uid: Some(NOBODY),
        }
    }

    fn virsh(&self, args: &[&str]) -> Result<String, String> {
        let mut command = as_user(self.folder.path(), "virsh");
        let Output {
            status,
            stdout,
            stderr,
        } = command
            .args(["-c", "qemu:///session"])
            .args(args)
            .output()
            .unwrap();
        let said = |bytes| String::from_utf8_lossy(bytes).trim().to_owned();
        if status.success() {
            Ok(said(&stdout))
        } else {
            Err(said(&stderr))
        }
    }

    /// Defines a domain.
    fn define(&self, xml: &str) {
        let path = self.folder.path().join("domain.xml");
        std::fs::write(&path, xml).unwrap();
        self.virsh(&["define", "domain.xml"]).unwrap();
    }
}

impl Drop for Daemon {
    fn drop(&mut self) {
        let _ = self.virsh(&["destroy", "db"]);
        // It may have ended already.
        let _ = self.process.kill();
        let _ = self.process.wait();
    }
}

/// A domain that was not prepared.
const BARE: &str = "<domain type='qemu'>\n  <name>db</name>\n  <memory unit='MiB'>64</memory>\n  \
    <vcpu>1</vcpu>\n  <os><type arch='x86_64' machine='pc'>hvm</type></os>\n  <devices>\n    \
    <emulator>/usr/bin/qemu-system-x86_64</emulator>\n    <memballoon model='none'/>\n  \
    </devices>\n</domain>\n";

/// One test for everything, because a daemon takes seconds to start.
#[tokio::test]
#[expect(
    clippy::too_many_lines,
    reason = "one session with a daemon, from start to end"
)]
async fn a_real_libvirtd_is_understood() {
    let Some(mut daemon) = Daemon::new() else {
        return;
    };
    daemon.is_up().await;
    let libvirt = daemon.libvirt();
    if rustix::process::geteuid().is_root() {
        let strict = Libvirt {
            owner_uid: None,
            ..libvirt.clone()
        };
        assert!(refused(&strict, "db").await.contains("libvirt.owner_uid"));
    }
    assert!(refused(&libvirt, "db").await.contains("Domain not found"));

    // The missing elements are named, and the patch supplies them.
    daemon.define(BARE);
    assert!(refused(&libvirt, "db").await.contains("does not run"));
    daemon.virsh(&["start", "--paused", "db"]).unwrap();
    let said = refused(&libvirt, "db").await;
    assert!(
        said.contains("no NUMA cell 0") && said.contains("demeter host xml db"),
        "{said}"
    );
    daemon.virsh(&["destroy", "db"]).unwrap();
    let wanted = Wanted {
        provisioner: ProvisionerKind::DemeterBalloon,
        fast: None,
        slow: None,
        cells: None,
        host: None,
    };
    // Blocking, so it needs a thread outside the runtime.
    let lacks = || {
        let libvirt = daemon.libvirt();
        let asked = std::thread::spawn(move || lacks(&libvirt, "db", wanted));
        asked.join().unwrap().unwrap()
    };
    let patch = lacks().diff.unwrap();
    let xml = daemon.virsh(&["dumpxml", "--inactive", "db"]).unwrap();
    std::fs::write(daemon.folder.path().join("db.xml"), xml + "\n\n").unwrap();
    std::fs::write(daemon.folder.path().join("db.patch"), patch).unwrap();
    let patched = Command::new("patch")
        .current_dir(daemon.folder.path())
        .args(["db.xml", "db.patch"])
        .output()
        .unwrap();
    assert!(patched.status.success(), "{patched:?}");
    daemon.virsh(&["define", "db.xml", "--validate"]).unwrap();
    assert_eq!(lacks().diff, None);
    daemon.virsh(&["start", "--paused", "db"]).unwrap();

    // The memory lies where QEMU reports it through libvirt.
    let mut connection = connected(&libvirt, "db").await.unwrap();
    let backends = connection.hypervisor.backends().await.unwrap();
    let mut names: Vec<_> = backends
        .iter()
        .map(|of| (of.id.as_deref(), of.shared))
        .collect();
    names.sort();
    assert_eq!(
        names,
        [(Some("ram-node0"), true), (Some("ram-node1"), true)]
    );
    let memdev = PerTier {
        fast: "ram-node0".to_owned(),
        slow: "ram-node1".to_owned(),
    };
    let found = LiveBacking::find(
        &HostFiles::default(),
        &Outside::default(),
        "db",
        &connection,
        &memdev,
    )
    .await;
    let sizes =
        Tier::ALL.map(|tier| crate::backing::Backing::size(found.as_ref().unwrap(), tier).0 >> 20);
    assert_eq!(sizes, [16, 48]);
    drop(found);
    let agent = connection.agent.clone().unwrap();
    let stream = tokio::net::UnixStream::connect(&agent.path).await.unwrap();
    assert_eq!(agent.opener.opened(&stream).unwrap(), Ok(()));
    assert!(
        connection
            .hypervisor
            .balloon_size()
            .await
            .unwrap_err()
            .to_string()
            .contains("balloon")
    );

    // Events are reported.
    daemon.virsh(&["reset", "db"]).unwrap();
    assert_eq!(soon(connection.events.next()).await, Some(Event::Reset));

    // A restarted daemon costs the connection only.
    let before = connection.process;
    daemon.restart().await;
    while soon(connection.events.next()).await.is_some() {}
    assert!(before.is_there());
    let mut connection = connected(&libvirt, "db").await.unwrap();
    assert_eq!(connection.process, before);
    let agent = connection.agent.clone().unwrap();
    let stream = tokio::net::UnixStream::connect(&agent.path).await.unwrap();
    assert_eq!(
        agent.opener.opened(&stream).unwrap(),
        Ok(()),
        "by the daemon before"
    );

    // The domain is found among the running ones.
    let (found_in, mut found) = tokio::sync::mpsc::channel(1);
    let discovering = tokio::spawn(discover(libvirt.clone(), found_in));
    let domains = soon(found.recv()).await.unwrap();
    let names: Vec<_> = domains.managed.keys().map(crate::VmName::as_str).collect();
    assert_eq!(names, ["db"]);

    // The end of the domain ends the connection.
    daemon.virsh(&["destroy", "db"]).unwrap();
    while soon(connection.events.next()).await.is_some() {}
    assert!(crate::process::Process::open(before.pid).is_err());
    while !soon(found.recv()).await.unwrap().managed.is_empty() {}
    discovering.abort();
    daemon.stop();
    assert!(refused(&libvirt, "db").await.contains("cannot connect"));
}
