//! Machines of any nodes: what a node is, and what is wrong with a list of nodes.

use std::ops::Range;

use demeter_policy::LEVELS;
use serde::{Deserialize, Serialize};

use crate::check::{BANDWIDTH_MAX_GBPS, LATENCY_MAX_NS, TIER_MAX_MIB};
use crate::fault::{refuse_if, within};
use crate::{Machine, Tier};

/// Most nodes of a machine, which is the agent's bound, too.
const NODES_MAX: usize = 64;

/// Distance of a node from itself (ACPI, SLIT), and the most that the kernel takes for reachable.
const OWN_DISTANCE: u64 = 10;
const DISTANCE_MAX: u64 = 254;

/// Most sockets.
const SOCKETS_MAX: u32 = 16;

/// One node of a machine.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
#[cfg_attr(feature = "schema", derive(schemars::JsonSchema))]
#[serde(deny_unknown_fields)]
pub struct MachineNode {
    /// Its tier: 1 is the fastest.
    pub tier: u32,
    /// The socket that it is attached to. The first nodes have the CPUs, node 0 those of socket 0 and so on, and all
    /// sockets have as many.
    #[serde(default)]
    pub socket: u32,
    /// Memory free to programs once the guest has booted, MiB. A node with CPUs may have none.
    pub usable_mib: u64,
    /// Latency of a load from each socket's CPUs, nanoseconds: `latency_ns = [80, 140]`.
    pub latency_ns: Vec<u64>,
    /// Bandwidth from each socket's CPUs, GB/s (10^9 bytes).
    pub bandwidth_gbps: Vec<u64>,
    /// Second of the timed phase at which its memory comes online. Only the last node may come or go.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub comes_at_s: Option<u64>,
    /// Second of the timed phase at which its memory goes offline.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub goes_at_s: Option<u64>,
}

impl MachineNode {
    /// Whether its memory comes or goes while the machine runs.
    pub fn is_plugged(&self) -> bool {
        self.comes_at_s.is_some() || self.goes_at_s.is_some()
    }

    /// Latency of a load from a socket's CPUs, nanoseconds.
    pub fn latency_from_ns(&self, socket: u32) -> u64 {
        self.latency_ns[socket as usize]
    }

    /// Bandwidth from a socket's CPUs, GB/s.
    pub fn bandwidth_from_gbps(&self, socket: u32) -> u64 {
        self.bandwidth_gbps[socket as usize]
    }

    /// The node that a tier of a machine of one socket stands for.
    fn of_tier(tier: u32, of: &Tier) -> Self {
        Self {
            tier,
            socket: 0,
            usable_mib: of.usable_mib,
            latency_ns: vec![of.latency_ns],
            bandwidth_gbps: vec![of.bandwidth_gbps],
            comes_at_s: None,
            goes_at_s: None,
        }
    }
}

impl Machine {
    /// All nodes, in the order of their numbers: those that are listed, or the fast and the slow tier's.
    pub fn nodes(&self) -> Vec<MachineNode> {
        match &self.node[..] {
            [] => vec![
                MachineNode::of_tier(1, &self.fast),
                MachineNode::of_tier(2, &self.slow),
            ],
            listed => listed.to_vec(),
        }
    }

    /// How many sockets there are.
    pub fn sockets(&self) -> u32 {
        1 + self.node.iter().map(|node| node.socket).max().unwrap_or(0)
    }

    /// The CPUs of a socket.
    pub fn cpus_of(&self, socket: u32) -> Range<u32> {
        let each = self.vcpus / self.sockets();
        socket * each..(socket + 1) * each
    }

    /// Distance of each node to each node (SLIT): latency in tenths of that of the CPUs' own node. A way between nodes
    /// without CPUs leads over the socket of one of them.
    pub fn distances(&self) -> Vec<Vec<u64>> {
        let (sockets, nodes) = (self.sockets(), self.nodes());
        let from_socket = |socket: u32, to: &MachineNode| {
            let own_ns = nodes[socket as usize].latency_from_ns(socket);
            OWN_DISTANCE * to.latency_from_ns(socket) / own_ns
        };
        let distance = |(a, from): (u32, &MachineNode), (b, to): (u32, &MachineNode)| {
            if a == b {
                return OWN_DISTANCE;
            }
            let distance = match (a < sockets, b < sockets) {
                (true, _) => from_socket(a, to),
                (false, true) => from_socket(b, from),
                (false, false) => {
                    let over = |socket| from_socket(socket, from) + from_socket(socket, to);
                    over(from.socket)
                        .min(over(to.socket))
                        .saturating_sub(OWN_DISTANCE)
                }
            };
            distance.clamp(OWN_DISTANCE + 1, DISTANCE_MAX)
        };
        let numbered = || (0u32..).zip(&nodes);
        let row = |from| numbered().map(|to| distance(from, to)).collect();
        numbered().map(row).collect()
    }

    /// Memory of all nodes that are there from start to end, MiB.
    pub fn room_mib(&self) -> u64 {
        let nodes = self.nodes().into_iter();
        let lasting = nodes.filter(|node| !node.is_plugged());
        lasting.map(|node| node.usable_mib).sum()
    }

    /// Checks the listed nodes for a timed phase of this length.
    pub(crate) fn check_nodes(&self, duration_s: u64) -> Result<(), String> {
        let nodes = &self.node;
        for (key, tier) in [("fast", &self.fast), ("slow", &self.slow)] {
            refuse_if(*tier != Tier::default(), || {
                format!(
                    "machine.{key}: the nodes ([[machine.node]]) say what memory there is: remove one of both"
                )
            })?;
        }
        within("machine.node, their number", nodes.len(), 2..=NODES_MAX)?;
        for (number, node) in nodes.iter().enumerate() {
            let key = |key: &str| format!("machine.node[{number}].{key}");
            within(&key("tier"), node.tier, 1..=LEVELS as u32)?;
            within(&key("socket"), node.socket, 0..=SOCKETS_MAX - 1)?;
        }
        let sockets = self.sockets();
        let tiers = nodes.iter().map(|node| node.tier).max().unwrap_or(0);
        within("machine.node, their tiers", tiers, 2..=LEVELS as u32)?;
        for tier in 1..=tiers {
            let of_tier = |node: &MachineNode| node.tier == tier && node.usable_mib > 0;
            refuse_if(!nodes.iter().any(of_tier), || {
                format!(
                    "machine.node: tier {tier} has no memory: number tiers from 1 on, and give each a node"
                )
            })?;
        }
        for (number, node) in (0..sockets).zip(nodes) {
            refuse_if(node.socket != number, || {
                format!(
                    "machine.node[{number}].socket = {}: the first {sockets} nodes have the CPUs of the {sockets} sockets: set \
                     socket = {number}",
                    node.socket
                )
            })?;
        }
        refuse_if(!self.vcpus.is_multiple_of(sockets), || {
            format!(
                "machine.vcpus = {}: must be a multiple of the {sockets} sockets of machine.node",
                self.vcpus
            )
        })?;
        for number in 0..nodes.len() {
            self.check_node(number, duration_s)?;
        }
        self.check_order()
    }

    fn check_node(&self, number: usize, duration_s: u64) -> Result<(), String> {
        let node = &self.node[number];
        let key = |key: &str| format!("machine.node[{number}].{key}");
        let has_cpus = number < self.sockets() as usize;
        within(
            &key("usable_mib"),
            node.usable_mib,
            u64::from(!has_cpus)..=TIER_MAX_MIB,
        )?;
        let sockets = self.sockets() as usize;
        for (name, figures, most) in [
            ("latency_ns", &node.latency_ns, LATENCY_MAX_NS),
            ("bandwidth_gbps", &node.bandwidth_gbps, BANDWIDTH_MAX_GBPS),
        ] {
            refuse_if(figures.len() != sockets, || {
                format!(
                    "{} has {} figures: give one for each of {sockets} socket(s)",
                    key(name),
                    figures.len()
                )
            })?;
            for &figure in figures {
                within(&key(name), figure, 1..=most)?;
            }
        }
        let own_ns = node.latency_from_ns(node.socket);
        let nearest = (0..).zip(&node.latency_ns).min_by_key(|(_, ns)| **ns);
        if let Some((socket, ns)) = nearest.filter(|(_, ns)| **ns < own_ns) {
            return Err(format!(
                "{} = {ns} from socket {socket}, but {own_ns} from its own socket {}: swap them, or set socket = {socket}",
                key("latency_ns"),
                node.socket
            ));
        }
        refuse_if(
            node.is_plugged() && (has_cpus || number + 1 != self.node.len()),
            || {
                format!(
                    "machine.node[{number}]: only the last node comes or goes, and no node with CPUs: move it to the end"
                )
            },
        )?;
        for (name, at_s) in [
            ("comes_at_s", node.comes_at_s),
            ("goes_at_s", node.goes_at_s),
        ] {
            refuse_if(at_s.is_some_and(|s| !(1..duration_s).contains(&s)), || {
                format!(
                    "{} = {}: must be at least 1 and below duration_s = {duration_s}",
                    key(name),
                    at_s.unwrap_or(0)
                )
            })?;
        }
        match (node.comes_at_s, node.goes_at_s) {
            (Some(comes), Some(goes)) if comes >= goes => Err(format!(
                "{} = {goes}: must be above comes_at_s = {comes}",
                key("goes_at_s")
            )),
            _ => Ok(()),
        }
    }

    /// Refuses a node that beats one of a faster tier on the same socket in latency and in bandwidth.
    fn check_order(&self) -> Result<(), String> {
        let with_memory = || {
            let nodes = self.node.iter().enumerate();
            nodes.filter(|(_, node)| node.usable_mib > 0)
        };
        for (slow_number, slow) in with_memory() {
            for (fast_number, fast) in with_memory() {
                let socket = fast.socket;
                let beats = slow.socket == socket
                    && slow.tier > fast.tier
                    && slow.latency_from_ns(socket) <= fast.latency_from_ns(socket)
                    && slow.bandwidth_from_gbps(socket) >= fast.bandwidth_from_gbps(socket);
                refuse_if(beats, || {
                    format!(
                        "machine.node[{slow_number}] of tier {} is as good as machine.node[{fast_number}] of tier {}: \
                         swap their tiers",
                        slow.tier, fast.tier
                    )
                })?;
            }
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::{MachinePlace, Thp};

    /// Some sound machine: DRAM on each socket, perhaps without memory on the first, then slower nodes.
    fn any_machine() -> impl Strategy<Value = Machine> {
        let far = (0u32..4, 1u64..5000, 0u64..500);
        let last = (any::<bool>(), proptest::option::of(1u64..9));
        let far = proptest::collection::vec(far, 1..20);
        (1u32..5, 1u32..4, far, last, any::<bool>(), any::<bool>()).prop_map(
            |(sockets, each, far, (comes, goes_at_s), hmat, is_bare)| {
                // A socket's own nodes are nearer than all others.
                let from = |socket: u32, near_ns: u64| {
                    let of = |from| near_ns + if from == socket { 0 } else { 60 };
                    (0..sockets).map(of).collect::<Vec<_>>()
                };
                let dram = |socket: u32| MachineNode {
                    tier: 1,
                    socket,
                    usable_mib: if is_bare && socket + 1 < sockets {
                        0
                    } else {
                        100
                    },
                    latency_ns: from(socket, 80),
                    bandwidth_gbps: vec![100; sockets as usize],
                    comes_at_s: None,
                    goes_at_s: None,
                };
                let slower = |(at, (socket, usable_mib, ns)): (usize, (u32, u64, u64))| {
                    // The first two tiers are there in any case.
                    let tier = if at == 0 {
                        2
                    } else {
                        2 + (at as u32 % 3).min(at as u32)
                    };
                    MachineNode {
                        tier,
                        socket: socket % sockets,
                        usable_mib,
                        latency_ns: from(socket % sockets, 1000 * u64::from(tier) + ns),
                        bandwidth_gbps: vec![20; sockets as usize],
                        ..dram(0)
                    }
                };
                let mut node: Vec<_> = (0..sockets).map(dram).collect();
                node.extend(far.into_iter().enumerate().map(slower));
                if let Some(last) = node.last_mut() {
                    last.comes_at_s = comes.then_some(1).filter(|_| goes_at_s != Some(1));
                    last.goes_at_s = goes_at_s;
                }
                Machine {
                    place: MachinePlace::Guest,
                    vcpus: sockets * each,
                    thp: Thp::Always,
                    fast: Tier::default(),
                    slow: Tier::default(),
                    hmat,
                    node,
                }
            },
        )
    }

    proptest! {
        #[test]
        fn sound_machines_pass_and_survive_their_file(machine in any_machine()) {
            prop_assert_eq!(machine.check_nodes(10), Ok(()));
            let text = toml::to_string(&machine).unwrap();
            prop_assert_eq!(toml::from_str::<Machine>(&text).unwrap(), machine.clone());
            // All CPUs are of one socket each, and its node is of that socket.
            let cpus: Vec<u32> = (0..machine.sockets()).flat_map(|s| machine.cpus_of(s)).collect();
            prop_assert_eq!(cpus, (0..machine.vcpus).collect::<Vec<_>>());
            let with_cpus = (0..).zip(&machine.node).take(machine.sockets() as usize);
            prop_assert!(with_cpus.into_iter().all(|(socket, node)| node.socket == socket));
        }

        /// Whatever the keys hold, a check ends in at most one line, and what passes has sound figures.
        #[test]
        fn any_figures_are_judged_in_a_line(
            mut machine in any_machine(),
            at: prop::sample::Index,
            tier in 0u32..6,
            socket in 0u32..20,
            mib: u64,
            figures in proptest::collection::vec(any::<u64>(), 0..4),
            comes_at_s: Option<u64>,
        ) {
            let node = at.get(&machine.node).clone();
            let changed = MachineNode { tier, socket, usable_mib: mib, latency_ns: figures, comes_at_s, ..node };
            let at = at.index(machine.node.len());
            machine.node[at] = changed;
            match machine.check_nodes(10) {
                Err(what) => prop_assert!(what.starts_with("machine.") && !what.contains('\n'), "{}", what),
                Ok(()) => {
                    let sockets = machine.sockets() as usize;
                    prop_assert!(machine.node.iter().all(|n| n.latency_ns.len() == sockets));
                    prop_assert!(machine.room_mib() <= TIER_MAX_MIB * NODES_MAX as u64);
                }
            }
        }
    }

    /// A node of a machine with one socket, or with two if it has figures of both; `more` overrides.
    fn node(tier: u32, ns: &[u64], more: &str) -> String {
        let gbps = vec![10; ns.len()];
        let mib = if more.contains("usable_mib") {
            ""
        } else {
            ", usable_mib = 9"
        };
        format!("{{ tier = {tier}{mib}, latency_ns = {ns:?}, bandwidth_gbps = {gbps:?}{more} }}")
    }

    #[test]
    #[expect(clippy::too_many_lines, reason = "a table of cases")]
    fn impossible_nodes_are_refused_by_the_key() {
        let said = |nodes: &[String]| {
            let text = format!("vcpus = 2\nnode = [{}]", nodes.join(", "));
            toml::from_str::<Machine>(&text).unwrap().check_nodes(10)
        };
        let (fast, slow) = (node(1, &[80], ""), node(2, &[250], ""));
        said(&[fast.clone(), slow.clone()]).unwrap();
        let far = |socket, ns| node(1, ns, &format!(", socket = {socket}"));
        said(&[
            far(0, &[80, 140]),
            far(1, &[140, 80]),
            node(2, &[250, 310], ""),
        ])
        .unwrap();
        for (nodes, says) in [
            (
                vec![fast.clone()],
                "machine.node, their number = 1: must be 2 to 64",
            ),
            (
                vec![slow.clone(); 65],
                "machine.node, their number = 65: must be 2 to 64",
            ),
            (
                vec![fast.clone(), node(5, &[250], "")],
                "machine.node[1].tier = 5: must be 1 to 4",
            ),
            (
                vec![fast.clone(); 2],
                "machine.node, their tiers = 1: must be 2 to 4",
            ),
            (
                vec![fast.clone(), node(3, &[250], "")],
                "machine.node: tier 2 has no memory",
            ),
            (
                vec![fast.clone(), node(2, &[250], ", socket = 16")],
                "machine.node[1].socket = 16: must be 0 to 15",
            ),
            (
                vec![fast.clone(), node(2, &[250], ", socket = 2")],
                "machine.node[1].socket = 2: the first 3 nodes have",
            ),
            (
                [0, 1, 2]
                    .map(|s| far(s, &[80, 80, 80]))
                    .into_iter()
                    .chain([slow.clone()])
                    .collect(),
                "machine.vcpus = 2: must be a multiple of the 3 sockets",
            ),
            (
                vec![fast.clone(), node(2, &[250, 310], "")],
                "machine.node[1].latency_ns has 2 figures: give one for each of 1",
            ),
            (
                vec![fast.clone(), node(2, &[0], "")],
                "machine.node[1].latency_ns = 0: must be 1 to 1000000",
            ),
            (
                vec![
                    fast.clone(),
                    node(2, &[250], ", usable_mib = 0"),
                    slow.clone(),
                ],
                "machine.node[1].usable_mib = 0: must be 1",
            ),
            (
                vec![
                    far(0, &[140, 80]),
                    far(1, &[140, 80]),
                    node(2, &[250, 310], ""),
                ],
                "machine.node[0].latency_ns = 80 from socket 1, but 140 from its own socket 0",
            ),
            (
                vec![fast.clone(), node(2, &[80], "")],
                "machine.node[1] of tier 2 is as good as machine.node[0] of tier 1",
            ),
            (
                vec![
                    fast.clone(),
                    node(2, &[250], ", comes_at_s = 1"),
                    slow.clone(),
                ],
                "machine.node[1]: only the last node comes",
            ),
            (
                vec![fast.clone(), node(2, &[250], ", comes_at_s = 10")],
                "machine.node[1].comes_at_s = 10: must be at least 1",
            ),
            (
                vec![
                    fast.clone(),
                    node(2, &[250], ", comes_at_s = 5, goes_at_s = 5"),
                ],
                "machine.node[1].goes_at_s = 5: must be above comes_at_s = 5",
            ),
        ] {
            let said = said(&nodes).unwrap_err();
            assert!(
                said.starts_with(says) && !said.contains('\n'),
                "{says}: {said}"
            );
        }
    }

    #[test]
    fn a_machine_of_two_tiers_has_their_nodes() {
        let text = "vcpus = 2\nfast = { usable_mib = 3, latency_ns = 80, bandwidth_gbps = 9 }\n\
                    slow = { usable_mib = 7, latency_ns = 250, bandwidth_gbps = 8 }";
        let machine: Machine = toml::from_str(text).unwrap();
        let [fast, slow] = &machine.nodes()[..] else {
            panic!("two nodes");
        };
        assert_eq!((fast.tier, slow.tier, machine.sockets()), (1, 2, 1));
        assert_eq!((machine.cpus_of(0), machine.room_mib()), (0..2, 10));
        // Nothing of nodes is in its file.
        let written = toml::to_string(&machine).unwrap();
        assert!(
            !written.contains("node") && !written.contains("hmat"),
            "{written}"
        );
    }
}
