//! QEMU as a [`Hypervisor`]: the few commands that we need, with their types (QEMU's
//! qapi/machine.json and qapi/misc.json).

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId, PhysRange, Pid};
use demeter_proto::shown;
use serde::Deserialize;
use serde_json::{Value, json};

use super::connection::{Qemu, QmpError};
use super::mtree;
use crate::hypervisor::{
    HostVirtAddr, Hypervisor, HypervisorError, Mapping, MemoryBackend, MemoryDevice,
};

impl Hypervisor for Qemu {
    fn name(&self) -> String {
        self.which().to_owned()
    }

    async fn backends(&self) -> Result<Vec<MemoryBackend>, HypervisorError> {
        #[derive(Deserialize)]
        struct Memdev {
            id: Option<String>,
            size: u64,
            #[serde(default)]
            share: bool,
        }
        let memdevs: Vec<Memdev> = self.execute("query-memdev", json!({})).await?;
        let backend = |memdev: Memdev| MemoryBackend {
            // The cleaned name is shown in messages. A name that changes here matches no configured
            // one.
            id: memdev.id.as_deref().map(shown),
            size: ByteCount(memdev.size),
            shared: memdev.share,
        };
        Ok(memdevs.into_iter().map(backend).collect())
    }

    async fn memory_map(&self, backend: &str) -> Result<Vec<Mapping>, HypervisorError> {
        let text = self.monitor("info mtree -f").await?;
        let ranges = mtree::parse(&text).map_err(|what| self.unknown(MONITOR, what))?;
        let mut mappings = vec![];
        for ram in ranges {
            // Machine types before 4.0 name the region after the backend's path in QEMU's object
            // tree.
            if ram.region.trim_start_matches("/objects/") != backend {
                continue;
            }
            let host = self.host_address(ram.range.start()).await?;
            let last = GuestPhysAddr(ram.range.end().0 - 1);
            let last = self.host_address(last).await?;
            if last.0.checked_sub(host.0) != Some(ram.range.len().0 - 1) {
                let what = format!("memory backend {backend:?} is mapped in several parts");
                return Err(self.unknown(MONITOR, what).into());
            }
            mappings.push(Mapping {
                guest: ram.range,
                host,
            });
        }
        Ok(mappings)
    }

    async fn plugged_memory(&self) -> Result<Vec<Mapping>, HypervisorError> {
        let mut mappings = vec![];
        for device in self.query_memory_devices().await? {
            let (address, size) = match device.r#type.as_str() {
                "dimm" | "nvdimm" => ("addr", "size"),
                "virtio-mem" => ("memaddr", "max-size"),
                "virtio-pmem" => ("memaddr", "size"),
                // Unknown devices count as memory of no tier.
                _ => continue,
            };
            let figure = |name: &str| device.data[name].as_u64();
            let range = figure(address)
                .zip(figure(size))
                .and_then(|(start, size)| PhysRange::new(GuestPhysAddr(start), ByteCount(size)));
            let guest = range.ok_or_else(|| {
                let what = format!("{} without a place", device.r#type);
                self.unknown(MEMORY_DEVICES, what)
            })?;
            let host = self.host_address(guest.start()).await?;
            mappings.push(Mapping { guest, host });
        }
        Ok(mappings)
    }

    async fn vcpus(&self) -> Result<Vec<Pid>, HypervisorError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct Cpu {
            thread_id: u32,
        }
        let cpus: Vec<Cpu> = self.execute("query-cpus-fast", json!({})).await?;
        Ok(cpus.into_iter().map(|cpu| Pid(cpu.thread_id)).collect())
    }

    async fn pinning_device(&self) -> Result<Option<String>, HypervisorError> {
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
                return Ok(Some(shown(&device.name)));
            }
        }
        Ok(None)
    }

    async fn memory_devices(&self) -> Result<Vec<MemoryDevice>, HypervisorError> {
        #[derive(Deserialize)]
        #[serde(rename_all = "kebab-case")]
        struct VirtioMem {
            id: Option<String>,
            node: u32,
            size: u64,
            requested_size: u64,
            max_size: u64,
            block_size: u64,
        }
        let devices = self.query_memory_devices().await?;
        let of_our_kind = devices.into_iter().filter(|of| of.r#type == "virtio-mem");
        of_our_kind
            .map(|device| {
                let device: VirtioMem = serde_json::from_value(device.data)
                    .map_err(|error| self.unknown(MEMORY_DEVICES, error.to_string()))?;
                Ok(MemoryDevice {
                    id: device.id,
                    node: NodeId(device.node),
                    size: ByteCount(device.size),
                    requested: ByteCount(device.requested_size),
                    max: ByteCount(device.max_size),
                    block: ByteCount(device.block_size),
                })
            })
            .collect()
    }

    async fn request_size(&self, device: &str, size: ByteCount) -> Result<(), HypervisorError> {
        let arguments = json!({
            "path": format!("/machine/peripheral/{device}"),
            "property": "requested-size",
            "value": size.0,
        });
        self.execute::<Value>("qom-set", arguments).await?;
        Ok(())
    }

    async fn balloon_size(&self) -> Result<ByteCount, HypervisorError> {
        #[derive(Deserialize)]
        struct Info {
            actual: u64,
        }
        let info: Info = self.execute("query-balloon", json!({})).await?;
        Ok(ByteCount(info.actual))
    }

    async fn request_balloon_size(&self, size: ByteCount) -> Result<(), HypervisorError> {
        let arguments = json!({"value": size.0});
        self.execute::<Value>("balloon", arguments).await?;
        Ok(())
    }

    fn events_told(&self) -> u64 {
        self.told()
    }

    /// A question that QEMU's main loop answers. The main loop also handles resets, stops, resumes,
    /// loads and migrations, so each of these has finished or not begun. Events and answers leave
    /// through one queue.
    ///
    /// libvirt forwards both on threads of its own and does not promise their order. There, an
    /// event may be late by the time that libvirt's daemon takes to send it.
    async fn catch_up(&self) -> Result<(), HypervisorError> {
        self.execute::<Value>("query-status", json!({})).await?;
        Ok(())
    }

    fn size_change(&self) -> impl Future<Output = ()> + Send {
        self.size_changes().notified()
    }
}

/// One element of the answer to [`MEMORY_DEVICES`].
#[derive(Deserialize)]
struct AnyMemoryDevice {
    r#type: String,
    data: Value,
}

const MEMORY_DEVICES: &str = "query-memory-devices";

impl Qemu {
    async fn query_memory_devices(&self) -> Result<Vec<AnyMemoryDevice>, QmpError> {
        self.execute(MEMORY_DEVICES, json!({})).await
    }

    /// The address at which QEMU has mapped a byte of guest memory.
    async fn host_address(&self, addr: GuestPhysAddr) -> Result<HostVirtAddr, QmpError> {
        let text = self.monitor(&format!("gpa2hva {:#x}", addr.0)).await?;
        // "Host virtual address for 0x0 (node0) is 0x7f2a40000000"
        text.trim()
            .rsplit_once(" is 0x")
            .and_then(|(_, digits)| u64::from_str_radix(digits, 16).ok())
            .map(HostVirtAddr)
            .ok_or_else(|| self.unknown(MONITOR, text.trim().chars().take(80).collect()))
    }

    /// Runs a command of the human monitor: text in, text out.
    async fn monitor(&self, line: &str) -> Result<String, QmpError> {
        let arguments = json!({"command-line": line});
        self.execute(MONITOR, arguments).await
    }
}

const MONITOR: &str = "human-monitor-command";
