//! What a host needs to run a guest: KVM's modules, an emulator with its firmware, and the guest's
//! kernel, initramfs and command line.
//!
//! The guest of a system that works in the guest (`demeter`), and of the oracle, has a node of each tier, backed by
//! the host's node of that tier. For all others a guest's memory is one node, backed where
//! the host likes.

use std::path::{Path, PathBuf};
use std::process::Command;

use demeter_scenario::{Scenario, Settings, System};

use super::initramfs::Initramfs;
use super::lab::{Lab, agent_config};
use super::memory::NodeSizes;
use super::qemu::{KERNEL_ARGS, numa};
use super::tool;
use crate::error::Error;
use crate::link::{
    AGENT_CONFIG_PATH, GUEST_QMP_PATH, HOST_CONFIG_PATH, HOST_SOCKET_PATH, JOB_PATH, Job, Level,
    MODULES_DIR, PORT_NAME,
};

/// In the order that they need each other.
const MODULES: [&str; 3] = [
    "virt/lib/irqbypass",
    "arch/x86/kvm/kvm",
    "arch/x86/kvm/kvm-amd",
];

/// Where a host has what its guest is made of.
const FOLDER: &str = "/guest";

/// What the emulator of a guest loads beside it: the BIOS, what boots a kernel directly, and what
/// speeds up its interrupts.
const FIRMWARE: [&str; 3] = ["bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin"];

/// The guest's emulator takes so much of the host's memory beside the guest's, MiB.
const EMULATOR_MIB: u64 = 64;

/// Memory that a guest with one node finds beside its workload's, MiB.
const SLACK_MIB: u64 = 48;

const MEND: &str = "apt-get install qemu-system-x86, or set DEMETER_QEMU to a qemu-system-x86_64";

/// Whether `system` works in the guest, and not in the host; the oracle does.
fn is_of_guest(system: System) -> bool {
    system == System::Oracle || system.has_agent()
}

/// Puts into a host's initramfs what its guest needs. `host` comes as the job of a VM in
/// which the workload runs, and becomes the host's own.
pub fn into_host(
    lab: &Lab,
    kernel: &Path,
    initramfs: &mut Initramfs,
    host: &mut Job,
    folder: &Path,
) -> Result<(), Error> {
    let qemu = find(&lab.qemu)?;
    initramfs.add_program(&format!("{FOLDER}/qemu"), &qemu)?;
    for (name, file) in FIRMWARE.iter().zip(firmware(&qemu)?) {
        initramfs.add_file(&format!("{FOLDER}/{name}"), &file);
    }
    for (at, module) in lab.stock_modules(MODULES)?.iter().enumerate() {
        initramfs.add_file(&format!("{MODULES_DIR}/kvm-{at}.ko"), module);
    }
    initramfs.add_file(&format!("{FOLDER}/vmlinuz"), kernel);

    let is_tiered = is_of_guest(host.settings.system);
    let mut guest = Job {
        level: Level::Guest { is_tiered },
        ..host.clone()
    };
    let idle = if is_tiered { &mut *host } else { &mut guest };
    idle.settings = Settings::new(System::None, &idle.settings.name);
    let mut of_guest = Initramfs::default();
    for name in ["demeter", host.scenario.workload.kind()] {
        of_guest.add_program(&format!("bin/{name}"), &lab.programs.join(name))?;
    }
    let text =
        serde_json::to_string(&guest).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
    of_guest.add_text(JOB_PATH, text);
    of_guest.add_text(AGENT_CONFIG_PATH, agent_config(&guest, false));
    let archive = folder.join("guest-initramfs");
    of_guest.write(&archive)?;
    initramfs.add_file(&format!("{FOLDER}/initramfs"), &archive);
    let initramfs_mib = of_guest.size_bytes()?.div_ceil(1 << 20);
    let sizes = sizes(&host.scenario, is_tiered, initramfs_mib)?;
    initramfs.add_text(HOST_CONFIG_PATH, controller_config(&host.scenario, sizes));
    host.level = Level::Host {
        guest: command(&host.scenario, sizes),
    };
    Ok(())
}

/// Memory of the guest's nodes; the second has none where it has but one.
fn sizes(scenario: &Scenario, is_tiered: bool, initramfs_mib: u64) -> Result<NodeSizes, Error> {
    let machine = &scenario.machine;
    let (fast_mib, slow_mib) = (machine.fast.usable_mib, machine.slow.usable_mib);
    let least = NodeSizes::with_usable([scenario.footprint_mib() + SLACK_MIB, 0], initramfs_mib);
    let least_mib = least.fast_mib + least.slow_mib;
    if least_mib + EMULATOR_MIB > fast_mib + slow_mib || fast_mib <= EMULATOR_MIB {
        return Err(Error::Missing {
            what: format!(
                "the guest takes {least_mib} MiB and its emulator {EMULATOR_MIB} MiB, but both tiers of the \
                 host hold {} MiB",
                fast_mib + slow_mib
            ),
            mend: "raise machine.fast.usable_mib or machine.slow.usable_mib".into(),
        });
    }
    Ok(match is_tiered {
        // Nodes begin at boundaries of huge pages.
        true => NodeSizes {
            fast_mib: (fast_mib - EMULATOR_MIB) & !1,
            slow_mib: slow_mib & !1,
        },
        false => NodeSizes {
            fast_mib: least_mib,
            slow_mib: 0,
        },
    })
}

/// How the controller manages the guest, where it does: it has the whole fast tier, less what the emulator
/// takes of it.
fn controller_config(scenario: &Scenario, sizes: NodeSizes) -> String {
    let fast_mib = scenario.machine.fast.usable_mib - EMULATOR_MIB;
    let slow_mib = sizes.fast_mib + sizes.slow_mib;
    format!(
        "socket = \"{HOST_SOCKET_PATH}\"\nstate = \"/run/demeter/host.json\"\n\
         pool = {{ fast_mib = {fast_mib}, slow_mib = {slow_mib} }}\n\
         [vm.guest]\nqmp = \"{GUEST_QMP_PATH}\"\nmanage = \"history\"\n\
         fast = {{ size_mib = {fast_mib} }}\nslow = {{ size_mib = {slow_mib} }}\n"
    )
}

/// The guest's command line in the host.
fn command(scenario: &Scenario, sizes: NodeSizes) -> Vec<String> {
    let NodeSizes { fast_mib, slow_mib } = sizes;
    let mut command = vec![format!("{FOLDER}/qemu")];
    let mut option = |name: &str, value: String| command.extend([name.to_owned(), value]);
    option("-L", FOLDER.into());
    option("-accel", "kvm".into());
    option("-cpu", "host".into());
    option("-smp", scenario.machine.vcpus.to_string());
    option("-m", format!("{}M", fast_mib + slow_mib));
    let backend = |node: u32, mib: u64| format!("memory-backend-ram,id=node{node},size={mib}M");
    if slow_mib == 0 {
        option("-machine", "pc,memory-backend=node0".into());
        option("-object", backend(0, fast_mib));
    } else {
        option("-machine", "pc,hmat=on".into());
        for (node, mib) in [(0, fast_mib), (1, slow_mib)] {
            let backend = backend(node, mib);
            // Not bound: a node that is full for a moment must not kill the guest.
            option(
                "-object",
                format!("{backend},host-nodes={node},policy=preferred"),
            );
        }
        for (name, value) in numa(&scenario.machine) {
            option(name, value);
        }
    }
    option("-kernel", format!("{FOLDER}/vmlinuz"));
    option("-initrd", format!("{FOLDER}/initramfs"));
    option("-append", KERNEL_ARGS.into());
    // The host's own console, so that its log tells of both.
    option("-serial", "file:/dev/ttyS0".into());
    option("-chardev", "stdio,id=link,signal=off".into());
    option("-device", "virtio-serial-pci".into());
    option("-qmp", format!("unix:{GUEST_QMP_PATH},server=on,wait=off"));
    option(
        "-device",
        format!("virtserialport,chardev=link,name={PORT_NAME}"),
    );
    option("-display", "none".into());
    let flags = ["-nodefaults", "-no-user-config", "-no-reboot"];
    command.extend(flags.map(String::from));
    command
}

/// The emulator's file.
fn find(qemu: &Path) -> Result<PathBuf, Error> {
    tool::find(qemu).ok_or_else(|| Error::Missing {
        what: format!("there is no {}", qemu.display()),
        mend: MEND.into(),
    })
}

/// Its firmware, from the folders that it names.
fn firmware(qemu: &Path) -> Result<[PathBuf; FIRMWARE.len()], Error> {
    let listing = tool::output(Command::new(qemu).args(["-L", "help"]), MEND)?;
    let mut missing = None;
    let found = FIRMWARE.map(|name| {
        let mut places = listing.lines().map(|dir| Path::new(dir.trim()).join(name));
        places.find(|place| place.is_file()).unwrap_or_else(|| {
            missing = Some(name);
            PathBuf::new()
        })
    });
    match missing {
        None => Ok(found),
        Some(name) => Err(Error::Missing {
            what: format!("{} has no {name}, which a guest needs", qemu.display()),
            mend: "apt-get install qemu-system-data seabios".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The scenario that we ship.
    fn scenario() -> Scenario {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/nested.toml");
        Scenario::load(&shipped).unwrap()
    }

    #[test]
    fn a_guest_fits_into_its_host_and_holds_its_workload() {
        let mut scenario = scenario();
        let host_mib = scenario.machine.fast.usable_mib + scenario.machine.slow.usable_mib;
        for is_tiered in [false, true] {
            let sizes = sizes(&scenario, is_tiered, 30).unwrap();
            let guest_mib = sizes.fast_mib + sizes.slow_mib;
            assert!(guest_mib + EMULATOR_MIB <= host_mib, "{sizes:?}");
            assert!(guest_mib > scenario.footprint_mib() + 30, "{sizes:?}");
            assert_eq!(sizes.slow_mib > 0, is_tiered);
        }
        scenario.machine.slow.usable_mib = 260;
        let said = sizes(&scenario, false, 30).unwrap_err().to_string();
        assert!(said.contains("raise machine.fast.usable_mib"), "{said}");
    }

    #[test]
    fn only_a_tiered_guest_has_its_nodes_backed_by_the_hosts() {
        let backed = |slow_mib| {
            let command = command(
                &scenario(),
                NodeSizes {
                    fast_mib: 100,
                    slow_mib,
                },
            );
            let backs = |part: &&String| part.contains("host-nodes=");
            command.iter().filter(backs).cloned().collect::<Vec<_>>()
        };
        assert_eq!(backed(0), [""; 0]);
        let [fast, slow] = &backed(300)[..] else {
            panic!("{:?}", backed(300))
        };
        assert!(fast.contains("size=100M,host-nodes=0") && slow.contains("size=300M,host-nodes=1"));
    }

    #[test]
    fn the_controller_takes_its_configuration() {
        let sizes = NodeSizes {
            fast_mib: 600,
            slow_mib: 0,
        };
        let config: demeter_host::config::Config =
            toml::from_str(&controller_config(&scenario(), sizes)).unwrap();
        config.check().unwrap();
        let guest = config.vms.values().next().unwrap();
        assert_eq!(guest.slow.size_mib, 600);
    }
}
