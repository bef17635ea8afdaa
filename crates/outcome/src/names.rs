//! Names of CPU time causes and counters in a result.

/// The purpose of a cause of CPU time.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Role {
    /// The workload, and everything that runs under any system.
    Work,
    /// Managing memory, as far as it exceeds that of `none`.
    Management,
    /// Observing the run.
    Watching,
}

use Role::{Management, Watching, Work};

/// Causes of CPU time: the simulator's, then a VM's, whose whole system time counts as management.
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

/// System time of a VM without another cause.
pub const OTHER_SYSTEM: &str = "other_system";

/// The simulator's counters.
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

/// Prefix of the simulator's counters of access histories: pages by the number of ones, from `01` to `32`.
pub const HISTORY_PREFIX: &str = "pages_with_ones_";

/// The simulator's counters of a VM under dirty logging.
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

/// Prefix of a host's KVM counters.
pub const KVM_PREFIX: &str = "kvm_";

/// Prefixes of the counters kept from /proc/vmstat, which concern migration.
pub const VMSTAT_PREFIXES: [&str; 7] = [
    "pgpromote",
    "pgdemote",
    "pgmigrate",
    "pgscan_kswapd",
    "pgscan_direct",
    "numa_",
    "thp_",
];

/// The role of a cause; `None` if it is unknown.
pub fn role(cause: &str) -> Option<Role> {
    let mut causes = CAUSES.iter();
    causes
        .find(|(name, _)| *name == cause)
        .map(|(_, role)| *role)
}

/// Whether a run can have a counter of this name.
pub fn is_counter(name: &str) -> bool {
    COUNTERS.contains(&name)
        || LOGGING_COUNTERS.contains(&name)
        || name.starts_with(HISTORY_PREFIX)
        || name.starts_with(KVM_PREFIX)
        || VMSTAT_PREFIXES.iter().any(|start| name.starts_with(start))
}
