//! What a host needs to run guests: KVM's modules, an emulator with its firmware, the guests' kernel, and
//! of each guest an initramfs and a command line.
//!
//! The guests of a system that works in the guest (`demeter-damon`, `g-linux`), and of the oracle, have a node of each tier, backed by
//! the host's node of that tier; they divide the fast one by their shares. For all others a guest's memory is one
//! node, backed where the host likes.

use std::fs;
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
    AGENT_CONFIG_PATH, GuestStart, HOST_CONFIG_PATH, HOST_SOCKET_PATH, JOB_PATH, Job, Level,
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
    matches!(system, System::Oracle | System::GLinux) || system.has_agent()
}

/// Puts into a host's initramfs what its guests need. `host` comes as the job of a VM in
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
    let mut initramfs_mib = 0;
    let fleet = host.scenario.vms();
    for (name, scenario) in &fleet {
        let archive = pack(lab, host, name, scenario, is_tiered, folder)?;
        let size = fs::metadata(&archive).map_err(Error::io("read", &archive))?;
        initramfs_mib = size.len().div_ceil(1 << 20).max(initramfs_mib);
        initramfs.add_file(&initramfs_path(name), &archive);
    }
    let has_unit = host.settings.system == System::Demeter;
    if is_tiered {
        host.settings = Settings::new(System::None, &host.settings.name);
    }
    let guests = guests(&host.scenario, is_tiered, initramfs_mib)?;
    let config = controller_config(&host.scenario, &guests);
    initramfs.add_text(HOST_CONFIG_PATH, config);
    host.level = Level::Host {
        guests: guests
            .iter()
            .map(|guest| GuestStart {
                name: guest.name.clone(),
                command: command(&host.scenario, guest),
                has_unit,
                node_bytes: guest.sizes.bytes(),
            })
            .collect(),
    };
    Ok(())
}

/// Writes a guest's initramfs, with its job.
fn pack(
    lab: &Lab,
    host: &Job,
    name: &str,
    scenario: &Scenario,
    is_tiered: bool,
    folder: &Path,
) -> Result<PathBuf, Error> {
    let settings = match is_tiered {
        true => host.settings.clone(),
        false => Settings::new(System::None, &host.settings.name),
    };
    let job = Job {
        level: Level::Guest { is_tiered },
        scenario: scenario.clone(),
        settings,
        ..host.clone()
    };
    let mut initramfs = Initramfs::default();
    for program in ["demeter", scenario.workload.kind()] {
        initramfs.add_program(&format!("bin/{program}"), &lab.programs.join(program))?;
    }
    let text = serde_json::to_string(&job).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
    initramfs.add_text(JOB_PATH, text);
    initramfs.add_text(AGENT_CONFIG_PATH, agent_config(&job, false));
    let archive = folder.join(format!("{name}-initramfs"));
    initramfs.write(&archive)?;
    Ok(archive)
}

/// Where a host has a guest's initramfs.
fn initramfs_path(name: &str) -> String {
    format!("{FOLDER}/{name}-initramfs")
}

/// Where a host has a guest's QMP socket.
fn qmp_path(name: &str) -> String {
    format!("/run/demeter/{name}.qmp")
}

/// A guest, as its host has it.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Guest {
    name: String,
    /// Its share of the fast tier.
    share: u32,
    /// Fast memory that it begins with, MiB: its part by its share.
    fast_mib: u64,
    /// Memory of its nodes; the second has none where it has but one.
    sizes: NodeSizes,
}

/// Fast memory for guests, once each one's emulator has its part; what the emulators take lies there at the worst.
fn fast_mib(scenario: &Scenario, guests: usize) -> u64 {
    let emulators_mib = EMULATOR_MIB * guests as u64;
    scenario
        .machine
        .fast
        .usable_mib
        .saturating_sub(emulators_mib)
}

/// The guests, and the memory of each.
fn guests(scenario: &Scenario, is_tiered: bool, initramfs_mib: u64) -> Result<Vec<Guest>, Error> {
    let fleet = scenario.vms();
    let count = fleet.len() as u64;
    let vms = scenario.provision.as_ref().map_or(&[][..], |p| &p.vms);
    let share = |index: usize| vms.get(index).map_or(1, |vm| vm.share);
    let shares: u64 = (0..fleet.len()).map(|index| u64::from(share(index))).sum();
    let (fast_mib, slow_mib) = (
        fast_mib(scenario, fleet.len()),
        scenario.machine.slow.usable_mib,
    );
    let least = NodeSizes::with_usable([scenario.footprint_mib() + SLACK_MIB, 0], initramfs_mib);
    let least_mib = least.fast_mib + least.slow_mib;
    let guests: Vec<Guest> = fleet
        .into_iter()
        .enumerate()
        .map(|(index, (name, _))| {
            // Nodes begin at boundaries of huge pages.
            let part_mib = (fast_mib * u64::from(share(index)) / shares) & !1;
            let sizes = match is_tiered {
                true => NodeSizes {
                    fast_mib: part_mib,
                    slow_mib: (slow_mib / count) & !1,
                },
                false => NodeSizes {
                    fast_mib: least_mib,
                    slow_mib: 0,
                },
            };
            Guest {
                name,
                share: share(index),
                fast_mib: part_mib,
                sizes,
            }
        })
        .collect();
    let is_short = |guest: &Guest| guest.sizes.fast_mib + guest.sizes.slow_mib < least_mib;
    let is_short = guests.iter().any(is_short) || least_mib * count > fast_mib + slow_mib;
    if is_short || guests.iter().any(|guest| guest.fast_mib == 0) {
        return Err(Error::Missing {
            what: format!(
                "each of {count} guests takes {least_mib} MiB and its emulator {EMULATOR_MIB} MiB, but both tiers \
                 of the host hold {} MiB",
                scenario.machine.fast.usable_mib + slow_mib
            ),
            mend: "raise machine.fast.usable_mib or machine.slow.usable_mib".into(),
        });
    }
    Ok(guests)
}

/// How the controller manages the guests, where it does: they have the whole fast tier, less what their emulators
/// take of it.
fn controller_config(scenario: &Scenario, guests: &[Guest]) -> String {
    let fast_mib = fast_mib(scenario, guests.len());
    let memory_mib = |guest: &Guest| guest.sizes.fast_mib + guest.sizes.slow_mib;
    let slow_mib: u64 = guests.iter().map(memory_mib).sum();
    let provision = scenario.provision.as_ref();
    let policy = provision.and_then(|p| p.policies.first().copied());
    let policy = policy.unwrap_or_default();
    let guarantee_mib = provision.map_or(0, |p| p.fast_guarantee_mib);
    let vms = guests.iter().map(|guest| {
        format!(
            "[vm.{}]\nqmp = \"{}\"\nmanage = \"history\"\nshare = {}\n\
             fast = {{ size_mib = {}, guarantee_mib = {guarantee_mib}, limit_mib = {fast_mib} }}\n\
             slow = {{ size_mib = {} }}\n",
            guest.name,
            qmp_path(&guest.name),
            guest.share,
            guest.fast_mib,
            memory_mib(guest)
        )
    });
    let vms: String = vms.collect();
    format!(
        "socket = \"{HOST_SOCKET_PATH}\"\nstate = \"/run/demeter/host.json\"\npolicy = \"{policy}\"\n\
         pool = {{ fast_mib = {fast_mib}, slow_mib = {slow_mib} }}\n{vms}"
    )
}

/// A guest's command line in the host.
fn command(scenario: &Scenario, guest: &Guest) -> Vec<String> {
    let NodeSizes { fast_mib, slow_mib } = guest.sizes;
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
    option("-initrd", initramfs_path(&guest.name));
    option("-append", KERNEL_ARGS.into());
    // The host's own console, so that its log tells of all.
    option("-serial", "file:/dev/ttyS0".into());
    option("-chardev", "stdio,id=link,signal=off".into());
    option("-device", "virtio-serial-pci".into());
    option(
        "-qmp",
        format!("unix:{},server=on,wait=off", qmp_path(&guest.name)),
    );
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
    use demeter_policy::provision::Policy;

    use super::*;

    /// The scenario that we ship.
    fn scenario() -> Scenario {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/nested.toml");
        Scenario::load(&shipped).unwrap()
    }

    /// The same with two guests, of three shares and one.
    fn fleet(policy: &str) -> Scenario {
        let mut scenario = scenario();
        scenario.settings.clear();
        // The unit has one reader.
        scenario.systems.retain(|&system| system != System::Demeter);
        scenario.machine.slow.usable_mib = 1200;
        let text = format!(
            "provisioners = [\"static\"]\npolicies = [\"{policy}\"]\n\
             vms = [{{ name = \"a\", share = 3, hot_mib = 50 }}, {{ name = \"b\", hot_mib = 20 }}]\n"
        );
        scenario.provision = Some(toml::from_str(&text).unwrap());
        scenario.check().unwrap();
        scenario
    }

    fn memory_mib(guest: &Guest) -> u64 {
        guest.sizes.fast_mib + guest.sizes.slow_mib
    }

    #[test]
    fn guests_fit_into_their_host_and_hold_their_workload() {
        for (mut scenario, count) in [(scenario(), 1), (fleet("static"), 2)] {
            let host_mib = scenario.machine.fast.usable_mib + scenario.machine.slow.usable_mib;
            for is_tiered in [false, true] {
                let guests = guests(&scenario, is_tiered, 30).unwrap();
                assert_eq!(guests.len() as u64, count);
                let all_mib: u64 = guests.iter().map(memory_mib).sum();
                assert!(all_mib + count * EMULATOR_MIB <= host_mib, "{guests:?}");
                for guest in &guests {
                    assert!(
                        memory_mib(guest) > scenario.footprint_mib() + 30,
                        "{guests:?}"
                    );
                    assert_eq!(guest.sizes.slow_mib > 0, is_tiered);
                }
            }
            scenario.machine.slow.usable_mib = 260;
            let said = guests(&scenario, false, 30).unwrap_err().to_string();
            assert!(said.contains("raise machine.fast.usable_mib"), "{said}");
        }
    }

    #[test]
    fn guests_with_both_nodes_divide_fast_memory_by_their_shares() {
        let guests = guests(&fleet("static"), true, 30).unwrap();
        let [a, b] = &guests[..] else {
            panic!("{guests:?}")
        };
        assert_eq!((a.sizes.fast_mib, b.sizes.fast_mib), (84, 28));
    }

    #[test]
    fn only_a_tiered_guest_has_its_nodes_backed_by_the_hosts() {
        let backed = |slow_mib| {
            let guest = Guest {
                name: "a".into(),
                share: 1,
                fast_mib: 100,
                sizes: NodeSizes {
                    fast_mib: 100,
                    slow_mib,
                },
            };
            let command = command(&scenario(), &guest);
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
        for (scenario, policy) in [(scenario(), Policy::Static), (fleet("wss"), Policy::Wss)] {
            let guests = guests(&scenario, false, 30).unwrap();
            let text = controller_config(&scenario, &guests);
            let config: demeter_host::config::Config = toml::from_str(&text).unwrap();
            config.check().unwrap();
            assert_eq!((config.policy, config.vms.len()), (policy, guests.len()));
            for guest in &guests {
                let vm = &config.vms[&guest.name.parse().unwrap()];
                assert_eq!(
                    (vm.share, vm.slow.size_mib),
                    (guest.share, memory_mib(guest))
                );
                assert_eq!(vm.fast.size_mib, guest.fast_mib);
            }
        }
    }
}
