//! One connection to a Cloud Hypervisor process: questions, and polling for changes of its VM.

use std::collections::BTreeSet;
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use demeter_policy::{ByteCount, Pid};
use demeter_proto::shown;
use serde::Deserialize;
use serde_json::json;
use tokio::sync::{Mutex, mpsc};
use tokio::task::spawn_blocking;
use tokio::time::{sleep, timeout};

use super::info::{Info, State};
use super::{CloudHypervisorError, at, memory};
use crate::hypervisor::{
    AgentSocket, Channel, Connection, Event, Events, Hypervisor, HypervisorError, Mapping,
    MemoryBackend, MemoryDevice,
};
use crate::memory::NamedFile;
use crate::outside::{self, FileId, MayWait, Outside};
use crate::process::{Opener, PeerProcess};

const PING: &str = "GET /api/v1/vmm.ping";
const INFO: &str = "GET /api/v1/vm.info";
const RESIZE: &str = "PUT /api/v1/vm.resize";

/// Maximum length of an answer. A VM with a hundred devices needs a tenth of it.
const ANSWER_BYTES_MAX: usize = 1 << 20;

/// Capacity of the event queue.
const EVENTS_MAX: usize = 16;

/// Maximum number of the process's threads that are searched.
const THREADS_MAX: usize = 16384;

/// Time limits of a connection.
#[derive(Debug, Clone, Copy)]
pub struct Timeouts {
    /// Time limit for an answer.
    pub answer: Duration,
    /// Poll interval for changes.
    pub look_every: Duration,
}

impl Default for Timeouts {
    fn default() -> Self {
        Self {
            answer: Duration::from_secs(5),
            look_every: Duration::from_millis(500),
        }
    }
}

/// A handle for questions; clones ask the same process.
#[derive(Debug, Clone)]
pub struct CloudHypervisor(Arc<Vmm>);

#[derive(Debug)]
struct Vmm {
    socket: PathBuf,
    /// Parent of /proc.
    root: PathBuf,
    outside: Outside,
    process: PeerProcess,
    limits: Timeouts,
    /// The last observation and the channel for changes; `None` once polling has ended.
    seen: Mutex<Option<Seen>>,
    /// Number of events sent, plus one after the end.
    told: AtomicU64,
}

#[derive(Debug)]
struct Seen {
    look: Look,
    tell: mpsc::Sender<Event>,
}

/// The observed part of a VM's state. A reset gives it other memory files.
#[derive(Debug, PartialEq, Eq)]
struct Look {
    memory: BTreeSet<FileId>,
    state: State,
    devices: BTreeSet<String>,
}

impl CloudHypervisor {
    /// Connects and checks the listener. `owner_uid` is a trusted user besides root and our own;
    /// `root` is the parent of /proc.
    pub async fn connect(
        socket: &Path,
        outside: &Outside,
        owner_uid: Option<u32>,
        root: &Path,
        limits: Timeouts,
    ) -> Result<Connection<Self>, CloudHypervisorError> {
        #[derive(Deserialize)]
        struct Ping {
            pid: Option<i64>,
        }
        let (stream, process) = open(socket, outside, limits).await?;
        let own_uid = rustix::process::geteuid().as_raw();
        if !process.is_trusted(own_uid, owner_uid) {
            return Err(CloudHypervisorError::Foreign {
                path: socket.into(),
                uid: process.uid,
            });
        }
        let vmm = Self(Arc::new(Vmm {
            socket: socket.into(),
            root: root.into(),
            outside: outside.clone(),
            process,
            limits,
            seen: Mutex::new(None),
            told: AtomicU64::new(0),
        }));
        let text = vmm.ask_over(stream, PING, String::new()).await?;
        let ping: Ping =
            serde_json::from_str(&text).map_err(|error| vmm.unknown(PING, &error.to_string()))?;
        // Older versions do not report their process id.
        if let Some(pid) = ping.pid
            && pid != i64::from(process.pid.0)
        {
            return Err(CloudHypervisorError::NotItself {
                path: socket.into(),
                opener: process.pid,
                vmm: pid,
            });
        }
        let info = vmm.info().await?;
        if matches!(info.state, State::Created | State::Shutdown) {
            return Err(vmm.unfit("it does not run; boot it (ch-remote boot)".into()));
        }
        let agent = match info.vsock {
            Some(path) if path.is_relative() => {
                let why =
                    "its vsock socket has a relative path; give --vsock socket= an absolute path";
                return Err(vmm.unfit(why.into()));
            }
            agent => agent.map(|path| AgentSocket {
                path,
                opener: Opener::only(process),
                channel: Channel::Vsock,
            }),
        };
        let look = vmm.look().await?;
        let (tell, events) = mpsc::channel(EVENTS_MAX);
        tokio::spawn(vmm.clone().watch(tell.clone()));
        *vmm.0.seen.lock().await = Some(Seen { look, tell });
        Ok(Connection {
            hypervisor: vmm,
            events: Events::new(events),
            process,
            agent,
        })
    }

    /// Polls until the receiver is dropped or a question fails.
    async fn watch(self, tell: mpsc::Sender<Event>) {
        loop {
            tokio::select! {
                () = tell.closed() => break,
                () = sleep(self.0.limits.look_every) => {}
            }
            if let Err(error) = self.look_again().await {
                tracing::debug!("{error}");
                break;
            }
        }
        *self.0.seen.lock().await = None;
        // Count the end before the last sender is dropped, which ends the events.
        self.0.told.fetch_add(1, Ordering::Relaxed);
        drop(tell);
    }

    /// Sends the changes since the last poll.
    async fn look_again(&self) -> Result<(), CloudHypervisorError> {
        let ended = |why: &str| CloudHypervisorError::Gone {
            vmm: self.name(),
            why: why.into(),
        };
        let mut seen = self.0.seen.lock().await;
        let Seen { look: before, tell } =
            seen.as_mut().ok_or_else(|| ended("polling has ended"))?;
        let now = self.look().await?;
        let reset = (now.memory != before.memory).then_some(Event::Reset);
        // After a reset the VM has other memory files.
        let changed = (now != *before).then_some(Event::Changed);
        for event in reset.into_iter().chain(changed) {
            self.0.told.fetch_add(1, Ordering::Relaxed);
            if tell.try_send(event).is_err() {
                // The lost event may be a reset, so polling must end.
                *seen = None;
                return Err(ended("changes come faster than they are handled"));
            }
        }
        *before = now;
        Ok(())
    }

    async fn look(&self) -> Result<Look, CloudHypervisorError> {
        // Read memory last, so that a reset is reported before later changes.
        let Info { state, devices, .. } = self.info().await?;
        let memory = self.files().await?.iter().map(|of| of.file).collect();
        Ok(Look {
            memory,
            state,
            devices,
        })
    }

    async fn files(&self) -> Result<Vec<NamedFile>, CloudHypervisorError> {
        let (root, pid) = (self.0.root.clone(), self.0.process.pid);
        let asked = self.0.outside.ask("the VMM's maps", move |wait| {
            memory::files(&root, pid, wait)
        });
        let found = asked.await.unwrap_or_else(|stuck| Err(stuck.into()));
        found.map_err(|error| self.unfit(error.to_string()))
    }

    async fn info(&self) -> Result<Info, CloudHypervisorError> {
        let text = self.ask(INFO, String::new()).await?;
        Info::parse(&text).map_err(|what| self.unknown(INFO, &what))
    }

    /// The VM; an error if it has no memory zones.
    async fn zoned(&self) -> Result<Info, CloudHypervisorError> {
        let info = self.info().await?;
        if info.zones.is_empty() {
            let why = "it has no memory zones; start it with --memory size=0 and a --memory-zone \
                       id=..,size=..,shared=on for each tier";
            return Err(self.unfit(why.into()));
        }
        Ok(info)
    }

    async fn ask(
        &self,
        question: &'static str,
        body: String,
    ) -> Result<String, CloudHypervisorError> {
        let (stream, process) = open(&self.0.socket, &self.0.outside, self.0.limits).await?;
        if process != self.0.process {
            return Err(CloudHypervisorError::Gone {
                vmm: self.name(),
                why: format!("process {} listens there now", process.pid),
            });
        }
        self.ask_over(stream, question, body).await
    }

    /// Asks on a thread that may block. The thread ends in time even if its caller stops waiting.
    async fn ask_over(
        &self,
        stream: std::os::unix::net::UnixStream,
        question: &'static str,
        body: String,
    ) -> Result<String, CloudHypervisorError> {
        let limit = self.0.limits.answer;
        let asking = spawn_blocking(move || {
            demeter_http::ask_over(stream, question, &body, limit, ANSWER_BYTES_MAX)
        });
        let answer = asking.await.map_err(|error| CloudHypervisorError::Gone {
            vmm: self.name(),
            why: error.to_string(),
        })?;
        let socket = &self.0.socket;
        answer.map_err(|error| CloudHypervisorError::of_answer(socket, question, limit, error))
    }

    /// The error for an invalid answer. `what` may quote parts of it.
    fn unknown(&self, question: &'static str, what: &str) -> CloudHypervisorError {
        CloudHypervisorError::Answer {
            vmm: self.name(),
            question,
            what: shown(what).chars().take(200).collect(),
        }
    }

    fn unfit(&self, why: String) -> CloudHypervisorError {
        let vmm = self.name();
        CloudHypervisorError::Vm { vmm, why }
    }
}

/// The threads of a process that run virtual CPUs.
fn vcpus(folder: &Path, wait: &MayWait) -> io::Result<Vec<Pid>> {
    let mut threads = vec![];
    for entry in outside::entries_of(folder, THREADS_MAX, wait)? {
        // A thread may end during the search.
        let name = outside::text_of(&entry.join("comm"), wait).unwrap_or_default();
        let number = name.trim().strip_prefix("vcpu").unwrap_or_default();
        let thread = entry
            .file_name()
            .and_then(|name| name.to_str()?.parse().ok());
        if let (true, Some(thread)) = (number.parse::<u32>().is_ok(), thread) {
            threads.push(Pid(thread));
        }
    }
    Ok(threads)
}

/// Connects and identifies the listener.
async fn open(
    socket: &Path,
    outside: &Outside,
    limits: Timeouts,
) -> Result<(std::os::unix::net::UnixStream, PeerProcess), CloudHypervisorError> {
    let connecting = async {
        let stream = outside.connect(socket).await?;
        let process = PeerProcess::of(&stream)?;
        let stream = stream.into_std()?;
        stream.set_nonblocking(false)?;
        Ok((stream, process))
    };
    match timeout(limits.answer, connecting).await {
        Ok(connected) => connected.map_err(|source| CloudHypervisorError::Connect {
            path: socket.into(),
            source,
        }),
        Err(_) => Err(CloudHypervisorError::Silent {
            vmm: at(socket),
            question: "at all",
            after: limits.answer,
        }),
    }
}

impl Hypervisor for CloudHypervisor {
    fn name(&self) -> String {
        at(&self.0.socket)
    }

    async fn backends(&self) -> Result<Vec<MemoryBackend>, HypervisorError> {
        let zones = self.zoned().await?.zones.into_iter();
        let backend = zones.map(|zone| MemoryBackend {
            id: Some(zone.id),
            size: ByteCount(zone.size),
            shared: zone.shared,
        });
        Ok(backend.collect())
    }

    async fn memory_map(&self, backend: &str) -> Result<Vec<Mapping>, HypervisorError> {
        if !cfg!(target_arch = "x86_64") {
            let why = "the layout of its zones is known for x86-64 only";
            return Err(self.unfit(why.into()).into());
        }
        let info = self.zoned().await?;
        let regions = info.regions().map_err(|why| self.unfit(why))?;
        let places =
            memory::places(&regions, &self.files().await?).map_err(|why| self.unfit(why))?;
        let of_zone = regions.iter().zip(places);
        let of_zone = of_zone.filter(|(region, _)| info.zones[region.zone].id == backend);
        Ok(of_zone.map(|(_, mapping)| mapping).collect())
    }

    async fn plugged_memory(&self) -> Result<Vec<Mapping>, HypervisorError> {
        // Zones hold all memory of such a VM, and VMs that can grow are refused.
        Ok(vec![])
    }

    /// Found by their thread names: `vcpu0` and so on (vmm/src/cpu.rs).
    async fn vcpus(&self) -> Result<Vec<Pid>, HypervisorError> {
        let folder = format!("proc/{}/task", self.0.process.pid);
        let folder = self.0.root.join(folder);
        let asked = self
            .0
            .outside
            .ask("the VMM's threads", move |wait| vcpus(&folder, wait));
        let found = asked.await.unwrap_or_else(|stuck| Err(stuck.into()));
        let found = found.map_err(|error| CloudHypervisorError::Gone {
            vmm: self.name(),
            why: format!("cannot read its threads: {error}"),
        });
        Ok(found?)
    }

    async fn pinning_device(&self) -> Result<Option<String>, HypervisorError> {
        Ok(self.info().await?.pinning)
    }

    async fn memory_devices(&self) -> Result<Vec<MemoryDevice>, HypervisorError> {
        let why = "it reports only the requested size of a zone's virtio-mem, not the plugged size; \
                   use provisioner = \"demeter-balloon\"";
        Err(self.unfit(why.into()).into())
    }

    async fn request_size(&self, _device: &str, _size: ByteCount) -> Result<(), HypervisorError> {
        self.memory_devices().await.map(|_| ())
    }

    async fn balloon_size(&self) -> Result<ByteCount, HypervisorError> {
        let actual = self.info().await?.actual;
        Ok(actual.ok_or_else(|| self.unknown(INFO, "no memory_actual_size"))?)
    }

    async fn request_balloon_size(&self, size: ByteCount) -> Result<(), HypervisorError> {
        let zones = self.zoned().await?.zones;
        let whole: u64 = zones.iter().map(|zone| zone.size).sum();
        let body = json!({"desired_balloon": whole.saturating_sub(size.0)});
        self.ask(RESIZE, body.to_string()).await?;
        Ok(())
    }

    fn events_told(&self) -> u64 {
        self.0.told.load(Ordering::Relaxed)
    }

    /// Polls once. A reset or restore before this call has made other memory files, so it is
    /// noticed.
    async fn catch_up(&self) -> Result<(), HypervisorError> {
        Ok(self.look_again().await?)
    }

    fn size_change(&self) -> impl Future<Output = ()> + Send {
        // Cloud Hypervisor does not report it.
        std::future::pending()
    }
}
