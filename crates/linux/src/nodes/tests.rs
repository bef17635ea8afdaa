use std::fs;

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
    Topology::read(machine(nodes).path())?.fast_and_slow()
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
    assert_eq!((found.fast, found.slow), (NodeId(1), NodeId(0)));
    assert_eq!(found.decided_by, DecidedBy::MemoryTier);
}

#[test]
fn latency_decides_within_one_tier() {
    let nodes = [(1, "0", Some(4), Some(250)), (1, "1", Some(4), Some(80))];
    let found = order(&nodes).unwrap();
    assert_eq!((found.fast, found.slow), (NodeId(1), NodeId(0)));
    assert_eq!(found.decided_by, DecidedBy::Latency);
    assert!(
        Topology::read(machine(&nodes).path())
            .unwrap()
            .shares_one_tier()
    );
}

#[test]
fn a_cpuless_node_is_slow_where_nothing_else_is_known() {
    let found = order(&[(1, "", None, None), (1, "0-3", None, None)]).unwrap();
    assert_eq!((found.fast, found.slow), (NodeId(1), NodeId(0)));
    assert_eq!(found.decided_by, DecidedBy::CpulessNode);
}

#[test]
fn the_largest_slower_node_is_taken() {
    let nodes = [
        (10, "0", Some(4), None),
        (10, "1", Some(4), None),
        (5, "", Some(9), None),
        (20, "", Some(9), None),
    ];
    let found = order(&nodes).unwrap();
    assert_eq!((found.fast, found.slow), (NodeId(0), NodeId(3)));
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
    let [memory] = NodeMemory::read_all(root, [node.id]).unwrap();
    assert!(memory.low_watermark <= memory.high_watermark);
    assert!(memory.free.0 > 0 && memory.free <= node.total);
}

#[test]
fn lists_are_parsed_within_bounds() {
    assert_eq!(parse_list("0-2,5\n"), [0, 1, 2, 5]);
    assert_eq!(parse_list("\n"), [0u32; 0]);
    assert!(parse_list("0-4294967295,0-4294967295").len() <= 1024);
}

proptest! {
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
