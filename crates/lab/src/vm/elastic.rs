//! Memory devices and sockets that make a VM's memory resizable.

use std::path::{Path, PathBuf};

use demeter_policy::provision::ProvisionerKind;
use demeter_scenario::{Machine, Tier};

use super::memory::{NodeSizes, PLUG_ALIGN_MIB, VmNode};
use super::monitor::own_qmp_socket;
use super::quoted::quoted;

/// Boot memory of each node beside the kernel's own, MiB, for VMs with memory devices. It holds the page descriptors of
/// hotplugged memory.
const BOOT_MIB: [u64; 2] = [64, 32];

/// With less RAM than this, no RAM is above 4 GiB (-machine pc), MiB.
const RAM_LOW_MAX_MIB: u64 = 3584;

/// A VM with resizable memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Elastic {
    /// The mechanism.
    pub provisioner: ProvisionerKind,
    /// Node sizes at boot.
    pub boot: NodeSizes,
    /// Size of the memory device in each node; 0 for none.
    pub plug_mib: u64,
    /// Memory to own: as much as a VM that is booted with the machine's memory.
    pub target: NodeSizes,
}

/// A memory device.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct MemoryDevice {
    /// The node of its memory.
    pub node: usize,
    /// Its maximum size, MiB.
    pub size_mib: u64,
    /// Address of its memory, MiB; the emulator's plugin needs it.
    pub at_mib: u64,
}

impl Elastic {
    /// A VM whose nodes can each hold the machine's whole memory.
    pub fn new(provisioner: ProvisionerKind, machine: &Machine, initramfs_mib: u64) -> Self {
        let target = NodeSizes::of(machine, initramfs_mib);
        let whole_mib = machine.fast.usable_mib + machine.slow.usable_mib;
        let full = NodeSizes::of(&machine_of(machine, [whole_mib; 2]), initramfs_mib);
        if provisioner != ProvisionerKind::VirtioMem {
            return Self {
                provisioner,
                boot: full,
                plug_mib: 0,
                target,
            };
        }
        // Page descriptors: 64 bytes for each page of 4 KiB.
        let described_mib = whole_mib.div_ceil(64);
        let boot = NodeSizes::of(
            &machine_of(machine, BOOT_MIB.map(|mib| mib + described_mib)),
            initramfs_mib,
        );
        let rest_mib = (full.fast_mib.saturating_sub(boot.fast_mib))
            .max(full.slow_mib.saturating_sub(boot.slow_mib));
        Self {
            provisioner,
            boot,
            plug_mib: rest_mib.max(1).next_multiple_of(PLUG_ALIGN_MIB),
            target,
        }
    }

    /// Maximum sizes of the VM's nodes.
    pub fn full(&self) -> NodeSizes {
        NodeSizes {
            fast_mib: self.boot.fast_mib + self.plug_mib,
            slow_mib: self.boot.slow_mib + self.plug_mib,
        }
    }

    /// Its nodes.
    pub fn nodes(&self) -> Vec<VmNode> {
        let node = |ram_mib| VmNode {
            ram_mib,
            plug_mib: self.plug_mib,
        };
        [self.boot.fast_mib, self.boot.slow_mib].map(node).into()
    }

    /// The memory devices, if its memory is hotplugged.
    pub fn memory_devices(&self) -> Vec<MemoryDevice> {
        memory_devices(&self.nodes())
    }

    /// The devices as names and values of QEMU's options. Memory backends must follow those of the nodes. With
    /// `prealloc`, hotplugged memory is backed at once.
    pub fn options(&self, folder: &Path, prealloc: bool) -> Vec<(&'static str, String)> {
        let mut options = vec![control(&qmp_socket(folder))];
        // A second socket for the lab itself.
        options.push(control(&own_qmp_socket(folder)));
        options.extend(agent_port(folder));
        if self.provisioner == ProvisionerKind::VirtioBalloon {
            options.push(("-device", "virtio-balloon-pci,id=balloon0".into()));
        }
        // In node order: the first device's backend comes before the second's.
        for device in self.memory_devices() {
            let MemoryDevice {
                node,
                size_mib,
                at_mib,
            } = device;
            options.push((
                "-object",
                format!("memory-backend-memfd,id=plug{node},size={size_mib}M,share=on"),
            ));
            options.push((
                "-device",
                format!(
                    "virtio-mem-pci,id=vmem{node},memdev=plug{node},node={node},\
                     memaddr={:#x},requested-size={size_mib}M,prealloc={}",
                    at_mib << 20,
                    if prealloc { "on" } else { "off" }
                ),
            ));
        }
        options
    }
}

/// The memory devices of nodes.
pub fn memory_devices(nodes: &[VmNode]) -> Vec<MemoryDevice> {
    let ram_mib: u64 = nodes.iter().map(|node| node.ram_mib).sum();
    let high_mib = match ram_mib < RAM_LOW_MAX_MIB {
        true => 0,
        false => ram_mib - 3072,
    };
    let mut at_mib = 4096 + high_mib.next_multiple_of(1024) + gap_mib(nodes);
    let mut devices = vec![];
    for (node, &VmNode { plug_mib, .. }) in nodes.iter().enumerate() {
        if plug_mib > 0 {
            devices.push(MemoryDevice {
                node,
                size_mib: plug_mib,
                at_mib,
            });
            at_mib += plug_mib;
        }
    }
    devices
}

/// Address space for the memory devices of nodes, MiB: the gap before them and the devices.
pub fn device_space_mib(nodes: &[VmNode]) -> u64 {
    match nodes.iter().map(|node| node.plug_mib).sum() {
        0 => 0,
        mib => gap_mib(nodes) + mib,
    }
}

/// The gap before memory devices, MiB: plugin/memory_model.h says why.
fn gap_mib(nodes: &[VmNode]) -> u64 {
    let ram: Vec<u64> = nodes.iter().map(|node| node.ram_mib).collect();
    let last = ram.iter().rposition(|&mib| mib > 0).unwrap_or(0);
    ram[..last]
        .iter()
        .sum::<u64>()
        .next_multiple_of(PLUG_ALIGN_MIB)
}

/// A kernel module that the VM must load.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Module {
    /// Our own balloon.
    Balloon,
    /// A module of the kernel's package.
    Stock(&'static str),
}

/// The module that the provisioner needs.
pub fn module(provisioner: ProvisionerKind) -> Module {
    match provisioner {
        ProvisionerKind::VirtioBalloon => Module::Stock("drivers/virtio/virtio_balloon"),
        ProvisionerKind::VirtioMem => Module::Stock("drivers/virtio/virtio_mem"),
        ProvisionerKind::DemeterBalloon => Module::Balloon,
    }
}

/// The option for a control socket.
pub fn control(socket: &Path) -> (&'static str, String) {
    ("-qmp", format!("unix:{}", served(socket)))
}

/// The options for the port of the VM's agent, with its socket in `folder`.
pub fn agent_port(folder: &Path) -> [(&'static str, String); 2] {
    let socket = served(&agent_socket(folder));
    [
        ("-chardev", format!("socket,id=agent,path={socket}")),
        (
            "-device",
            "virtserialport,chardev=agent,name=org.demeter.0".into(),
        ),
    ]
}

fn served(socket: &Path) -> String {
    format!("{},server=on,wait=off", quoted(socket))
}

/// The VM's control socket.
pub fn qmp_socket(folder: &Path) -> PathBuf {
    folder.join("qmp.sock")
}

/// The socket of the VM's agent.
pub fn agent_socket(folder: &Path) -> PathBuf {
    folder.join("agent.sock")
}

fn machine_of(machine: &Machine, usable_mib: [u64; 2]) -> Machine {
    let tier = |tier: &Tier, usable_mib| Tier {
        usable_mib,
        ..tier.clone()
    };
    Machine {
        fast: tier(&machine.fast, usable_mib[0]),
        slow: tier(&machine.slow, usable_mib[1]),
        ..machine.clone()
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::super::memory::tests::machine;
    use super::*;

    proptest! {
        /// With any mechanism, each node can hold the machine's whole memory and the target. A VM with hotplugged
        /// memory boots with no more than the target.
        #[test]
        fn each_node_can_hold_all(fast in 100u64..1 << 20, slow in 100u64..1 << 20) {
            for provisioner in [ProvisionerKind::DemeterBalloon, ProvisionerKind::VirtioMem] {
                let elastic = Elastic::new(provisioner, &machine(fast, slow), 30);
                let full = elastic.full();
                prop_assert!(full.fast_mib.min(full.slow_mib) >= fast + slow);
                prop_assert!(elastic.target.fast_mib <= full.fast_mib);
                prop_assert!(elastic.target.slow_mib <= full.slow_mib);
                prop_assert_eq!(elastic.plug_mib % PLUG_ALIGN_MIB, 0);
                prop_assert_eq!(elastic.plug_mib == 0, provisioner != ProvisionerKind::VirtioMem);
            }
        }
    }

    #[test]
    fn memory_devices_lie_where_the_plugin_expects_them() {
        let elastic = Elastic {
            provisioner: ProvisionerKind::VirtioMem,
            boot: NodeSizes {
                fast_mib: 300,
                slow_mib: 1000,
            },
            plug_mib: 256,
            target: NodeSizes::default(),
        };
        // These values match plugin/plugin_test.c: 4 GiB + 384 and + 640 MiB.
        let options = elastic.options(Path::new("/vm"), false);
        let devices: Vec<&String> = options
            .iter()
            .map(|(_, value)| value)
            .filter(|value| value.starts_with("virtio-mem-pci"))
            .collect();
        assert!(devices[0].contains("node=0,memaddr=0x118000000,requested-size=256M"));
        assert!(devices[1].contains("node=1,memaddr=0x128000000,requested-size=256M"));
        assert_eq!(device_space_mib(&elastic.nodes()), 384 + 2 * 256);
    }
}
