//! Reads the statistics that the host gets every second.

use std::fs;
use std::io;
use std::path::Path;

use demeter_policy::benefit::Benefit;
use demeter_policy::{ByteCount, NodeId};
use demeter_proto::{BootId, NODES_MAX, NodeStats, NodeTotal, Permille, Relocation, Stats};

use super::{Balloon, NodeBalloon};
use crate::nodes::{NodeUsage, NodesError, Topology};
use crate::status::{Status, TierStatus};

/// The kernel's identifier of this boot.
pub fn boot_id(root: &Path) -> io::Result<BootId> {
    let text = fs::read_to_string(root.join("proc/sys/kernel/random/boot_id"))?;
    let digits: String = text.trim().chars().filter(|&c| c != '-').collect();
    let malformed = |e| io::Error::new(io::ErrorKind::InvalidData, e);
    let number = u128::from_str_radix(&digits, 16).map_err(malformed)?;
    Ok(BootId(number.to_be_bytes()))
}

/// Sizes of the nodes with memory, including held memory.
pub fn totals(
    topology: &Topology,
    mut balloon: Option<&mut (dyn Balloon + 'static)>,
) -> Vec<NodeTotal> {
    let totals = topology.with_memory().map(|node| NodeTotal {
        node: node.id,
        total: with_held(node.total, of_driver(&mut balloon, node.id).held),
    });
    totals.take(NODES_MAX).collect()
}

/// Adds held memory, which the driver subtracts from the kernel's count.
fn with_held(counted: ByteCount, held: ByteCount) -> ByteCount {
    ByteCount(counted.0.saturating_add(held.0))
}

/// The driver's statistics of a node; zero without a driver.
fn of_driver(balloon: &mut Option<&mut (dyn Balloon + 'static)>, node: NodeId) -> NodeBalloon {
    let stats = balloon.as_mut().and_then(|b| b.stats(node).ok());
    stats.unwrap_or_default()
}

/// Current use of memory. `status` is that of an agent in the same process.
pub fn stats(
    root: &Path,
    nodes: &[NodeTotal],
    mut balloon: Option<&mut (dyn Balloon + 'static)>,
    status: Option<&Status>,
) -> Result<Stats, NodesError> {
    let mut oom_returned = 0;
    let mut told = Vec::with_capacity(nodes.len());
    for &NodeTotal { node, .. } in nodes {
        let usage = NodeUsage::read(root, node)?;
        let NodeBalloon {
            held,
            oom_returned: returned,
        } = of_driver(&mut balloon, node);
        oom_returned += returned.0;
        let working_set = status.map_or(0, |status| working_set_on(status, node));
        told.push(NodeStats {
            node,
            total: with_held(usage.total, held),
            free: usage.free,
            held,
            working_set: ByteCount(working_set),
        });
    }
    let (psi_some, psi_full) = pressure(root);
    Ok(Stats {
        psi_some,
        psi_full,
        fast_hit: status.and_then(|s| s.fast_hit_permille).map(Permille::new),
        relocation: status.map(|s| Relocation {
            cost_ms: s.moves_cost_ms,
            benefit_ms: s.moves_benefit_ms,
            is_resting: s.is_resting,
        }),
        benefit: status.and_then(|status| benefit(status, &told)),
        oom_returned: ByteCount(oom_returned),
        nodes: told,
    })
}

/// The benefit of fast memory that the VM owns: the kernel and other programs need some of it first.
fn benefit(status: &Status, told: &[NodeStats]) -> Option<Benefit> {
    let nodes = &status.tiers.first()?.nodes;
    let of_tier = told.iter().filter(|of| nodes.contains(&of.node.0));
    let owned = of_tier.map(|of| of.total.0.saturating_sub(of.held.0));
    let managed = status.targets.iter().map(|target| target.fast_bytes);
    let usable = managed.chain([status.fast_free_bytes]);
    let (owned, usable) = (
        owned.fold(0, u64::saturating_add),
        usable.fold(0, u64::saturating_add),
    );
    let benefit = status.benefit.clone()?;
    Some(benefit.beside(ByteCount(owned.saturating_sub(usable))))
}

/// The working set to report with a node. The first node of each tier reports for its tier.
fn working_set_on(status: &Status, node: NodeId) -> u64 {
    let is_first = |tier: &TierStatus| tier.nodes.first() == Some(&node.0);
    match status.tiers.iter().position(is_first) {
        Some(0) => status.working_set_fast_bytes,
        Some(1) => status.working_set_slow_bytes,
        _ => 0,
    }
}

/// `some avg10` and `full avg10` of `ROOT/proc/pressure/memory`; zero if the kernel has no PSI.
fn pressure(root: &Path) -> (Permille, Permille) {
    let text = fs::read_to_string(root.join("proc/pressure/memory")).unwrap_or_default();
    let avg10 = |kind: &str| {
        let line = text.lines().find_map(|line| line.strip_prefix(kind));
        let percent = line
            .and_then(|line| {
                line.split_whitespace()
                    .find_map(|w| w.strip_prefix("avg10="))
            })
            .and_then(|number| number.parse::<f64>().ok());
        Permille::new((percent.unwrap_or(0.0) * 10.0).round() as u16)
    };
    (avg10("some "), avg10("full "))
}

#[cfg(test)]
pub(super) mod tests {
    use demeter_policy::{MIB, PAGE_SIZE};

    use super::super::simulated::SimulatedBalloon;
    use super::*;

    /// A machine with a fast and a slow node.
    pub fn root() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        let write = |path: &str, text: &str| {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        };
        for (node, total_kib, free_kib) in [(0, 204_800, 1024), (1, 819_200, 4096)] {
            let dir = format!("sys/devices/system/node/node{node}");
            write(
                &format!("{dir}/meminfo"),
                &format!(
                    "Node {node} MemTotal: {total_kib} kB\nNode {node} MemFree: {free_kib} kB\n"
                ),
            );
            write(&format!("{dir}/distance"), "10 20\n");
            write(
                &format!("{dir}/cpulist"),
                if node == 0 { "0\n" } else { "\n" },
            );
        }
        write(
            "proc/pressure/memory",
            "some avg10=12.34 avg60=0.00 avg300=0.00 total=1\n\
             full avg10=3.00 avg60=0.00 avg300=0.00 total=0\n",
        );
        write(
            "proc/sys/kernel/random/boot_id",
            "0123abcd-0000-4000-8000-0000000000ff\n",
        );
        root
    }

    #[test]
    fn everything_is_read_below_the_root() {
        let root = root();
        let BootId(boot_id) = boot_id(root.path()).unwrap();
        assert_eq!(boot_id[..4], [0x01, 0x23, 0xab, 0xcd]);
        assert_eq!(boot_id[15], 0xff);

        let mut balloon = SimulatedBalloon::new(1000);
        balloon
            .inflate(NodeId(1), ByteCount(3 * PAGE_SIZE), false)
            .unwrap();
        let topology = Topology::read(root.path()).unwrap();
        let nodes = totals(&topology, Some(&mut balloon));
        assert_eq!(nodes[0].total, ByteCount(200 * MIB));
        assert_eq!(nodes[1].total, ByteCount(800 * MIB + 3 * PAGE_SIZE));
        let status = Status {
            tiers: [0, 1]
                .map(|node| TierStatus {
                    nodes: vec![node],
                    ..Default::default()
                })
                .into(),
            working_set_fast_bytes: 5,
            working_set_slow_bytes: 7,
            fast_hit_permille: Some(900),
            moves_cost_ms: 3,
            moves_benefit_ms: -1,
            ..Default::default()
        };
        let stats = stats(root.path(), &nodes, Some(&mut balloon), Some(&status)).unwrap();
        assert_eq!((stats.psi_some.get(), stats.psi_full.get()), (123, 30));
        assert_eq!(stats.fast_hit, Some(Permille::new(900)));
        let relocation = stats.relocation.unwrap();
        assert_eq!((relocation.cost_ms, relocation.benefit_ms), (3, -1));
        let node = |n: usize| stats.nodes[n];
        assert_eq!(node(0).total, ByteCount(200 * MIB));
        assert_eq!(node(0).free, ByteCount(MIB));
        assert_eq!(node(0).working_set, ByteCount(5));
        assert_eq!(node(1).held, ByteCount(3 * PAGE_SIZE));
        assert_eq!(node(1).total, ByteCount(800 * MIB + 3 * PAGE_SIZE));
        assert_eq!(node(1).working_set, ByteCount(7));
    }

    #[test]
    fn without_an_agent_nothing_is_known_of_accesses() {
        let root = root();
        fs::remove_dir_all(root.path().join("proc/pressure")).unwrap();
        let nodes = totals(&Topology::read(root.path()).unwrap(), None);
        let stats = stats(root.path(), &nodes, None, None).unwrap();
        assert_eq!((stats.fast_hit, stats.relocation), (None, None));
        assert_eq!(stats.psi_some, Permille::default());
        assert!(
            stats
                .nodes
                .iter()
                .all(|n| n.working_set.0 == 0 && n.held.0 == 0)
        );
    }
}
