//! The seam to hypervisors: what the controller needs of the process that runs a VM.
//!
//! [`qemu`] is reached over a socket of its own or by way of [`libvirt`]; [`cloud_hypervisor`] has a REST API.
//! Another one is a module beside them that makes a [`Connection`] and passes the suite of `conformance.rs`. Nothing above this module knows how a
//! hypervisor is spoken to.

pub mod cloud_hypervisor;
#[cfg(test)]
mod conformance;
pub mod libvirt;
pub mod qemu;

use std::path::PathBuf;

use demeter_policy::{ByteCount, NodeId, PhysRange, Pid};
use tokio::sync::mpsc;

use crate::process::{Opener, PeerProcess};

/// A way to speak with the hypervisor of one VM. Clones share the connection, which ends with the
/// last of them. Every call answers in bounded time.
///
/// Its answers are about the machine as it is now: nothing is remembered.
pub trait Hypervisor: Clone + Send + Sync + 'static {
    /// What it is and where, for messages: `QEMU at /run/vm/db.qmp`.
    fn name(&self) -> String;

    /// All memory that the VM was started with.
    fn backends(&self) -> impl Answer<Vec<MemoryBackend>>;

    /// Where the memory of a backend lies, for the guest and in the hypervisor's process; empty
    /// where the guest has it nowhere.
    fn memory_map(&self, backend: &str) -> impl Answer<Vec<Mapping>>;

    /// Memory that was plugged in after the VM was started, or can be, whatever its backend is.
    fn plugged_memory(&self) -> impl Answer<Vec<Mapping>>;

    /// The threads that run virtual CPUs.
    fn vcpus(&self) -> impl Answer<Vec<Pid>>;

    /// A device that keeps guest memory pinned: where a hole is punched into the memory file, it
    /// would go on with pages that the guest no longer has.
    fn pinning_device(&self) -> impl Answer<Option<String>>;

    /// All virtio-mem devices.
    fn memory_devices(&self) -> impl Answer<Vec<MemoryDevice>>;

    /// Asks the guest to take or to leave memory of a device. How far it has come, the device's
    /// size tells later.
    fn request_size(&self, device: &str, size: ByteCount) -> impl Answer<()>;

    /// How large the guest is by virtio-balloon, over all nodes.
    fn balloon_size(&self) -> impl Answer<ByteCount>;

    /// Asks the guest to make itself so large, over all nodes, by virtio-balloon.
    fn request_balloon_size(&self, size: ByteCount) -> impl Answer<()>;

    /// How many events it has told so far, which [`Events`] gives or has given; one more once the
    /// connection has ended, after which nothing is told.
    fn events_told(&self) -> u64;

    /// Asks something that changes nothing, for the order of what is said: once this has answered, all
    /// events of what happened before it was called are told, and counted in [`events_told`].
    ///
    /// [`events_told`]: Self::events_told
    fn catch_up(&self) -> impl Answer<()>;

    /// Waits until a memory device or the balloon changes its size, from the moment of this call
    /// on. May never end: sizes are to be looked at now and then as well.
    fn size_change(&self) -> impl Future<Output = ()> + Send;
}

/// A call's result, later.
pub trait Answer<T>: Future<Output = Result<T, HypervisorError>> + Send {}

impl<T, F: Future<Output = Result<T, HypervisorError>> + Send> Answer<T> for F {}

/// A fresh connection. What was known of the one before it may no longer hold.
#[derive(Debug)]
pub struct Connection<H> {
    /// For questions.
    pub hypervisor: H,
    /// What happens in the VM.
    pub events: Events,
    /// The process that runs the VM and has its memory.
    pub process: PeerProcess,
    /// The agent's socket, where whoever manages the hypervisor has made it; else the configuration
    /// names it, and `process` serves it.
    pub agent: Option<AgentSocket>,
}

/// A guest agent's socket, and who must have opened it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct AgentSocket {
    /// Where it is.
    pub path: PathBuf,
    /// Who opened it.
    pub opener: Opener,
    /// What it leads to.
    pub channel: Channel,
}

/// What an agent's socket leads to.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Channel {
    /// The guest's virtio-serial port.
    Port,
    /// All of the guest's vsock ports: which one is meant is said first. Firecracker's docs/vsock.md
    /// describes it, Cloud Hypervisor's docs/vsock.md takes it over.
    Vsock,
}

/// What a hypervisor tells by itself, in order.
#[derive(Debug)]
pub struct Events(mpsc::Receiver<Event>);

impl Events {
    /// What comes out of `events`; its other end is dropped when the connection ends.
    pub(crate) fn new(events: mpsc::Receiver<Event>) -> Self {
        Self(events)
    }

    /// The next one, or `None` when the connection has ended. May be dropped and called again
    /// without losing one.
    pub async fn next(&mut self) -> Option<Event> {
        self.0.recv().await
    }
}

/// What happens in a VM, as far as its memory is concerned. Whoever hears of it asks for the
/// present state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Event {
    /// The machine was reset: its memory is as after power-on, and its balloon is empty.
    Reset,
    /// The machine was stopped, goes on, is migrated, or got or lost a device: where its memory lies
    /// and what is in it may have changed.
    Changed,
}

/// Memory that a VM was started with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryBackend {
    /// Its name; the hypervisor's own ones may have none.
    pub id: Option<String>,
    /// Its size.
    pub size: ByteCount,
    /// Whether other processes may map the same memory.
    pub shared: bool,
}

/// A run of guest memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Mapping {
    /// Where the guest has it.
    pub guest: PhysRange,
    /// Where its first byte lies in the hypervisor's process; the others follow.
    pub host: HostVirtAddr,
}

/// An address in the hypervisor's own address space (hVA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostVirtAddr(pub u64);

/// A virtio-mem device: memory of a node that its guest can be asked to take or to leave.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct MemoryDevice {
    /// The device's name; without one it cannot be told to resize.
    pub id: Option<String>,
    /// The guest's node that its memory belongs to.
    pub node: NodeId,
    /// What the guest has of it now.
    pub size: ByteCount,
    /// What it was asked to have.
    pub requested: ByteCount,
    /// The most it can have.
    pub max: ByteCount,
    /// Sizes are multiples of this.
    pub block: ByteCount,
}

/// Why a hypervisor cannot be talked to, or does not do as told. Its own words, for a person.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum HypervisorError {
    /// Nothing is said in time.
    #[error("{0}")]
    Timeout(String),
    /// The connection has ended.
    #[error("{0}")]
    Gone(String),
    /// It cannot be connected to, refuses, or says what makes no sense.
    #[error("{0}")]
    Failed(String),
}
