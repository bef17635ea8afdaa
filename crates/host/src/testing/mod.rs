//! A simulated VM for tests, reached over a QMP socket or by function calls.
//!
//! Its memory files are real and mapped by the test's own process, as by a hypervisor.

mod cloud_hypervisor;
mod guest;
mod libvirt;
mod qmp;
mod vm;

use std::fs::File;
use std::os::fd::FromRawFd;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};
use std::time::Duration;

use demeter_policy::provision::ProvisionerKind;
use demeter_policy::{ByteCount, NodeId, PerTier, Tier, TierBytes};
use demeter_proto::GpaRange;
use tokio::net::UnixListener;
use tokio::sync::{Notify, broadcast, mpsc, watch};
use tokio::task::{JoinHandle, JoinSet};

use crate::agent::tests::own_process;
use crate::config::Libvirt;
use crate::hypervisor::cloud_hypervisor::{self as ch, CloudHypervisor};
use crate::hypervisor::libvirt::connect;
use crate::hypervisor::qemu::{Qemu, Timeouts};
use crate::hypervisor::{Connection, Event, Events, Mapping};
use crate::outside::Outside;
use vm::Simulated;
pub(crate) use vm::State;

pub(crate) use guest::FakeGuest;

/// An empty memfd.
pub(crate) fn memfd(bytes: u64) -> File {
    // SAFETY: a constant name; the result is checked before it is used.
    let fd = unsafe { libc::memfd_create(c"demeter-test".as_ptr(), libc::MFD_CLOEXEC) };
    assert!(fd >= 0, "{}", std::io::Error::last_os_error());
    // SAFETY: the descriptor is new, valid and nobody else's.
    let file = unsafe { File::from_raw_fd(fd) };
    file.set_len(bytes).unwrap();
    file
}

/// An unsolicited report of a VM.
#[derive(Debug, Clone, Copy)]
pub(crate) enum Told {
    Event(Event),
    SizeChange,
}

/// A VM whose QEMU serves one QMP client at a time.
pub(crate) struct FakeVm {
    folder: PathBuf,
    /// Keeps the folder, if it belongs to the VM.
    temporary: Option<tempfile::TempDir>,
    state: Arc<Mutex<State>>,
    told: broadcast::Sender<Told>,
    /// Number of events sent.
    happened: Arc<AtomicU64>,
    server: JoinHandle<()>,
    /// Its libvirtd, if any.
    daemon: Mutex<JoinSet<()>>,
}

impl FakeVm {
    /// A VM with boot memory of `boot` and the same amount by virtio-mem.
    pub fn new(boot: TierBytes) -> Self {
        let temporary = tempfile::tempdir().unwrap();
        let mut vm = Self::within(temporary.path(), boot);
        vm.temporary = Some(temporary);
        vm
    }

    /// Like `new`, with its sockets in an existing folder.
    pub fn within(folder: &Path, boot: TierBytes) -> Self {
        Self::of(folder, State::new(boot))
    }

    /// Like `within`, with no page in use yet.
    pub fn sparse(folder: &Path, boot: TierBytes) -> Self {
        Self::of(folder, State::sparse(boot))
    }

    fn of(folder: &Path, state: State) -> Self {
        let state = Arc::new(Mutex::new(state));
        let (told, _) = broadcast::channel(16);
        let listener = UnixListener::bind(folder.join("qmp")).unwrap();
        let server = tokio::spawn(qmp::serve(listener, state.clone(), told.clone()));
        Self {
            folder: folder.into(),
            temporary: None,
            state,
            told,
            happened: Arc::default(),
            server,
            daemon: Mutex::default(),
        }
    }

    /// Connects to it by QMP.
    pub async fn connect(&self) -> Connection<Qemu> {
        let limits = Timeouts {
            command: Duration::from_secs(1),
            ..Timeouts::default()
        };
        let path = self.folder.join("qmp");
        Qemu::connect(&path, &Outside::default(), None, limits)
            .await
            .unwrap()
    }

    /// Connects to it through libvirt, as the domain "db".
    pub async fn connect_libvirt(&self) -> Connection<Qemu> {
        let daemon = self.libvirt(true);
        let nodes = PerTier {
            fast: NodeId(0),
            slow: NodeId(1),
        };
        connect(
            &daemon,
            &Outside::default(),
            "db",
            ProvisionerKind::DemeterBalloon,
            nodes,
        )
        .await
        .unwrap()
    }

    /// Starts a libvirtd with this VM as its domain "db". It replaces the former one. `runs` is
    /// whether the domain runs.
    pub fn libvirt(&self, runs: bool) -> Libvirt {
        let pid = std::process::id().to_string();
        std::fs::create_dir_all(self.folder.join("qemu")).unwrap();
        std::fs::write(self.folder.join("qemu/db.pid"), pid).unwrap();
        let socket = self.folder.join("libvirt-sock");
        // There is none the first time.
        let _ = std::fs::remove_file(&socket);
        let listener = UnixListener::bind(&socket).unwrap();
        let has = libvirt::Has {
            state: self.state.clone(),
            runs,
            agent: self.folder.join("agent"),
        };
        let mut daemon = self.daemon.lock().unwrap();
        daemon.abort_all();
        daemon.spawn(libvirt::serve(listener, has, self.told.clone()));
        Libvirt {
            socket: Some(socket),
            ..Libvirt::default()
        }
    }

    /// Connects to it by Cloud Hypervisor's API, which it has from then on. Its slow memory then
    /// follows the fast memory without a hole, because all of it lies below 3 GiB.
    pub async fn connect_cloud_hypervisor(&self) -> Connection<CloudHypervisor> {
        let socket = self.cloud_hypervisor();
        let limits = ch::Timeouts {
            answer: Duration::from_secs(1),
            look_every: Duration::from_millis(10),
        };
        CloudHypervisor::connect(&socket, &Outside::default(), None, &self.folder, limits)
            .await
            .unwrap()
    }

    /// Starts its Cloud Hypervisor and returns the API socket.
    pub fn cloud_hypervisor(&self) -> PathBuf {
        let has = cloud_hypervisor::Has {
            state: self.state.clone(),
            folder: self.folder.clone(),
            told: Arc::new(Mutex::new(self.told.subscribe())),
            calls: Arc::default(),
        };
        self.state().in_one_run = true;
        has.show_process();
        let socket = self.folder.join("api.sock");
        let listener = UnixListener::bind(&socket).unwrap();
        let vsock = UnixListener::bind(self.folder.join("vsock")).unwrap();
        let mut daemon = self.daemon.lock().unwrap();
        daemon.spawn(cloud_hypervisor::serve(listener, vsock, has));
        socket
    }

    /// Connects to it by function calls.
    pub fn simulated(&self) -> Connection<Simulated> {
        let size_change = Arc::new(Notify::new());
        let (events_told, told_so_far) = watch::channel(self.happened.load(Ordering::Relaxed));
        let hypervisor = Simulated {
            state: self.state.clone(),
            size_change: size_change.clone(),
            happened: self.happened.clone(),
            events_told: told_so_far,
        };
        let (events_in, events) = mpsc::channel(16);
        let mut told = self.told.subscribe();
        tokio::spawn(async move {
            while let Ok(told) = told.recv().await {
                match told {
                    Told::Event(event) => {
                        let _ = events_in.send(event).await;
                        events_told.send_modify(|count| *count += 1);
                    }
                    Told::SizeChange => size_change.notify_waiters(),
                }
            }
            events_told.send_modify(|count| *count += 1);
            drop(events_in);
        });
        Connection {
            hypervisor,
            events: Events::new(events),
            process: own_process(),
            agent: None,
        }
    }

    pub fn folder(&self) -> &Path {
        &self.folder
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Address ranges of its guest's nodes.
    pub fn guest_ranges(&self) -> Vec<(NodeId, GpaRange)> {
        let layout = self.state().layout().into_iter();
        let range = |(node, mapping, _): (NodeId, Mapping, _)| {
            let range = GpaRange {
                start: mapping.guest.start(),
                bytes: mapping.guest.len(),
            };
            (node, range)
        };
        layout.map(range).collect()
    }

    /// Names of its memory backends.
    pub fn memdev() -> PerTier<String> {
        PerTier {
            fast: "node0".into(),
            slow: "node1".into(),
        }
    }

    /// The file of a tier's boot memory.
    pub fn file(&self, tier: Tier) -> File {
        self.state().boot.get(tier).file.try_clone().unwrap()
    }

    /// Makes the guest keep this much of its virtio-mem.
    pub fn use_memory(&self, tier: Tier, bytes: ByteCount) {
        self.state().use_memory(tier, bytes);
    }

    /// Sends a report to the connected clients; there must be one.
    pub fn tell(&self, told: Told) {
        assert!(self.told.receiver_count() > 0, "nobody is connected");
        self.tell_if_heard(told);
    }

    /// Sends a report to the connected clients, if any.
    pub fn tell_if_heard(&self, told: Told) {
        if matches!(told, Told::Event(_)) {
            self.happened.fetch_add(1, Ordering::Relaxed);
        }
        let _ = self.told.send(told);
    }

    /// Its state, for another task.
    pub fn shared_state(&self) -> Arc<Mutex<State>> {
        self.state.clone()
    }

    /// Ends QEMU. Its socket file stays, as after a crash.
    pub fn kill(&self) {
        self.server.abort();
    }
}

impl Drop for FakeVm {
    fn drop(&mut self) {
        self.server.abort();
    }
}
