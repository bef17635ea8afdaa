//! The report of `demeter host probe`: how this host supports managing VMs, and how to fix the
//! rest.

use std::fmt::{self, Display, Formatter};
use std::fs::{self, File};
use std::os::fd::AsRawFd;
use std::path::Path;

use demeter_linux::nodes::{Tiers, Topology};
use demeter_linux::perf::{PARANOIA_MAX, paranoia};
use demeter_policy::{MIB, Tier};
use serde::Serialize;

/// `KVM_CHECK_EXTENSION` and `KVM_CAP_GUEST_MEMFD` (linux/kvm.h).
const KVM_CHECK_EXTENSION: libc::Ioctl = 0xAE03;
const KVM_CAP_GUEST_MEMFD: libc::c_int = 234;

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

/// Facts about KVM.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize)]
pub struct KvmReport {
    /// Whether /dev/kvm can be opened.
    pub device: bool,
    /// The CPU's extension: `vmx` or `svm`.
    pub extension: Option<&'static str>,
    /// Whether it has two-dimensional page tables (EPT, NPT).
    pub two_dimensions: Option<bool>,
    /// Whether these have access and dirty bits. Without them, KVM unmaps pages to detect accesses.
    pub access_bits: Option<bool>,
    /// Whether VMs may run VMs.
    pub nested: Option<bool>,
    /// Whether guests may have private memory, which cannot be moved.
    pub guest_memfd: Option<bool>,
    /// Whether KVM's counters in debugfs can be read.
    pub counters: bool,
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

/// A NUMA node.
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

/// A recommended change.
#[derive(Debug, Clone, PartialEq, Eq, Serialize)]
pub struct Advice {
    /// Whether the host cannot manage VMs without the change.
    pub blocks: bool,
    /// The problem.
    pub what: String,
    /// The fix.
    pub hint: String,
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
        thp: line("sys/kernel/mm/transparent_hugepage/enabled").and_then(chosen),
        shmem_thp: line("sys/kernel/mm/transparent_hugepage/shmem_enabled").and_then(chosen),
        hugetlb: hugetlb(root),
        nodes: topology.as_ref().map_or(vec![], |topology| {
            let node = |node: &demeter_linux::nodes::Node| NodeReport {
                id: node.id.0,
                total_bytes: node.total.0,
                free_bytes: node.free.0,
                has_cpus: node.has_cpus,
            };
            topology.with_memory().map(node).collect()
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

/// The word in brackets, as in `always [madvise] never`.
fn chosen(text: String) -> Option<String> {
    let (_, rest) = text.split_once('[')?;
    Some(rest.split_once(']')?.0.into())
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

impl KvmReport {
    fn read(root: &Path) -> Self {
        let cpuinfo = fs::read_to_string(root.join("proc/cpuinfo")).unwrap_or_default();
        let flags = cpuinfo.lines().find(|line| line.starts_with("flags"));
        let has = |flag| flags.is_some_and(|flags| flags.split_whitespace().any(|f| f == flag));
        let extension = ["vmx", "svm"].into_iter().find(|&flag| has(flag));
        let parameter = |module: &str, name: &str| {
            let path = root.join(format!("sys/module/{module}/parameters/{name}"));
            let text = fs::read_to_string(path).ok()?;
            Some(matches!(text.trim(), "Y" | "1"))
        };
        let (two_dimensions, access_bits, nested) = match extension {
            Some("vmx") => (
                parameter("kvm_intel", "ept"),
                parameter("kvm_intel", "eptad"),
                parameter("kvm_intel", "nested"),
            ),
            // AMD's nested page tables have the format of ordinary ones, with access bits.
            Some(_) => (
                parameter("kvm_amd", "npt"),
                parameter("kvm_amd", "npt"),
                parameter("kvm_amd", "nested"),
            ),
            None => (None, None, None),
        };
        let kvm = root.join("dev/kvm");
        let device = File::options().read(true).write(true).open(kvm).ok();
        let guest_memfd = device.as_ref().map(|kvm| {
            // SAFETY: the call takes a number by value and touches no memory of ours.
            let has =
                unsafe { libc::ioctl(kvm.as_raw_fd(), KVM_CHECK_EXTENSION, KVM_CAP_GUEST_MEMFD) };
            has > 0
        });
        Self {
            device: device.is_some(),
            extension,
            two_dimensions,
            access_bits,
            nested,
            guest_memfd,
            counters: fs::read_dir(root.join("sys/kernel/debug/kvm")).is_ok(),
        }
    }
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

impl HostReport {
    fn write_kvm(&self, f: &mut Formatter<'_>) -> fmt::Result {
        let Self { kvm, .. } = self;
        let ageing = match self.ageing_flushes {
            Some(true) => "KVM's ageing flushes TLBs",
            Some(false) => "KVM's ageing does not flush TLBs",
            None => "ageing unknown",
        };
        writeln!(f, "kernel        {}, {ageing}", known(&self.kernel))?;
        writeln!(
            f,
            "kvm           /dev/kvm {}, {}, two dimensions {}, access bits {}, nested {}",
            yes_no(kvm.device),
            kvm.extension.unwrap_or("no vmx or svm"),
            maybe(kvm.two_dimensions),
            maybe(kvm.access_bits),
            maybe(kvm.nested),
        )?;
        writeln!(
            f,
            "              guest_memfd {}, counters {}",
            maybe(kvm.guest_memfd),
            yes_no(kvm.counters)
        )
    }

    fn write_huge_pages(&self, f: &mut Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "huge pages    transparent {}, of shared memory {}",
            known(&self.thp),
            known(&self.shmem_thp)
        )?;
        for of in &self.hugetlb {
            let HugetlbReport {
                size_kib,
                total,
                free,
            } = of;
            write!(f, "; {total} of {size_kib} KiB set aside, {free} free")?;
        }
        writeln!(f)
    }
}

impl Display for HostReport {
    fn fmt(&self, f: &mut Formatter<'_>) -> fmt::Result {
        self.write_kvm(f)?;
        let damon = match self.damon {
            DamonReport::Free => "free".into(),
            DamonReport::Taken { kdamonds } => format!("in use ({kdamonds} kdamonds)"),
            DamonReport::Missing => "missing".into(),
            DamonReport::Denied => "permission denied".into(),
        };
        writeln!(f, "damon         {damon}")?;
        self.write_huge_pages(f)?;
        for node in &self.nodes {
            writeln!(
                f,
                "node {:<8} {} MiB, {} MiB free, {}",
                node.id,
                node.total_bytes / MIB,
                node.free_bytes / MIB,
                if node.has_cpus {
                    "with CPUs"
                } else {
                    "no CPUs"
                }
            )?;
        }
        match &self.tiers {
            Some(tiers) => writeln!(
                f,
                "tiers         fast: node {}, slow: node {} ({})",
                tiers.fast, tiers.slow, tiers.decided_by
            )?,
            None => writeln!(f, "tiers         none")?,
        }
        for advice in &self.advice {
            let grade = if advice.blocks { "PROBLEM" } else { "warning" };
            writeln!(
                f,
                "{grade}       {}\n              hint: {}",
                advice.what, advice.hint
            )?;
        }
        if self.advice.iter().all(|advice| !advice.blocks) {
            writeln!(
                f,
                "VMs can be managed from this host (manage = \"history\")."
            )?;
        }
        Ok(())
    }
}

fn known(value: &Option<String>) -> &str {
    value.as_deref().unwrap_or("unknown")
}

fn maybe(value: Option<bool>) -> &'static str {
    value.map_or("unknown", yes_no)
}

fn yes_no(value: bool) -> &'static str {
    if value { "yes" } else { "no" }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn host(files: &[(&str, &str)]) -> HostReport {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, text).unwrap();
        }
        probe(root.path())
    }

    const DAMON: &str = "sys/kernel/mm/damon/admin/kdamonds/nr_kdamonds";

    fn blocking(report: &HostReport) -> Vec<&str> {
        let blocking = report.advice.iter().filter(|advice| advice.blocks);
        blocking.map(|advice| advice.what.as_str()).collect()
    }

    #[test]
    fn a_kernel_that_keeps_perf_events_to_itself_is_told_of() {
        for (level, is_told) in [("3", true), ("2", false), ("-1", false)] {
            let report = host(&[
                (DAMON, "0\n"),
                ("proc/sys/kernel/perf_event_paranoid", level),
            ]);
            let tells = blocking(&report)
                .iter()
                .any(|what| what.contains("paranoid is 3"));
            assert_eq!(tells, is_told, "{level}");
        }
    }

    #[test]
    fn a_host_that_has_everything() {
        let meminfo = |node: u32| {
            format!("Node {node} MemTotal: 1048576 kB\nNode {node} MemFree: 524288 kB\n")
        };
        let report = host(&[
            ("proc/sys/kernel/osrelease", "6.13.2-generic\n"),
            ("proc/cpuinfo", "flags\t\t: fpu svm sse\n"),
            ("sys/module/kvm_amd/parameters/npt", "Y\n"),
            ("sys/module/kvm_amd/parameters/nested", "1\n"),
            (DAMON, "0\n"),
            (
                "sys/kernel/mm/transparent_hugepage/enabled",
                "always [madvise] never\n",
            ),
            (
                "sys/kernel/mm/hugepages/hugepages-2048kB/nr_hugepages",
                "8\n",
            ),
            (
                "sys/kernel/mm/hugepages/hugepages-2048kB/free_hugepages",
                "3\n",
            ),
            ("sys/devices/system/node/node0/meminfo", &meminfo(0)),
            ("sys/devices/system/node/node0/cpulist", "0-3\n"),
            ("sys/devices/system/node/node0/distance", "10 20\n"),
            ("sys/devices/system/node/node1/meminfo", &meminfo(1)),
            ("sys/devices/system/node/node1/cpulist", "\n"),
            ("sys/devices/system/node/node1/distance", "20 10\n"),
        ]);
        assert_eq!(report.advice, []);
        assert_eq!(report.ageing_flushes, Some(false));
        assert_eq!(report.kvm.access_bits, Some(true));
        let hugetlb = HugetlbReport {
            size_kib: 2048,
            total: 8,
            free: 3,
        };
        assert_eq!(report.hugetlb, [hugetlb]);
        let tiers = report.tiers.as_ref().unwrap();
        assert_eq!((tiers.fast, tiers.slow), (0, 1));
        let text = report.to_string();
        assert!(text.contains("can be managed from this host"), "{text}");
        assert!(text.contains("8 of 2048 KiB set aside, 3 free"), "{text}");
    }

    #[test]
    fn what_is_missing_is_named_with_its_hint() {
        let report = host(&[
            ("proc/sys/kernel/osrelease", "6.12.94+deb12-cloud-amd64\n"),
            ("proc/cpuinfo", "flags : vmx\n"),
            ("sys/module/kvm_intel/parameters/eptad", "N\n"),
            (DAMON, "2\n"),
        ]);
        assert_eq!(report.ageing_flushes, Some(true));
        assert_eq!(report.kvm.access_bits, Some(false));
        let blocking = blocking(&report);
        assert_eq!(blocking.len(), 2, "{blocking:?}");
        assert!(blocking[1].contains("DAMON is in use (2 kdamonds)"));
        let warned = report.to_string();
        assert!(warned.contains("eptad=1") && warned.contains("Linux 6.13"));
        assert!(!warned.contains("can be managed"));
    }

    #[test]
    fn tiers_beyond_two_are_told() {
        let tiers = |text: &str| text.parse::<Tiers>().unwrap();
        assert_eq!(merged(&tiers("0,1/2,3")), None);
        let told = merged(&tiers("0/1,2/3")).unwrap().what;
        assert!(
            told.contains("3 tiers") && told.contains("nodes 1, 2, 3 are one"),
            "{told}"
        );
    }

    #[test]
    fn nothing_at_all_is_no_reason_to_fall_over() {
        let report = host(&[("proc/sys/kernel/osrelease", "no number")]);
        assert_eq!(report.ageing_flushes, None);
        assert_eq!(report.damon, DamonReport::Missing);
        assert!(blocking(&report).contains(&"the kernel has no DAMON"));
        assert!(report.to_string().contains("access bits unknown"));
    }
}
