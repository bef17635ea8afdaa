//! Inputs and outputs of the controller: observations, commands and refusals.

use demeter_policy::{ByteCount, Tier, TierBytes};

use crate::VmName;

/// Milliseconds on the caller's monotonic clock.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Millis(pub u64);

/// Id of a command, unique within one controller.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Ticket(pub u64);

/// A command for a VM's task, to be finished within [`PATIENCE`](super::PATIENCE).
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct VmCommand {
    /// The VM.
    pub vm: VmName,
    /// Id that the observation returns.
    pub ticket: Ticket,
    /// The work to do.
    pub order: Order,
}

/// A request to a VM's provisioner.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Order {
    /// Find out what the VM owns.
    Ask,
    /// Bring the owned memory of a tier to a target.
    Set {
        /// The tier.
        tier: Tier,
        /// The memory that the VM should own.
        target: ByteCount,
    },
}

/// A report of a VM's task.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Observation {
    /// The hypervisor answers. The VM may hold all its memory now.
    Seen {
        /// All memory of the VM, by tier.
        most: TierBytes,
    },
    /// The VM can be managed.
    Here,
    /// The VM can no longer be managed; it may still run.
    Lost,
    /// The hypervisor has exited.
    Gone,
    /// The guest was reset: its balloon is empty.
    Reset,
    /// The VM's owned memory may have changed by itself.
    OwnedChanged,
    /// The answer to [`Order::Ask`].
    Owned {
        /// The command's ticket.
        ticket: Ticket,
        /// Verified owned memory.
        owned: TierBytes,
    },
    /// The answer to [`Order::Set`].
    Moved {
        /// The command's ticket.
        ticket: Ticket,
        /// Verified owned memory of the tier.
        owned: ByteCount,
        /// Reason why that is not the target, if a retry may get closer.
        reason: Option<String>,
    },
    /// A command failed, and the VM's owned memory is unknown.
    Failed {
        /// The command's ticket.
        ticket: Ticket,
        /// The cause.
        reason: String,
    },
    /// A command made progress and must be repeated at once. The VM's owned memory is still
    /// unknown.
    Unfinished {
        /// The command's ticket.
        ticket: Ticket,
        /// Reason for the delay.
        reason: String,
    },
    /// The guest sent data that cannot be true.
    Hostile {
        /// The false claim.
        reason: String,
    },
}

/// Reason why a wish is refused.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    /// There is no VM of that name.
    #[error("there is no VM '{0}'")]
    Unknown(VmName),
    /// The VM's pool is not there.
    #[error("the pool of VM '{0}' is not there")]
    NoPool(VmName),
    /// There is already a VM of that name.
    #[error("there are two VMs '{0}'")]
    Twice(VmName),
    /// The sum of all wishes exceeds the pool.
    #[error(
        "{wished} of {tier} memory for all VMs together is more than the pool's {pool}; \
         lower another VM first"
    )]
    BeyondPool {
        /// The pool's tier.
        tier: Tier,
        /// The sum of wishes.
        wished: ByteCount,
        /// The pool's size.
        pool: ByteCount,
    },
    /// The wish is below the VM's guarantee.
    #[error("{wished} of {tier} memory for {vm} is under its guarantee of {guarantee}")]
    UnderGuarantee {
        /// The VM.
        vm: VmName,
        /// The tier.
        tier: Tier,
        /// The wish.
        wished: ByteCount,
        /// The guarantee.
        guarantee: ByteCount,
    },
    /// The wish is above the VM's limit.
    #[error("{wished} of {tier} memory for {vm} is over its limit of {limit}")]
    OverLimit {
        /// The VM.
        vm: VmName,
        /// The tier.
        tier: Tier,
        /// The wish.
        wished: ByteCount,
        /// The limit.
        limit: ByteCount,
    },
    /// The VM is marked as hostile.
    #[error("{vm} is left alone until it is started anew, because {reason}")]
    Hostile {
        /// The VM.
        vm: VmName,
        /// The reason for the mark.
        reason: String,
    },
}
