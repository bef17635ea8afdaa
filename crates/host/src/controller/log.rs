//! What happened, for a person and for tests.

use std::fmt;

use demeter_policy::{ByteCount, Tier, TierBytes};

use super::{Millis, Order};
use crate::VmName;

/// Something that happened.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct LogEntry {
    /// When.
    pub at: Millis,
    /// To which VM; `None` where it is not about one.
    pub vm: Option<VmName>,
    /// What.
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

/// What may happen.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum What {
    /// A wish was accepted.
    Desired(TierBytes),
    /// A command was sent.
    Sent(Order),
    /// The VM owns what it was told to, or as near as its provisioner gets.
    Reached {
        /// Of which tier.
        tier: Tier,
        /// So much.
        owned: ByteCount,
    },
    /// The VM does not own what it was told to; it is tried again.
    Short {
        /// Of which tier.
        tier: Tier,
        /// So much.
        owned: ByteCount,
        /// It was to be so much.
        target: ByteCount,
        /// Why it is not.
        reason: String,
    },
    /// A command failed; it is tried again.
    Failed(String),
    /// No observation came in time; the VM is asked again.
    Overdue,
    /// The VM can be spoken to.
    Here,
    /// It cannot any more.
    Lost,
    /// Its hypervisor has ended.
    Gone,
    /// Somebody lifted the mark.
    Forgiven,
    /// The guest was reset.
    Reset,
    /// It claims what cannot be true, and is left alone.
    Hostile(String),
    /// VMs may hold more of a tier than its pool has: some have not given back yet what they were
    /// started with. No VM grows meanwhile.
    Above {
        /// Which tier.
        tier: Tier,
        /// The most that they may hold.
        held: ByteCount,
        /// The size of the pool.
        pool: ByteCount,
    },
    /// They do no more.
    Within(Tier),
    /// More is committed than a pool holds.
    OverPool {
        /// Which pool.
        tier: Tier,
        /// What is committed.
        committed: ByteCount,
        /// What it holds.
        pool: ByteCount,
    },
}

impl fmt::Display for What {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Desired(wish) => {
                write!(f, "shall have {} fast, {} slow", wish.fast, wish.slow)
            }
            Self::Sent(Order::Ask) => f.write_str("asked what it owns"),
            Self::Sent(Order::Set { tier, target }) => write!(f, "told to own {target} {tier}"),
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
