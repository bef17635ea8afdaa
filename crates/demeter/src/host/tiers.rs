//! Detects this host's tiers from kernel and firmware.

use std::path::{Path, PathBuf};

use demeter_host::hypervisor::libvirt::{HostTier, Speed};
use demeter_host::probe;
use demeter_policy::{NodeId, PerTier};

/// The tiers: the configured nodes, or those of this host if it has two.
pub fn of_host(named: Option<PerTier<NodeId>>) -> Option<PerTier<HostTier>> {
    let root = Path::new("/");
    let found = || {
        let tiers = probe::probe(root).tiers?;
        Some(PerTier {
            fast: NodeId(tiers.fast),
            slow: NodeId(tiers.slow),
        })
    };
    let nodes = named.or_else(found)?;
    Some(PerTier::from_fn(|tier| HostTier {
        node: *nodes.get(tier),
        speed: speed(root, *nodes.get(tier)),
    }))
}

/// Speed of a node from the firmware (HMAT), as exported by the kernel (Documentation/admin-guide/mm/numaperf).
fn speed(root: &Path, node: NodeId) -> Option<Speed> {
    let folder = format!("sys/devices/system/node/node{node}/access0/initiators");
    let folder: PathBuf = root.join(folder);
    let number = |name: &str| -> Option<u64> {
        let text = std::fs::read_to_string(folder.join(name)).ok()?;
        text.trim().parse().ok().filter(|&number| number > 0)
    };
    Some(Speed {
        latency_ns: number("read_latency")?,
        bandwidth_mb_s: number("read_bandwidth")?,
    })
}

#[cfg(test)]
mod tests {
    use std::fs;

    use super::*;

    #[test]
    fn a_nodes_speed_is_what_the_kernel_tells() {
        let root = tempfile::tempdir().unwrap();
        let folder = root
            .path()
            .join("sys/devices/system/node/node2/access0/initiators");
        fs::create_dir_all(&folder).unwrap();
        fs::write(folder.join("read_latency"), "250\n").unwrap();
        assert_eq!(speed(root.path(), NodeId(2)), None);
        fs::write(folder.join("read_bandwidth"), "40000\n").unwrap();
        let want = Speed {
            latency_ns: 250,
            bandwidth_mb_s: 40_000,
        };
        assert_eq!(speed(root.path(), NodeId(2)), Some(want));
        assert_eq!(speed(root.path(), NodeId(0)), None);
    }
}
