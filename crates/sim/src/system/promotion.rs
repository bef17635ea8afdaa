//! What Linux promotes of the pages that fault, and how much of it in a second (`should_numa_migrate_memory` in
//! kernel/sched/fair.c).

use demeter_policy::MIB;

use super::Managed;
use crate::machine::cost::PS_PER_MS;

/// A fault that comes within this time shows a hot page (`hot_threshold_ms`).
pub(super) const HOT_MS: u32 = 1000;

/// How much may be promoted (`numa_balancing_promote_rate_limit_MBps`).
#[derive(Debug, Default)]
pub(super) struct RateLimit {
    /// Bytes that may be promoted in a second, if that is limited.
    bytes: Option<u64>,
    /// The second that goes on.
    second: u64,
    /// Bytes promoted in it.
    promoted: u64,
}

impl RateLimit {
    /// What an administrator has set, if anything.
    pub(super) fn of(managed: &Managed) -> Self {
        let rate_mib = managed.knob(|s| s.rate_mib_per_s);
        Self {
            bytes: rate_mib.map(|mib| u64::from(mib) * MIB),
            ..Self::default()
        }
    }

    /// Whether more may be promoted in this second.
    pub(super) fn has_room(&mut self, now_ps: u64) -> bool {
        let second = now_ps / (1000 * PS_PER_MS);
        if self.second != second {
            (self.second, self.promoted) = (second, 0);
        }
        self.bytes.is_none_or(|bytes| self.promoted < bytes)
    }

    /// So much was promoted.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.promoted += bytes;
    }
}
