//! Prepares a host VM with guests: KVM's modules, an emulator with firmware, the guests' kernel, and an initramfs and
//! command line per guest.
//!
//! Guests of a system that works in the guest (`demeter-damon`, `g-linux`), and of the oracle, have a node of each
//! tier, backed by the host's node of that tier. They divide the fast tier by their shares. With a balloon, a guest's
//! fast node is as large as the whole fast tier, and the host's controller sets the guest's part. For all other
//! systems, a guest's memory is one node, backed anywhere in the host.

use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;

use demeter_guest::tracker::Choice;
use demeter_host_api::config::Libvirt;
use demeter_host_api::config::{Config, Manage};
use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_scenario::{Scenario, Settings, System};

use super::elastic::{agent_port, control, qmp_socket};
use super::initramfs::Initramfs;
use super::lab::{Lab, agent_config};
use super::memory::NodeSizes;
use super::qemu::{KERNEL_ARGS, numa};
use super::qemu_check;
use super::setup::{ControllerSetup, VmEntry};
use super::tool;
use crate::error::Error;
use crate::link::{
    AGENT_CONFIG_PATH, GUESTS_MEMORY_DIR, GuestStart, HOST_CONFIG_PATH, HOST_SOCKET_PATH, JOB_PATH,
    Job, MODULES_DIR, Nesting, PORT_NAME,
};

/// KVM's modules in dependency order.
const MODULES: [&str; 3] = [
    "virt/lib/irqbypass",
    "arch/x86/kvm/kvm",
    "arch/x86/kvm/kvm-amd",
];

/// Folder of the guests' common files in a host.
const FOLDER: &str = "/guest";

/// Folder of the guests in a host; each has a folder with its initramfs and sockets.
const GUESTS: &str = "/guests";

/// Firmware of a guest's emulator: the BIOS, the direct kernel loader, and the interrupt accelerator.
const FIRMWARE: [&str; 3] = ["bios-256k.bin", "linuxboot_dma.bin", "kvmvapic.bin"];

/// Host memory of a guest's emulator, beside the guest's own, MiB.
const EMULATOR_MIB: u64 = 64;

/// Memory of a guest with one node, beside its workload's, MiB.
const SLACK_MIB: u64 = 48;

/// Memory layout of guests.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Memory {
    /// One node.
    Flat,
    /// A node of each tier.
    Tiered,
    /// A node of each tier, and a balloon in each.
    Sized,
}

impl Memory {
    /// The layout for a system: tiered for systems that work in the guest, and for the oracle.
    fn of(system: System, scenario: &Scenario) -> Self {
        match system {
            System::Oracle | System::GLinux => Self::Tiered,
            system if !system.has_agent() => Self::Flat,
            _ if provisioner(scenario).is_some() => Self::Sized,
            _ => Self::Tiered,
        }
    }
}

/// The mechanism that resizes the guests, if any.
fn provisioner(scenario: &Scenario) -> Option<ProvisionerKind> {
    scenario.provision.as_ref()?.provisioners.first()?.kind()
}

/// The controller's policy for fast memory.
fn policy(scenario: &Scenario) -> Policy {
    let provision = scenario.provision.as_ref();
    let policy = provision.and_then(|p| p.policies.first().copied());
    policy.unwrap_or_default()
}

/// Adds all files for its guests to a host's initramfs. `host` begins as the job of a VM that runs the workload, and
/// becomes the host's own job.
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

    let memory = Memory::of(host.settings.system, &host.scenario);
    let mut initramfs_mib = 0;
    let fleet = host.scenario.vms();
    for (name, scenario) in &fleet {
        let archive = pack(lab, host, name, scenario, memory, folder)?;
        let size = fs::metadata(&archive).map_err(Error::io("read", &archive))?;
        initramfs_mib = size.len().div_ceil(1 << 20).max(initramfs_mib);
        initramfs.add_file(&initramfs_path(name).to_string_lossy(), &archive);
    }
    let has_unit = host.settings.system == System::Demeter;
    if memory != Memory::Flat {
        host.settings = Settings::new(System::None, &host.settings.name);
    }
    let guests = guests(&host.scenario, memory, initramfs_mib)?;
    let config = controller_config(&host.scenario, memory, &guests)?;
    let config = toml::to_string(&config).expect("a configuration is a table of plain values");
    initramfs.add_text(HOST_CONFIG_PATH, config);
    host.level = Nesting::Host {
        policy: (memory == Memory::Sized).then(|| policy(&host.scenario)),
        guests: guests
            .iter()
            .map(|guest| GuestStart {
                name: guest.name.clone(),
                command: command(&host.scenario, memory, guest),
                has_unit,
                node_bytes: guest.sizes.bytes(),
            })
            .collect(),
    };
    Ok(())
}

/// Writes a guest's initramfs, including its job.
fn pack(
    lab: &Lab,
    host: &Job,
    name: &str,
    scenario: &Scenario,
    memory: Memory,
    folder: &Path,
) -> Result<PathBuf, Error> {
    let is_tiered = memory != Memory::Flat;
    let settings = match is_tiered {
        true => host.settings.clone(),
        false => Settings::new(System::None, &host.settings.name),
    };
    let provisioner = provisioner(scenario);
    let job = Job {
        level: Nesting::Guest { is_tiered },
        scenario: scenario.clone(),
        settings,
        provisioner,
        ..host.clone()
    };
    let mut initramfs = Initramfs::default();
    for program in ["demeter", scenario.workload.kind()] {
        initramfs.add_program(&format!("bin/{program}"), &lab.programs.join(program))?;
    }
    if let Some(provisioner) = provisioner {
        lab.add_driver(&mut initramfs, provisioner)?;
    }
    let text = serde_json::to_string(&job).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
    initramfs.add_text(JOB_PATH, text);
    initramfs.add_text(AGENT_CONFIG_PATH, agent_config(&job, Choice::Lab, false));
    let archive = folder.join(format!("{name}-initramfs"));
    initramfs.write(&archive)?;
    Ok(archive)
}

/// A guest's folder in a host.
fn folder_of(name: &str) -> PathBuf {
    Path::new(GUESTS).join(name)
}

/// Path of a guest's initramfs in a host.
fn initramfs_path(name: &str) -> PathBuf {
    folder_of(name).join("initramfs")
}

/// A guest as seen by its host.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Guest {
    name: String,
    /// Its share of the fast tier.
    share: u32,
    /// Initial fast memory, MiB, by its share.
    fast_mib: u64,
    /// Fast memory that no policy reclaims, MiB.
    guarantee_mib: u64,
    /// Sizes of its nodes; the second is 0 if it has only one.
    sizes: NodeSizes,
}

/// Fast memory for guests, after the emulators' own memory, which may all lie there.
fn fast_mib(scenario: &Scenario, guests: usize) -> u64 {
    let emulators_mib = EMULATOR_MIB * guests as u64;
    scenario
        .machine
        .fast
        .usable_mib
        .saturating_sub(emulators_mib)
}

/// The guests and their memory.
fn guests(scenario: &Scenario, memory: Memory, initramfs_mib: u64) -> Result<Vec<Guest>, Error> {
    let fleet = scenario.vms();
    let count = fleet.len() as u64;
    let provision = scenario.provision.as_ref();
    let vms = provision.map_or(&[][..], |p| &p.vms);
    let share = |index: usize| vms.get(index).map_or(1, |vm| vm.share);
    let shares: u64 = (0..fleet.len()).map(|index| u64::from(share(index))).sum();
    let (fast_mib, slow_mib) = (
        fast_mib(scenario, fleet.len()),
        scenario.machine.slow.usable_mib,
    );
    let least = NodeSizes::with_usable([scenario.footprint_mib() + SLACK_MIB, 0], initramfs_mib);
    let least_mib = least.fast_mib + least.slow_mib;
    let part_of_slow_mib = (slow_mib / count) & !1;
    // A kernel cannot release its own memory.
    let kernel_mib = match memory {
        Memory::Sized => {
            let usable = [fast_mib, part_of_slow_mib];
            NodeSizes::with_usable(usable, initramfs_mib).fast_mib - fast_mib
        }
        Memory::Flat | Memory::Tiered => 0,
    };
    let guarantee_mib = kernel_mib + provision.map_or(0, |p| p.fast_guarantee_mib);
    let guests: Vec<Guest> = fleet
        .into_iter()
        .enumerate()
        .map(|(index, (name, _))| {
            // Nodes begin at huge page boundaries.
            let part_mib = (fast_mib * u64::from(share(index)) / shares) & !1;
            let (fast_mib, slow_mib) = match memory {
                Memory::Flat => (least_mib, 0),
                Memory::Tiered => (part_mib, part_of_slow_mib),
                Memory::Sized => (fast_mib & !1, part_of_slow_mib),
            };
            Guest {
                name,
                share: share(index),
                fast_mib: part_mib,
                guarantee_mib,
                sizes: NodeSizes { fast_mib, slow_mib },
            }
        })
        .collect();
    let is_short = |guest: &Guest| match memory {
        Memory::Flat => false,
        Memory::Tiered | Memory::Sized => guest.fast_mib + guest.sizes.slow_mib < least_mib,
    };
    let is_poor = |guest: &&Guest| memory == Memory::Sized && guest.fast_mib < guarantee_mib;
    if let Some(guest) = guests.iter().find(is_poor) {
        return Err(Error::Missing {
            what: format!(
                "guest {} begins with {} MiB of fast memory, and is to have {guarantee_mib} MiB: {kernel_mib} MiB for its \
                 kernel, and fast_guarantee_mib",
                guest.name, guest.fast_mib
            ),
            hint: "raise machine.fast.usable_mib or the guest's share".into(),
        });
    }
    let is_short = guests.iter().any(is_short) || least_mib * count > fast_mib + slow_mib;
    if is_short || guests.iter().any(|guest| guest.fast_mib == 0) {
        return Err(Error::Missing {
            what: format!(
                "each of {count} guests takes {least_mib} MiB and its emulator {EMULATOR_MIB} MiB, but both tiers \
                 of the host hold {} MiB",
                scenario.machine.fast.usable_mib + slow_mib
            ),
            hint: "raise machine.fast.usable_mib or machine.slow.usable_mib".into(),
        });
    }
    Ok(guests)
}

/// The controller's configuration if it manages or resizes the guests. They share the whole fast tier, minus the
/// emulators' part.
fn controller_config(
    scenario: &Scenario,
    memory: Memory,
    guests: &[Guest],
) -> Result<Config, Error> {
    let fast_mib = fast_mib(scenario, guests.len());
    let slow_mib = |guest: &Guest| match memory {
        Memory::Sized => guest.sizes.slow_mib,
        // All of its memory may end up there.
        Memory::Flat | Memory::Tiered => guest.sizes.fast_mib + guest.sizes.slow_mib,
    };
    let entry = |guest: &Guest| VmEntry {
        name: guest.name.clone(),
        folder: folder_of(&guest.name),
        domain: None,
        size: NodeSizes {
            fast_mib: guest.fast_mib,
            slow_mib: slow_mib(guest),
        },
        limit: NodeSizes {
            fast_mib,
            slow_mib: slow_mib(guest),
        },
        fast_guarantee_mib: guest.guarantee_mib,
        // Policies divide fast memory only.
        slow_guarantee_mib: slow_mib(guest),
        share: guest.share,
    };
    let setup = ControllerSetup {
        provisioner: ProvisionerKind::DemeterBalloon,
        pool: NodeSizes {
            fast_mib,
            slow_mib: guests.iter().map(slow_mib).sum(),
        },
        libvirt: Libvirt::default(),
        vms: guests.iter().map(entry).collect(),
    };
    let folder = Path::new(HOST_SOCKET_PATH).parent();
    let mut config = setup.config(folder.unwrap_or(Path::new("/")))?;
    if memory != Memory::Sized {
        config.policy = policy(scenario);
        for vm in config.vms.values_mut() {
            (vm.manage, vm.agent) = (Manage::History, None);
            (vm.fast.memdev, vm.slow.memdev) = (None, None);
        }
    }
    Ok(config)
}

/// A guest's command line in the host.
fn command(scenario: &Scenario, memory: Memory, guest: &Guest) -> Vec<String> {
    let NodeSizes { fast_mib, slow_mib } = guest.sizes;
    let mut command = vec![format!("{FOLDER}/qemu")];
    let mut option = |name: &str, value: String| command.extend([name.to_owned(), value]);
    option("-L", FOLDER.into());
    option("-accel", "kvm".into());
    option("-cpu", "host".into());
    option("-smp", scenario.machine.vcpus.to_string());
    option("-m", format!("{}M", fast_mib + slow_mib));
    // Balloon memory is punched out of a file. A memfd may lie anywhere, so KVM could not map huge pages.
    let kind = match memory {
        Memory::Sized => {
            format!("memory-backend-file,mem-path={GUESTS_MEMORY_DIR},share=on,align=2M")
        }
        Memory::Flat | Memory::Tiered => "memory-backend-ram".into(),
    };
    let backend = |node: u32, mib: u64| format!("{kind},id=node{node},size={mib}M");
    if slow_mib == 0 {
        option("-machine", "pc,memory-backend=node0".into());
        option("-object", backend(0, fast_mib));
    } else {
        option("-machine", "pc,hmat=on".into());
        for (node, mib) in [(0, fast_mib), (1, slow_mib)] {
            let backend = backend(node, mib);
            // Not bound: a temporarily full node must not kill the guest.
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
    option("-initrd", initramfs_path(&guest.name).display().to_string());
    option("-append", KERNEL_ARGS.into());
    // The host's own console, so that its log covers all guests.
    option("-serial", "file:/dev/ttyS0".into());
    option("-chardev", "stdio,id=link,signal=off".into());
    option("-device", "virtio-serial-pci".into());
    option(
        "-device",
        format!("virtserialport,chardev=link,name={PORT_NAME}"),
    );
    let folder = folder_of(&guest.name);
    let (name, value) = control(&qmp_socket(&folder));
    option(name, value);
    if memory == Memory::Sized {
        for (name, value) in agent_port(&folder) {
            option(name, value);
        }
    }
    option("-display", "none".into());
    let flags = ["-nodefaults", "-no-user-config", "-no-reboot"];
    command.extend(flags.map(String::from));
    command
}

/// Path of the emulator.
fn find(qemu: &Path) -> Result<PathBuf, Error> {
    tool::find(qemu).ok_or_else(|| Error::Missing {
        what: format!("there is no {}", qemu.display()),
        hint: qemu_check::HINT.into(),
    })
}

/// Its firmware files, from the folders that it lists.
fn firmware(qemu: &Path) -> Result<[PathBuf; FIRMWARE.len()], Error> {
    let listing = tool::output(Command::new(qemu).args(["-L", "help"]), qemu_check::HINT)?;
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
            hint: "apt-get install qemu-system-data seabios".into(),
        }),
    }
}

#[cfg(test)]
mod tests {
    use demeter_scenario::Provisioner;

    use super::*;

    /// The shipped scenario.
    fn scenario() -> Scenario {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/nested.toml");
        Scenario::load(&shipped).unwrap()
    }

    /// The scenario with two guests, of three shares and one.
    fn fleet(policy: &str) -> Scenario {
        let mut scenario = scenario();
        scenario.settings.clear();
        // The sampling unit supports one reader.
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

    /// The scenario with balloons, and with fast memory for two kernels.
    fn with_balloons() -> Scenario {
        let mut scenario = fleet("shares");
        scenario.machine.fast.usable_mib = 768;
        scenario.systems = vec![System::DemeterDamon];
        let balloon = Provisioner::Sized(ProvisionerKind::DemeterBalloon);
        scenario.provision.as_mut().unwrap().provisioners = vec![balloon];
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
            for memory in [Memory::Flat, Memory::Tiered] {
                let guests = guests(&scenario, memory, 30).unwrap();
                assert_eq!(guests.len() as u64, count);
                let all_mib: u64 = guests.iter().map(memory_mib).sum();
                assert!(all_mib + count * EMULATOR_MIB <= host_mib, "{guests:?}");
                for guest in &guests {
                    assert!(
                        memory_mib(guest) > scenario.footprint_mib() + 30,
                        "{guests:?}"
                    );
                    assert_eq!(guest.sizes.slow_mib > 0, memory == Memory::Tiered);
                }
            }
            scenario.machine.slow.usable_mib = 260;
            let said = guests(&scenario, Memory::Flat, 30).unwrap_err().to_string();
            assert!(said.contains("raise machine.fast.usable_mib"), "{said}");
        }
    }

    #[test]
    fn guests_with_both_nodes_divide_fast_memory_by_their_shares() {
        let guests = guests(&fleet("static"), Memory::Tiered, 30).unwrap();
        let [a, b] = &guests[..] else {
            panic!("{guests:?}")
        };
        assert_eq!((a.sizes.fast_mib, b.sizes.fast_mib), (84, 28));
    }

    #[test]
    fn guests_with_balloons_may_each_have_the_whole_fast_tier_and_begin_with_their_part() {
        let mut scenario = with_balloons();
        let memory = Memory::of(System::DemeterDamon, &scenario);
        assert_eq!(memory, Memory::Sized);
        let guests = guests(&scenario, memory, 30).unwrap();
        let pool_mib = 768 - 2 * EMULATOR_MIB;
        let parts: Vec<u64> = guests.iter().map(|guest| guest.fast_mib).collect();
        assert_eq!(parts, [480, 160]);
        for guest in &guests {
            assert_eq!(guest.sizes.fast_mib, pool_mib);
            let command = command(&scenario, memory, guest);
            let has = |part: &str| command.iter().any(|word| word.contains(part));
            assert!(has("share=on,align=2M,id=node0") && has("name=org.demeter.0"));
        }

        let config = controller_config(&scenario, memory, &guests).unwrap();
        config.check().unwrap();
        // Until the timed phase begins.
        assert_eq!(config.policy, Policy::Static);
        let vm = &config.vms[&"b".parse().unwrap()];
        assert_eq!(vm.agent, Some("/guests/b/agent.sock".into()));
        assert_eq!(vm.fast.limit_mib, Some(pool_mib));
        assert!(vm.fast.guarantee_mib > vm.fast.size_mib / 2, "{vm:?}");
        assert_eq!(vm.slow.guarantee_mib, vm.slow.size_mib);

        scenario.machine.fast.usable_mib = 500;
        let said = super::guests(&scenario, memory, 30)
            .unwrap_err()
            .to_string();
        assert!(
            said.contains("guest b begins with 92 MiB") && said.contains("raise"),
            "{said}"
        );
    }

    #[test]
    fn only_a_tiered_guest_has_its_nodes_backed_by_the_hosts() {
        let backed = |slow_mib| {
            let guest = Guest {
                name: "a".into(),
                share: 1,
                fast_mib: 100,
                guarantee_mib: 16,
                sizes: NodeSizes {
                    fast_mib: 100,
                    slow_mib,
                },
            };
            let command = command(&scenario(), Memory::Tiered, &guest);
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
            let guests = guests(&scenario, Memory::Flat, 30).unwrap();
            let config = controller_config(&scenario, Memory::Flat, &guests).unwrap();
            config.check().unwrap();
            assert_eq!(config.socket, Path::new(HOST_SOCKET_PATH));
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
