//! A simulated VM: the machine, and a hypervisor reached by function calls.

use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard};

use demeter_policy::{
    ByteCount, GuestPhysAddr, MIB, NodeId, PAGE_SIZE, PerTier, PhysRange, Pid, Tier, TierBytes,
};
use demeter_proto::Nonce;
use tokio::sync::{Notify, watch};

use super::memfd;
use crate::backing::FileOffset;
use crate::hypervisor::{
    Event, HostVirtAddr, Hypervisor, HypervisorError, Mapping, MemoryBackend, MemoryDevice,
};
use crate::memory::MemoryFile;
use crate::outside::MayWait;

/// A tier's boot memory: a filled memfd, mapped.
#[derive(Debug)]
pub(super) struct BootMemory {
    pub(super) file: File,
    address: u64,
    bytes: u64,
}

impl BootMemory {
    fn new(bytes: u64) -> Self {
        let file = memfd(bytes);
        Self::of(file, bytes)
    }

    /// Like `new`, with no page in use yet.
    fn sparse(bytes: u64) -> Self {
        Self::mapped(memfd(bytes), bytes)
    }

    fn of(file: File, bytes: u64) -> Self {
        for offset in (0..bytes).step_by(MIB as usize) {
            file.write_all_at(&[7; MIB as usize], offset).unwrap();
        }
        Self::mapped(file, bytes)
    }

    /// Maps a file without reserving memory.
    fn mapped(file: File, bytes: u64) -> Self {
        // SAFETY: a new shared mapping of a file of ours, at an address of the kernel's choice.
        // Nothing refers to it: it is there to be found in /proc/PID/maps.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED | libc::MAP_NORESERVE,
                file.as_raw_fd(),
                0,
            )
        };
        let error = std::io::Error::last_os_error();
        assert_ne!(address, libc::MAP_FAILED, "{error}");
        Self {
            file,
            address: address as u64,
            bytes,
        }
    }
}

impl BootMemory {
    pub(super) fn bytes(&self) -> u64 {
        self.bytes
    }
}

impl Drop for BootMemory {
    fn drop(&mut self) {
        // SAFETY: unmaps what `new` mapped, to which nothing refers.
        unsafe { libc::munmap(self.address as *mut libc::c_void, self.bytes as usize) };
    }
}

/// A virtio-mem device and its guest.
#[derive(Debug)]
struct Device {
    size: u64,
    requested: u64,
    max: u64,
    in_use: u64,
}

/// State and behaviour of a VM.
#[derive(Debug)]
pub(crate) struct State {
    pub(super) boot: PerTier<BootMemory>,
    devices: PerTier<Device>,
    /// Requested and present size of the virtio balloon.
    balloon_wanted: u64,
    balloon_size: u64,
    balloon_least: u64,
    /// Stops all answers.
    pub silent: bool,
    /// False size that it reports for each of its memories.
    pub claims: Option<ByteCount>,
    /// Reports its memory as private.
    pub private: bool,
    /// Has a device that pins memory.
    pub pinned: bool,
    /// Guest-physical addresses of a DIMM.
    pub dimm: Option<PhysRange>,
    /// A one-time action when QEMU is asked for its status, before the answer.
    pub upon_status: Option<fn(&mut State) -> Event>,
    /// Number of plugged devices of Cloud Hypervisor.
    pub(super) plugged_devices: usize,
    /// Content of its domain's `<metadata>`.
    pub metadata: String,
    /// Content of its domain's `<numatune>`.
    pub numatune: String,
    /// Lays memory out without a hole, like a Cloud Hypervisor VM that ends below 3 GiB.
    pub(super) in_one_run: bool,
}

const BLOCK: u64 = 2 * MIB;

/// Memory that a guest plugs or unplugs between two polls.
const STEP: u64 = 64 * MIB;

/// Address at which slow memory continues above a hole.
const HOLE_END: u64 = 1 << 32;

impl State {
    /// A VM with boot memory of `boot` and the same amount by virtio-mem.
    pub(super) fn new(boot: TierBytes) -> Self {
        Self::of(boot, BootMemory::new)
    }

    /// Like `new`, with no page in use yet.
    pub(super) fn sparse(boot: TierBytes) -> Self {
        Self::of(boot, BootMemory::sparse)
    }

    fn of(boot: TierBytes, memory: fn(u64) -> BootMemory) -> Self {
        let device = |tier| {
            let bytes = boot.get(tier).0;
            Device {
                size: bytes,
                requested: bytes,
                max: bytes,
                in_use: 0,
            }
        };
        let whole = boot.fast.0 + boot.slow.0;
        Self {
            boot: PerTier::from_fn(|tier| memory(boot.get(tier).0)),
            devices: PerTier::from_fn(device),
            balloon_wanted: whole,
            balloon_size: whole,
            balloon_least: 0,
            silent: false,
            claims: None,
            private: false,
            pinned: false,
            dimm: None,
            upon_status: None,
            plugged_devices: 0,
            metadata: String::new(),
            numatune: String::new(),
            in_one_run: false,
        }
    }

    /// Replaces all memory, like Cloud Hypervisor at a reset.
    pub(super) fn renew(&mut self) {
        let fresh = |tier| BootMemory::new(self.boot.get(tier).bytes);
        self.boot = PerTier::from_fn(fresh);
    }

    /// This VM's part of the test's own maps, with Cloud Hypervisor's file names.
    pub(super) fn maps(&self) -> String {
        let maps = std::fs::read_to_string("/proc/self/maps").unwrap();
        let ours = |line: &&str| {
            let starts = |memory: &BootMemory| line.starts_with(&format!("{:x}-", memory.address));
            starts(&self.boot.fast) || starts(&self.boot.slow)
        };
        let named = |line: &str| line.replace("/memfd:demeter-test", "/memfd:ch_ram") + "\n";
        maps.lines().filter(ours).map(named).collect()
    }

    /// Makes a tier's memory read-only for the hypervisor.
    pub fn protect(&mut self, tier: Tier) {
        let memory = self.boot.get(tier);
        let at = memory.address as *mut libc::c_void;
        // SAFETY: what `BootMemory` mapped, which nothing refers to.
        let result = unsafe { libc::mprotect(at, memory.bytes as usize, libc::PROT_READ) };
        assert_eq!(result, 0);
    }

    /// Gives a tier a new file at `path`.
    pub fn replace_file(&mut self, tier: Tier, path: &Path) {
        let file = File::options()
            .read(true)
            .write(true)
            .create_new(true)
            .open(path)
            .unwrap();
        let bytes = self.boot.get(tier).bytes;
        file.set_len(bytes).unwrap();
        *self.boot.get_mut(tier) = BootMemory::of(file, bytes);
    }

    /// Backs a tier by a sparse file.
    pub fn back_by(&mut self, tier: Tier, file: File) {
        let bytes = self.boot.get(tier).bytes;
        file.set_len(bytes).unwrap();
        *self.boot.get_mut(tier) = BootMemory::mapped(file, bytes);
    }

    pub(super) fn use_memory(&mut self, tier: Tier, bytes: ByteCount) {
        self.balloon_least = bytes.0 + self.boot.slow.bytes;
        let boot = self.boot.get(tier).bytes;
        self.devices.get_mut(tier).in_use = bytes.0.saturating_sub(boot);
    }

    pub(super) fn backends(&self) -> Vec<MemoryBackend> {
        let backend = |(id, memory): (&str, &BootMemory)| MemoryBackend {
            id: Some(id.into()),
            size: self.claims.unwrap_or(ByteCount(memory.bytes)),
            shared: !self.private,
        };
        [("node0", &self.boot.fast), ("node1", &self.boot.slow)]
            .map(backend)
            .into()
    }

    /// The layout of memory: node, mapping and offset in its backend.
    pub(super) fn layout(&self) -> [(NodeId, Mapping, FileOffset); 3] {
        let (fast, slow) = (&self.boot.fast, &self.boot.slow);
        let low = slow.bytes / 2;
        let high = match self.in_one_run {
            true => fast.bytes + low,
            false => HOLE_END,
        };
        [
            (0, fast, 0, fast.bytes, 0),
            (1, slow, fast.bytes, low, 0),
            (1, slow, high, slow.bytes - low, low),
        ]
        .map(|(node, memory, start, bytes, offset)| {
            let mapping = Mapping {
                guest: PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)).unwrap(),
                host: HostVirtAddr(memory.address + offset),
            };
            (NodeId(node), mapping, FileOffset(offset))
        })
    }

    /// Address of a tier's memory in the hypervisor's process.
    pub fn host_address(&self, tier: Tier) -> u64 {
        self.boot.get(tier).address
    }

    /// Writes a nonce to the guest's last page in a node, which no test holds.
    pub fn show(&self, node: NodeId, nonce: Nonce) -> Option<GuestPhysAddr> {
        let (_, mapping, offset) = self.layout().into_iter().rfind(|part| part.0 == node)?;
        let memory = self.boot.get(match node {
            NodeId(0) => Tier::Fast,
            _ => Tier::Slow,
        });
        let into = mapping.guest.len().0 - PAGE_SIZE;
        memory.file.write_all_at(&nonce.0, offset.0 + into).unwrap();
        Some(GuestPhysAddr(mapping.guest.start().0 + into))
    }

    pub(super) fn memory_devices(&mut self) -> Vec<MemoryDevice> {
        let device = |tier: Tier| {
            let node = NodeId((tier == Tier::Slow).into());
            let device = self.devices.get_mut(tier);
            let goal = device.requested.max(device.in_use);
            device.size = nearer(device.size, goal);
            MemoryDevice {
                id: Some(format!("vm{node}")),
                node,
                size: ByteCount(device.size),
                requested: ByteCount(device.requested),
                max: ByteCount(device.max),
                block: ByteCount(BLOCK),
            }
        };
        Tier::ALL.map(device).into()
    }

    /// All memory besides boot memory: the devices and the DIMM. It is mapped to the fast tier's
    /// memory.
    pub(super) fn plugged(&self) -> Vec<Mapping> {
        let devices = Tier::ALL
            .map(|tier| PhysRange::new(device_at(tier), ByteCount(self.devices.get(tier).max)));
        let host = HostVirtAddr(self.boot.fast.address);
        let ranges = devices.into_iter().flatten().chain(self.dimm);
        ranges.map(|guest| Mapping { guest, host }).collect()
    }

    pub(super) fn request_size(&mut self, device: &str, size: u64) -> Result<(), String> {
        let device = match device {
            "vm0" => &mut self.devices.fast,
            "vm1" => &mut self.devices.slow,
            _ => return Err("no such device".into()),
        };
        if !size.is_multiple_of(BLOCK) || size > device.max {
            return Err("'requested-size' cannot be that".into());
        }
        device.requested = size;
        Ok(())
    }

    pub(super) fn request_balloon_size(&mut self, size: u64) {
        self.balloon_wanted = size;
    }

    pub(super) fn balloon_size(&mut self) -> u64 {
        let goal = self.balloon_wanted.max(self.balloon_least);
        let size = nearer(self.balloon_size, goal);
        if size < self.balloon_size {
            self.discard(self.balloon_size - size);
        }
        self.balloon_size = size;
        size
    }

    /// Takes memory from the guest like virtio-balloon, fast memory first in this double.
    fn discard(&self, bytes: u64) {
        let wait = &MayWait::in_a_test();
        let taken = self.boot.fast.bytes + self.boot.slow.bytes - self.balloon_size;
        let mut at = taken;
        let end = taken + bytes;
        while at < end {
            let (memory, offset) = match at.checked_sub(self.boot.fast.bytes) {
                None => (&self.boot.fast, at),
                Some(offset) => (&self.boot.slow, offset),
            };
            let file = MemoryFile::new(memory.file.try_clone().unwrap(), wait).unwrap();
            file.punch(FileOffset(offset), ByteCount(PAGE_SIZE), wait)
                .unwrap();
            at += PAGE_SIZE;
        }
    }
}

/// Guest-physical address of a virtio-mem device.
pub(super) fn device_at(tier: Tier) -> GuestPhysAddr {
    GuestPhysAddr((1 << 42) + ((tier as u64) << 41))
}

/// One step from `now` towards `goal`.
fn nearer(now: u64, goal: u64) -> u64 {
    goal.clamp(now.saturating_sub(STEP), now + STEP)
}

/// A hypervisor of a simulated VM.
#[derive(Debug, Clone)]
pub(crate) struct Simulated {
    pub(super) state: Arc<Mutex<State>>,
    pub(super) size_change: Arc<Notify>,
    pub(super) happened: Arc<AtomicU64>,
    pub(super) events_told: watch::Receiver<u64>,
}

impl Simulated {
    fn state(&self) -> Result<MutexGuard<'_, State>, HypervisorError> {
        let state = self.state.lock().unwrap();
        match state.silent {
            true => Err(HypervisorError::Timeout("it says nothing".into())),
            false => Ok(state),
        }
    }
}

impl Hypervisor for Simulated {
    fn name(&self) -> String {
        "the simulated VM".into()
    }

    async fn backends(&self) -> Result<Vec<MemoryBackend>, HypervisorError> {
        Ok(self.state()?.backends())
    }

    async fn memory_map(&self, backend: &str) -> Result<Vec<Mapping>, HypervisorError> {
        let layout = self.state()?.layout().into_iter();
        let of_backend = layout.filter(|(node, ..)| format!("node{node}") == backend);
        Ok(of_backend.map(|(_, mapping, _)| mapping).collect())
    }

    async fn plugged_memory(&self) -> Result<Vec<Mapping>, HypervisorError> {
        Ok(self.state()?.plugged())
    }

    async fn vcpus(&self) -> Result<Vec<Pid>, HypervisorError> {
        self.state().map(|_| vec![Pid(std::process::id())])
    }

    async fn pinning_device(&self) -> Result<Option<String>, HypervisorError> {
        Ok(self.state()?.pinned.then(|| "gpu0".into()))
    }

    async fn memory_devices(&self) -> Result<Vec<MemoryDevice>, HypervisorError> {
        Ok(self.state()?.memory_devices())
    }

    async fn request_size(&self, device: &str, size: ByteCount) -> Result<(), HypervisorError> {
        let result = self.state()?.request_size(device, size.0);
        result.map_err(HypervisorError::Failed)
    }

    async fn balloon_size(&self) -> Result<ByteCount, HypervisorError> {
        Ok(ByteCount(self.state()?.balloon_size()))
    }

    async fn request_balloon_size(&self, size: ByteCount) -> Result<(), HypervisorError> {
        self.state()?.request_balloon_size(size.0);
        Ok(())
    }

    fn events_told(&self) -> u64 {
        *self.events_told.borrow()
    }

    async fn catch_up(&self) -> Result<(), HypervisorError> {
        let happened = self.happened.load(Ordering::Relaxed);
        let mut told = self.events_told.clone();
        let told = told.wait_for(|told| *told >= happened).await;
        told.map(|_| ())
            .map_err(|_| HypervisorError::Gone("it has ended".into()))
    }

    fn size_change(&self) -> impl Future<Output = ()> + Send {
        self.size_change.notified()
    }
}
