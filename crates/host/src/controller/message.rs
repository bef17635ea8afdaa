//! What the controller is told, and what it tells.

use demeter_policy::{ByteCount, Tier, TierBytes};

use crate::VmName;

/// Milliseconds on a clock that does not jump; the caller's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(pub u64);

/// Tells a command from all others of this controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// What a VM's task shall do; it has [`PATIENCE`](super::PATIENCE) for it.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmCommand {
    /// Whose task.
    pub vm: VmName,
    /// Comes back in the observation.
    pub ticket: Ticket,
    /// What to do.
    pub order: Order,
}

/// What may be asked of a VM's provisioner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Find out what the VM owns.
    Ask,
    /// Bring what it owns of a tier to a target.
    Set {
        /// Of which tier.
        tier: Tier,
        /// What it shall own.
        target: ByteCount,
    },
}

/// What a VM's task has to tell.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// Its hypervisor answers. The VM may have all its memory now.
    Seen {
        /// All memory of the VM, by tier.
        most: TierBytes,
    },
    /// The VM can be spoken to.
    Here,
    /// It cannot any more; it may still run.
    Lost,
    /// Its hypervisor has ended.
    Gone,
    /// The guest was reset: its balloon is empty.
    Reset,
    /// What it owns may have changed by itself.
    OwnedChanged,
    /// The answer to [`Order::Ask`].
    Owned {
        /// The command's.
        ticket: Ticket,
        /// Verified.
        owned: TierBytes,
    },
    /// The answer to [`Order::Set`].
    Moved {
        /// The command's.
        ticket: Ticket,
        /// What it owns of the tier now; verified.
        owned: ByteCount,
        /// Why that is not the target, if the provisioner could do better another time.
        reason: Option<String>,
    },
    /// A command failed, and what the VM owns is not known.
    Failed {
        /// The command's.
        ticket: Ticket,
        /// Why.
        reason: String,
    },
    /// A command came further, and is to be asked for again at once; what the VM owns is not known yet.
    Unfinished {
        /// The command's.
        ticket: Ticket,
        /// Why it took so long.
        reason: String,
    },
    /// It claims what cannot be true.
    Hostile {
        /// What.
        reason: String,
    },
}

/// Why a wish is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// Nobody has that name.
    #[error("there is no VM '{0}'")]
    Unknown(VmName),
    /// Somebody has it already.
    #[error("there are two VMs '{0}'")]
    Twice(VmName),
    /// More than all wishes together may be.
    #[error(
        "{wished} of {tier} memory for all VMs together is more than the pool's {pool}; \
         lower another VM first"
    )]
    BeyondPool {
        /// Which pool.
        tier: Tier,
        /// The sum of wishes.
        wished: ByteCount,
        /// The pool's size.
        pool: ByteCount,
    },
    /// Less than was committed.
    #[error("{wished} of {tier} memory for {vm} is under its guarantee of {guarantee}")]
    UnderGuarantee {
        /// For whom.
        vm: VmName,
        /// Of which tier.
        tier: Tier,
        /// The wish.
        wished: ByteCount,
        /// The guarantee.
        guarantee: ByteCount,
    },
    /// More than it may have.
    #[error("{wished} of {tier} memory for {vm} is over its limit of {limit}")]
    OverLimit {
        /// For whom.
        vm: VmName,
        /// Of which tier.
        tier: Tier,
        /// The wish.
        wished: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// The VM was caught lying.
    #[error("{vm} is left alone until it is started anew, because {reason}")]
    Hostile {
        /// Who.
        vm: VmName,
        /// What it did.
        reason: String,
    },
}
