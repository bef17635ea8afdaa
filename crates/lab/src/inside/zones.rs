//! Span and free memory of a node, from the kernel's memory zones.

use std::fs;
use std::path::Path;

use demeter_guest::nodes::Zone;
use demeter_policy::{MIB, NodeId, PAGE_SIZE};

use crate::fault::Fault;

/// Memory that programs can still allocate from a node, MiB: free memory and per-CPU free pages above the low
/// watermarks.
pub fn node_free_mib(root: &Path, node: u32) -> Result<u64, Fault> {
    let takeable = |zone: &Zone| (zone.free + zone.held_by_cpus).saturating_sub(zone.low);
    let pages: u64 = zones_of(root, node)?.iter().map(takeable).sum();
    Ok(pages * PAGE_SIZE / MIB)
}

/// Free memory of several nodes together, MiB.
pub fn nodes_free_mib(root: &Path, nodes: impl IntoIterator<Item = NodeId>) -> Result<u64, Fault> {
    let free = nodes.into_iter().map(|node| node_free_mib(root, node.0));
    free.sum()
}

/// Physical address range of a node, `[start, end)`.
pub fn node_range(root: &Path, node: u32) -> Result<(u64, u64), Fault> {
    let zones = zones_of(root, node)?;
    let zones = zones.iter().filter(|zone| zone.spanned > 0);
    let start = zones.clone().map(|zone| zone.first).min();
    let end = zones
        .map(|zone| zone.first.saturating_add(zone.spanned))
        .max();
    match (start, end) {
        (Some(start), Some(end)) => Ok((
            start.saturating_mul(PAGE_SIZE),
            end.saturating_mul(PAGE_SIZE),
        )),
        _ => Err(Fault::Unsupported {
            what: format!("node {node} has no memory"),
            hint: "the lab needs a kernel with CONFIG_NUMA and CONFIG_ACPI_HMAT",
        }),
    }
}

fn zones_of(root: &Path, node: u32) -> Result<Vec<Zone>, Fault> {
    let path = root.join("proc/zoneinfo");
    let text = fs::read_to_string(&path).map_err(Fault::io("read", &path))?;
    Ok(Zone::of_node(&text, NodeId(node)))
}

#[cfg(test)]
mod tests {
    use super::*;

    const ZONEINFO: &str = "\
Node 0, zone      DMA
  per-node stats
      nr_inactive_anon 11
  pages free     3840
        boost    0
        min      10
        low      256
        high     20
        spanned  4095
        present  3998
  pagesets
    cpu: 0
              count: 300
              high:  4
    cpu: 1
              count: 100
              high:  4
  start_pfn:           1
Node 0, zone    DMA32
  pages free     25600
        low      512
        spanned  26000
  start_pfn:           4096
Node 1, zone    DMA32
  pages free     100
        low      200
        spanned  50
  start_pfn:           30096
Node 1, zone   Normal
  pages free     0
        low      0
        spanned  0
  start_pfn:           0
";

    fn machine() -> tempfile::TempDir {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir_all(root.path().join("proc")).unwrap();
        fs::write(root.path().join("proc/zoneinfo"), ZONEINFO).unwrap();
        root
    }

    #[test]
    fn a_node_is_free_down_to_its_low_watermarks() {
        let root = machine();
        assert_eq!(
            node_free_mib(root.path(), 0).unwrap(),
            (3840 + 400 - 256 + 25600 - 512) / 256
        );
        assert_eq!(node_free_mib(root.path(), 1).unwrap(), 0);
    }

    #[test]
    fn a_node_spans_its_zones() {
        let root = machine();
        assert_eq!(node_range(root.path(), 0).unwrap(), (4096, 30096 * 4096));
        assert_eq!(
            node_range(root.path(), 1).unwrap(),
            (30096 * 4096, 30146 * 4096)
        );
        assert!(
            node_range(root.path(), 2)
                .unwrap_err()
                .to_string()
                .contains("node 2")
        );
    }
}
