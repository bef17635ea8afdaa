//! Parts that the reports of guest and host share: a node, a problem, the mode of huge pages.

use std::fmt::{self, Display, Formatter};
use std::path::Path;

use demeter_policy::MIB;
use serde::Serialize;

use crate::nodes::Node;

/// One NUMA node.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeReport {
    /// Its number.
    pub id: u32,
    /// All its memory, bytes.
    pub total_bytes: u64,
    /// Free memory, bytes.
    pub free_bytes: u64,
    /// Whether it has CPUs.
    pub has_cpus: bool,
    /// Distances to all nodes; 10 is local.
    pub distances: Vec<u32>,
    /// The kernel's memory tier; lower is faster.
    pub tier: Option<u32>,
    /// Read latency from the firmware, nanoseconds.
    pub read_latency_ns: Option<u32>,
}

impl From<&Node> for NodeReport {
    fn from(node: &Node) -> Self {
        Self {
            id: node.id.0,
            total_bytes: node.total.0,
            free_bytes: node.free.0,
            has_cpus: node.has_cpus,
            distances: node.distances.clone(),
            tier: node.tier,
            read_latency_ns: node.read_latency_ns,
        }
    }
}

impl Display for NodeReport {
    /// As a line of a report, without its end.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "node {:<9} {} MiB, {} MiB free, {}",
            self.id,
            self.total_bytes / MIB,
            self.free_bytes / MIB,
            match self.has_cpus {
                true => "with CPUs",
                false => "no CPUs",
            },
        )?;
        match self.tier {
            Some(tier) => write!(f, ", tier {tier}")?,
            None => write!(f, ", tier unknown")?,
        }
        if let Some(latency_ns) = self.read_latency_ns {
            write!(f, ", reads in {latency_ns} ns")?;
        }
        write!(f, ", distances")?;
        self.distances
            .iter()
            .try_for_each(|distance| write!(f, " {distance}"))
    }
}

/// A problem and its hint.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Whether nothing works until it is fixed; otherwise it works worse.
    pub blocks: bool,
    /// The problem.
    pub what: String,
    /// The way to fix it.
    pub hint: String,
}

impl Display for Advice {
    /// As two lines of a report, without the end of the second.
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let grade = match self.blocks {
            true => "PROBLEM",
            false => "warning",
        };
        let Self { what, hint, .. } = self;
        write!(f, "{grade}        {what}\n               hint: {hint}")
    }
}

/// The mode of transparent huge pages in a file of `ROOT/sys/kernel/mm/transparent_hugepage`: `enabled` is that of
/// anonymous memory, `shmem_enabled` that of memfds and /dev/shm.
pub fn thp_mode(root: &Path, file: &str) -> Option<String> {
    let folder = root.join("sys/kernel/mm/transparent_hugepage");
    let text = std::fs::read_to_string(folder.join(file)).ok()?;
    // The mode is the word in brackets, as in `always [madvise] never`.
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.into())
}
