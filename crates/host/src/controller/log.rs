//! Log entries of the controller, for people and tests.

use std::fmt;

use demeter_policy::{ByteCount, Tier, TierBytes};

use super::{Millis, Order};
use crate::VmName;

/// A log entry.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// Time of the event.
    pub at: Millis,
    /// The VM, unless the event is about none.
    pub vm: Option<VmName>,
    /// The event.
    pub what: What,
}

impl LogEntry {
    pub(super) fn new(at: Millis, vm: &VmName, what: What) -> Self {
        Self {
            at,
            vm: Some(vm.clone()),
            what,
        }
    }

    pub(super) fn of_host(at: Millis, what: What) -> Self {
        Self { at, vm: None, what }
    }
}

/// An event.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A wish was accepted.
    Desired(TierBytes),
    /// A command was sent.
    Sent(Order),
    /// The VM owns its target, or as much of it as its provisioner can reach.
    Reached {
        /// The tier.
        tier: Tier,
        /// Owned memory.
        owned: ByteCount,
    },
    /// The VM does not own its target; the controller retries.
    Short {
        /// The tier.
        tier: Tier,
        /// Owned memory.
        owned: ByteCount,
        /// The target.
        target: ByteCount,
        /// The cause.
        reason: String,
    },
    /// A command failed; the controller retries.
    Failed(String),
    /// No observation came in time; the VM is asked again.
    Overdue,
    /// The VM can be managed.
    Here,
    /// The VM can no longer be managed.
    Lost,
    /// The hypervisor has exited.
    Gone,
    /// An operator lifted the hostile mark.
    Forgiven,
    /// The guest was reset.
    Reset,
    /// The guest sent false data and is left alone.
    Hostile(String),
    /// VMs may hold more of a tier than its pool has, because some have not returned their boot
    /// memory. No VM grows meanwhile.
    Above {
        /// The tier.
        tier: Tier,
        /// The most that they may hold.
        held: ByteCount,
        /// The size of the pool.
        pool: ByteCount,
    },
    /// VMs hold no more of this tier than its pool has.
    Within(Tier),
    /// More is committed than a pool holds.
    OverPool {
        /// The tier.
        tier: Tier,
        /// Committed memory.
        committed: ByteCount,
        /// Size of the pool.
        pool: ByteCount,
    },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Desired(wish) => {
                write!(
                    f,
                    "desired size is now {} fast, {} slow",
                    wish.fast, wish.slow
                )
            }
            Self::Sent(Order::Ask) => f.write_str("asked what it owns"),
            Self::Sent(Order::Set { tier, target }) => write!(f, "asked to own {target} {tier}"),
            Self::Reached { tier, owned } => write!(f, "owns {owned} {tier}"),
            Self::Short {
                tier,
                owned,
                target,
                reason,
            } => write!(f, "owns {owned} {tier} instead of {target}: {reason}"),
            Self::Failed(reason) => write!(f, "failed: {reason}"),
            Self::Overdue => f.write_str("did not answer in time"),
            Self::Here => f.write_str("is here"),
            Self::Forgiven => f.write_str("is managed again"),
            Self::Lost => f.write_str("does not answer any more"),
            Self::Gone => f.write_str("has ended"),
            Self::Reset => f.write_str("was reset"),
            Self::Hostile(reason) => write!(f, "is left alone: {reason}"),
            Self::Above { tier, held, pool } => write!(
                f,
                "VMs may hold {held} of {tier} memory, the pool has {pool}: none grows until they have \
                 given it back"
            ),
            Self::Within(tier) => write!(f, "VMs hold no more {tier} memory than the pool has"),
            Self::OverPool {
                tier,
                committed,
                pool,
            } => write!(f, "{committed} {tier} committed, the pool holds {pool}"),
        }
    }
}
