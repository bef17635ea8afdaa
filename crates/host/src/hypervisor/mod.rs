//! The seam to hypervisors: the questions and commands that the controller needs.
//!
//! [`qemu`] is reached over its own socket or through [`libvirt`]; [`cloud_hypervisor`] has a REST
//! API. A new hypervisor is a module beside them that makes a [`Connection`] and passes the suite
//! of `conformance.rs`. Code above this module does not depend on the hypervisor's protocol.

pub mod cloud_hypervisor;
#[cfg(test)]
mod conformance;
pub mod libvirt;
pub mod qemu;

use std::path::PathBuf;

use demeter_policy::{ByteCount, NodeId, PhysRange, Pid};
use tokio::sync::mpsc;

use crate::process::{Opener, PeerProcess};

/// A connection to the hypervisor of one VM.
///
/// Clones share the connection, which ends with the last of them. Every call answers in bounded
/// time and describes the machine as it is now; nothing is cached.
pub trait Hypervisor: Clone + Send + Sync + 'static {
    /// Kind and address of the hypervisor, for messages: `QEMU at /run/vm/db.qmp`.
    fn name(&self) -> String;

    /// All memory that the VM was started with.
    fn backends(&self) -> impl Answer<Vec<MemoryBackend>>;

    /// Addresses of a backend's memory in the guest and in the hypervisor's process; empty if the
    /// guest does not map it.
    fn memory_map(&self, backend: &str) -> impl Answer<Vec<Mapping>>;

    /// Memory that was or can be plugged in after the VM's start, of any backend.
    fn plugged_memory(&self) -> impl Answer<Vec<Mapping>>;

    /// The threads that run virtual CPUs.
    fn vcpus(&self) -> impl Answer<Vec<Pid>>;

    /// A device that pins guest memory. It would keep using pages that a hole removed from the
    /// guest.
    fn pinning_device(&self) -> impl Answer<Option<String>>;

    /// All virtio-mem devices.
    fn memory_devices(&self) -> impl Answer<Vec<MemoryDevice>>;

    /// Asks the guest to plug or unplug memory of a device. The device's size shows the progress.
    fn request_size(&self, device: &str, size: ByteCount) -> impl Answer<()>;

    /// The guest's size by virtio-balloon, over all nodes.
    fn balloon_size(&self) -> impl Answer<ByteCount>;

    /// Asks the guest to resize by virtio-balloon, over all nodes.
    fn request_balloon_size(&self, size: ByteCount) -> impl Answer<()>;

    /// Number of events sent to [`Events`] so far, plus one once the connection has ended. No event
    /// follows that end.
    fn events_told(&self) -> u64;

    /// A barrier: waits for a question that changes nothing. When it returns, all events of what
    /// happened before the call have been sent and counted in [`events_told`].
    ///
    /// [`events_told`]: Self::events_told
    fn catch_up(&self) -> impl Answer<()>;

    /// Waits for the next size change of a memory device or the balloon. It may never return, so
    /// callers must also poll the sizes.
    fn size_change(&self) -> impl Future<Output = ()> + Send;
}

/// The future result of a call.
pub trait Answer<T>: Future<Output = Result<T, HypervisorError>> + Send {}

impl<T, F: Future<Output = Result<T, HypervisorError>> + Send> Answer<T> for F {}

/// A new connection. Facts from an earlier connection may be stale.
#[derive(Debug)]
pub struct Connection<H> {
    /// Handle for questions and commands.
    pub hypervisor: H,
    /// Events of the VM.
    pub events: Events,
    /// The process that runs the VM and has its memory.
    pub process: PeerProcess,
    /// The agent's socket, if the hypervisor's manager made it. Otherwise the configuration names
    /// it, and `process` serves it.
    pub agent: Option<AgentSocket>,
}

/// A guest agent's socket and the process that must have opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSocket {
    /// Path of the socket.
    pub path: PathBuf,
    /// The process that must have opened it.
    pub opener: Opener,
    /// The guest's device behind it.
    pub channel: Channel,
}

/// The guest's device behind an agent's socket.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// The guest's virtio-serial port.
    Port,
    /// All of the guest's vsock ports; the client first names one. Firecracker's docs/vsock.md
    /// describes the protocol, and Cloud Hypervisor's docs/vsock.md adopts it.
    Vsock,
}

/// Unsolicited events of a hypervisor, in order.
#[derive(Debug)]
pub struct Events(mpsc::Receiver<Event>);

impl Events {
    /// Wraps a channel whose sender is dropped when the connection ends.
    pub(crate) fn new(events: mpsc::Receiver<Event>) -> Self {
        Self(events)
    }

    /// The next event, or `None` when the connection has ended. Cancel-safe: a dropped call loses
    /// no event.
    pub async fn next(&mut self) -> Option<Event> {
        self.0.recv().await
    }
}

/// An event that concerns a VM's memory. Receivers must ask for the present state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The machine was reset: its memory is as after power-on, and its balloon is empty.
    Reset,
    /// The machine was stopped, resumed or migrated, or a device was added or removed. Place and
    /// content of its memory may have changed.
    Changed,
}

/// A memory backend: memory that a VM was started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBackend {
    /// Its name; some hypervisors have backends without one.
    pub id: Option<String>,
    /// Its size.
    pub size: ByteCount,
    /// Whether other processes may map the same memory.
    pub shared: bool,
}

/// A contiguous range of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// Its guest-physical addresses.
    pub guest: PhysRange,
    /// Address of its first byte in the hypervisor's process; the rest follows contiguously.
    pub host: HostVirtAddr,
}

/// An address in the hypervisor's own address space (hVA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostVirtAddr(pub u64);

/// A virtio-mem device: memory of a node that the guest can plug and unplug.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryDevice {
    /// The device's name; without one it cannot be resized.
    pub id: Option<String>,
    /// The guest's node that its memory belongs to.
    pub node: NodeId,
    /// Memory that the guest has plugged now.
    pub size: ByteCount,
    /// Memory that the guest was asked to plug.
    pub requested: ByteCount,
    /// Maximum size.
    pub max: ByteCount,
    /// Block size; sizes are multiples of it.
    pub block: ByteCount,
}

/// Reason why a hypervisor cannot be used, in its own words for people.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HypervisorError {
    /// No answer came in time.
    #[error("{0}")]
    Timeout(String),
    /// The connection has ended.
    #[error("{0}")]
    Gone(String),
    /// It cannot be connected to, refuses, or sends something invalid.
    #[error("{0}")]
    Failed(String),
}
