//! Carries out on one VM what the controller decided.

pub mod balloon;
#[cfg(test)]
mod conformance;
mod held;
pub mod virtio_balloon;
pub mod virtio_mem;

use demeter_policy::{ByteCount, Tier, TierBytes};
use tokio::time::Instant;

use crate::controller::{Observation, Order, PATIENCE, VmCommand};
use crate::hypervisor::HypervisorError;

/// A way to change how much memory of each tier a VM owns.
///
/// One VM, one provisioner, one task that calls it: calls never overlap. A call that is cut off
/// (its future dropped) leaves a state that the next [`actual`](Self::actual) reads.
pub trait Provisioner: Send {
    /// As it is called in configuration and metrics.
    fn name(&self) -> &'static str;

    /// What the VM's files occupy beyond what it owns, as far as that is known without asking anybody:
    /// memory that it was to leave alone and that somebody has touched. 0 where it is not known.
    fn overrun(&self) -> impl Future<Output = TierBytes> + Send {
        std::future::ready(TierBytes::default())
    }

    /// What the VM owns now, asked from it and not remembered.
    fn actual(
        &mut self,
        deadline: Instant,
    ) -> impl Future<Output = Result<TierBytes, ProvisionError>> + Send;

    /// Brings what the VM owns of `tier` to `target`, as near as can be had by `deadline`.
    ///
    /// What it comes to is not an error: the VM may have nothing to give right now.
    fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> impl Future<Output = Result<Progress, ProvisionError>> + Send;
}

/// What became of [`Provisioner::set`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// What the VM owns of the tier now.
    pub owned: ByteCount,
    /// What went back to the host by what the call did, by the backing file's blocks.
    pub returned_to_host: ByteCount,
    /// Why `owned` is not the target, if it is not.
    pub reason: Option<String>,
}

/// Why a provisioner could not do, or not know, what it was asked.
#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    /// Nobody is there, or not for long enough.
    #[error("{0} is not there; it is tried again")]
    Unreachable(String),
    /// No answer came in time.
    #[error("{0} did not answer in time; it is tried again")]
    Timeout(String),
    /// It came further in the time that it had, and goes on where it is.
    #[error("what the guest holds is in very many pieces; it is gone on with")]
    Unfinished,
    /// The guest cannot do it at all.
    #[error(
        "the guest's balloon driver is not loaded, or not the one that came with its agent; load \
         demeter_balloon of the same release in the guest, or give the VM `provisioner = \"virtio-mem\"`"
    )]
    NoDriver,
    /// The VM said no.
    #[error("refused: {0}")]
    Refused(String),
    /// What is known of it may hold no more.
    #[error("the VM was reset, stopped or changed meanwhile; it is looked at anew")]
    Disturbed,
    /// What the VM said cannot be true. It is to be left alone.
    #[error("the guest lies: {0}")]
    Hostile(String),
    /// The memory behind the VM could not be given back.
    #[error("the backing of {tier} memory: {source}")]
    Backing {
        /// Of which tier.
        tier: Tier,
        /// What the system said.
        source: std::io::Error,
    },
}

impl From<HypervisorError> for ProvisionError {
    fn from(error: HypervisorError) -> Self {
        match error {
            HypervisorError::Timeout(why) => Self::Timeout(why),
            HypervisorError::Gone(why) => Self::Unreachable(why),
            HypervisorError::Failed(why) => Self::Refused(why),
        }
    }
}

/// Carries a command of the controller out. Gives the observation of it, and what went back to the
/// host.
pub async fn carry_out(
    provisioner: &mut impl Provisioner,
    command: &VmCommand,
) -> (Observation, ByteCount) {
    let ticket = command.ticket;
    let deadline = Instant::now() + PATIENCE;
    let result = match command.order {
        Order::Ask => {
            let owned = provisioner.actual(deadline).await;
            owned.map(|owned| (Observation::Owned { ticket, owned }, ByteCount(0)))
        }
        Order::Set { tier, target } => {
            let progress = provisioner.set(tier, target, deadline).await;
            progress.map(
                |Progress {
                     owned,
                     returned_to_host,
                     reason,
                 }| {
                    let observation = Observation::Moved {
                        ticket,
                        owned,
                        reason,
                    };
                    (observation, returned_to_host)
                },
            )
        }
    };
    result.unwrap_or_else(|error| {
        let observation = match error {
            ProvisionError::Hostile(reason) => Observation::Hostile { reason },
            error @ ProvisionError::Unfinished => Observation::Unfinished {
                ticket,
                reason: error.to_string(),
            },
            error => Observation::Failed {
                ticket,
                reason: error.to_string(),
            },
        };
        (observation, ByteCount(0))
    })
}
