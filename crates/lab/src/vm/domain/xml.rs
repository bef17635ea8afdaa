//! Converts a VM's parts to a domain's XML (libvirt's docs/formatdomain), without I/O.

use std::fmt::Write;
use std::path::{Path, PathBuf};

use demeter_policy::provision::ProvisionerKind;

use super::super::elastic::{Elastic, MemoryDevice, agent_socket, device_space_mib};
use super::super::qemu::{CPU, KERNEL_ARGS, Parts};
use crate::link::PORT_NAME;

/// Path of the socket to which the VM connects.
pub fn link(folder: &Path) -> PathBuf {
    folder.join("link.sock")
}

/// The XML of the domain `name`, the same machine as [`Parts::command`].
pub fn xml(parts: &Parts, name: &str) -> String {
    let path = |path: &Path| escaped(&path.display().to_string());
    let vcpus = parts.machine.vcpus;
    let [fast_mib, slow_mib] = ram_of_tiers(parts);
    let name = escaped(name);
    let allocation = match parts.prealloc {
        true => "<allocation mode='immediate'/>",
        false => "",
    };
    let tiers = tiers(parts);
    let Plugged {
        limit,
        devices,
        places,
    } = plugged(parts);
    let kernel = path(parts.kernel);
    let initramfs = path(parts.initramfs);
    let kernel_args = escaped(KERNEL_ARGS);
    let emulator = path(parts.qemu);
    let console = path(&parts.console_log());
    let link = path(&link(parts.folder));
    let agent = path(&agent_socket(parts.folder));
    let balloon = match parts.elastic.map(|elastic: &Elastic| elastic.provisioner) {
        Some(ProvisionerKind::VirtioBalloon) => "virtio",
        _ => "none",
    };
    let mut passed = String::new();
    for value in parts.tiers().into_iter().flat_map(|(n, v)| [n.into(), v]) {
        // Writing to a String never fails.
        let _ = write!(passed, "<qemu:arg value='{}'/>", escaped(&value));
    }
    format!(
        "<domain type='qemu' xmlns:qemu='http://libvirt.org/schemas/domain/qemu/1.0'>
  <name>{name}</name>
  {limit}<memory unit='MiB'>{whole_mib}</memory>
  <memoryBacking><source type='memfd'/><access mode='shared'/>{allocation}</memoryBacking>
  <vcpu>{vcpus}</vcpu>
  <os>
    <type arch='x86_64' machine='pc'>hvm</type>
    <kernel>{kernel}</kernel>
    <initrd>{initramfs}</initrd>
    <cmdline>{kernel_args}</cmdline>
  </os>
  <features><acpi/></features>
  <cpu mode='custom' match='exact' check='none'>
    <model fallback='forbid'>{CPU}</model>
    <topology sockets='1' dies='1' cores='{vcpus}' threads='1'/>
    <numa>
      <cell id='0' cpus='0-{last_cpu}' memory='{fast_mib}' unit='MiB'/>
      <cell id='1' memory='{slow_mib}' unit='MiB'/>
      <interconnects>{tiers}</interconnects>
    </numa>
  </cpu>
  <on_reboot>destroy</on_reboot>
  <devices>
    <emulator>{emulator}</emulator>
    <controller type='usb' model='none'/>
    <serial type='file'><source path='{console}' append='on'/></serial>
    <channel type='unix'>
      <source mode='connect' path='{link}'/>
      <target type='virtio' name='{PORT_NAME}'/>
    </channel>
    <channel type='unix'>
      <source mode='bind' path='{agent}'/>
      <target type='virtio' name='org.demeter.0'/>
    </channel>
    <memballoon model='{balloon}'/>{devices}
  </devices>
  <qemu:commandline>{passed}</qemu:commandline>{places}
</domain>
",
        whole_mib = fast_mib + slow_mib,
        last_cpu = vcpus - 1,
    )
}

/// Hotplugged memory; each part is empty if there is none.
#[derive(Default)]
struct Plugged {
    /// Maximum memory of the domain.
    limit: String,
    devices: String,
    /// Addresses of the devices, which libvirt leaves to the emulator.
    places: String,
}

fn plugged(parts: &Parts) -> Plugged {
    let Some(elastic) = parts.elastic.filter(|elastic| elastic.plug_mib > 0) else {
        return Plugged::default();
    };
    let all = elastic.memory_devices();
    let most_mib = ram_of_tiers(parts).iter().sum::<u64>() + device_space_mib(parts.nodes);
    let (mut devices, mut places) = (String::new(), String::new());
    for device in &all {
        let MemoryDevice {
            node,
            size_mib,
            at_mib,
        } = device;
        // Writing to a String never fails. Names of users begin with "ua-".
        let _ = write!(
            devices,
            "
    <memory model='virtio-mem'>
      <target>
        <size unit='MiB'>{size_mib}</size><node>{node}</node>
        <block unit='MiB'>2</block><requested unit='MiB'>{size_mib}</requested>
      </target>
      <alias name='ua-vmem{node}'/>
    </memory>"
        );
        let _ = write!(
            places,
            "<qemu:device alias='ua-vmem{node}'><qemu:frontend>\
             <qemu:property name='memaddr' type='unsigned' value='{}'/>\
             </qemu:frontend></qemu:device>",
            at_mib << 20
        );
    }
    Plugged {
        limit: format!(
            "<maxMemory slots='{}' unit='MiB'>{most_mib}</maxMemory>\n  ",
            all.len()
        ),
        devices,
        places: format!("\n  <qemu:override>{places}</qemu:override>"),
    }
}

/// RAM of the fast and of the slow node, MiB: VMs of other nodes are no domains.
fn ram_of_tiers(parts: &Parts) -> [u64; 2] {
    [0, 1].map(|node| parts.nodes.get(node).map_or(0, |node| node.ram_mib))
}

/// Memory tiers reported by the firmware.
fn tiers(parts: &Parts) -> String {
    let mut text = String::new();
    let tiers = [&parts.machine.fast, &parts.machine.slow];
    for (node, tier) in tiers.into_iter().enumerate() {
        // Writing to a String never fails.
        let _ = write!(
            text,
            "<latency initiator='0' target='{node}' type='access' value='{}'/>",
            tier.latency_ns
        );
    }
    for (node, tier) in tiers.into_iter().enumerate() {
        let kib_per_s = tier.bandwidth_gbps << 20;
        let _ = write!(
            text,
            "<bandwidth initiator='0' target='{node}' type='access' value='{kib_per_s}' unit='KiB'/>"
        );
    }
    text
}

/// Escapes text for an element or an attribute.
fn escaped(text: &str) -> String {
    text.replace('&', "&amp;")
        .replace('<', "&lt;")
        .replace('\'', "&apos;")
}

#[cfg(test)]
mod tests {
    use super::super::super::memory::VmNode;
    use super::super::super::memory::tests::machine;
    use super::*;

    /// Only libvirt can validate the structure: tests/domain.rs.
    #[test]
    fn whatever_a_path_holds_it_stays_a_path() {
        let odd = Path::new("/a'b&c<d");
        let xml = xml(
            &Parts {
                qemu: odd,
                plugin: odd,
                kernel: odd,
                initramfs: odd,
                machine: &machine(60, 220),
                cpu_properties: &[],
                dilation: 8,
                clock: Default::default(),
                tlb: demeter_scenario::Cpu::default().tlb(),
                nodes: &[100, 300].map(|ram_mib| VmNode {
                    ram_mib,
                    plug_mib: 0,
                }),
                elastic: None,
                prealloc: true,
                has_events: false,
                folder: odd,
            },
            "a'b",
        );
        let document = roxmltree::Document::parse(&xml).unwrap();
        let text = |tag: &str| {
            let mut nodes = document.descendants();
            nodes
                .find(|node| node.has_tag_name(tag))
                .and_then(|n| n.text())
        };
        assert_eq!(text("name"), Some("a'b"));
        assert_eq!(text("kernel"), Some("/a'b&c<d"));
        assert_eq!(text("memory"), Some("400"));
        let mut values = document.descendants().filter_map(|n| n.attribute("value"));
        assert!(values.any(|value| value.starts_with("file=/a'b&c<d,shm=/a'b&c<d/shared,")));
        assert!(xml.contains("<allocation mode='immediate'/>"));
    }
}
