//! What the host tells about itself: one snapshot, made anew whenever something changed, for the
//! API and for Prometheus alike; and the last things that happened.

use std::collections::VecDeque;
use std::sync::{Arc, Mutex, PoisonError};

use demeter_policy::TierBytes;
use demeter_policy::provision::{Policy, ProvisionerKind};
use serde::{Deserialize, Serialize};

/// A snapshot of the host.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct HostView {
    /// The host's version.
    pub version: String,
    /// The policy by which memory is divided.
    pub policy: Policy,
    /// What is divided.
    pub pool: TierView,
    /// What VMs have been committed of it; never more than the pool.
    pub committed: TierView,
    /// The most that VMs may hold. Above the pool while VMs have not given back what they were started
    /// with: no VM grows meanwhile.
    #[serde(default)]
    pub may_hold: TierView,
    /// How often more was committed than there is. 0, or something is wrong with this program.
    pub violations: u64,
    /// The VMs, by name.
    pub vms: Vec<VmView>,
    /// Domains that run and are not managed, by name. Their memory counts against no pool.
    #[serde(default)]
    pub left_alone: Vec<LeftAloneView>,
}

/// A domain that libvirt runs and that is not managed.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct LeftAloneView {
    /// Its name.
    pub name: String,
    /// Why it is not managed.
    pub why: String,
    /// All its memory, as far as it is known.
    pub memory_bytes: u64,
}

impl HostView {
    /// Memory that VMs may hold beyond the pool.
    pub fn excess(&self) -> TierView {
        TierView {
            fast_bytes: self
                .may_hold
                .fast_bytes
                .saturating_sub(self.pool.fast_bytes),
            slow_bytes: self
                .may_hold
                .slow_bytes
                .saturating_sub(self.pool.slow_bytes),
        }
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
    /// It can be reached and is trusted.
    Up,
    /// It does not run, or does not answer.
    #[default]
    Down,
    /// Its guest lied; it is left alone.
    Marked,
}

/// One VM.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct VmView {
    /// Its name.
    pub name: String,
    /// How its size is changed.
    pub provisioner: ProvisionerKind,
    /// Who moves its memory between tiers: `agent` or `history`; `None` until one does.
    #[serde(default)]
    pub managed_by: Option<String>,
    /// Whether it can be managed.
    pub state: VmState,
    /// What it shall have, by wish or by policy.
    pub desired: TierView,
    /// What it shall own: what is desired, less what its driver may take back by itself.
    pub target: TierView,
    /// What it was committed; counts against the pool.
    pub committed: TierView,
    /// What it owns, when last asked.
    pub owned: Option<TierView>,
    /// The most that it may hold: all its memory, until it was verified to own less.
    #[serde(default)]
    pub may_hold: TierView,
    /// Its guarantee.
    #[serde(default)]
    pub guarantee: TierView,
    /// Its limit, and no more than all its memory.
    #[serde(default)]
    pub limit: TierView,
    /// What went back to the host since this program started.
    pub returned_bytes: u64,
    /// How often memory was touched that the VM was to leave alone: it was taken back each time.
    #[serde(default)]
    pub overruns: u64,
    /// How much that was, the last time.
    #[serde(default)]
    pub overrun: TierView,
    /// Share of sampled accesses that fast memory served, 0 to 1.
    pub fast_hit: Option<f64>,
    /// What its agent's moves have cost and brought; `None` where no agent runs.
    #[serde(default)]
    pub relocation: Option<RelocationView>,
    /// Memory in use again and again, as the guest estimates it.
    pub working_set_bytes: Option<u64>,
    /// Share of time that some task of the guest waited for memory, 0 to 1.
    pub pressure: Option<f64>,
    /// Why it is not as it should be.
    pub problem: Option<String>,
}

/// What an agent's moves have cost and brought since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct RelocationView {
    /// Time that moves took, milliseconds.
    pub cost_ms: u64,
    /// Time that they are taken to have saved, milliseconds; negative where they did harm.
    pub benefit_ms: i64,
    /// Whether the agent rests, because moving brings nothing.
    pub is_resting: bool,
}

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq, Serialize, Deserialize)]
pub struct EventView {
    /// Counts up by one from 1 at the program's start.
    pub number: u64,
    /// Milliseconds since 1970.
    pub time_ms: u64,
    /// The VM it is about.
    pub vm: Option<String>,
    /// What, for people.
    pub text: String,
}

/// The last events.
#[derive(Debug, Clone, Default)]
pub struct EventLog(Arc<Mutex<Ring>>);

#[derive(Debug, Default)]
struct Ring {
    last_number: u64,
    events: VecDeque<EventView>,
}

impl EventLog {
    /// How many events are kept.
    pub const EVENTS_MAX: usize = 4096;

    /// Adds an event.
    pub fn push(&self, time_ms: u64, vm: Option<String>, text: String) {
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
            text,
        });
    }

    /// The events with numbers above `number`, oldest first, as far as they are still kept.
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
