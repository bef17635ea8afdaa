//! The emulator's command line.

use std::path::{Path, PathBuf};
use std::process::Command;

use demeter_scenario::{
    Clock, Geometry, Machine, MachineNode, MachinePlace, SamplingUnit, TlbSizes,
};

use super::counts::SHARED;
use super::elastic::{Elastic, MemoryDevice, device_space_mib, memory_devices};
use super::memory::VmNode;
use super::monitor::{DIMM_MIB, DIMM_SLOTS};
use super::quoted::quoted;
use crate::link::PORT_NAME;

/// Size of the plugin's shared memory: DEMETER_SHARED_BYTES in plugin/shared_page.h.
const SHARED_MIB: u64 = 4;

/// The kernel's arguments. An oops panics, since a damaged kernel could hang, and a panic ends the VM, due to
/// `-no-reboot`. `nokaslr` keeps the kernel in one node. `init_on_alloc=0` is set because Debian's kernels clear every
/// allocated page, even those that a balloon takes and returns unread. `no_timer_check` is set because on a busy host
/// the emulated timer looks broken. `perf_cpu_time_max_percent=0` is set because the kernel would count the host's other
/// work as the cost of a sample, and throttle sampling. `pti=off` is set for CPUs of Intel: Ice Lake needs no second page
/// table, but the emulated one cannot say so. The argument of the init process follows `--`.
pub const KERNEL_ARGS: &str = "console=ttyS0 loglevel=5 oops=panic panic=-1 nokaslr init_on_alloc=0 \
                           no_timer_check pti=off sysctl.kernel.perf_cpu_time_max_percent=0 \
                           rdinit=/bin/demeter -- lab-init";

/// More arguments for a VM with memory devices. Memory comes online as movable, since the kernel's own allocations could
/// never go offline. Addresses above 4 GiB would have the kernel take 64 MiB of a node for bounce buffers.
const PLUGGED_ARGS: &str = "memhp_default_state=online_movable swiotlb=noforce";

/// The CPU model, without "enhanced rep movsb": with it, the kernel copies and clears pages byte by byte, which takes
/// four times as long under the emulator.
pub const CPU: &str = "qemu64";

/// The emulator's longest instruction: 2^10 ns.
const ICOUNT_SHIFT_MAX: u32 = 10;

/// The parts of a VM.
#[derive(Debug)]
pub struct Parts<'a> {
    /// The emulator.
    pub qemu: &'a Path,
    /// Its plugin.
    pub plugin: &'a Path,
    /// The kernel's image.
    pub kernel: &'a Path,
    /// The initial file system.
    pub initramfs: &'a Path,
    /// The scenario's machine.
    pub machine: &'a Machine,
    /// More properties of its CPUs.
    pub cpu_properties: &'a [String],
    /// Factor by which slow memory's delay is stretched.
    pub dilation: u64,
    /// Its clock.
    pub clock: Clock,
    /// The TLBs that the plugin models, if the emulator leaves accessed bits to it.
    pub tlb: TlbSizes,
    /// Sizes of the nodes.
    pub nodes: &'a [VmNode],
    /// Resize parameters, if its memory is resizable.
    pub elastic: Option<&'a Elastic>,
    /// Whether all its memory is backed from the start.
    pub prealloc: bool,
    /// Whether it has events: a reset then restarts it instead of ending it, and DIMMs can be plugged.
    pub has_events: bool,
    /// The VM's private folder on the host.
    pub folder: &'a Path,
}

impl Parts<'_> {
    /// Path of the console's log.
    pub fn console_log(&self) -> PathBuf {
        self.folder.join("console.log")
    }

    /// Path of the emulator's output.
    pub fn output_log(&self) -> PathBuf {
        self.folder.join("qemu.log")
    }

    /// The command line. The link is the child's standard input, a connected socket.
    pub fn command(&self) -> Command {
        let mut command = Command::new(self.qemu);
        let mut option = |name: &str, value: String| {
            command.arg(name).arg(value);
        };
        self.processors(&mut option);
        self.memory(&mut option);
        option("-kernel", self.kernel.display().to_string());
        option("-initrd", self.initramfs.display().to_string());
        option(
            "-append",
            match self.dimms().is_empty() {
                true => KERNEL_ARGS.into(),
                false => format!("{PLUGGED_ARGS} {KERNEL_ARGS}"),
            },
        );
        self.ports(&mut option);
        let elastic = self.elastic;
        for (name, value) in elastic.map_or(vec![], |e| e.options(self.folder, self.prealloc)) {
            option(name, value);
        }
        for (name, value) in self.tiers() {
            option(name, value);
        }
        option("-display", "none".into());
        command.args(["-nodefaults", "-no-user-config"]);
        if !self.has_events {
            command.arg("-no-reboot");
        }
        command
    }

    /// The machine's type, clock and CPUs.
    fn processors(&self, option: &mut dyn FnMut(&str, String)) {
        let Machine { place, vcpus, .. } = self.machine;
        let hmat = if self.machine.hmat { ",hmat=on" } else { "" };
        option("-machine", format!("pc{hmat}"));
        let is_model = self.clock == Clock::Model;
        let thread = if is_model { "single" } else { "multi" };
        option("-accel", format!("tcg,thread={thread}"));
        if is_model {
            for (name, value) in model_clock(self.dilation) {
                option(name, value);
            }
        }
        // A host VM has AMD's nested paging, which this emulator supports on any machine.
        let mut cpu = match place {
            MachinePlace::Guest => CPU.into(),
            MachinePlace::Host => format!("{CPU},+svm,+npt"),
        };
        for property in self.cpu_properties {
            cpu = format!("{cpu},{property}");
        }
        option("-cpu", cpu);
        option(
            "-smp",
            match self.machine.sockets() {
                1 => vcpus.to_string(),
                sockets => format!(
                    "{vcpus},sockets={sockets},cores={},threads=1",
                    vcpus / sockets
                ),
            },
        );
    }

    /// Memory devices that a guest finds at its boot, beside its RAM.
    fn dimms(&self) -> Vec<MemoryDevice> {
        match self.elastic {
            Some(_) => vec![],
            None => memory_devices(self.nodes),
        }
    }

    /// RAM, nodes and memory devices.
    fn memory(&self, option: &mut dyn FnMut(&str, String)) {
        let ram_mib: u64 = self.nodes.iter().map(|node| node.ram_mib).sum();
        let dimms = self.dimms();
        let slots = if self.has_events {
            DIMM_SLOTS
        } else {
            dimms.len()
        };
        let device_mib = device_space_mib(self.nodes);
        let more_mib = if self.has_events {
            DIMM_SLOTS as u64 * DIMM_MIB
        } else {
            0
        };
        let devices = match device_mib + more_mib {
            0 => String::new(),
            mib => format!(",maxmem={}M,slots={slots}", ram_mib + mib),
        };
        option("-m", format!("{ram_mib}M{devices}"));
        let prealloc = if self.prealloc { ",prealloc=on" } else { "" };
        let with_ram = (0..).zip(self.nodes).filter(|(_, node)| node.ram_mib > 0);
        for (node, VmNode { ram_mib, .. }) in with_ram {
            option(
                "-object",
                format!("memory-backend-memfd,id=node{node},size={ram_mib}M,share=on{prealloc}"),
            );
        }
        for (name, value) in numa(self.machine) {
            option(name, value);
        }
        for dimm in &dimms {
            let (node, size_mib) = (dimm.node, dimm.size_mib);
            option(
                "-object",
                format!("memory-backend-memfd,id=plug{node},size={size_mib}M,share=on{prealloc}"),
            );
            option(
                "-device",
                format!(
                    "pc-dimm,id=dimm{node},memdev=plug{node},node={node},addr={:#x}",
                    dimm.at_mib << 20
                ),
            );
        }
    }

    /// The console, and the link to the lab.
    fn ports(&self, option: &mut dyn FnMut(&str, String)) {
        let is_model = self.clock == Clock::Model;
        // Appended to, so that a restarted VM continues in the same log.
        let console = format!(
            "file,id=console,append=on,path={}",
            quoted(&self.console_log())
        );
        option("-chardev", console);
        option("-serial", "chardev:console".into());
        // Another thread would take what the guest writes, and interrupt it at a time of the host's.
        let by_vcpu = if is_model { ",ioeventfd=off" } else { "" };
        option("-device", format!("virtio-serial-pci{by_vcpu}"));
        option("-chardev", "socket,id=link,fd=0".into());
        option(
            "-device",
            format!("virtserialport,chardev=link,name={PORT_NAME}"),
        );
    }

    /// The options for tiers and samples: the plugin, and the memory that it shares with the guest and the lab.
    pub fn tiers(&self) -> [(&'static str, String); 3] {
        let shared = self.folder.join(SHARED);
        let node = |(vm, node): (&VmNode, MachineNode)| {
            let figures = node.latency_ns.iter().zip(&node.bandwidth_gbps);
            let figures: String = figures.map(|(ns, gbps)| format!(":{ns}:{gbps}")).collect();
            format!("node={}:{}{figures},", vm.ram_mib, vm.plug_mib)
        };
        let nodes: String = self
            .nodes
            .iter()
            .zip(self.machine.nodes())
            .map(node)
            .collect();
        let plugin = format!(
            "file={},shm={},{nodes}dilation={},tlb={}",
            quoted(self.plugin),
            quoted(&shared),
            self.dilation,
            tlb(&self.tlb)
        );
        let memory = format!(
            "memory-backend-file,id=shared,mem-path={},size={SHARED_MIB}M,share=on",
            quoted(&shared)
        );
        // The guest must be its master, otherwise the VM could not be migrated. The device is given as JSON, as libvirt
        // does. QEMU creates other devices first, which would take the slot that libvirt assigns.
        let device = r#"{"driver":"ivshmem-plain","memdev":"shared","master":"on"}"#.into();
        [
            ("-plugin", plugin),
            ("-object", memory),
            ("-device", device),
        ]
    }
}

/// TLBs as the plugin reads them.
fn tlb(sizes: &TlbSizes) -> String {
    let arrays = [sizes.l1_4k, sizes.l1_2m, sizes.l1_1g, sizes.l2, sizes.l2_1g];
    let arrays = arrays.map(|Geometry { sets, ways }| format!("{sets}:{ways}"));
    format!("{}:{}", arrays.join(":"), u8::from(sizes.is_l2_4k_only))
}

/// The options that make nodes of the memory backends `node0`, `node1` and so on.
pub fn numa(machine: &Machine) -> Vec<(&'static str, String)> {
    let nodes = machine.nodes();
    let mut values = vec![];
    for (number, node) in (0u32..).zip(&nodes) {
        let mut value = format!("node,nodeid={number}");
        if number < machine.sockets() {
            let cpus = machine.cpus_of(number);
            value += &format!(",cpus={}-{}", cpus.start, cpus.end - 1);
        }
        if node.usable_mib > 0 && !node.is_plugged() {
            value += &format!(",memdev=node{number}");
        }
        if number >= machine.sockets() && machine.hmat {
            value += &format!(",initiator={}", node.socket);
        }
        values.push(value);
    }
    if !machine.node.is_empty() {
        values.extend(distances(machine));
    }
    for socket in (0..machine.sockets()).filter(|_| machine.hmat) {
        for (number, node) in nodes.iter().enumerate() {
            let lb = format!(
                "hmat-lb,initiator={socket},target={number},hierarchy=memory,data-type=access"
            );
            values.push(format!(
                "{lb}-latency,latency={}",
                node.latency_from_ns(socket)
            ));
            let gbps = node.bandwidth_from_gbps(socket);
            values.push(format!("{lb}-bandwidth,bandwidth={gbps}G"));
        }
    }
    values.into_iter().map(|value| ("-numa", value)).collect()
}

/// Distances of all nodes from each other.
fn distances(machine: &Machine) -> Vec<String> {
    let row = |(a, row): (usize, Vec<u64>)| {
        let value = move |(b, distance)| format!("dist,src={a},dst={b},val={distance}");
        row.into_iter().enumerate().map(value).collect::<Vec<_>>()
    };
    machine
        .distances()
        .into_iter()
        .enumerate()
        .flat_map(row)
        .collect()
}

/// The options for a clock of the model's own. An instruction takes a nanosecond of the modelled machine, stretched like
/// the delays of memory, to a power of two. Idle time is skipped. The date and the machine's random numbers are fixed.
fn model_clock(dilation: u64) -> [(&'static str, String); 3] {
    let shift = dilation.max(1).ilog2().min(ICOUNT_SHIFT_MAX);
    [
        ("-icount", format!("shift={shift},sleep=off")),
        ("-rtc", "base=2026-01-01,clock=vm".into()),
        ("-seed", "1".into()),
    ]
}

/// The properties of a CPU with a sampling unit. Linux drives PEBS by the CPU's model: this is Ice Lake's of servers.
pub fn unit_properties(unit: SamplingUnit) -> &'static [&'static str] {
    match unit {
        SamplingUnit::Ibs => &["ibs=on"],
        SamplingUnit::Pebs => &[
            "vendor=GenuineIntel",
            "family=6",
            "model=106",
            "stepping=6",
            "pebs=on",
        ],
        SamplingUnit::None => &[],
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_shared_memory_is_as_large_as_the_plugin_makes_it() {
        let header = include_str!("../../plugin/shared_page.h");
        let bytes = SHARED_MIB << 20;
        assert!(header.contains(&format!("DEMETER_SHARED_BYTES {bytes}u ")));
    }

    /// Two sockets with DRAM and CXL memory, as the firmware has them in the tests of machines by hand.
    #[test]
    fn nodes_become_options() {
        let text = "vcpus = 4\n\
            node = [{ tier = 1, usable_mib = 9, latency_ns = [80, 160], bandwidth_gbps = [100, 40] },\
            { tier = 1, socket = 1, usable_mib = 0, latency_ns = [160, 80], bandwidth_gbps = [40, 100] },\
            { tier = 2, usable_mib = 9, latency_ns = [250, 330], bandwidth_gbps = [20, 10] },\
            { tier = 2, socket = 1, usable_mib = 9, latency_ns = [330, 250], bandwidth_gbps = [10, 20], goes_at_s = 5 }]";
        let mut machine: Machine = toml::from_str(text).unwrap();
        let options = |machine: &Machine| -> Vec<String> {
            numa(machine).into_iter().map(|(_, value)| value).collect()
        };
        let all = options(&machine);
        assert_eq!(all[0], "node,nodeid=0,cpus=0-1,memdev=node0");
        assert_eq!(all[1], "node,nodeid=1,cpus=2-3");
        assert_eq!(all[2], "node,nodeid=2,memdev=node2,initiator=0");
        assert_eq!(all[3], "node,nodeid=3,initiator=1");
        for (a, row) in [
            [10, 20, 31, 41],
            [20, 10, 41, 31],
            [31, 41, 10, 62],
            [41, 31, 62, 10],
        ]
        .iter()
        .enumerate()
        {
            for (b, distance) in row.iter().enumerate() {
                assert_eq!(
                    all[4 + 4 * a + b],
                    format!("dist,src={a},dst={b},val={distance}")
                );
            }
        }
        let lb = "hmat-lb,initiator=1,target=2,hierarchy=memory,data-type=access";
        assert_eq!(all[32], format!("{lb}-latency,latency=330"));
        assert_eq!(all[33], format!("{lb}-bandwidth,bandwidth=10G"));
        assert_eq!(all.len(), 36);
        machine.hmat = false;
        let bare = options(&machine);
        assert_eq!(bare.len(), 20);
        assert_eq!(bare[2], "node,nodeid=2,memdev=node2");
    }

    /// As the head of plugin/demeter_lab.c says.
    #[test]
    fn tlbs_are_written_as_the_plugin_reads_them() {
        let sizes = demeter_scenario::Cpu::IceLakeSp.tlb();
        assert_eq!(tlb(&sizes), "16:4:8:4:2:4:128:16:4:4:0");
        let plugin = include_str!("../../plugin/demeter_lab.c");
        assert!(plugin.contains("tlb=16:4:8:4:2:4:128:16:4:4:0"));
    }

    #[test]
    fn an_instruction_is_stretched_like_a_delay() {
        let shift = |dilation| model_clock(dilation)[0].1.clone();
        assert_eq!(shift(1), "shift=0,sleep=off");
        assert_eq!(shift(8), "shift=3,sleep=off");
        assert_eq!(shift(15), "shift=3,sleep=off");
        assert_eq!(shift(1 << 20), "shift=10,sleep=off");
    }
}
