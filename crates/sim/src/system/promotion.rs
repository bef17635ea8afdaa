//! Linux's promotion rules for hint faults: hot threshold and rate limit (`should_numa_migrate_memory` in
//! kernel/sched/fair.c).

use demeter_policy::MIB;

use super::Managed;
use crate::machine::cost::PS_PER_MS;

/// A page that faults within this time is hot (`hot_threshold_ms`).
pub(super) const HOT_MS: u32 = 1000;

/// Rate limit of promotion (`numa_balancing_promote_rate_limit_MBps`).
#[derive(Debug, Default)]
pub(super) struct RateLimit {
    /// Bytes per second, if limited.
    bytes: Option<u64>,
    /// The current second.
    second: u64,
    /// Bytes promoted in this second.
    promoted: u64,
}

impl RateLimit {
    /// The administrator's limit, if any.
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

    /// Counts promoted bytes.
    pub(super) fn spend(&mut self, bytes: u64) {
        self.promoted += bytes;
    }
}
