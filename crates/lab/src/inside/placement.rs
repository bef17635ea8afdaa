//! Memory near a socket, and the nodes on which a process's memory lies.

use std::cmp::Reverse;
use std::collections::BTreeMap;
use std::path::Path;
use std::time::Duration;

use demeter_guest::policies::read_places;
use demeter_policy::{MIB, NodeId, Pid};
use demeter_scenario::Machine;

use super::testbed::Testbed;
use crate::fault::Fault;

/// The node of the fastest tier that is nearest to a socket.
pub fn nearest_fast(bed: &Testbed<'_>, machine: &Machine, socket: u32) -> NodeId {
    let fastest = bed.tiers.fastest().iter().copied();
    let nodes = machine.nodes();
    let figures = |node: &NodeId| {
        let node = nodes.get(node.0 as usize)?;
        let gbps = Reverse(node.bandwidth_from_gbps(socket));
        Some((node.latency_from_ns(socket), gbps))
    };
    // On this machine nodes may have any numbers, and the tier has one node.
    fastest.min_by_key(figures).unwrap_or(NodeId(0))
}

/// The nodes that count as fast for a copy. If copies run on several sockets, each has the node of its own.
pub fn fast_nodes(bed: &Testbed<'_>, machine: &Machine, socket: u32, copies: u32) -> Vec<NodeId> {
    match machine.sockets() > 1 && copies > 1 {
        true => vec![nearest_fast(bed, machine, socket)],
        false => bed.tiers.fastest().to_vec(),
    }
}

/// Longest time to read where a copy's memory lies.
const READ_MAX: Duration = Duration::from_secs(10);

/// Bytes of a process on each node.
#[derive(Debug, Default, PartialEq, Eq)]
pub struct Placement(BTreeMap<NodeId, u64>);

impl Placement {
    /// Reads where a process's memory lies.
    pub fn read(root: &Path, pid: Pid) -> Result<Self, Fault> {
        let mut bytes = BTreeMap::new();
        let is_whole = read_places(root, pid, READ_MAX, |place| {
            for (node, resident) in place.resident {
                *bytes.entry(node).or_insert(0) += resident.0;
            }
        })
        .map_err(|error| Fault::Workload(error.to_string()))?;
        match is_whole {
            true => Ok(Self(bytes)),
            false => Err(Fault::Workload(format!(
                "has more mappings than can be read in {READ_MAX:?}"
            ))),
        }
    }

    /// The placement in words, for a process that runs on this socket.
    pub fn describe(&self, machine: &Machine, socket: u32) -> String {
        let nodes = machine.nodes();
        let is_elsewhere = |node: &NodeId| {
            let node = nodes.get(node.0 as usize);
            node.is_some_and(|node| node.socket != socket)
        };
        let elsewhere = self.0.iter().filter(|(node, _)| is_elsewhere(node));
        let elsewhere: u64 = elsewhere.map(|(_, bytes)| bytes).sum();
        let node = |(node, bytes): (&NodeId, &u64)| format!("node {node} {} MiB", bytes / MIB);
        let all: Vec<String> = self.0.iter().map(node).collect();
        format!(
            "{}; on other sockets {} MiB",
            all.join(", "),
            elsewhere / MIB
        )
    }
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    /// Two sockets, each with DRAM and CXL memory.
    fn machine() -> Machine {
        let node = |tier: u32, socket: u32, ns: [u64; 2]| {
            format!(
                "{{ tier = {tier}, socket = {socket}, usable_mib = 9, latency_ns = {ns:?}, bandwidth_gbps = [9, 9] }}"
            )
        };
        let nodes = [
            node(1, 0, [80, 140]),
            node(1, 1, [140, 80]),
            node(2, 0, [250, 310]),
            node(2, 1, [310, 250]),
        ];
        toml::from_str(&format!("vcpus = 2\nnode = [{}]", nodes.join(", "))).unwrap()
    }

    #[test]
    fn copies_of_several_sockets_have_a_fast_node_each_and_one_program_has_all() {
        let machine = machine();
        let bed = Testbed::vm_of(&machine).unwrap();
        let of = |socket, copies| fast_nodes(&bed, &machine, socket, copies);
        assert_eq!(of(0, 2), [NodeId(0)]);
        assert_eq!(of(1, 2), [NodeId(1)]);
        assert_eq!(of(0, 1), [NodeId(0), NodeId(1)]);
    }

    #[test]
    fn memory_on_other_sockets_is_summed_over_mappings_and_page_sizes() {
        let placement = |numa_maps: &str| {
            let root = tempfile::tempdir().unwrap();
            fs::create_dir_all(root.path().join("proc/9")).unwrap();
            fs::write(root.path().join("proc/9/numa_maps"), numa_maps).unwrap();
            Placement::read(root.path(), Pid(9)).unwrap()
        };
        let several = placement(
            "7f00 default anon=512 dirty=512 N0=256 N3=256 kernelpagesize_kB=4\n\
             7f80 bind:1 file=/N1=7 huge N1=2 N2=1 kernelpagesize_kB=2048\n\
             7fff default stack\n",
        );
        assert_eq!(
            several.describe(&machine(), 0),
            "node 0 1 MiB, node 1 4 MiB, node 2 2 MiB, node 3 1 MiB; on other sockets 5 MiB"
        );
        assert_eq!(placement("N0=x =\n"), Placement::default());
    }
}
