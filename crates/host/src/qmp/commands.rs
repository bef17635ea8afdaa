//! The few commands we need, with their types (QEMU's qapi/machine.json and qapi/misc.json).

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId};
use serde::Deserialize;
use serde_json::{Value, json};

use super::connection::{Qmp, QmpError};
use super::mtree::{self, RamRange};

/// A memory backend: what `-object memory-backend-*` made.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct MemoryBackend {
    /// Its name; QEMU's own ones have none.
    pub id: Option<String>,
    /// Its size in bytes.
    pub size: u64,
    /// Whether other processes may map the same memory.
    #[serde(default)]
    pub share: bool,
}

/// A virtio-mem device: memory of a node that its guest can be asked to take or to leave.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub struct VirtioMem {
    /// The device's name; without one it cannot be told to resize.
    pub id: Option<String>,
    /// The guest's node that its memory belongs to.
    pub node: u32,
    /// Bytes that the guest has of it now.
    pub size: u64,
    /// Bytes that it was asked to have.
    pub requested_size: u64,
    /// The most it can have, bytes.
    pub max_size: u64,
    /// Sizes are multiples of so many bytes.
    pub block_size: u64,
}

impl VirtioMem {
    /// The guest's node.
    pub fn node(&self) -> NodeId {
        NodeId(self.node)
    }
}

/// An address in QEMU's own address space (hVA).
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct HostVirtAddr(pub u64);

impl Qmp {
    /// All memory backends (`query-memdev`).
    pub async fn memory_backends(&self) -> Result<Vec<MemoryBackend>, QmpError> {
        self.execute("query-memdev", json!({})).await
    }

    /// All virtio-mem devices (`query-memory-devices`).
    pub async fn virtio_mems(&self) -> Result<Vec<VirtioMem>, QmpError> {
        const COMMAND: &str = "query-memory-devices";
        #[derive(Deserialize)]
        struct Device {
            r#type: String,
            data: Value,
        }
        let devices: Vec<Device> = self.execute(COMMAND, json!({})).await?;
        devices
            .into_iter()
            .filter(|device| device.r#type == "virtio-mem")
            .map(|device| {
                serde_json::from_value(device.data)
                    .map_err(|error| self.unknown(COMMAND, error.to_string()))
            })
            .collect()
    }

    /// Asks the guest to take or to leave memory of a virtio-mem device. How far it has come, the
    /// device's size tells later.
    pub async fn request_size(&self, device: &str, bytes: ByteCount) -> Result<(), QmpError> {
        let arguments = json!({
            "path": format!("/machine/peripheral/{device}"),
            "property": "requested-size",
            "value": bytes.0,
        });
        self.execute::<Value>("qom-set", arguments).await.map(drop)
    }

    /// Asks the guest to make itself so large, over all nodes, by virtio-balloon.
    pub async fn balloon(&self, bytes: ByteCount) -> Result<(), QmpError> {
        let arguments = json!({"value": bytes.0});
        self.execute::<Value>("balloon", arguments).await.map(drop)
    }

    /// How large the guest is by virtio-balloon.
    pub async fn balloon_size(&self) -> Result<ByteCount, QmpError> {
        #[derive(Deserialize)]
        struct Info {
            actual: u64,
        }
        let info: Info = self.execute("query-balloon", json!({})).await?;
        Ok(ByteCount(info.actual))
    }

    /// Where memory lies for the guest.
    pub async fn ram_ranges(&self) -> Result<Vec<RamRange>, QmpError> {
        let text = self.monitor("info mtree -f").await?;
        mtree::parse(&text).map_err(|what| self.unknown(MONITOR, what))
    }

    /// Where QEMU has mapped a byte of guest memory.
    pub async fn host_address(&self, addr: GuestPhysAddr) -> Result<HostVirtAddr, QmpError> {
        let text = self.monitor(&format!("gpa2hva {:#x}", addr.0)).await?;
        // "Host virtual address for 0x0 (node0) is 0x7f2a40000000"
        text.trim()
            .rsplit_once(" is 0x")
            .and_then(|(_, digits)| u64::from_str_radix(digits, 16).ok())
            .map(HostVirtAddr)
            .ok_or_else(|| self.unknown(MONITOR, text.trim().chars().take(80).collect()))
    }

    /// A device of this VM that keeps guest memory pinned, so that a hole punched into the memory
    /// file would leave the device with pages that the guest no longer has.
    pub async fn pinning_device(&self) -> Result<Option<String>, QmpError> {
        #[derive(Deserialize)]
        struct Property {
            name: String,
            r#type: String,
        }
        for folder in ["/machine/peripheral", "/machine/peripheral-anon"] {
            let devices: Vec<Property> = self.execute("qom-list", json!({"path": folder})).await?;
            let pins = |device: &Property| {
                let kind = device.r#type.as_str();
                kind.starts_with("child<vfio-") || kind.starts_with("child<vhost-vdpa")
            };
            if let Some(device) = devices.into_iter().find(pins) {
                return Ok(Some(device.name));
            }
        }
        Ok(None)
    }

    /// A command of the monitor for people: text in, text out.
    async fn monitor(&self, line: &str) -> Result<String, QmpError> {
        let arguments = json!({"command-line": line});
        self.execute(MONITOR, arguments).await
    }
}

const MONITOR: &str = "human-monitor-command";
