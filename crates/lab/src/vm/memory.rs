//! Node sizes that leave a scenario's memory to its programs.
//!
//! Measured with Debian's 6.12 cloud kernel between 60 and 3,000 MiB per node. A VM's first report has the actual
//! sizes, which are within 5 % of the request. They are 7 to 12 MiB less if the emulator gives a virtio-serial device
//! long queues, which the guest's driver fills with pages (QEMU 10: 1,024 buffers each, 7.2: 32 and 128).

use std::fs;
use std::path::Path;

use demeter_scenario::{Machine, MachineNode};

use crate::error::Error;

/// The kernel's image and boot-time allocations. All of it lies in node 0, due to `nokaslr` on the kernel's command
/// line; without it, the node is random.
const KERNEL_MIB: u64 = 58;
/// The kernel's boot-time allocations in node 1.
const KERNEL_SLOW_MIB: u64 = 9;
/// Page descriptors: 64 bytes per page of 4 KiB, 1 in 63 of usable memory.
const PAGES_PER_DESCRIPTOR_PAGE: u64 = 63;
/// khugepaged raises the low watermarks to 5/4 of 5 % of memory, at most [`WATERMARKS_MAX_MIB`]. Relative to usable
/// memory that is 1 in 15.
const USABLE_PER_WATERMARK: u64 = 15;
const WATERMARKS_MAX_MIB: u64 = 83;
/// Above this size, the machine has memory beyond 4 GiB. The kernel then adds bounce buffers (64 MiB) and the
/// watermarks of another zone.
const ONE_ZONE_MAX_MIB: u64 = 3 * 1024;
const HIGH_MEMORY_MIB: u64 = 84;

/// The emulator's own memory.
const EMULATOR_MIB: u64 = 512;

/// Block size in which the kernel adds memory, MiB. Equals PLUG_ALIGN in plugin/memory_model.h.
pub const PLUG_ALIGN_MIB: u64 = 128;

/// One node of a VM, MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct VmNode {
    /// RAM that it is booted with.
    pub ram_mib: u64,
    /// The size of its memory device; 0 for none.
    pub plug_mib: u64,
}

impl VmNode {
    /// Its memory with all of its device.
    pub fn most_mib(&self) -> u64 {
        self.ram_mib + self.plug_mib
    }
}

/// Nodes in which a VM with this initramfs finds the usable memory of a machine of any nodes.
pub fn nodes_of(machine: &Machine, initramfs_mib: u64) -> Vec<VmNode> {
    let nodes = machine.nodes();
    let plug_mib = |node: &MachineNode| match node.is_plugged() {
        true => node.usable_mib.next_multiple_of(PLUG_ALIGN_MIB),
        false => 0,
    };
    let plugged_mib: u64 = nodes.iter().map(plug_mib).sum();
    let has_ram = |node: &&MachineNode| node.usable_mib > 0 && !node.is_plugged();
    let usable: Vec<u64> = nodes
        .iter()
        .filter(has_ram)
        .map(|node| node.usable_mib)
        .collect();
    // The first node describes what is plugged in, too.
    let first_mib = initramfs_mib + plugged_mib.div_ceil(PAGES_PER_DESCRIPTOR_PAGE);
    let mut ram = ram_with_usable(&usable, first_mib).into_iter();
    let node = |node: &MachineNode| VmNode {
        ram_mib: has_ram(&node).then(|| ram.next()).flatten().unwrap_or(0),
        plug_mib: plug_mib(node),
    };
    nodes.iter().map(node).collect()
}

/// RAM of nodes whose usable memory this is. Not all are 0.
fn ram_with_usable(usable: &[u64], initramfs_mib: u64) -> Vec<u64> {
    let sum: u64 = usable.iter().sum();
    let watermarks = (sum / USABLE_PER_WATERMARK).min(WATERMARKS_MAX_MIB);
    // Even, so that each node begins at a boundary of huge pages.
    let node = |(number, usable_mib): (usize, &u64)| {
        let kernel_mib = match number {
            0 => KERNEL_MIB + initramfs_mib,
            _ => KERNEL_SLOW_MIB,
        };
        let own = usable_mib + kernel_mib + usable_mib / PAGES_PER_DESCRIPTOR_PAGE;
        (own + watermarks * usable_mib / sum).next_multiple_of(2)
    };
    let mut ram: Vec<u64> = usable.iter().enumerate().map(node).collect();
    if ram.iter().sum::<u64>() > ONE_ZONE_MAX_MIB
        && let Some(last) = ram.last_mut()
    {
        *last += HIGH_MEMORY_MIB;
    }
    ram
}

/// Sizes of a VM's two nodes, MiB.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSizes {
    /// Node 0.
    pub fast_mib: u64,
    /// Node 1.
    pub slow_mib: u64,
}

impl NodeSizes {
    /// Node sizes that leave the machine's usable memory to programs, with this initramfs.
    pub fn of(machine: &Machine, initramfs_mib: u64) -> Self {
        let usable = [machine.fast.usable_mib, machine.slow.usable_mib];
        Self::with_usable(usable, initramfs_mib)
    }

    /// Node sizes that leave this much memory to programs, with this initramfs. A node without memory for programs has
    /// size 0.
    pub fn with_usable(usable: [u64; 2], initramfs_mib: u64) -> Self {
        let ram = ram_with_usable(&usable, initramfs_mib);
        Self {
            fast_mib: ram[0],
            slow_mib: ram[1],
        }
    }

    /// The sizes of nodes that have memory, bytes.
    pub fn bytes(self) -> Vec<u64> {
        let mib = [self.fast_mib, self.slow_mib].into_iter();
        mib.filter(|&mib| mib > 0).map(|mib| mib << 20).collect()
    }
}

/// Fails if this machine has too little memory for a VM of this size. It reads MemAvailable of /proc/meminfo below
/// `root`.
pub fn check_host(root: &Path, vm_mib: u64) -> Result<(), Error> {
    let need_mib = vm_mib + EMULATOR_MIB;
    let path = root.join("proc/meminfo");
    let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let available_kib: Option<u64> = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    match available_kib.map(|kib| kib / 1024) {
        Some(have_mib) if have_mib < need_mib => Err(Error::Memory { need_mib, have_mib }),
        _ => Ok(()),
    }
}

#[cfg(test)]
pub(super) mod tests {
    use demeter_scenario::{MachinePlace, Thp, Tier};
    use proptest::prelude::*;

    use super::*;

    /// A machine with this much memory in its tiers.
    pub(in crate::vm) fn machine(fast_mib: u64, slow_mib: u64) -> Machine {
        let tier = |usable_mib| Tier {
            usable_mib,
            latency_ns: 1,
            bandwidth_gbps: 1,
        };
        Machine {
            place: MachinePlace::Guest,
            vcpus: 1,
            thp: Thp::Always,
            fast: tier(fast_mib),
            slow: tier(slow_mib),
            hmat: true,
            node: vec![],
        }
    }

    proptest! {
        /// For any scenario, a node holds the requested memory without mostly being overhead.
        #[test]
        fn nodes_hold_what_was_asked_for(fast in 1u64..1 << 24, slow in 1u64..1 << 24) {
            let sizes = NodeSizes::of(&machine(fast, slow), 30);
            prop_assert!(sizes.fast_mib >= fast + KERNEL_MIB + 30);
            prop_assert!(sizes.slow_mib > slow);
            prop_assert!(sizes.fast_mib + sizes.slow_mib <= (fast + slow) * 51 / 50 + 300);
            prop_assert_eq!((sizes.fast_mib % 2, sizes.slow_mib % 2), (0, 0));
        }
    }

    #[test]
    fn a_scenario_larger_than_the_machine_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        let meminfo = "MemTotal: 8192000 kB\nMemAvailable:    2097152 kB\n";
        fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
        check_host(root.path(), 1536).unwrap();
        let said = check_host(root.path(), 1538).unwrap_err().to_string();
        assert!(
            said.contains("2050 MiB") && said.contains("2048 MiB"),
            "{said}"
        );
    }
}
