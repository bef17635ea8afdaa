//! The API's view of the host: a snapshot of its state and a log of recent events.
//!
//! The snapshot is rebuilt after every change. The API and Prometheus both read it.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use demeter_policy::benefit::{Benefit, Slowdown};
use demeter_policy::provision::{Policy, ProvisionerKind};
use demeter_policy::{ByteCount, TierBytes};
use demeter_proto::BENEFIT_TOLD;
use serde::{Deserialize, Serialize};

/// A snapshot of the host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostView {
    /// The host's version.
    pub version: String,
    /// The policy by which memory is divided.
    pub policy: Policy,
    /// Whether all VMs get all their memory back, whatever their limits.
    #[serde(default)]
    pub evacuates: bool,
    /// Size of the pool, or of all pools together.
    pub pool: TierView,
    /// Memory committed to VMs; never more than the pool.
    pub committed: TierView,
    /// Upper bound of the memory that VMs hold. It exceeds the pool while VMs have not yet returned
    /// their boot memory; no VM grows meanwhile.
    #[serde(default)]
    pub may_hold: TierView,
    /// Each pool.
    #[serde(default)]
    pub pools: Vec<PoolView>,
    /// Keys of which a person has set another value than the configuration's file says.
    #[serde(default)]
    pub settings: Vec<SettingView>,
    /// How often more was committed than the pool has. Must be 0; anything else is a bug.
    pub violations: u64,
    /// Why the state file is not written, if so. No VM gets a command meanwhile.
    #[serde(default)]
    pub unsaved: Option<String>,
    /// The VMs, by name.
    pub vms: Vec<VmView>,
    /// Running domains that are not managed, by name. Their memory is not part of the pool.
    #[serde(default)]
    pub left_alone: Vec<LeftAloneView>,
}

/// A value that a person set over the file's.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct SettingView {
    /// The key: `vm.db.share`; `vm.db` for a VM that was added or removed.
    pub key: String,
    /// The file's value, if any.
    pub file: Option<String>,
    /// The value that was set.
    pub value: String,
    /// Why it is not in use, if so.
    pub problem: Option<String>,
}

/// A running libvirt domain that is not managed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftAloneView {
    /// Its name.
    pub name: String,
    /// Why it is not managed.
    pub why: String,
    /// All its memory, if known.
    pub memory_bytes: u64,
}

impl HostView {
    /// Memory that VMs may hold beyond their pools.
    pub fn excess(&self) -> TierView {
        if self.pools.is_empty() {
            return self.may_hold.beyond(self.pool);
        }
        let beyond = self.pools.iter().map(PoolView::excess);
        beyond.fold(TierView::default(), |sum, of| TierView {
            fast_bytes: sum.fast_bytes.saturating_add(of.fast_bytes),
            slow_bytes: sum.slow_bytes.saturating_add(of.slow_bytes),
        })
    }
}

/// One pool.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct PoolView {
    /// Its name; empty for the only pool of a host.
    pub name: String,
    /// The host's nodes of its fast memory; empty if unknown.
    pub fast_nodes: Vec<u32>,
    /// The host's nodes of its slow memory.
    pub slow_nodes: Vec<u32>,
    /// Its size.
    pub size: TierView,
    /// Memory committed to its VMs; never more than its size.
    pub committed: TierView,
    /// Upper bound of the memory that its VMs hold.
    pub may_hold: TierView,
    /// Why its policy cannot divide it; `None` if it can.
    #[serde(default)]
    pub problem: Option<String>,
}

impl PoolView {
    /// Memory that its VMs may hold beyond its size.
    pub fn excess(&self) -> TierView {
        self.may_hold.beyond(self.size)
    }
}

/// Bytes of each tier.
#[derive(Debug, Clone, Copy, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierView {
    /// Fast memory.
    pub fast_bytes: u64,
    /// Slow memory.
    pub slow_bytes: u64,
}

impl TierView {
    /// The excess over `other`.
    fn beyond(self, other: Self) -> Self {
        Self {
            fast_bytes: self.fast_bytes.saturating_sub(other.fast_bytes),
            slow_bytes: self.slow_bytes.saturating_sub(other.slow_bytes),
        }
    }

    /// Both tiers together.
    pub fn sum(self) -> u64 {
        self.fast_bytes.saturating_add(self.slow_bytes)
    }
}

impl From<TierBytes> for TierView {
    fn from(bytes: TierBytes) -> Self {
        Self {
            fast_bytes: bytes.fast.0,
            slow_bytes: bytes.slow.0,
        }
    }
}

/// Whether a VM can be managed.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize, strum::Display)]
#[serde(rename_all = "lowercase")]
#[strum(serialize_all = "lowercase")]
pub enum VmState {
    /// It is connected and trusted.
    Up,
    /// It is not running or does not answer.
    #[default]
    Down,
    /// Its guest sent false data. The controller sends it no more commands.
    Marked,
}

/// One VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Its name.
    pub name: String,
    /// Its pool; empty for the only pool of a host.
    #[serde(default)]
    pub pool: String,
    /// The provisioner that changes its size.
    pub provisioner: ProvisionerKind,
    /// Component that moves its memory between tiers: `agent` or `history`; `None` until one does.
    #[serde(default)]
    pub managed_by: Option<String>,
    /// Whether it can be managed.
    pub state: VmState,
    /// Desired size, set by the API or by the policy.
    pub desired: TierView,
    /// Size that the VM is asked to own: desired, less its out-of-memory allowance.
    pub target: TierView,
    /// Memory committed to the VM; counts against the pool.
    pub committed: TierView,
    /// Memory that the VM owned when last asked.
    pub owned: Option<TierView>,
    /// Upper bound of the memory that it holds. It is all its memory until the VM was verified to
    /// own less.
    #[serde(default)]
    pub may_hold: TierView,
    /// Its guarantee.
    #[serde(default)]
    pub guarantee: TierView,
    /// Its limit, at most all its memory.
    #[serde(default)]
    pub limit: TierView,
    /// Memory returned to the host since the controller started.
    pub returned_bytes: u64,
    /// How often the VM used memory that it did not own. The host reclaimed it each time.
    #[serde(default)]
    pub overruns: u64,
    /// Size of the latest such overrun.
    #[serde(default)]
    pub overrun: TierView,
    /// Share of sampled accesses that fast memory served, 0 to 1.
    pub fast_hit: Option<f64>,
    /// Cost and benefit of its agent's moves; `None` without an agent.
    #[serde(default)]
    pub relocation: Option<RelocationView>,
    /// Working set as the guest estimates it.
    pub working_set_bytes: Option<u64>,
    /// Share of time in which some task of the guest waited for memory, 0 to 1.
    pub pressure: Option<f64>,
    /// Protocol version of its agent; `None` while none is connected.
    #[serde(default)]
    pub protocol: Option<u16>,
    /// Benefit of fast memory, as its agent estimates it.
    #[serde(default)]
    pub benefit: Option<Benefit>,
    /// Its service level; `None` without `slowdown_max_percent`.
    #[serde(default)]
    pub service: Option<ServiceView>,
    /// Where its memory lies on the host; `None` until its pages were counted.
    #[serde(default)]
    pub places: Option<PlacesView>,
    /// Current problem of the VM, for people.
    pub problem: Option<String>,
}

/// The reason why a VM has no estimate of its slowdown, by its agent's protocol version.
pub fn no_estimate(protocol: Option<u16>) -> String {
    match protocol {
        None => "its slowdown is unknown: no agent is connected".into(),
        Some(version) if version < BENEFIT_TOLD => format!(
            "its slowdown is unknown: its agent speaks protocol {version}, and estimates come with {BENEFIT_TOLD}; \
             upgrade the agent"
        ),
        Some(_) => {
            "its slowdown is unknown: its agent has not seen enough memory accesses yet".into()
        }
    }
}

impl VmView {
    /// Slowdown with the fast memory that it owns, against a VM whose memory is all fast.
    pub fn slowdown(&self) -> Option<Slowdown> {
        let owned = ByteCount(self.owned?.fast_bytes);
        Some(self.benefit.as_ref()?.slowdown(owned))
    }
}

/// A VM's service level.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct ServiceView {
    /// The largest slowdown against a VM whose memory is all fast, percent.
    pub slowdown_max_percent: u32,
    /// Fast memory that it needs for this, by the upper bound of its agent's estimate.
    pub needs_bytes: Option<u64>,
    /// Why the level is not met or not known to be, if so.
    pub unmet: Option<String>,
}

/// Where a VM's memory lies on the host.
#[derive(Debug, Clone, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct PlacesView {
    /// Nodes of its fast memory, by number.
    pub fast: Vec<PlaceView>,
    /// Nodes of its slow memory, by number.
    pub slow: Vec<PlaceView>,
    /// Memory of each tier on nodes that are not the tier's; `None` if the tiers' nodes are unknown.
    pub elsewhere: Option<TierView>,
}

/// Memory on a node of the host.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Serialize, Deserialize)]
pub struct PlaceView {
    /// The node's number.
    pub node: u32,
    /// The memory.
    pub bytes: u64,
}

/// Cost and benefit of an agent's moves since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RelocationView {
    /// Time spent on moves, milliseconds.
    pub cost_ms: u64,
    /// Estimated time saved by moves, milliseconds; negative if they did harm.
    pub benefit_ms: i64,
    /// Whether the agent has stopped moving because moves brought no benefit.
    pub is_resting: bool,
}

/// An event in the life of the host or a VM.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventView {
    /// Number of the event, counted from 1 since the controller started.
    pub number: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// The VM that the event is about.
    pub vm: Option<String>,
    /// The origin of the request, if there was one: a client of the API, SIGHUP, libvirt or a policy.
    #[serde(default)]
    pub by: Option<String>,
    /// Description for people.
    pub text: String,
}

/// A ring of the latest events.
#[derive(Debug, Clone, Default)]
pub struct EventLog(Arc<Mutex<Ring>>);

#[derive(Debug, Default)]
struct Ring {
    last_number: u64,
    events: VecDeque<EventView>,
}

impl EventLog {
    /// Maximum number of events that are kept.
    pub const EVENTS_MAX: usize = 4096;

    /// Adds an event that nobody asked for.
    pub fn push(&self, time_ms: u64, vm: Option<String>, text: String) {
        self.push_by(time_ms, vm, text, None);
    }

    /// Adds an event, and who asked for it.
    pub fn push_by(&self, time_ms: u64, vm: Option<String>, text: String, by: Option<String>) {
        let mut ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        ring.last_number += 1;
        let number = ring.last_number;
        if ring.events.len() == Self::EVENTS_MAX {
            ring.events.pop_front();
        }
        ring.events.push_back(EventView {
            number,
            time_ms,
            vm,
            by,
            text,
        });
    }

    /// Kept events with a number above `number`, oldest first.
    pub fn after(&self, number: u64) -> Vec<EventView> {
        let ring = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let newer = ring
            .events
            .iter()
            .skip_while(|event| event.number <= number);
        newer.cloned().collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_log_keeps_the_last_events_and_their_numbers() {
        let log = EventLog::default();
        assert_eq!(log.after(0), []);
        let count = EventLog::EVENTS_MAX as u64 + 10;
        for number in 1..=count {
            log.push(number * 2, None, format!("event {number}"));
        }
        let numbers = |after| {
            log.after(after)
                .iter()
                .map(|e| e.number)
                .collect::<Vec<_>>()
        };
        assert_eq!(numbers(0), (11..=count).collect::<Vec<_>>());
        assert_eq!(numbers(count - 2), [count - 1, count]);
        assert!(numbers(count).is_empty());
        assert!(numbers(u64::MAX).is_empty());
        assert_eq!(log.after(count - 1)[0].time_ms, count * 2);
    }
}
