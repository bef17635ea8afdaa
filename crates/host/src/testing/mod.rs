//! A VM for tests: a QEMU that behaves, as far as its QMP socket tells, with real memory files that
//! the test's own process has mapped, as QEMU would.

mod guest;

use std::fs::File;
use std::os::fd::{AsRawFd, FromRawFd};
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, MutexGuard};

use demeter_policy::{ByteCount, GuestPhysAddr, MIB, NodeId, PAGE_SIZE, PerTier, Tier, TierBytes};
use demeter_proto::GpaRange;
use serde_json::{Value, json};
use tokio::io::{AsyncBufReadExt, AsyncWriteExt, BufReader};
use tokio::net::{UnixListener, UnixStream};
use tokio::sync::broadcast;

use crate::memory::{FileOffset, MemoryFile};

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

/// A tier's boot memory: a filled memfd, mapped.
#[derive(Debug)]
struct Memory {
    file: File,
    address: u64,
    bytes: u64,
}

impl Memory {
    fn new(bytes: u64) -> Self {
        let file = memfd(bytes);
        for offset in (0..bytes).step_by(MIB as usize) {
            file.write_all_at(&[7; MIB as usize], offset).unwrap();
        }
        // SAFETY: a new shared mapping of a file of ours, at an address of the kernel's choice.
        // Nothing refers to it: it is there to be found in /proc/PID/maps.
        let address = unsafe {
            libc::mmap(
                std::ptr::null_mut(),
                bytes as usize,
                libc::PROT_READ | libc::PROT_WRITE,
                libc::MAP_SHARED,
                file.as_raw_fd(),
                0,
            )
        };
        assert_ne!(address, libc::MAP_FAILED);
        Self {
            file,
            address: address as u64,
            bytes,
        }
    }
}

impl Drop for Memory {
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

/// What a fake VM is made of, and does.
#[derive(Debug)]
pub(crate) struct State {
    boot: PerTier<Memory>,
    devices: PerTier<Device>,
    /// What the virtio balloon was told, and what it has come to.
    balloon_wanted: u64,
    balloon_size: u64,
    balloon_least: u64,
    /// Answers nothing any more.
    pub silent: bool,
    /// Says that its memory is private.
    pub private: bool,
    /// Has a device that pins memory.
    pub pinned: bool,
}

const BLOCK: u64 = 2 * MIB;

/// What a guest takes or leaves between two looks.
const STEP: u64 = 64 * MIB;

/// Where slow memory goes on behind a hole.
const HOLE_END: u64 = 1 << 32;

impl State {
    /// Runs a command, as QEMU would; or says why not.
    fn execute(&mut self, command: &str, arguments: &Value) -> Result<Value, String> {
        match command {
            "qmp_capabilities" => Ok(json!({})),
            "query-memdev" => Ok(json!(["node0", "node1"].map(|id| {
                let bytes = if id == "node0" {
                    &self.boot.fast
                } else {
                    &self.boot.slow
                }
                .bytes;
                json!({"id": id, "size": bytes, "share": !self.private, "policy": "default"})
            }))),
            "query-memory-devices" => {
                let devices = Tier::ALL.map(|tier| {
                    let node = u32::from(tier == Tier::Slow);
                    let device = self.devices.get_mut(tier);
                    let goal = device.requested.max(device.in_use);
                    device.size = nearer(device.size, goal);
                    json!({"type": "virtio-mem", "data": {
                        "id": format!("vm{node}"), "node": node, "size": device.size,
                        "requested-size": device.requested, "max-size": device.max,
                        "block-size": BLOCK, "memaddr": 1u64 << 40, "memdev": "/objects/x",
                    }})
                });
                Ok(json!([{"type": "dimm", "data": {}}, devices[0], devices[1]]))
            }
            "qom-set" => {
                let device = match arguments["path"].as_str() {
                    Some("/machine/peripheral/vm0") => &mut self.devices.fast,
                    Some("/machine/peripheral/vm1") => &mut self.devices.slow,
                    _ => return Err("no such device".into()),
                };
                let value = arguments["value"].as_u64().ok_or("not a size")?;
                if !value.is_multiple_of(BLOCK) || value > device.max {
                    return Err("'requested-size' cannot be that".into());
                }
                device.requested = value;
                Ok(json!({}))
            }
            "balloon" => {
                self.balloon_wanted = arguments["value"].as_u64().ok_or("not a size")?;
                Ok(json!({}))
            }
            "query-balloon" => {
                let size = nearer(
                    self.balloon_size,
                    self.balloon_wanted.max(self.balloon_least),
                );
                if size < self.balloon_size {
                    self.discard(self.balloon_size - size);
                }
                self.balloon_size = size;
                Ok(json!({"actual": size}))
            }
            "qom-list" => Ok(match (self.pinned, arguments["path"].as_str()) {
                (true, Some("/machine/peripheral")) => {
                    json!([{"name": "gpu0", "type": "child<vfio-pci>"}])
                }
                _ => json!([{"name": "type", "type": "string"}]),
            }),
            "human-monitor-command" => {
                self.monitor(arguments["command-line"].as_str().unwrap_or(""))
            }
            _ => Err(format!("The command {command} has not been found")),
        }
    }

    /// Where memory lies: first address, bytes, node, offset in its backend.
    fn pieces(&self) -> [(u64, u64, usize, u64); 3] {
        let (fast, slow) = (self.boot.fast.bytes, self.boot.slow.bytes);
        let low = slow / 2;
        [
            (0, fast, 0, 0),
            (fast, low, 1, 0),
            (HOLE_END, slow - low, 1, low),
        ]
    }

    fn monitor(&self, line: &str) -> Result<Value, String> {
        let mapped = [self.boot.fast.address, self.boot.slow.address];
        let pieces = self.pieces();
        if let Some(address) = line.strip_prefix("gpa2hva 0x") {
            let address = u64::from_str_radix(address, 16).map_err(|_| "not a number")?;
            let piece = pieces.iter().find(|p| (p.0..p.0 + p.1).contains(&address));
            return Ok(json!(piece.map_or(
                "No memory is mapped at address".to_owned(),
                |p| format!(
                    "Host virtual address for {address:#x} (node{}) is {:#x}\r\n",
                    p.2,
                    mapped[p.2] + p.3 + address - p.0
                )
            )));
        }
        let ranges: String = pieces
            .iter()
            .map(|(start, bytes, node, offset)| {
                let last = start + bytes - 1;
                let offset = if *offset == 0 {
                    String::new()
                } else {
                    format!(" @{offset:016x}")
                };
                format!("  {start:016x}-{last:016x} (prio 0, ram): node{node}{offset}\r\n")
            })
            .collect();
        Ok(json!(format!(
            "FlatView #0\r\n AS \"I/O\", root: io\r\n Root memory region: io\r\n  \
             0000000000000000-0000000000000007 (prio 0, i/o): dma-chan\r\n\r\nFlatView #1\r\n \
             AS \"memory\", root: system\r\n Root memory region: system\r\n{ranges}\r\n"
        )))
    }

    /// Takes memory from the guest, as virtio-balloon does: fast memory first, if it so happens.
    fn discard(&self, bytes: u64) {
        let taken = self.boot.fast.bytes + self.boot.slow.bytes - self.balloon_size;
        let mut at = taken;
        let end = taken + bytes;
        while at < end {
            let (memory, offset) = match at.checked_sub(self.boot.fast.bytes) {
                None => (&self.boot.fast, at),
                Some(offset) => (&self.boot.slow, offset),
            };
            let file = MemoryFile::new(memory.file.try_clone().unwrap()).unwrap();
            file.punch(FileOffset(offset), ByteCount(PAGE_SIZE))
                .unwrap();
            at += PAGE_SIZE;
        }
    }
}

/// A step from `now` towards `goal`.
fn nearer(now: u64, goal: u64) -> u64 {
    goal.clamp(now.saturating_sub(STEP), now + STEP)
}

/// A QEMU that listens on a QMP socket for one client at a time.
pub(crate) struct FakeVm {
    folder: tempfile::TempDir,
    state: Arc<Mutex<State>>,
    events: broadcast::Sender<String>,
    server: tokio::task::JoinHandle<()>,
}

impl FakeVm {
    /// A VM with boot memory of `boot` and as much again by virtio-mem.
    pub fn new(boot: TierBytes) -> Self {
        let folder = tempfile::tempdir().unwrap();
        let boot = PerTier::from_fn(|tier| Memory::new(boot.get(tier).0));
        let whole = boot.fast.bytes + boot.slow.bytes;
        let device = |tier| {
            let bytes = match tier {
                Tier::Fast => boot.fast.bytes,
                Tier::Slow => boot.slow.bytes,
            };
            Device {
                size: bytes,
                requested: bytes,
                max: bytes,
                in_use: 0,
            }
        };
        let state = Arc::new(Mutex::new(State {
            devices: PerTier::from_fn(device),
            boot,
            balloon_wanted: whole,
            balloon_size: whole,
            balloon_least: 0,
            silent: false,
            private: false,
            pinned: false,
        }));
        let (events, _) = broadcast::channel(16);
        let listener = UnixListener::bind(folder.path().join("qmp")).unwrap();
        let server = tokio::spawn(serve(listener, state.clone(), events.clone()));
        Self {
            folder,
            state,
            events,
            server,
        }
    }

    pub fn qmp(&self) -> PathBuf {
        self.folder.path().join("qmp")
    }

    pub fn folder(&self) -> &Path {
        self.folder.path()
    }

    pub fn state(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap()
    }

    /// Where its guest's nodes lie.
    pub fn guest_ranges(&self) -> Vec<(NodeId, GpaRange)> {
        let range = |(start, bytes, node, _)| {
            let range = GpaRange {
                start: GuestPhysAddr(start),
                bytes: ByteCount(bytes),
            };
            (NodeId(node as u32), range)
        };
        self.state().pieces().map(range).to_vec()
    }

    /// The names of its memory backends.
    pub fn memdev() -> PerTier<String> {
        PerTier {
            fast: "node0".into(),
            slow: "node1".into(),
        }
    }

    /// A tier's boot memory, to look at.
    pub fn file(&self, tier: Tier) -> File {
        self.state().boot.get(tier).file.try_clone().unwrap()
    }

    /// From now on the guest uses so much of its virtio-mem and would not leave it.
    pub fn use_memory(&self, tier: Tier, bytes: ByteCount) {
        let mut state = self.state();
        state.balloon_least = bytes.0 + state.boot.slow.bytes;
        let boot = state.boot.get(tier).bytes;
        state.devices.get_mut(tier).in_use = bytes.0.saturating_sub(boot);
    }

    /// Tells the client of something.
    pub fn tell(&self, event: &str) {
        self.events.send(event.into()).unwrap();
    }

    /// Ends QEMU; its socket stays, as after a crash.
    pub fn kill(&self) {
        self.server.abort();
    }
}

impl Drop for FakeVm {
    fn drop(&mut self) {
        self.server.abort();
    }
}

async fn serve(
    listener: UnixListener,
    state: Arc<Mutex<State>>,
    events: broadcast::Sender<String>,
) {
    while let Ok((stream, _)) = listener.accept().await {
        // The client may go at any time.
        let _ = speak(stream, &state, events.subscribe()).await;
    }
}

async fn speak(
    stream: UnixStream,
    state: &Mutex<State>,
    mut events: broadcast::Receiver<String>,
) -> std::io::Result<()> {
    let (reader, mut writer) = stream.into_split();
    let mut lines = BufReader::new(reader).lines();
    writer
        .write_all(b"{\"QMP\": {\"version\": {}, \"capabilities\": []}}\r\n")
        .await?;
    loop {
        let said = tokio::select! {
            event = events.recv() => json!({"event": event.unwrap_or_default(), "data": {}}),
            line = lines.next_line() => {
                let Some(line) = line? else { return Ok(()) };
                let command: Value = serde_json::from_str(&line)?;
                let mut state = state.lock().unwrap();
                if state.silent {
                    continue;
                }
                let name = command["execute"].as_str().unwrap_or("");
                match state.execute(name, &command["arguments"]) {
                    Ok(value) => json!({"return": value, "id": command["id"]}),
                    Err(desc) => json!({
                        "error": {"class": "GenericError", "desc": desc}, "id": command["id"],
                    }),
                }
            }
        };
        writer.write_all(format!("{said}\r\n").as_bytes()).await?;
    }
}
