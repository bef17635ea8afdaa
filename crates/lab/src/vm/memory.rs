//! Node sizes that leave a scenario's memory to its programs.
//!
//! Measured with Debian's 6.12 cloud kernel between 60 and 3,000 MiB per node. A VM's first report has the actual
//! sizes, which are within 5 % of the request. They are 7 to 12 MiB less if the emulator gives a virtio-serial device
//! long queues, which the guest's driver fills with pages (QEMU 10: 1,024 buffers each, 7.2: 32 and 128).

use std::fs;
use std::path::Path;

use demeter_scenario::Machine;

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

/// Sizes of a VM's nodes, MiB.
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
        let sum = usable[0] + usable[1];
        let watermarks = (sum / USABLE_PER_WATERMARK).min(WATERMARKS_MAX_MIB);
        // Even, so that node 1 begins at a huge page boundary.
        let node = |usable_mib: u64, kernel_mib: u64| {
            let own = usable_mib + kernel_mib + usable_mib / PAGES_PER_DESCRIPTOR_PAGE;
            (own + watermarks * usable_mib / sum).next_multiple_of(2)
        };
        let fast_mib = node(usable[0], KERNEL_MIB + initramfs_mib);
        let mut slow_mib = node(usable[1], KERNEL_SLOW_MIB);
        if fast_mib + slow_mib > ONE_ZONE_MAX_MIB {
            slow_mib += HIGH_MEMORY_MIB;
        }
        Self { fast_mib, slow_mib }
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
