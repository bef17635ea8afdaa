//! The names by which a result tells what took CPU time and what was counted.

/// What a cause of CPU time is to whom manages memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// What the machine is there for, and what it does whoever manages memory.
    Work,
    /// The price of managing memory, as far as it is more than under `none`.
    Management,
    /// What watching the run takes.
    Watching,
}

use Role::{Management, Watching, Work};

/// Causes of CPU time: those of the simulator, then those of a VM, whose whole system time counts
/// as management.
pub const CAUSES: [(&str, Role); 26] = [
    ("compute", Work),
    ("walk", Work),
    ("cache", Work),
    ("fast", Work),
    ("slow", Work),
    ("track", Management),
    ("classify", Management),
    ("migrate", Management),
    ("fault", Work),
    ("hint", Management),
    ("exit", Management),
    ("flush", Management),
    ("kernel", Work),
    ("idle", Work),
    ("steal", Work),
    ("agent_user", Management),
    ("agent_system", Management),
    ("kswapd", Management),
    ("kdamond", Management),
    ("kcompactd", Management),
    ("khugepaged", Management),
    ("workload_user", Work),
    ("workload_system", Management),
    ("observer_user", Watching),
    ("observer_system", Management),
    (OTHER_SYSTEM, Management),
];

/// System time of a VM that no other cause took.
pub const OTHER_SYSTEM: &str = "other_system";

/// What the simulator counts.
pub const COUNTERS: [&str; 15] = [
    "flush_total",
    "flush_guest_local_one",
    "flush_guest_local_all",
    "flush_guest_remote",
    "flush_host_vcpu",
    "flush_host_invept",
    "page_faults",
    "hint_faults",
    "samples",
    "operations",
    "tlb_misses",
    "walk_references",
    "walk_ns",
    "segment_hits",
    "working_set_bytes",
];

/// What the simulator counts where a system keeps histories of accesses: pages by the ones in theirs, from
/// `01` to `32`.
pub const HISTORY_PREFIX: &str = "pages_with_ones_";

/// What the simulator counts of a VM whose writes are logged.
pub const LOGGING_COUNTERS: [&str; 8] = [
    "stage2_faults",
    "blocks_split",
    "tlb_broadcasts",
    "log_passes",
    "pages_sent",
    "starved_ms",
    "enable_ms",
    "downtime_ms",
];

/// What a host's KVM counts of its guests begins so.
pub const KVM_PREFIX: &str = "kvm_";

/// What is kept of a kernel's /proc/vmstat, by the start of its name: how pages moved.
pub const VMSTAT_PREFIXES: [&str; 7] = [
    "pgpromote",
    "pgdemote",
    "pgmigrate",
    "pgscan_kswapd",
    "pgscan_direct",
    "numa_",
    "thp_",
];

/// The role of a cause; none for one that nobody here knows.
pub fn role(cause: &str) -> Option<Role> {
    let mut causes = CAUSES.iter();
    causes
        .find(|(name, _)| *name == cause)
        .map(|(_, role)| *role)
}

/// Whether a run can have counted something by this name.
pub fn is_counter(name: &str) -> bool {
    COUNTERS.contains(&name)
        || LOGGING_COUNTERS.contains(&name)
        || name.starts_with(HISTORY_PREFIX)
        || name.starts_with(KVM_PREFIX)
        || VMSTAT_PREFIXES.iter().any(|start| name.starts_with(start))
}
