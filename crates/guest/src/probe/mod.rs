//! Reports whether Demeter works on this machine, and how to fix the rest.

mod needs;
mod text;

use std::fs;
use std::path::Path;

use demeter_linux::base_page::{base_page_size, check_base_pages};
use demeter_linux::damon::Owner;
use demeter_linux::report::thp_mode;
pub use demeter_linux::report::{Advice, NodeReport};
use demeter_policy::NodeId;
use serde::Serialize;

use crate::balloon::port;
use crate::balloon::{BalloonError, LiveBalloon};
use crate::nodes::{LeftAlone, NodesError, TierOrder, Topology};
use crate::tracker::{Settings, TrackerError, try_all};

/// The state of everything that Demeter needs.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct ProbeReport {
    /// The kernel's release, as in `uname -r`.
    pub kernel: Option<String>,
    /// The architecture that this program was built for.
    pub architecture: &'static str,
    /// Size of the kernel's base pages, bytes.
    pub page_bytes: Option<u64>,
    /// NUMA nodes in order of their numbers.
    pub nodes: Vec<NodeReport>,
    /// The tiers; null if there are none.
    pub order: Option<NodeOrder>,
    /// The kernel has put all memory into one tier.
    pub one_kernel_tier: bool,
    /// Trackers, best first.
    pub trackers: Vec<TrackerReport>,
    /// Rights of this process.
    pub permissions: Permissions,
    /// Mode of transparent huge pages: `always`, `madvise` or `never`.
    pub thp: Option<String>,
    /// `kernel.numa_balancing`: 2 is the kernel's own tiering.
    pub numa_balancing: Option<u32>,
    /// The kernel demotes pages instead of reclaiming them.
    pub demotion_enabled: Option<bool>,
    /// The kernel has DAMON's interface.
    pub damon: bool,
    /// The kernel's own user of DAMON that is enabled, if one is.
    pub damon_owner: Option<String>,
    /// The balloon driver, which holds memory for the host.
    pub balloon: BalloonReport,
    /// Problems, each with a hint, the gravest first.
    pub advice: Vec<Advice>,
}

/// The tiers and how they were determined.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct NodeOrder {
    /// The nodes of each tier, the fastest first: `0,1/2,3`.
    pub tiers: String,
    /// The evidence that separates each tier from the next one.
    pub decided_by: Vec<String>,
    /// Nodes that are in no tier, with the reason.
    pub left_alone: Vec<(u32, String)>,
}

/// Whether a tracker works.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TrackerReport {
    /// Its name.
    pub name: &'static str,
    /// It was opened and yields addresses.
    pub works: bool,
    /// It was not opened, because a running Demeter uses it.
    pub is_taken: bool,
    /// It was not opened, because DAMON_STAT uses DAMON; the agent turns that off while it works.
    pub waits_for_statistic: bool,
    /// Why it does not work, if so.
    pub why_not: Option<String>,
    /// The way to fix it.
    pub hint: Option<String>,
}

/// Whether the host can resize this VM with the balloon.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct BalloonReport {
    /// The VM has a port to the host.
    pub port: bool,
    /// Why the driver cannot be used, if so.
    pub why_not: Option<String>,
    /// The way to fix it.
    pub hint: Option<&'static str>,
}

/// Rights of this process.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize)]
pub struct Permissions {
    /// CAP_SYS_NICE: move other users' pages.
    pub sys_nice: bool,
    /// CAP_SYS_PTRACE: read other users' mappings.
    pub sys_ptrace: bool,
    /// CAP_PERFMON (or CAP_SYS_ADMIN): sample every process.
    pub perfmon: bool,
    /// CAP_SYS_ADMIN: use DAMON, read page frame numbers.
    pub sys_admin: bool,
    /// `kernel.perf_event_paranoid`.
    pub perf_event_paranoid: Option<i32>,
}

/// Probes the machine whose `/proc` and `/sys` lie below `root`.
///
/// It opens every tracker for a moment, and changes nothing.
pub fn probe(root: &Path) -> ProbeReport {
    let topology = Topology::read(root);
    let order = match &topology {
        Ok(topology) => topology.order(),
        Err(_) => Err(NodesError::OneNode(0)),
    };
    let settings = Settings {
        root: root.into(),
        // An agent would turn it off; a probe changes nothing.
        take_damon: false,
        ..Settings::default()
    };
    let line = |path: &str| {
        let text = fs::read_to_string(root.join(path)).ok()?;
        Some(text.trim().to_string())
    };
    let mut report = ProbeReport {
        kernel: line("proc/sys/kernel/osrelease"),
        architecture: std::env::consts::ARCH,
        page_bytes: base_page_size(root).map(|size| size.0),
        nodes: topology
            .as_ref()
            .map(|topology| topology.nodes.iter().map(NodeReport::from).collect())
            .unwrap_or_default(),
        order: order.as_ref().ok().map(NodeOrder::from),
        one_kernel_tier: topology.as_ref().is_ok_and(Topology::shares_one_tier),
        trackers: try_all(&settings)
            .into_iter()
            .map(TrackerReport::from)
            .collect(),
        permissions: Permissions::read(root),
        thp: thp_mode(root, "enabled"),
        numa_balancing: numa_balancing(root),
        demotion_enabled: line("sys/kernel/mm/numa/demotion_enabled")
            .map(|text| matches!(text.as_str(), "true" | "1")),
        damon: root.join("sys/kernel/mm/damon/admin").exists(),
        damon_owner: Owner::in_kernel(root).map(|owner| owner.to_string()),
        balloon: BalloonReport::read(root),
        advice: Vec::new(),
    };
    report.advice = advice(&report, topology.err(), order);
    report.advice.extend(other_pages(root));
    report.advice.extend(not_x86(report.architecture));
    // Another root is another machine, whose kernel cannot be tried.
    if root == Path::new("/") {
        report.advice.extend(needs::missing(root));
    } else {
        report
            .advice
            .extend(needs::missing_capabilities(&report.permissions));
    }
    report.advice.sort_by_key(|advice| !advice.blocks);
    report
}

pub use needs::missing;

/// The problem with base pages of another size.
fn other_pages(root: &Path) -> Option<Advice> {
    let error = check_base_pages(root).err()?;
    Some(Advice {
        blocks: true,
        what: format!(
            "the kernel has pages of {}, which Demeter does not move",
            error.0
        ),
        hint: "boot a kernel with pages of 4 KiB".into(),
    })
}

/// The parts that exist on x86-64 only.
fn not_x86(architecture: &str) -> Option<Advice> {
    (architecture != "x86_64").then(|| Advice {
        blocks: false,
        what: format!(
            "{architecture} lacks what is for x86-64 only: the tracker perf (Intel load latency, AMD IBS), flushed TLBs \
             for the tracker damon, and the lab"
        ),
        hint: "the tracker damon works; pages that stay in a TLB may look idle to it".into(),
    })
}

/// The problem with NUMA balancing, and its hint.
pub const BALANCING_ADVICE: (&str, &str) = (
    "the kernel moves pages between nodes as well (numa_balancing) and will undo Demeter's work",
    "sysctl kernel.numa_balancing=0",
);

/// `kernel.numa_balancing`; stock kernels boot with 1 if there are several nodes.
pub fn numa_balancing(root: &Path) -> Option<u32> {
    let text = fs::read_to_string(root.join("proc/sys/kernel/numa_balancing")).ok()?;
    text.trim().parse().ok()
}

fn advice(
    report: &ProbeReport,
    unread: Option<NodesError>,
    order: Result<TierOrder, NodesError>,
) -> Vec<Advice> {
    let mut advice = Vec::new();
    let mut add = |blocks, what: String, hint: &str| {
        advice.push(Advice {
            blocks,
            what,
            hint: hint.into(),
        });
    };
    let (order, unordered) = match order {
        Ok(order) => (Some(order), None),
        Err(error) => (None, Some(error)),
    };
    match (unread, unordered) {
        (Some(error), _) => add(true, error.to_string(), "mount /proc and /sys"),
        (None, Some(NodesError::OneNode(count))) => add(
            true,
            format!("only {count} NUMA node has memory: there is nothing to tier"),
            "give the VM a second node of slower memory",
        ),
        (None, Some(NodesError::NoSlowerNode(node))) => add(
            true,
            format!("no node is slower than node {node}: there is nothing to tier"),
            "name the tiers with --tiers, or describe the slow node's latency in ACPI HMAT",
        ),
        (None, Some(error)) => add(true, error.to_string(), "see above"),
        (None, None) => {}
    }
    // A tracker in use by a running agent works.
    let works = |it: &TrackerReport| it.works || it.is_taken || it.waits_for_statistic;
    if !report.trackers.iter().any(works) {
        add(
            true,
            "no tracker works".into(),
            "settle one of those above; damon is the easiest",
        );
    }
    if report.numa_balancing.is_some_and(|mode| mode != 0) {
        let (what, hint) = BALANCING_ADVICE;
        add(false, what.into(), hint);
    }
    for contradiction in order.iter().flat_map(|order| &order.contradictions) {
        add(false, contradiction.to_string(), "see the nodes above");
    }
    if report.one_kernel_tier && report.order.is_some() {
        add(
            false,
            "the kernel put all nodes in one memory tier: its own tiering and demotion do \
             nothing (Demeter is not affected)"
                .into(),
            "describe the slow node's latency in ACPI HMAT (QEMU: -machine hmat=on, -numa hmat-lb)",
        );
    }
    if report.balloon.port
        && let (Some(why_not), Some(hint)) = (&report.balloon.why_not, report.balloon.hint)
    {
        add(
            false,
            format!("the host cannot take memory back: {why_not}"),
            hint,
        );
    }
    advice
}

impl From<&TierOrder> for NodeOrder {
    fn from(order: &TierOrder) -> Self {
        let alone = |(node, why): &(NodeId, LeftAlone)| (node.0, why.to_string());
        Self {
            tiers: order.tiers.to_string(),
            decided_by: order.decided_by.iter().map(ToString::to_string).collect(),
            left_alone: order.left_alone.iter().map(alone).collect(),
        }
    }
}

impl From<(&'static str, Option<TrackerError>)> for TrackerReport {
    fn from((name, error): (&'static str, Option<TrackerError>)) -> Self {
        let works = error.is_none();
        let is_taken = matches!(error, Some(TrackerError::Taken { .. }));
        let mut waits_for_statistic = false;
        let (why_not, hint) = match error {
            None => (None, None),
            Some(TrackerError::Taken { .. }) => (Some("a running Demeter uses it".into()), None),
            Some(TrackerError::Held { by, .. }) => {
                waits_for_statistic = by == Owner::Statistic;
                (Some(format!("DAMON is in use by {by}")), Some(by.hint()))
            }
            Some(TrackerError::Unavailable { why, hint, .. }) => (Some(why), Some(hint)),
            Some(error) => (Some(error.to_string()), None),
        };
        Self {
            name,
            works,
            is_taken,
            waits_for_statistic,
            why_not,
            hint,
        }
    }
}

impl BalloonReport {
    fn read(root: &Path) -> Self {
        let (why_not, hint) = match LiveBalloon::open(root) {
            Ok(_) => (None, None),
            Err(BalloonError::Unavailable { why, hint }) => (Some(why), Some(hint)),
            Err(error) => (Some(error.to_string()), None),
        };
        Self {
            port: port::is_there(root),
            why_not,
            hint,
        }
    }
}

impl Permissions {
    /// Reads `ROOT/proc/self/status`; capabilities are numbered as in linux/capability.h.
    fn read(root: &Path) -> Self {
        const SYS_PTRACE: u32 = 19;
        const SYS_ADMIN: u32 = 21;
        const SYS_NICE: u32 = 23;
        const PERFMON: u32 = 38;
        let status = fs::read_to_string(root.join("proc/self/status")).unwrap_or_default();
        let effective = status
            .lines()
            .find_map(|line| u64::from_str_radix(line.strip_prefix("CapEff:")?.trim(), 16).ok())
            .unwrap_or(0);
        let has = |capability: u32| effective >> capability & 1 == 1;
        Self {
            sys_nice: has(SYS_NICE),
            sys_ptrace: has(SYS_PTRACE),
            perfmon: has(PERFMON) || has(SYS_ADMIN),
            sys_admin: has(SYS_ADMIN),
            perf_event_paranoid: demeter_linux::perf::paranoia(root),
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
