//! The machine's NUMA nodes: sizes, free memory and relative speed.

mod order;
mod tiers;
mod zone;

use std::collections::BTreeMap;
use std::io;
use std::path::{Path, PathBuf};

use demeter_policy::{BLOCK_SIZE, ByteCount, NodeId, PAGE_SIZE, Socket};

pub use order::{Contradiction, DecidedBy, LeftAlone, TierOrder};
pub use tiers::{NODES_MAX, Pair, TIERS_MAX, Tiers, TiersError};
pub use zone::Zone;

const NODE_DIR: &str = "sys/devices/system/node";
const TIER_DIR: &str = "sys/devices/virtual/memory_tiering";

/// All nodes with memory or CPUs.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Topology {
    /// Sorted by number.
    pub nodes: Vec<Node>,
}

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Node {
    /// Its number.
    pub id: NodeId,
    /// Size of its memory; zero for a node without memory.
    pub total: ByteCount,
    /// Free memory when the topology was read; [`NodeMemory`] is cheaper to read again.
    pub free: ByteCount,
    /// Whether it has CPUs of its own.
    pub has_cpus: bool,
    /// Numbers of its CPUs.
    pub cpus: Vec<u32>,
    /// Distance (SLIT, 10 is local) to each node in [`Topology::nodes`]' order.
    pub distances: Vec<u32>,
    /// The kernel's memory tier: the N of `memory_tierN`, lower is faster. `None` before Linux 6.1 and for nodes
    /// without memory.
    pub tier: Option<u32>,
    /// Read latency from the nearest CPUs, nanoseconds, if the firmware has it (ACPI HMAT).
    pub read_latency_ns: Option<u32>,
    /// Measured latency of a load from the nearest CPUs, nanoseconds, if any.
    pub measured_ns: Option<u32>,
}

/// An error in reading or ordering the nodes.
#[derive(Debug, thiserror::Error)]
pub enum NodesError {
    /// A kernel file cannot be read.
    #[error("cannot read {path}: {source}")]
    Io {
        /// The file.
        path: PathBuf,
        /// The system's error.
        source: io::Error,
    },
    /// A kernel file has unexpected contents.
    #[error("{path}: {what}")]
    Malformed {
        /// The file.
        path: PathBuf,
        /// The expected content.
        what: String,
    },
    /// Only one node has memory.
    #[error(
        "this machine has {0} NUMA node(s) with memory, tiering needs two: give it a second node of slower memory"
    )]
    OneNode(usize),
    /// No node is slower than the others.
    #[error(
        "no node is slower than node {0}: memory tiers, latencies and distances are alike and all have CPUs; \
         name the tiers with --tiers, or describe the slow node's latency in ACPI HMAT"
    )]
    NoSlowerNode(NodeId),
    /// A configured node does not exist.
    #[error("there is no node {0}, but tiers name it; see the nodes with demeter probe")]
    NoNode(NodeId),
    /// A configured node has no memory.
    #[error("node {0} has no memory, but tiers name it; see the nodes with demeter probe")]
    NoMemory(NodeId),
    /// The configured tiers are invalid.
    #[error("tiers: {0}")]
    Tiers(#[from] TiersError),
    /// There are too many nodes.
    #[error("this machine has {0} nodes, which are more than {NODES_MAX}")]
    TooManyNodes(usize),
}

impl Topology {
    /// Reads `ROOT/sys/devices/system/node` and the kernel's memory tiers.
    pub fn read(root: &Path) -> Result<Self, NodesError> {
        let dir = root.join(NODE_DIR);
        let mut ids = numbered_entries(&dir, "node")?;
        ids.sort_unstable();
        if ids.len() > NODES_MAX {
            return Err(NodesError::TooManyNodes(ids.len()));
        }
        let tiers = read_tiers(root)?;
        let nodes = ids
            .into_iter()
            .map(|id| Node::read(&dir, id, &tiers))
            .collect::<Result<_, _>>()?;
        Ok(Self { nodes })
    }

    /// Nodes that hold memory.
    pub fn with_memory(&self) -> impl Iterator<Item = &Node> {
        self.nodes.iter().filter(|node| node.total.0 > 0)
    }

    /// The node of a CPU.
    pub fn node_of_cpu(&self, cpu: u32) -> Option<NodeId> {
        let mut nodes = self.nodes.iter();
        nodes.find(|n| n.cpus.contains(&cpu)).map(|node| node.id)
    }

    /// The socket of each node: that of its own CPUs, or of the nearest.
    pub fn sockets(&self) -> BTreeMap<NodeId, Socket> {
        let with_cpus = || self.nodes.iter().filter(|node| node.has_cpus).enumerate();
        let socket = |node: &Node| {
            let nearest = with_cpus().min_by_key(|(_, other)| match other.id == node.id {
                true => 0,
                false => self.distance(other.id, node.id).unwrap_or(u32::MAX),
            });
            let number = nearest.map_or(0, |(number, _)| number);
            (node.id, Socket::new(number))
        };
        self.nodes.iter().map(socket).collect()
    }

    /// The CPUs nearest to a node; empty if unknown.
    pub fn nearest_cpus(&self, node: NodeId) -> &[u32] {
        let with_cpus = self.nodes.iter().filter(|other| other.has_cpus);
        let nearest = with_cpus.min_by_key(|other| match other.id == node {
            true => 0,
            false => self.distance(other.id, node).unwrap_or(u32::MAX),
        });
        nearest.map_or(&[], |nearest| &nearest.cpus)
    }

    /// Read latencies that the firmware tells, nanoseconds.
    pub fn firmware_ns(&self) -> BTreeMap<NodeId, u32> {
        let told = self
            .nodes
            .iter()
            .map(|node| (node.id, node.read_latency_ns));
        told.filter_map(|(node, ns)| Some((node, ns?))).collect()
    }

    /// Sets measured latencies of nodes, nanoseconds.
    pub fn set_measured(&mut self, measured_ns: &BTreeMap<NodeId, u32>) {
        for node in &mut self.nodes {
            node.measured_ns = measured_ns.get(&node.id).copied();
        }
    }

    /// Whether several nodes have memory and the kernel put all of them into one memory tier.
    ///
    /// The kernel's own tiering does nothing then.
    pub fn shares_one_tier(&self) -> bool {
        let mut tiers = self.with_memory().map(|node| node.tier);
        match (tiers.next(), tiers.next()) {
            (Some(Some(first)), Some(second)) => {
                second == Some(first) && tiers.all(|tier| tier == Some(first))
            }
            _ => false,
        }
    }
}

impl Node {
    fn read(dir: &Path, id: u32, tiers: &[(u32, Vec<u32>)]) -> Result<Self, NodesError> {
        let dir = dir.join(format!("node{id}"));
        let usage = NodeUsage::read_dir(&dir)?;
        let distances = read_text(&dir.join("distance"))?
            .split_whitespace()
            .filter_map(|word| word.parse().ok())
            .collect();
        let cpus = parse_list(&read_text(&dir.join("cpulist"))?);
        // The file is missing if the firmware has no HMAT.
        let read_latency_ns = std::fs::read_to_string(dir.join("access0/initiators/read_latency"))
            .ok()
            .and_then(|text| text.trim().parse().ok())
            .filter(|&latency_ns| latency_ns > 0);
        Ok(Self {
            id: NodeId(id),
            total: usage.total,
            free: usage.free,
            has_cpus: !cpus.is_empty(),
            cpus,
            distances,
            tier: tiers
                .iter()
                .find(|(_, nodes)| nodes.contains(&id))
                .map(|&(tier, _)| tier),
            read_latency_ns,
            measured_ns: None,
        })
    }
}

/// Size and free memory of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeUsage {
    /// All its memory.
    pub total: ByteCount,
    /// Free memory.
    pub free: ByteCount,
}

impl NodeUsage {
    /// Reads `ROOT/sys/devices/system/node/nodeN/meminfo`.
    pub fn read(root: &Path, node: NodeId) -> Result<Self, NodesError> {
        Self::read_dir(&root.join(NODE_DIR).join(format!("node{node}")))
    }

    fn read_dir(dir: &Path) -> Result<Self, NodesError> {
        let path = dir.join("meminfo");
        let meminfo = read_text(&path)?;
        let bytes_of = |key: &str| {
            meminfo_bytes(&meminfo, key).ok_or_else(|| NodesError::Malformed {
                path: path.clone(),
                what: format!("no {key}"),
            })
        };
        Ok(Self {
            total: bytes_of("MemTotal:")?,
            free: bytes_of("MemFree:")?,
        })
    }
}

/// Free memory that the kernel needs beyond a watermark to make one huge page out of small ones (`compact_gap` in
/// `mm/compaction.h`, Linux 6.12). With less it reclaims memory instead.
pub(crate) const FOR_COMPACTION: u64 = 2 * BLOCK_SIZE;

/// A node's free memory and watermarks.
///
/// Both watermarks include, for each zone, its reserve for other kinds of allocation (`lowmem_reserve_ratio`), up to
/// the zone's size. Programs can take `free - high_watermark` before kswapd has work.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeMemory {
    /// Free memory.
    pub free: ByteCount,
    /// Memory on per-CPU lists of free pages, which the kernel does not count as free.
    pub held_by_cpus: ByteCount,
    /// The level below which kswapd is woken.
    pub low_watermark: ByteCount,
    /// The level up to which kswapd reclaims.
    pub high_watermark: ByteCount,
    /// Cached files that were not accessed lately: kswapd reclaims them first, without swapping.
    pub inactive_file: ByteCount,
    /// Online memory; a balloon does not reduce it.
    pub present: ByteCount,
}

impl NodeMemory {
    /// Reads some nodes' zones from `ROOT/proc/zoneinfo`, all at one moment. A removed node has zero memory.
    pub fn read_all(
        root: &Path,
        nodes: impl IntoIterator<Item = NodeId>,
    ) -> Result<Vec<Self>, NodesError> {
        let text = read_text(&root.join("proc/zoneinfo"))?;
        let of = |node| Self::parse(&text, node).unwrap_or_default();
        Ok(nodes.into_iter().map(of).collect())
    }

    /// Memory that programs can take before kswapd has work.
    pub fn usable(&self) -> ByteCount {
        ByteCount(self.free.0.saturating_sub(self.high_watermark.0))
    }

    /// Free memory that moves may use without making the kernel swap.
    ///
    /// Below the low watermark kswapd wakes, and reclaims up to the high one. A huge page is looked for among free ones, then
    /// made by compaction, and then by reclaim. The kernel leaves out the last step where free memory is above the high
    /// watermark by what compaction needs (`compaction_ready` in `mm/vmscan.c`).
    ///
    /// A node that is full of cached files stays between both watermarks. There moves keep to the low one, since reclaim
    /// only drops files.
    ///
    /// A huge page that a move has freed waits on a per-CPU list. The kernel allocates from this list only while the node
    /// has another free huge page (`__zone_watermark_ok` and `rmqueue` in `mm/page_alloc.c`). One such page is counted as
    /// free: else, in full fast memory, an exchange would demote a block and then find no room to promote. The length of
    /// the list is unknown, since small pages wait on it, too. In the lab (Linux 6.12) the first two demoted blocks left the
    /// node's free memory unchanged, and its lists grew from 2.4 to 6.4 MiB. They kept that for at least four seconds.
    pub fn for_moves(&self) -> ByteCount {
        let usable = self.free.0.saturating_sub(self.kept_from_moves());
        let is_on_a_list = usable >= BLOCK_SIZE && self.held_by_cpus.0 >= BLOCK_SIZE;
        ByteCount(usable + if is_on_a_list { BLOCK_SIZE } else { 0 })
    }

    /// Memory that the node lacks until moves may use any.
    pub fn missing_for_moves(&self) -> ByteCount {
        ByteCount(self.kept_from_moves().saturating_sub(self.free.0))
    }

    fn kept_from_moves(&self) -> u64 {
        let (low, high) = (self.low_watermark.0, self.high_watermark.0);
        match self.inactive_file.0 >= high.saturating_sub(low) {
            true => low,
            false => high.saturating_add(FOR_COMPACTION),
        }
    }

    /// Parses the file's text; `None` if it lists no zone of the node.
    pub fn parse(zoneinfo: &str, node: NodeId) -> Option<Self> {
        let bytes = |pages: u64| pages.saturating_mul(PAGE_SIZE);
        let add = |sum: Self, zone: Zone| {
            let kept = |mark: u64| bytes(mark.saturating_add(zone.reserve).min(zone.managed));
            let plus = |a: ByteCount, b: u64| ByteCount(a.0.saturating_add(b));
            Self {
                free: plus(sum.free, bytes(zone.free)),
                held_by_cpus: plus(sum.held_by_cpus, bytes(zone.held_by_cpus)),
                low_watermark: plus(sum.low_watermark, kept(zone.low)),
                high_watermark: plus(sum.high_watermark, kept(zone.high)),
                inactive_file: plus(sum.inactive_file, bytes(zone.inactive_file)),
                present: plus(sum.present, bytes(zone.present)),
            }
        };
        let zones = Zone::of_node(zoneinfo, node);
        (!zones.is_empty()).then(|| zones.into_iter().fold(Self::default(), add))
    }
}

/// The kernel's memory tiers with their nodes; empty where the kernel has none.
fn read_tiers(root: &Path) -> Result<Vec<(u32, Vec<u32>)>, NodesError> {
    let dir = root.join(TIER_DIR);
    let ids = match numbered_entries(&dir, "memory_tier") {
        Err(NodesError::Io { source, .. }) if source.kind() == io::ErrorKind::NotFound => {
            return Ok(Vec::new());
        }
        ids => ids?,
    };
    ids.into_iter()
        .map(|id| {
            let text = read_text(&dir.join(format!("memory_tier{id}/nodelist")))?;
            Ok((id, parse_list(&text)))
        })
        .collect()
}

/// The numbers N of the entries `PREFIXN` in a directory.
fn numbered_entries(dir: &Path, prefix: &str) -> Result<Vec<u32>, NodesError> {
    let to_error = |source| NodesError::Io {
        path: dir.into(),
        source,
    };
    let mut numbers = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(to_error)? {
        let name = entry.map_err(to_error)?.file_name();
        let number = name.to_str().and_then(|name| name.strip_prefix(prefix));
        numbers.extend(number.and_then(|number| number.parse::<u32>().ok()));
    }
    Ok(numbers)
}

fn read_text(path: &Path) -> Result<String, NodesError> {
    std::fs::read_to_string(path).map_err(|source| NodesError::Io {
        path: path.into(),
        source,
    })
}

/// The value of `Node N KEY value kB`.
fn meminfo_bytes(meminfo: &str, key: &str) -> Option<ByteCount> {
    let line = meminfo
        .lines()
        .find(|line| line.split_ascii_whitespace().nth(2) == Some(key))?;
    let kib: u64 = line.split_ascii_whitespace().nth(3)?.parse().ok()?;
    Some(ByteCount(kib.checked_mul(1024)?))
}

/// Parses a list of the kernel's, such as `0-3,7`. Numbers above 1023, Linux' maximum of nodes, are omitted, so that a
/// huge range costs nothing.
pub fn parse_list(text: &str) -> Vec<u32> {
    const MAX: u32 = 1023;
    text.trim()
        .split(',')
        .filter_map(|part| {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            Some(first.trim().parse().ok()?..=last.trim().parse::<u32>().ok()?.min(MAX))
        })
        .flatten()
        .take(MAX as usize + 1)
        .collect()
}

#[cfg(test)]
mod tests;
