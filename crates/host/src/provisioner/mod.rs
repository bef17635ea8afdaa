//! Provisioners: carry out the controller's orders on one VM.

pub mod balloon;
#[cfg(test)]
mod conformance;
mod held;
pub mod virtio_balloon;
pub mod virtio_mem;

use demeter_policy::{ByteCount, Tier, TierBytes};
use tokio::time::Instant;

use crate::agent::Away;
use crate::controller::{Observation, Order, PATIENCE, VmCommand};
use crate::hypervisor::HypervisorError;
use crate::outside;

/// A way to change how much memory of each tier a VM owns.
///
/// Each VM has one provisioner and one task that calls it, so calls never overlap. A dropped call
/// leaves a state that the next [`actual`](Self::actual) reads.
pub trait Provisioner: Send {
    /// The provisioner's name in configuration and metrics.
    fn name(&self) -> &'static str;

    /// Reads how much host memory the VM's files occupy; `None` if its overrun is not watched.
    fn read_backed(&self) -> Option<outside::ReadSizes> {
        None
    }

    /// Memory beyond what the VM owns, if its files occupy `backed`; 0 if unknown.
    ///
    /// Such memory was returned and then touched again.
    fn overrun(&self, _backed: TierBytes) -> TierBytes {
        TierBytes::default()
    }

    /// Memory that the VM owns now. Asks the VM; nothing is cached.
    fn actual(
        &mut self,
        deadline: Instant,
    ) -> impl Future<Output = Result<TierBytes, ProvisionError>> + Send;

    /// Brings the owned memory of `tier` as close to `target` as possible by `deadline`.
    ///
    /// Missing the target is not an error: the VM may have nothing to give right now.
    fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> impl Future<Output = Result<Progress, ProvisionError>> + Send;
}

/// Result of [`Provisioner::set`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Progress {
    /// Memory of the tier that the VM owns now.
    pub owned: ByteCount,
    /// Memory that this call returned to the host, by the backing file's block count.
    pub returned_to_host: ByteCount,
    /// Reason why `owned` is not the target, if it is not.
    pub reason: Option<String>,
}

/// Reason why a provisioner failed.
#[derive(Debug, thiserror::Error)]
pub enum ProvisionError {
    /// The VM or its agent is not connected, or not for long enough.
    #[error("{0} is not connected; the controller retries")]
    Unreachable(String),
    /// No answer came in time.
    #[error("{0} did not answer in time; the controller retries")]
    Timeout(String),
    /// The call made progress; the next call continues from there.
    #[error("the guest's held memory is in very many pieces; the controller continues")]
    Unfinished,
    /// The guest has no usable balloon driver.
    #[error(
        "the guest's balloon driver is not loaded, or of another release than its agent; load \
         demeter_balloon of the same release in the guest, or give the VM `provisioner = \
         \"virtio-mem\"`"
    )]
    NoDriver,
    /// The VM refused.
    #[error("refused: {0}")]
    Refused(String),
    /// The VM changed during the call, so its known state is stale.
    #[error("the VM was reset, stopped or changed meanwhile; the controller inspects it again")]
    Disturbed,
    /// The guest sent data that cannot be true. It must be left alone.
    #[error("the guest lies: {0}")]
    Hostile(String),
    /// The VM's memory could not be returned.
    #[error("cannot use the file behind {tier} memory: {source}")]
    Backing {
        /// The tier.
        tier: Tier,
        /// The system's error.
        source: std::io::Error,
    },
}

impl From<Away> for ProvisionError {
    fn from(Away: Away) -> Self {
        Self::Unreachable("the guest's agent".to_owned())
    }
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

/// Carries out a command of the controller. Returns its observation and the memory returned to the
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
