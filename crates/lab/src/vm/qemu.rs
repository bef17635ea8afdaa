//! The emulator: its version and its command line.

use std::path::{Path, PathBuf};
use std::process::Command;

use demeter_scenario::{Machine, MachinePlace};

use super::counts::SHARED;
use super::elastic::Elastic;
use super::memory::NodeSizes;
use super::monitor::{DIMM_MIB, DIMM_SLOTS};
use super::tool;
use crate::error::Error;
use crate::link::PORT_NAME;

/// A release of QEMU, major and minor.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Version(pub u32, pub u32);

/// Oldest QEMU with all required features (`hmat`, `-plugin file=`, `-accel tcg`).
const VERSION_MIN: Version = Version(7, 0);

/// Size of the plugin's shared memory: DEMETER_SHARED_BYTES in plugin/shared_page.h.
const SHARED_MIB: u64 = 4;

/// The kernel's arguments. An oops panics, since a damaged kernel could hang, and a panic ends the VM, due to
/// `-no-reboot`. `nokaslr` keeps the kernel in one node. `init_on_alloc=0` is set because Debian's kernels clear every
/// allocated page, even those that a balloon takes and returns unread. `no_timer_check` is set because on a busy host
/// the emulated timer looks broken. `perf_cpu_time_max_percent=0` is set because the kernel would count the host's other
/// work as the cost of a sample, and throttle sampling. The argument of the init process follows `--`.
pub const KERNEL_ARGS: &str = "console=ttyS0 loglevel=5 oops=panic panic=-1 nokaslr init_on_alloc=0 \
                           no_timer_check sysctl.kernel.perf_cpu_time_max_percent=0 \
                           rdinit=/bin/demeter -- lab-init";

/// The CPU model, without "enhanced rep movsb": with it, the kernel copies and clears pages byte by byte, which takes
/// four times as long under the emulator.
pub const CPU: &str = "qemu64";

/// The word behind the version of our own emulator: PKGVERSION in xtask/src/emulator.rs.
const EXACT: &str = "(demeter)";

pub const MEND: &str =
    "apt-get install qemu-system-x86, or set DEMETER_QEMU to a qemu-system-x86_64";
const MEND_USER: &str = "apt-get install qemu-user, or set DEMETER_QEMU_USER to a qemu-x86_64";

/// Checks that the emulator exists and is recent enough.
pub fn check_version(qemu: &Path) -> Result<Version, Error> {
    version(qemu, MEND)
}

/// Checks the user-mode emulator. Debian 13 builds its own without plugins.
pub fn check_user_version(qemu: &Path) -> Result<Version, Error> {
    let version = version(qemu, MEND_USER)?;
    let help = tool::output(Command::new(qemu).arg("-help"), MEND_USER)?;
    match help.contains("-plugin") {
        true => Ok(version),
        false => Err(Error::NoPlugins {
            qemu: qemu.to_owned(),
        }),
    }
}

fn version(qemu: &Path, hint: &str) -> Result<Version, Error> {
    let said = tool::output(Command::new(qemu).arg("--version"), hint)?;
    let what = match parse_version(&said) {
        Some(version) if version >= VERSION_MIN => return Ok(version),
        Some(Version(major, minor)) => format!(
            "{} is version {major}.{minor}, the lab needs {}.{}",
            qemu.display(),
            VERSION_MIN.0,
            VERSION_MIN.1
        ),
        None => format!("{} does not report its version", qemu.display()),
    };
    let hint = hint.into();
    Err(Error::Missing { what, hint })
}

/// Whether this is our own emulator, whose CPUs have a sampling unit.
pub fn is_exact(qemu: &Path) -> Result<bool, Error> {
    let said = tool::output(Command::new(qemu).arg("--version"), MEND)?;
    Ok(says_exact(&said))
}

fn says_exact(said: &str) -> bool {
    said.lines().next().is_some_and(|line| line.contains(EXACT))
}

fn parse_version(said: &str) -> Option<Version> {
    let (_, number) = said.lines().next()?.split_once("version ")?;
    let mut parts = number.split(|c: char| !c.is_ascii_digit());
    Some(Version(
        parts.next()?.parse().ok()?,
        parts.next()?.parse().ok()?,
    ))
}

/// Checks that the emulator loads our plugin, without a VM.
pub fn check_loads(qemu: &Path, plugin: &Path) -> Result<(), Error> {
    let mut command = Command::new(qemu);
    command
        .args(["-machine", "none", "-accel", "tcg", "-display", "none"])
        .args(["-nodefaults", "-no-user-config", "-plugin"])
        .arg(format!("file={},check=on", quoted(plugin)));
    let hint = "the lab needs a QEMU built with TCG plugins, from 7.0 to 11.1: set DEMETER_QEMU to \
                such a qemu-system-x86_64";
    tool::output(&mut command, hint).map(drop)
}

/// Checks that the user-mode emulator loads our plugin. The plugin then prevents it from running anything.
pub fn check_user_loads(qemu: &Path, plugin: &Path) -> Result<(), Error> {
    let mut command = Command::new(qemu);
    command
        .arg("-plugin")
        .arg(format!("{},check=on", plugin.display()))
        .arg("/proc/self/exe");
    tool::output(&mut command, MEND_USER).map(drop)
}

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
    /// Sizes of the nodes.
    pub sizes: NodeSizes,
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
        let Machine { place, vcpus, .. } = self.machine;
        let NodeSizes { fast_mib, slow_mib } = self.sizes;
        let mut command = Command::new(self.qemu);
        let mut option = |name: &str, value: String| {
            command.arg(name).arg(value);
        };
        option("-machine", "pc,hmat=on".into());
        option("-accel", "tcg,thread=multi".into());
        // A host VM has AMD's nested paging, which this emulator supports on any machine.
        let mut cpu = match place {
            MachinePlace::Guest => CPU.into(),
            MachinePlace::Host => format!("{CPU},+svm,+npt"),
        };
        for property in self.cpu_properties {
            cpu = format!("{cpu},{property}");
        }
        option("-cpu", cpu);
        option("-smp", vcpus.to_string());
        let ram_mib = fast_mib + slow_mib;
        let slots = if self.has_events { DIMM_SLOTS } else { 0 };
        let device_mib = self.elastic.map_or(0, Elastic::device_space_mib);
        let devices = match device_mib + slots as u64 * DIMM_MIB {
            0 => String::new(),
            mib => format!(",maxmem={}M,slots={slots}", ram_mib + mib),
        };
        option("-m", format!("{ram_mib}M{devices}"));
        let prealloc = if self.prealloc { ",prealloc=on" } else { "" };
        for (node, mib) in [(0, fast_mib), (1, slow_mib)] {
            option(
                "-object",
                format!("memory-backend-memfd,id=node{node},size={mib}M,share=on{prealloc}"),
            );
        }
        for (name, value) in numa(self.machine) {
            option(name, value);
        }
        option("-kernel", self.kernel.display().to_string());
        option("-initrd", self.initramfs.display().to_string());
        option("-append", KERNEL_ARGS.into());
        // Appended to, so that a restarted VM continues in the same log.
        let console = format!(
            "file,id=console,append=on,path={}",
            quoted(&self.console_log())
        );
        option("-chardev", console);
        option("-serial", "chardev:console".into());
        option("-device", "virtio-serial-pci".into());
        option("-chardev", "socket,id=link,fd=0".into());
        option(
            "-device",
            format!("virtserialport,chardev=link,name={PORT_NAME}"),
        );
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

    /// The options for tiers and samples: the plugin, and the memory that it shares with the guest and the lab.
    pub fn tiers(&self) -> [(&'static str, String); 3] {
        let Machine { fast, slow, .. } = self.machine;
        let NodeSizes { fast_mib, slow_mib } = self.sizes;
        let shared = self.folder.join(SHARED);
        let plugin = format!(
            "file={},shm={},fast_mib={fast_mib},slow_mib={slow_mib},plug_mib={},fast_ns={},\
             slow_ns={},fast_gbps={},slow_gbps={},dilation={}",
            quoted(self.plugin),
            quoted(&shared),
            self.elastic.map_or(0, |e| e.plug_mib),
            fast.latency_ns,
            slow.latency_ns,
            fast.bandwidth_gbps,
            slow.bandwidth_gbps,
            self.dilation
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

/// The options that make two tiers of the memory backends `node0` and `node1`.
pub fn numa(machine: &Machine) -> Vec<(&'static str, String)> {
    let last_cpu = machine.vcpus - 1;
    let mut values = vec![
        format!("node,nodeid=0,cpus=0-{last_cpu},memdev=node0"),
        "node,nodeid=1,memdev=node1,initiator=0".into(),
    ];
    for (node, tier) in [(0, &machine.fast), (1, &machine.slow)] {
        let lb = format!("hmat-lb,initiator=0,target={node},hierarchy=memory,data-type=access");
        values.push(format!("{lb}-latency,latency={}", tier.latency_ns));
        values.push(format!("{lb}-bandwidth,bandwidth={}G", tier.bandwidth_gbps));
    }
    values.into_iter().map(|value| ("-numa", value)).collect()
}

/// A path in an option list, with commas escaped.
pub fn quoted(path: &Path) -> String {
    path.display().to_string().replace(',', ",,")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_from_what_packagers_print() {
        let debian = "QEMU emulator version 7.2.22 (Debian 1:7.2+dfsg-7+deb12u18)\nCopyright";
        assert_eq!(parse_version(debian), Some(Version(7, 2)));
        assert_eq!(
            parse_version("QEMU emulator version 10.0.50\n"),
            Some(Version(10, 0))
        );
        assert_eq!(parse_version("no emulator"), None);
        assert!(!says_exact(debian));
        let ours = "QEMU emulator version 7.2.22 (demeter)\nCopyright";
        assert_eq!(parse_version(ours), Some(Version(7, 2)));
        assert!(says_exact(ours));
    }

    #[test]
    fn a_missing_emulator_is_told_with_its_hint() {
        let said = check_version(Path::new("/nonexistent/qemu"))
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("/nonexistent/qemu") && said.contains("apt-get install"),
            "{said}"
        );
    }

    #[test]
    fn the_shared_memory_is_as_large_as_the_plugin_makes_it() {
        let header = include_str!("../../plugin/shared_page.h");
        let bytes = SHARED_MIB << 20;
        assert!(header.contains(&format!("DEMETER_SHARED_BYTES {bytes}u ")));
    }

    #[test]
    fn commas_in_paths_do_not_end_an_option() {
        assert_eq!(quoted(Path::new("/a,b/c")), "/a,,b/c");
    }
}
