//! NUMA policies of mappings and threads, and cpusets.
//!
//! Only `/proc/PID/numa_maps` shows the policies of other processes (numa(7)). For it the kernel walks the page tables
//! of each mapping, some 0.1 us a page. Hence a reading has a time limit.

use std::fs::File;
use std::io::{self, Read};
use std::path::Path;
use std::time::{Duration, Instant};

use demeter_policy::{ByteCount, GuestVirtAddr, NodeId, Pid};

use crate::maps::MapsError;

/// A set of NUMA nodes with numbers below 64. Nodes with higher numbers are never managed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeSet(u64);

impl NodeSet {
    /// All nodes.
    pub const ALL: Self = Self(u64::MAX);

    /// Parses a list of the kernel's: `0-1,4`.
    pub fn parse(list: &str) -> Option<Self> {
        let mut set = Self::default();
        for part in list.trim().split(',').filter(|part| !part.is_empty()) {
            let (first, last) = part.split_once('-').unwrap_or((part, part));
            let (first, last): (u32, u32) = (first.parse().ok()?, last.parse().ok()?);
            for node in first..=last.min(u64::BITS - 1) {
                set.insert(NodeId(node));
            }
        }
        Some(set)
    }

    /// Adds a node.
    pub fn insert(&mut self, node: NodeId) {
        self.0 |= 1u64.checked_shl(node.0).unwrap_or(0);
    }

    /// Whether all nodes of `other` are in it.
    pub fn includes(self, other: Self) -> bool {
        other.0 & !self.0 == 0
    }
}

impl FromIterator<NodeId> for NodeSet {
    fn from_iter<I: IntoIterator<Item = NodeId>>(nodes: I) -> Self {
        let mut set = Self::default();
        nodes.into_iter().for_each(|node| set.insert(node));
        set
    }
}

/// The NUMA policy of a mapping or a thread (set_mempolicy(2)).
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub enum Policy {
    /// None, or `local`, which equals the default.
    #[default]
    Default,
    /// Preferably these nodes.
    Preferred(NodeSet),
    /// Only these nodes.
    Bind(NodeSet),
    /// Interleaved over several nodes, weighted or not.
    Interleaved,
    /// A policy that this version does not know.
    Unknown,
}

/// Prefixes of policies in numa_maps; none starts with an earlier one.
const MODES: [&str; 7] = [
    "default",
    "local",
    "prefer (many)",
    "prefer",
    "bind",
    "interleave",
    "weighted interleave",
];

impl Policy {
    /// Parses the policy at the start of `text`. Returns it with the rest: `bind=static:0-1 anon=5`.
    fn parse(text: &str) -> (Self, &str) {
        let end = |text: &str| text.find(' ').unwrap_or(text.len());
        let mode = MODES.iter().find_map(|mode| {
            let rest = text.strip_prefix(mode)?;
            rest.starts_with(['=', ':', ' '])
                .then_some((*mode, rest))
                .or(rest.is_empty().then_some((*mode, rest)))
        });
        let Some((mode, rest)) = mode else {
            return (Self::Unknown, &text[end(text)..]);
        };
        let (how, rest) = rest.split_at(end(rest));
        let nodes = how
            .split_once(':')
            .and_then(|(_, list)| NodeSet::parse(list));
        let policy = match (mode, nodes) {
            ("default" | "local", _) => Self::Default,
            ("prefer" | "prefer (many)", Some(nodes)) => Self::Preferred(nodes),
            ("bind", Some(nodes)) => Self::Bind(nodes),
            ("interleave" | "weighted interleave", _) => Self::Interleaved,
            _ => Self::Unknown,
        };
        (policy, rest)
    }
}

/// A mapping's policy from numa_maps.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct PolicyOf {
    /// Start of the mapping.
    pub start: GuestVirtAddr,
    /// Its own policy, or that of the thread whose file was read.
    pub policy: Policy,
    /// Whether it consists of hugetlb pages.
    pub is_hugetlb: bool,
    /// Its resident bytes.
    pub resident: ByteCount,
}

/// A mapping's resident memory by node, from numa_maps.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct PlaceOf {
    /// Start of the mapping.
    pub start: GuestVirtAddr,
    /// Resident bytes of each node that has any.
    pub resident: Vec<(NodeId, ByteCount)>,
}

/// Parses a line: `START POLICY [file=PATH] [heap] [huge] anon=5 N0=3 N1=2 kernelpagesize_kB=4`.
fn parse_line(line: &str) -> Option<(PolicyOf, PlaceOf)> {
    let (start, rest) = line.split_once(' ')?;
    let start = GuestVirtAddr(u64::from_str_radix(start, 16).ok()?);
    let (policy, rest) = Policy::parse(rest);
    let (mut pages, mut page_kib, mut is_hugetlb) = (vec![], 4u64, false);
    // Spaces in paths are escaped.
    for field in rest.split_ascii_whitespace() {
        match field.split_once('=') {
            None => is_hugetlb |= field == "huge",
            Some(("kernelpagesize_kB", kib)) => page_kib = kib.parse().ok()?,
            Some((node, count)) => {
                let node = node.strip_prefix('N').and_then(|n| n.parse().ok());
                if let Some(node) = node {
                    pages.push((NodeId(node), count.parse::<u64>().ok()?));
                }
            }
        }
    }
    let page_bytes = page_kib.saturating_mul(1 << 10);
    let bytes = |pages: u64| ByteCount(pages.saturating_mul(page_bytes));
    let sum = pages
        .iter()
        .fold(0, |sum: u64, of| sum.saturating_add(of.1));
    let policy = PolicyOf {
        start,
        policy,
        is_hugetlb,
        resident: bytes(sum),
    };
    let resident = pages.into_iter().map(|(node, pages)| (node, bytes(pages)));
    let place = PlaceOf {
        start,
        resident: resident.collect(),
    };
    Some((policy, place))
}

/// Size of a read. The kernel holds the address space's lock while it walks the mappings of one read, about five.
const READ_BYTES: usize = 512;

/// The longest line: an address, a policy, a path.
const LINE_BYTES_MAX: usize = 8 << 10;

/// Reads the policies of a process's mappings, by address, for at most `patience`. Returns whether it read all.
///
/// A kernel without NUMA has no such file and no policies.
///
/// # Errors
/// The process has ended, or it cannot be inspected.
pub fn read_policies(
    root: &Path,
    pid: Pid,
    patience: Duration,
    mut each: impl FnMut(PolicyOf),
) -> Result<bool, MapsError> {
    read_lines(root, pid, patience, |(policy, _)| each(policy))
}

/// Reads where a process's mappings lie, by address, like [`read_policies`].
///
/// # Errors
/// The process has ended, or it cannot be inspected.
pub fn read_places(
    root: &Path,
    pid: Pid,
    patience: Duration,
    mut each: impl FnMut(PlaceOf),
) -> Result<bool, MapsError> {
    read_lines(root, pid, patience, |(_, place)| each(place))
}

fn read_lines(
    root: &Path,
    pid: Pid,
    patience: Duration,
    mut each: impl FnMut((PolicyOf, PlaceOf)),
) -> Result<bool, MapsError> {
    let began = Instant::now();
    let path = root.join(format!("proc/{pid}/numa_maps"));
    let mut read = || {
        let mut file = File::open(&path)?;
        let mut text = vec![];
        loop {
            let before = text.len();
            text.resize(before + READ_BYTES, 0);
            let read = file.read(&mut text[before..])?;
            text.truncate(before + read);
            if read == 0 {
                return Ok(true);
            }
            while let Some(end) = text.iter().position(|&b| b == b'\n') {
                if let Some(found) = parse_line(&String::from_utf8_lossy(&text[..end])) {
                    each(found);
                }
                text.drain(..=end);
            }
            if text.len() > LINE_BYTES_MAX || began.elapsed() > patience {
                return Ok(false);
            }
        }
    };
    read().map_err(|source: io::Error| match source.raw_os_error() {
        Some(libc::ENOENT | libc::ESRCH) => MapsError::Gone(pid),
        _ => MapsError::Io { path, source },
    })
}

/// A thread's own policy, which applies to pages that it touches first in mappings without a policy.
///
/// It is read from the first line: the first mapping is the program's file, which almost never has a policy of its own.
pub fn policy_of_thread(root: &Path, pid: Pid, thread: u32) -> Policy {
    let path = root.join(format!("proc/{pid}/task/{thread}/numa_maps"));
    let mut text = [0; 256];
    let read = File::open(path).and_then(|mut file| file.read(&mut text));
    let text = String::from_utf8_lossy(&text[..read.unwrap_or(0)]);
    let line = text.lines().next().unwrap_or_default();
    line.split_once(' ')
        .map_or(Policy::Default, |(_, rest)| Policy::parse(rest).0)
}

/// The nodes that a thread's cpuset allows; all if it is unknown.
pub fn allowed_nodes(root: &Path, pid: Pid, thread: u32) -> NodeSet {
    let path = root.join(format!("proc/{pid}/task/{thread}/status"));
    let status = std::fs::read(path).unwrap_or_default();
    let status = String::from_utf8_lossy(&status);
    let mut lines = status.lines();
    let list = lines.find_map(|line| line.strip_prefix("Mems_allowed_list:"));
    list.and_then(NodeSet::parse).unwrap_or(NodeSet::ALL)
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn set(nodes: &[u32]) -> NodeSet {
        nodes.iter().copied().map(NodeId).collect()
    }

    #[test]
    fn every_policy_is_told_apart() {
        for (line, policy, hugetlb, kib) in [
            (
                "7f00 default anon=2 dirty=2 N0=2 kernelpagesize_kB=4",
                Policy::Default,
                false,
                8,
            ),
            ("7f00 local heap", Policy::Default, false, 0),
            (
                "7f00 prefer:1 anon=1 N1=1 kernelpagesize_kB=4",
                Policy::Preferred(set(&[1])),
                false,
                4,
            ),
            (
                "7f00 prefer (many):0-1 N0=1",
                Policy::Preferred(set(&[0, 1])),
                false,
                4,
            ),
            ("7f00 bind:0", Policy::Bind(set(&[0])), false, 0),
            (
                "7f00 bind=static|balancing:0,2-3 N0=1 N3=5",
                Policy::Bind(set(&[0, 2, 3])),
                false,
                24,
            ),
            (
                "7f00 bind=relative:1 file=/tmp/a\\040huge",
                Policy::Bind(set(&[1])),
                false,
                0,
            ),
            (
                "7f00 interleave:0-1 N0=1 N1=1",
                Policy::Interleaved,
                false,
                8,
            ),
            (
                "7f00 weighted interleave:0-1",
                Policy::Interleaved,
                false,
                0,
            ),
            (
                "7f00 default file=/dev/hugepages/x huge anon=3 N1=3 kernelpagesize_kB=2048",
                Policy::Default,
                true,
                6144,
            ),
            ("7f00 spread:0-1 N0=1", Policy::Unknown, false, 4),
            ("7f00 defaults", Policy::Unknown, false, 0),
            ("7f00 bind:x", Policy::Unknown, false, 0),
        ] {
            let (found, places) = parse_line(line).unwrap();
            let by_node: u64 = places.resident.iter().map(|(_, bytes)| bytes.0).sum();
            assert_eq!(by_node, found.resident.0, "{line}");
            assert_eq!(found.start, GuestVirtAddr(0x7f00));
            assert_eq!(
                (found.policy, found.is_hugetlb),
                (policy, hugetlb),
                "{line}"
            );
            assert_eq!(found.resident.0, kib << 10, "{line}");
        }
    }

    #[test]
    fn sets_of_nodes() {
        assert_eq!(NodeSet::parse("0-1,4\n"), Some(set(&[0, 1, 4])));
        assert_eq!(NodeSet::parse("0-1023"), Some(NodeSet::ALL));
        assert_eq!(NodeSet::parse(""), Some(set(&[])));
        assert_eq!(NodeSet::parse("1-x"), None);
        assert!(set(&[0, 1]).includes(set(&[1])) && !set(&[1]).includes(set(&[0, 1])));
    }

    #[test]
    fn our_own_policies_and_nodes_can_be_read() {
        let own = Pid(std::process::id());
        let here = Box::new(0u8);
        let addr = GuestVirtAddr(&raw const *here as u64);
        let vmas = crate::maps::read_maps(Path::new("/"), own).unwrap();
        let vma = vmas.iter().find(|vma| vma.range.contains(addr)).unwrap();
        let mut found = vec![];
        let patience = Duration::from_secs(10);
        assert!(read_policies(Path::new("/"), own, patience, |p| found.push(p)).unwrap());
        let it = found.iter().find(|p| p.start == vma.range.start()).unwrap();
        assert!(it.resident.0 > 0 && !it.is_hugetlb);
        assert_eq!(it.policy, policy_of_thread(Path::new("/"), own, own.0));
        assert!(allowed_nodes(Path::new("/"), own, own.0).includes(set(&[0])));
    }

    #[test]
    fn a_reading_ends_when_patience_does() {
        let root = tempfile::tempdir().unwrap();
        std::fs::create_dir_all(root.path().join("proc/7")).unwrap();
        let text: String = (1..1000)
            .map(|i| format!("{:x} bind:0\n", i << 12))
            .collect();
        std::fs::write(root.path().join("proc/7/numa_maps"), text).unwrap();
        let mut count = 0;
        let whole = read_policies(root.path(), Pid(7), Duration::ZERO, |_| count += 1);
        assert!(!whole.unwrap() && count > 0 && count < 999);
        let error = read_policies(root.path(), Pid(8), Duration::ZERO, |_| ()).unwrap_err();
        assert!(matches!(error, MapsError::Gone(Pid(8))));
    }

    proptest! {
        #[test]
        fn any_line_is_survived(line in "\\PC{0,60}", nodes in "[0-9,-]{0,20}") {
            let _ = parse_line(&line);
            let _ = parse_line(&format!("1000 bind:{nodes} N0={nodes}"));
            let _ = NodeSet::parse(&nodes);
        }
    }
}
