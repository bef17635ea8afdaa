use std::fs;

use demeter_policy::MIB;
use proptest::prelude::*;
use tempfile::TempDir;

use super::*;

/// A fake root with nodes of (total MiB, CPU list, tier, latency).
fn machine(nodes: &[(u64, &str, Option<u32>, Option<u32>)]) -> TempDir {
    let root = tempfile::tempdir().unwrap();
    for (id, (mib, cpus, tier, latency_ns)) in nodes.iter().enumerate() {
        let dir = root.path().join(format!("{NODE_DIR}/node{id}"));
        fs::create_dir_all(dir.join("access0/initiators")).unwrap();
        let meminfo = format!(
            "Node {id} MemTotal: {} kB\nNode {id} MemFree: {} kB\n",
            mib * 1024,
            mib * 512
        );
        fs::write(dir.join("meminfo"), meminfo).unwrap();
        fs::write(dir.join("cpulist"), format!("{cpus}\n")).unwrap();
        fs::write(dir.join("distance"), "10 20\n").unwrap();
        if let Some(latency_ns) = latency_ns {
            let path = dir.join("access0/initiators/read_latency");
            fs::write(path, format!("{latency_ns}\n")).unwrap();
        }
        if let Some(tier) = tier {
            let path = root.path().join(format!("{TIER_DIR}/memory_tier{tier}"));
            fs::create_dir_all(&path).unwrap();
            let list = path.join("nodelist");
            let before = fs::read_to_string(&list).unwrap_or_default();
            let comma = if before.is_empty() { "" } else { "," };
            fs::write(list, format!("{before}{comma}{id}")).unwrap();
        }
    }
    root
}

fn order(nodes: &[(u64, &str, Option<u32>, Option<u32>)]) -> Result<TierOrder, NodesError> {
    Topology::read(machine(nodes).path())?.order()
}

fn tiers(order: &TierOrder) -> String {
    order.tiers.to_string()
}

#[test]
fn nodes_are_read_with_sizes_and_tiers() {
    let root = machine(&[(256, "0-1", Some(4), Some(80)), (800, "", Some(70), None)]);
    let topology = Topology::read(root.path()).unwrap();
    let slow = &topology.nodes[1];
    assert_eq!(slow.id, NodeId(1));
    assert_eq!(slow.total, ByteCount(800 << 20));
    assert_eq!(slow.free, ByteCount(400 << 20));
    assert!(!slow.has_cpus && topology.nodes[0].has_cpus);
    assert_eq!(slow.distances, [10, 20]);
    assert_eq!((slow.tier, slow.read_latency_ns), (Some(70), None));
    assert!(!topology.shares_one_tier());
}

#[test]
fn memory_tier_decides_before_latency() {
    let found = order(&[(1, "0", Some(70), Some(80)), (1, "", Some(4), Some(250))]).unwrap();
    assert_eq!(tiers(&found), "1/0");
    assert_eq!(found.decided_by, [DecidedBy::MemoryTier]);
}

#[test]
fn latency_decides_within_one_tier() {
    let nodes = [(1, "0", Some(4), Some(250)), (1, "1", Some(4), Some(80))];
    let found = order(&nodes).unwrap();
    assert_eq!(tiers(&found), "1/0");
    assert_eq!(found.decided_by, [DecidedBy::Latency]);
    assert!(
        Topology::read(machine(&nodes).path())
            .unwrap()
            .shares_one_tier()
    );
}

#[test]
fn a_cpuless_node_is_slow_where_nothing_else_is_known() {
    let found = order(&[(1, "", None, None), (1, "0-3", None, None)]).unwrap();
    assert_eq!(tiers(&found), "1/0");
    assert_eq!(found.decided_by, [DecidedBy::CpulessNode]);
}

/// A machine of nodes with memory, and its rows of distances.
fn topology(nodes: &[(&str, Option<u32>)], distances: &[&[u32]]) -> Topology {
    let node = |(id, &(cpus, tier)): (usize, &(&str, Option<u32>))| Node {
        id: NodeId(id as u32),
        total: ByteCount(1 << 30),
        free: ByteCount(1 << 29),
        has_cpus: !cpus.is_empty(),
        cpus: parse_list(cpus),
        distances: distances[id].to_vec(),
        tier,
        read_latency_ns: None,
        measured_ns: None,
    };
    Topology {
        nodes: nodes.iter().enumerate().map(node).collect(),
    }
}

#[test]
fn two_sockets_with_dram_and_cxl_each_are_two_tiers() {
    let nodes = [
        (10, "0", Some(4), Some(80)),
        (10, "1", Some(4), Some(82)),
        (5, "", Some(9), Some(250)),
        (20, "", Some(9), Some(255)),
    ];
    let found = order(&nodes).unwrap();
    assert_eq!(tiers(&found), "0,1/2,3");
    assert_eq!(found.decided_by, [DecidedBy::MemoryTier]);
}

/// On a busy machine a node may take twice as long when it is measured as its equal.
#[test]
fn a_measurement_does_not_part_nodes_that_the_firmware_calls_equal() {
    let nodes = [("0", None), ("1", None), ("", None), ("", None)];
    let distances: [&[u32]; 4] = [
        &[10, 21, 14, 24],
        &[21, 10, 24, 14],
        &[14, 24, 10, 28],
        &[24, 14, 28, 10],
    ];
    let mut machine = topology(&nodes, &distances);
    let figures = [(80, 90), (82, 95), (250, 260), (255, 520)];
    for (node, (told_ns, measured_ns)) in machine.nodes.iter_mut().zip(figures) {
        node.read_latency_ns = Some(told_ns);
        node.measured_ns = Some(measured_ns);
    }
    assert_eq!(tiers(&machine.order().unwrap()), "0,1/2,3");
    for node in &mut machine.nodes {
        node.read_latency_ns = None;
    }
    assert_eq!(tiers(&machine.order().unwrap()), "0,1/2/3");
}

#[test]
fn two_sockets_and_one_cxl_are_two_tiers() {
    let nodes = [("0", None), ("1", None), ("", None)];
    let distances: [&[u32]; 3] = [&[10, 21, 14], &[21, 10, 24], &[14, 24, 10]];
    let found = topology(&nodes, &distances).order().unwrap();
    assert_eq!(tiers(&found), "0,1/2");
    assert_eq!(found.decided_by, [DecidedBy::Distance]);
}

#[test]
fn three_tiers_are_told_apart_by_whatever_there_is() {
    let by_kernel = [
        (1, "", Some(22), None),
        (1, "0", Some(4), None),
        (1, "", Some(70), None),
        (0, "1", None, None),
    ];
    let found = order(&by_kernel).unwrap();
    assert_eq!(tiers(&found), "1/0/2");
    assert_eq!(found.left_alone, [(NodeId(3), LeftAlone::NoMemory)]);
    let nodes = [("0", None), ("", None), ("", None)];
    let distances: [&[u32]; 3] = [&[10, 14, 28], &[14, 10, 30], &[28, 30, 10]];
    let by_distance = topology(&nodes, &distances).order().unwrap();
    assert_eq!(tiers(&by_distance), "0/1/2");
    let mut mixed = topology(&nodes, &[&[10, 20, 20], &[20, 10, 20], &[20, 20, 10]]);
    for (node, measured_ns) in mixed.nodes.iter_mut().zip([100, 250, 600]) {
        node.measured_ns = Some(measured_ns);
    }
    let found = mixed.order().unwrap();
    assert_eq!(tiers(&found), "0/1/2");
    let by = [DecidedBy::Distance, DecidedBy::Measured];
    assert_eq!(found.decided_by, by);
}

#[test]
fn measured_latency_decides_last_and_contradictions_are_said() {
    let nodes = [("0", None), ("1", None)];
    let mut machine = topology(&nodes, &[&[10, 20], &[20, 10]]);
    assert!(machine.order().is_err());
    machine.nodes[0].measured_ns = Some(400);
    machine.nodes[1].measured_ns = Some(100);
    let found = machine.order().unwrap();
    assert_eq!(tiers(&found), "1/0");
    assert_eq!(found.contradictions, []);
    let by_hand = machine.order_by_hand(&"0/1".parse().unwrap()).unwrap();
    let [contradiction] = by_hand.contradictions[..] else {
        panic!("{by_hand:?}")
    };
    assert_eq!(
        (contradiction.fast, contradiction.slow),
        (NodeId(0), NodeId(1))
    );
    let said = contradiction.to_string();
    assert!(
        said.contains("by their measured latency: 400 against 100"),
        "{said}"
    );
}

#[test]
fn tiers_by_hand_name_nodes_with_memory() {
    let root = machine(&[
        (1, "0", None, None),
        (1, "", None, None),
        (0, "1", None, None),
        (1, "", None, None),
    ]);
    let topology = Topology::read(root.path()).unwrap();
    let by_hand = |text: &str| topology.order_by_hand(&text.parse().unwrap());
    let found = by_hand("1/0").unwrap();
    assert_eq!(tiers(&found), "1/0");
    let alone = [
        (NodeId(2), LeftAlone::NoMemory),
        (NodeId(3), LeftAlone::NotNamed),
    ];
    assert_eq!(found.left_alone, alone);
    assert!(matches!(
        by_hand("0/2"),
        Err(NodesError::NoMemory(NodeId(2)))
    ));
    assert!(matches!(by_hand("0/7"), Err(NodesError::NoNode(NodeId(7)))));
}

#[test]
fn what_is_more_than_the_bounds_is_put_together_or_refused() {
    let nodes = [
        (1, "0", Some(1), None),
        (1, "1", Some(2), None),
        (1, "", Some(3), None),
        (1, "", Some(4), None),
        (1, "", Some(5), None),
    ];
    let found = order(&nodes).unwrap();
    assert_eq!(tiers(&found), "0/1/2/3,4");
    assert_eq!(found.decided_by.len(), 3);
    let many = vec![(1, "", None, None); NODES_MAX + 1];
    assert!(matches!(order(&many), Err(NodesError::TooManyNodes(65))));
}

#[test]
fn one_node_and_no_slower_node_are_said_plainly() {
    assert!(matches!(
        order(&[(1, "0", Some(4), None), (0, "1", None, None)]),
        Err(NodesError::OneNode(1))
    ));
    assert!(matches!(
        order(&[(1, "0", Some(4), None), (1, "1", Some(4), None)]),
        Err(NodesError::NoSlowerNode(NodeId(0)))
    ));
}

#[test]
fn a_missing_tree_names_the_file() {
    let root = tempfile::tempdir().unwrap();
    let error = Topology::read(root.path()).unwrap_err().to_string();
    assert!(error.contains("sys/devices/system/node"), "{error}");
}

const ZONEINFO: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 0
  pages free     3840
        boost    0
        min      55
        low      68
        high     81
        spanned  4095
        present  3998
        managed  3840
        protection: (0, 1900, 1900, 1900)
      nr_free_pages 3840
  pagesets
    cpu: 0
              count:    3
              high:     9999
    cpu: 1
              count:    514
              high:     9999
Node 0, zone    DMA32
  pages free     20000
        min      1000
        low      1250
        high     1500
        managed  480000
        protection: (0, 0, 100, 100)
Node 1, zone   Normal
  pages free     7
        low      5
        high     6
        managed  1000
        protection: (0, 0, 0, 0)
";

#[test]
fn zones_are_summed_with_what_they_keep_back() {
    let node = NodeMemory::parse(ZONEINFO, NodeId(0)).unwrap();
    assert_eq!(node.free, ByteCount((3840 + 20000) * PAGE_SIZE));
    assert_eq!(node.held_by_cpus, ByteCount((3 + 514) * PAGE_SIZE));
    assert_eq!(node.low_watermark, ByteCount((1968 + 1350) * PAGE_SIZE));
    assert_eq!(node.high_watermark, ByteCount((1981 + 1600) * PAGE_SIZE));
    assert_eq!(node.present, ByteCount(3998 * PAGE_SIZE));
    let other = NodeMemory::parse(ZONEINFO, NodeId(1)).unwrap();
    assert_eq!(other.high_watermark, ByteCount(6 * PAGE_SIZE));
    assert_eq!(NodeMemory::parse(ZONEINFO, NodeId(2)), None);
}

#[test]
fn a_reserve_is_never_more_than_the_zone() {
    let text = "Node 0, zone DMA\n pages free 10\n low 5\n high 6\n managed 10\n \
                protection: (0, 99)\n";
    let node = NodeMemory::parse(text, NodeId(0)).unwrap();
    assert_eq!(node.high_watermark, node.free);
}

#[test]
fn the_running_kernel_is_understood() {
    let root = Path::new("/");
    let topology = Topology::read(root).unwrap();
    let node = topology.with_memory().next().unwrap();
    let memory = NodeMemory::read_all(root, [node.id]).unwrap()[0];
    assert!(memory.low_watermark <= memory.high_watermark);
    assert!(memory.free.0 > 0 && memory.free <= node.total);
}

#[test]
fn lists_are_parsed_within_bounds() {
    assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
    assert_eq!(parse_list("\n"), [0u32; 0]);
    assert!(parse_list("0-4294967295,0-4294967295").len() <= 1024);
}

/// A node's CPUs, memory tier, latencies and distances, some of which are unknown.
fn any_node() -> impl Strategy<Value = (bool, Option<u32>, Option<u32>, Option<u32>, Vec<u32>)> {
    (
        any::<bool>(),
        prop::option::of(0u32..4),
        prop::option::of(0u32..400),
        prop::option::of(0u32..400),
        prop::collection::vec(0u32..40, 0..7),
    )
}

proptest! {
    #[test]
    fn any_topology_has_an_order_that_holds(given in prop::collection::vec(any_node(), 0..7)) {
        let node = |(id, (has_cpus, tier, latency_ns, measured_ns, distances)): (usize, (bool, _, _, _, Vec<u32>))| Node {
            id: NodeId(id as u32),
            total: ByteCount(1),
            free: ByteCount(0),
            has_cpus,
            cpus: vec![],
            distances,
            tier,
            read_latency_ns: latency_ns,
            measured_ns,
        };
        let topology = Topology { nodes: given.into_iter().enumerate().map(node).collect() };
        if let Ok(order) = topology.order() {
            let mut nodes: Vec<NodeId> = order.tiers.nodes().collect();
            nodes.sort_unstable();
            let all: Vec<NodeId> = topology.nodes.iter().map(|node| node.id).collect();
            prop_assert_eq!(nodes, all);
            prop_assert_eq!(order.decided_by.len(), order.tiers.count() - 1);
            let tier = |id: &NodeId| topology.nodes[id.0 as usize].tier;
            if topology.nodes.iter().all(|node| node.tier.is_some()) {
                let in_order: Vec<_> = order.tiers.iter().take(TIERS_MAX - 1).flatten().map(tier).collect();
                prop_assert!(in_order.is_sorted());
            }
        }
    }

    #[test]
    fn any_zoneinfo_is_survived(
        tail in "(Node 0, zone X\n|pages free [0-9]{1,20}\n|low [0-9]{1,20}\n|protection: \\([0-9, ]*\\)\n|\\PC*\n){0,20}"
    ) {
        if let Some(memory) = NodeMemory::parse(&tail, NodeId(0)) {
            prop_assert!(tail.contains("Node 0, zone"));
            prop_assert_eq!(memory.free.0 % PAGE_SIZE == 0 || memory.free.0 == u64::MAX, true);
        }
    }
}

/// A node with this amount of free memory above its high watermark.
fn node(free: u64, held_by_cpus: u64) -> NodeMemory {
    NodeMemory {
        free: ByteCount(20 * MIB + free),
        held_by_cpus: ByteCount(held_by_cpus),
        low_watermark: ByteCount(16 * MIB),
        high_watermark: ByteCount(20 * MIB),
        inactive_file: ByteCount(0),
        present: ByteCount(100 * MIB),
    }
}

#[test]
fn a_huge_page_on_a_cpus_list_is_free_while_another_one_is() {
    let usable = |free: u64, on_lists| node(4 * MIB + free, on_lists).for_moves().0;
    assert_eq!(usable(3 * MIB, 5 * MIB), 5 * MIB, "one of them");
    assert_eq!(usable(3 * MIB, MIB), 3 * MIB);
    assert_eq!(usable(MIB, 5 * MIB), MIB, "out of reach");
    assert_eq!(usable(0, 5 * MIB), 0);
}

#[test]
fn moves_leave_what_the_kernel_keeps_and_room_for_compaction() {
    let usable_mib = |free: u64, files: u64| {
        let node = NodeMemory {
            inactive_file: ByteCount(files * MIB),
            ..node(free * MIB, 0)
        };
        node.for_moves().0 / MIB
    };
    assert_eq!([3, 4, 5].map(|free| usable_mib(free, 3)), [0, 0, 1]);
    assert_eq!(
        [0, 1, 5].map(|free| usable_mib(free, 4)),
        [4, 5, 9],
        "files"
    );
    let missing_mib = |free: u64| {
        let free = ByteCount(free * MIB);
        NodeMemory { free, ..node(0, 0) }.missing_for_moves().0 / MIB
    };
    assert_eq!([14, 24, 30].map(missing_mib), [10, 0, 0]);
    let kept = ByteCount(u64::MAX);
    let odd = NodeMemory {
        low_watermark: kept,
        ..node(0, 0)
    };
    assert_eq!(odd.for_moves().0, 0);
}
