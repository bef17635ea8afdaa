//! The report of `demeter host probe`: how this host supports managing VMs, and how to fix the
//! rest.

mod kvm;
mod text;

use std::fs;
use std::path::Path;

use demeter_linux::nodes::{Tiers, Topology};
use demeter_linux::perf::{PARANOIA_MAX, paranoia};
use demeter_linux::report::{Advice, NodeReport, thp_mode};
use demeter_policy::Tier;
use serde::Serialize;

pub use kvm::KvmReport;

/// First release whose KVM ages pages without flushing the TLBs of all its CPUs
/// (`KVM_ELIDE_TLB_FLUSH_IF_YOUNG`).
const QUIET_AGEING: (u32, u32) = (6, 13);

/// Facts about a host; `None` means unknown.
#[derive(Debug, Clone, PartialEq, Serialize)]
pub struct HostReport {
    /// The kernel's release.
    pub kernel: Option<String>,
    /// Whether KVM flushes TLBs when the kernel's reclaim checks guest pages for accesses.
    pub ageing_flushes: Option<bool>,
    /// Virtualization support.
    pub kvm: KvmReport,
    /// State of DAMON, which reads access bits.
    pub damon: DamonReport,
    /// `kernel.perf_event_paranoid`, which restricts reading DAMON's tracepoints.
    pub perf_event_paranoid: Option<i32>,
    /// Mode of transparent huge pages for anonymous memory.
    pub thp: Option<String>,
    /// Mode of transparent huge pages for memfds and /dev/shm.
    pub shmem_thp: Option<String>,
    /// Reserved huge pages.
    pub hugetlb: Vec<HugetlbReport>,
    /// Nodes with memory.
    pub nodes: Vec<NodeReport>,
    /// The fast and the slow node, if memory can be tiered.
    pub tiers: Option<TierReport>,
    /// Obstacles to `manage = "history"`, each with a hint, most severe first.
    pub advice: Vec<Advice>,
}

/// Availability of DAMON.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
#[serde(rename_all = "lowercase", tag = "state")]
pub enum DamonReport {
    /// No process uses it.
    Free,
    /// Kdamonds are running.
    Taken {
        /// Number of kdamonds.
        kdamonds: u64,
    },
    /// The kernel has no DAMON.
    Missing,
    /// Permission denied.
    Denied,
}

/// Reserved huge pages of one size.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct HugetlbReport {
    /// Size of a page, KiB.
    pub size_kib: u64,
    /// Number of reserved pages.
    pub total: u64,
    /// Number of unused ones.
    pub free: u64,
}

/// Nodes of the tiers.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct TierReport {
    /// The fast node.
    pub fast: u32,
    /// The slow node.
    pub slow: u32,
    /// The rule that chose them.
    pub decided_by: String,
}

/// Inspects the host whose /proc, /sys and /dev lie below `root`. Changes nothing.
pub fn probe(root: &Path) -> HostReport {
    let line = |path: &str| {
        let text = fs::read_to_string(root.join(path)).ok()?;
        Some(text.trim().to_owned())
    };
    let kernel = line("proc/sys/kernel/osrelease");
    let topology = Topology::read(root);
    let order = topology.as_ref().map(Topology::order);
    let mut report = HostReport {
        ageing_flushes: kernel
            .as_deref()
            .and_then(version)
            .map(|version| version < QUIET_AGEING),
        kernel,
        kvm: KvmReport::read(root),
        damon: DamonReport::read(root),
        perf_event_paranoid: paranoia(root),
        thp: thp_mode(root, "enabled"),
        shmem_thp: thp_mode(root, "shmem_enabled"),
        hugetlb: hugetlb(root),
        nodes: topology.as_ref().map_or(vec![], |topology| {
            topology.with_memory().map(NodeReport::from).collect()
        }),
        tiers: match &order {
            Ok(Ok(order)) => Some(TierReport {
                fast: order.pair.fast.0,
                slow: order.pair.slow.0,
                decided_by: order.decided_by[0].to_string(),
            }),
            _ => None,
        },
        advice: vec![],
    };
    let merged = match &order {
        Ok(Ok(order)) => merged(&order.tiers),
        _ => None,
    };
    let unordered = match order {
        Ok(Ok(_)) => None,
        Ok(Err(error)) => Some(error.to_string()),
        Err(error) => Some(error.to_string()),
    };
    report.advice = advice(&report, unordered);
    report.advice.extend(merged);
    report
}

/// A warning if the host has more tiers than the controller divides.
fn merged(tiers: &Tiers) -> Option<Advice> {
    if tiers.count() <= Tier::ALL.len() {
        return None;
    }
    let slower: Vec<_> = tiers.slower().map(|node| node.to_string()).collect();
    Some(Advice {
        blocks: false,
        what: format!(
            "it has {} tiers of memory, and the controller divides two: nodes {} are one slow tier",
            tiers.count(),
            slower.join(", ")
        ),
        hint: "name the slow_nodes of one tier in pool to leave the others to the host".into(),
    })
}

/// The first two numbers of a release.
fn version(release: &str) -> Option<(u32, u32)> {
    let mut numbers = release.split(['.', '-']).map(|part| part.parse().ok());
    Some((numbers.next()??, numbers.next()??))
}

fn hugetlb(root: &Path) -> Vec<HugetlbReport> {
    let dir = root.join("sys/kernel/mm/hugepages");
    let entries = fs::read_dir(&dir).into_iter().flatten().flatten();
    let mut found: Vec<_> = entries
        .filter_map(|entry| {
            let name = entry.file_name().into_string().ok()?;
            let size_kib = name.strip_prefix("hugepages-")?.strip_suffix("kB")?;
            let number = |file: &str| {
                let text = fs::read_to_string(entry.path().join(file)).ok()?;
                text.trim().parse().ok()
            };
            Some(HugetlbReport {
                size_kib: size_kib.parse().ok()?,
                total: number("nr_hugepages")?,
                free: number("free_hugepages")?,
            })
        })
        .collect();
    found.sort_by_key(|of| of.size_kib);
    found
}

impl DamonReport {
    fn read(root: &Path) -> Self {
        let path = root.join("sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds");
        match fs::read_to_string(path) {
            Ok(text) => match text.trim().parse() {
                Ok(0) => Self::Free,
                Ok(kdamonds) => Self::Taken { kdamonds },
                Err(_) => Self::Missing,
            },
            Err(error) if error.kind() == std::io::ErrorKind::PermissionDenied => Self::Denied,
            Err(_) => Self::Missing,
        }
    }
}

fn advice(report: &HostReport, unordered: Option<String>) -> Vec<Advice> {
    let mut advice = vec![];
    let mut add = |blocks, what: String, hint: &str| {
        advice.push(Advice {
            blocks,
            what,
            hint: hint.into(),
        });
    };
    if let Some(why) = unordered {
        add(true, why, "tiering needs a fast and a slower node");
    }
    match report.damon {
        DamonReport::Free => {}
        DamonReport::Taken { kdamonds } => add(
            true,
            format!("DAMON is in use ({kdamonds} kdamonds)"),
            "stop the process that uses it, unless it is demeter host",
        ),
        DamonReport::Missing => add(
            true,
            "the kernel has no DAMON".into(),
            "use a kernel with CONFIG_DAMON_VADDR and CONFIG_DAMON_SYSFS",
        ),
        DamonReport::Denied => add(true, "permission denied for DAMON".into(), "run as root"),
    }
    if let Some(level) = report.perf_event_paranoid
        && level > PARANOIA_MAX
    {
        add(
            true,
            format!(
                "kernel.perf_event_paranoid is {level}: the controller may not read DAMON's tracepoint"
            ),
            "sysctl kernel.perf_event_paranoid=2",
        );
    }
    let kvm = &report.kvm;
    if kvm.extension.is_none() {
        add(
            false,
            "the CPU shows no virtualization (vmx, svm): VMs are emulated here".into(),
            "enable it in the firmware, or allow nested virtualization for this VM",
        );
    } else if kvm.access_bits == Some(false) {
        add(
            false,
            "guest page tables have no access bits: each scan unmaps pages".into(),
            "load kvm_intel with eptad=1, on a CPU that has them",
        );
    }
    if report.ageing_flushes == Some(true) {
        add(
            false,
            "this kernel's KVM flushes TLBs whenever reclaim checks guest pages for accesses; scans \
             through DAMON do not"
                .into(),
            "use Linux 6.13 or later if the host itself reclaims or tiers guest memory",
        );
    }
    if report.thp.as_deref() == Some("never") {
        add(
            false,
            "guest memory has no huge pages: a scan checks only 4 KiB of each 2 MiB".into(),
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        );
    }
    advice.sort_by_key(|advice| !advice.blocks);
    advice
}

#[cfg(test)]
mod tests;
