//! Parser of `GET /api/v1/vm.info`, and the layout of memory zones that follows from it.
//!
//! The format is vmm/src/api/openapi/cloud-hypervisor.yaml in Cloud Hypervisor's tree, API version
//! 0.3.0.

use std::collections::{BTreeMap, BTreeSet};
use std::path::PathBuf;

use demeter_policy::{ByteCount, GuestPhysAddr, PAGE_SIZE, PhysRange};
use demeter_proto::shown;
use serde::Deserialize;
use serde::de::IgnoredAny;

/// Maximum number of zones; two are needed.
const ZONES_MAX: usize = 64;

/// End of memory below 4 GiB and start of memory above: MEM_32BIT_RESERVED_START and
/// RAM_64BIT_START in arch/src/x86_64/layout.rs.
const LOW_END: u64 = 3 << 30;
const HIGH_START: u64 = 4 << 30;

/// Description of a VM by its Cloud Hypervisor process.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Info {
    /// Whether it runs.
    pub state: State,
    /// Its memory zones, in guest-physical order.
    pub zones: Vec<Zone>,
    /// Memory that the guest has, without the virtio balloon's.
    pub actual: Option<ByteCount>,
    /// Socket of its vsock device, if any.
    pub vsock: Option<PathBuf>,
    /// A device that pins memory, if any.
    pub pinning: Option<String>,
    /// Names of all its devices.
    pub devices: BTreeSet<String>,
}

/// Lifecycle state of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Deserialize)]
pub enum State {
    /// Described, but not started yet.
    Created,
    /// It runs.
    Running,
    /// Shut down.
    Shutdown,
    /// Paused.
    Paused,
    /// A state of a newer version.
    #[serde(other)]
    Other,
}

/// A memory zone.
#[derive(Debug, Clone, PartialEq, Eq, Deserialize)]
pub struct Zone {
    /// Its name.
    pub id: String,
    /// Its size, bytes.
    pub size: u64,
    /// Whether other processes may map it.
    #[serde(default)]
    pub shared: bool,
    #[serde(default)]
    hugepages: bool,
    file: Option<PathBuf>,
    hotplug_size: Option<u64>,
}

/// A contiguous part of a zone's memory, with a file of its own.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// Index of the zone.
    pub zone: usize,
    /// Guest-physical addresses.
    pub guest: PhysRange,
}

#[derive(Deserialize)]
struct Answer {
    config: Config,
    state: State,
    memory_actual_size: Option<u64>,
    #[serde(default)]
    device_tree: Option<BTreeMap<String, IgnoredAny>>,
}

#[derive(Deserialize)]
struct Config {
    memory: Memory,
    vsock: Option<Vsock>,
    /// Passed through by VFIO, by vDPA, and from another process.
    devices: Option<Vec<Device>>,
    vdpa: Option<Vec<Device>>,
    user_devices: Option<Vec<Device>>,
}

#[derive(Deserialize)]
struct Memory {
    zones: Option<Vec<Zone>>,
}

#[derive(Deserialize)]
struct Vsock {
    socket: PathBuf,
}

#[derive(Deserialize)]
struct Device {
    id: Option<String>,
}

impl Info {
    /// Parses an answer. The error describes its fault and may quote parts of it.
    pub fn parse(text: &str) -> Result<Self, String> {
        let answer: Answer = serde_json::from_str(text).map_err(|error| error.to_string())?;
        let Config {
            memory,
            vsock,
            devices,
            vdpa,
            user_devices,
        } = answer.config;
        let mut zones = memory.zones.unwrap_or_default();
        if zones.len() > ZONES_MAX {
            return Err(format!("{} memory zones", zones.len()));
        }
        let mut names = BTreeSet::new();
        let mut sum = 0_u64;
        for zone in &mut zones {
            // The cleaned name is shown in messages. A name that changes here matches no configured
            // one.
            zone.id = shown(&zone.id);
            let whole = zone.size > 0 && zone.size.is_multiple_of(PAGE_SIZE);
            sum = sum
                .checked_add(zone.size)
                .filter(|_| whole)
                .ok_or_else(|| format!("memory zone {:?} of {} bytes", zone.id, zone.size))?;
            if !names.insert(zone.id.clone()) {
                return Err(format!("two memory zones {:?}", zone.id));
            }
        }
        let pinning = [devices, vdpa, user_devices];
        let mut pinning = pinning.into_iter().flatten().flatten();
        let name = |device: Device| device.id.as_deref().map_or("without a name".into(), shown);
        let devices = answer.device_tree.unwrap_or_default();
        Ok(Self {
            state: answer.state,
            zones,
            actual: answer.memory_actual_size.map(ByteCount),
            vsock: vsock.map(|vsock| vsock.socket),
            pinning: pinning.next().map(name),
            devices: devices.into_keys().collect(),
        })
    }

    /// The guest-physical layout of the zones.
    ///
    /// Zones lie end to end from address 0, with a hole from 3 to 4 GiB. A zone that meets the hole
    /// continues above it in a second region (arch_memory_regions in arch/src/x86_64/mod.rs,
    /// create_memory_regions_from_zones in vmm/src/memory_manager.rs). The error is the reason why
    /// the layout is unknown or unreliable.
    pub fn regions(&self) -> Result<Vec<Region>, String> {
        for zone in &self.zones {
            let Zone { id, .. } = zone;
            if zone.hugepages {
                return Err(format!(
                    "memory zone {id:?} has reserved huge pages, and a hole would lose the \
                     reservation; remove hugepages=on"
                ));
            }
            if zone.file.is_some() {
                return Err(format!(
                    "memory zone {id:?} has a file, which a reboot maps again without a notice; \
                     remove file="
                ));
            }
            if zone.hotplug_size.is_some() {
                return Err(format!(
                    "memory zone {id:?} has hotplug_size, whose plugged part is not reported; remove \
                     hotplug_size="
                ));
            }
        }
        let mut regions = vec![];
        let mut at = 0_u64;
        for (zone, Zone { size, .. }) in self.zones.iter().enumerate() {
            let mut left = *size;
            while left > 0 {
                let room = match at {
                    ..LOW_END => LOW_END - at,
                    LOW_END => {
                        at = HIGH_START;
                        continue;
                    }
                    _ => u64::MAX - at,
                };
                let bytes = left.min(room);
                let guest = PhysRange::new(GuestPhysAddr(at), ByteCount(bytes));
                let guest = guest.ok_or("memory beyond all addresses")?;
                regions.push(Region { zone, guest });
                at += bytes;
                left -= bytes;
            }
        }
        Ok(regions)
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::MIB;
    use proptest::prelude::*;
    use serde_json::json;

    use super::*;

    const GIB: u64 = 1 << 30;

    fn info(memory: serde_json::Value) -> Result<Info, String> {
        let config = json!({"memory": memory, "cpus": {"boot_vcpus": 2}, "vsock": {"cid": 3, "socket": "/v"}});
        Info::parse(&json!({"config": config, "state": "Running", "new": [1]}).to_string())
    }

    fn zones(sizes: &[u64]) -> serde_json::Value {
        let zone = |(place, size): (usize, &u64)| json!({"id": format!("z{place}"), "size": size, "shared": true});
        let zones: Vec<_> = sizes.iter().enumerate().map(zone).collect();
        json!({"size": 0, "zones": zones, "thp": true})
    }

    fn places(sizes: &[u64]) -> Vec<(usize, u64, u64)> {
        let regions = info(zones(sizes)).unwrap().regions().unwrap();
        let place = |of: &Region| (of.zone, of.guest.start().0, of.guest.len().0);
        regions.iter().map(place).collect()
    }

    #[test]
    fn zones_follow_each_other_around_the_hole() {
        assert_eq!(places(&[GIB, GIB]), [(0, 0, GIB), (1, GIB, GIB)]);
        assert_eq!(
            places(&[3 * GIB, GIB]),
            [(0, 0, 3 * GIB), (1, 4 * GIB, GIB)]
        );
        assert_eq!(
            places(&[GIB, 4 * GIB, MIB]),
            [
                (0, 0, GIB),
                (1, GIB, 2 * GIB),
                (1, 4 * GIB, 2 * GIB),
                (2, 6 * GIB, MIB)
            ],
            "the example of Cloud Hypervisor's own source, and one more"
        );
    }

    #[test]
    fn what_cannot_be_relied_on_is_refused_with_the_hint() {
        for (key, value) in [
            ("hugepages", json!(true)),
            ("file", json!("/dev/shm/x")),
            ("hotplug_size", json!(MIB)),
        ] {
            let mut memory = zones(&[MIB, MIB]);
            memory["zones"][1][key] = value;
            let said = info(memory).unwrap().regions().unwrap_err();
            assert!(said.contains("\"z1\"") && said.contains(key), "{said}");
        }
        for memory in [
            zones(&[0]),
            zones(&[MIB + 1]),
            zones(&[1 << 63, 1 << 63]),
            zones(&[MIB; ZONES_MAX + 1]),
            json!({"size": 0, "zones": [{"id": "z"}]}),
            json!({"zones": [{"id": "z", "size": MIB}, {"id": "z", "size": MIB}]}),
        ] {
            assert!(info(memory.clone()).is_err(), "{memory}");
        }
        let far = info(zones(&[MIB, u64::MAX - (PAGE_SIZE - 1) - 2 * MIB])).unwrap();
        assert!(far.regions().unwrap_err().contains("beyond"));
        assert_eq!(info(json!({"size": GIB})).unwrap().zones, []);
    }

    proptest! {
        /// Regions are in order, avoid the hole, and are as large as their zones.
        #[test]
        fn nothing_is_lost_around_the_hole(pages in prop::collection::vec(1..2_000_000_u64, 1..8)) {
            let sizes: Vec<u64> = pages.iter().map(|pages| pages * PAGE_SIZE).collect();
            let places = places(&sizes);
            let mut end = 0;
            for &(_, start, bytes) in &places {
                prop_assert!(start == end || (end == LOW_END && start == HIGH_START));
                end = start + bytes;
                prop_assert!(end <= LOW_END || start >= HIGH_START);
            }
            for (zone, size) in sizes.iter().enumerate() {
                let parts = places.iter().filter(|part| part.0 == zone);
                prop_assert_eq!(parts.map(|part| part.2).sum::<u64>(), *size);
            }
        }

        #[test]
        fn any_text_is_survived(text in "\\PC{0,200}") {
            let _ = Info::parse(&text);
        }
    }
}
