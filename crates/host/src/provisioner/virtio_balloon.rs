//! Sizing by virtio-balloon, the baseline: one balloon for the whole VM, blind to tiers.
//!
//! The guest's allocator chooses the pages, and no interface reports their node. So a VM's owned
//! memory of a tier is only bounded from above: pages in the balloon that exceed the other tier's
//! holes must come from this tier. The upper bound keeps the pool's guarantee. The VM rarely
//! reaches its target; this baseline exists to show that.

use std::sync::Arc;

use demeter_policy::{ByteCount, Tier, TierBytes};
use tokio::time::{Instant, timeout_at};

use super::virtio_mem::{LAST_LOOK, LOOK_EVERY, within};
use super::{Progress, ProvisionError, Provisioner};
use crate::backing::Backing;
use crate::hypervisor::Hypervisor;
use crate::outside::Outside;

/// The virtio balloon of one VM.
#[derive(Debug)]
pub struct VirtioBalloon<H, B> {
    hypervisor: H,
    backing: Arc<B>,
    outside: Outside,
    /// The last target of each tier.
    wanted: TierBytes,
}

impl<H: Hypervisor, B: Backing> VirtioBalloon<H, B> {
    /// The balloon of a VM whose memory is `backing`.
    pub fn new(hypervisor: H, backing: B, outside: Outside) -> Self {
        let wanted = TierBytes::from_fn(|tier| backing.size(tier));
        Self {
            hypervisor,
            backing: Arc::new(backing),
            outside,
            wanted,
        }
    }

    async fn backed(&self, tier: Tier) -> Result<ByteCount, ProvisionError> {
        let backing = self.backing.clone();
        let asked = self.outside.ask("the VM's memory file", move |wait| {
            backing.backed(tier, wait)
        });
        let backed = asked.await.unwrap_or_else(|stuck| Err(stuck.into()));
        backed.map_err(|source| ProvisionError::Backing { tier, source })
    }

    async fn backed_in_all(&self) -> Result<u64, ProvisionError> {
        Ok(self.backed(Tier::Fast).await?.0 + self.backed(Tier::Slow).await?.0)
    }

    /// The most that a guest of `guest` bytes can own of each tier.
    async fn at_most(&self, guest: ByteCount) -> Result<TierBytes, ProvisionError> {
        let size = TierBytes::from_fn(|tier| self.backing.size(tier));
        let held = (size.fast.0 + size.slow.0).saturating_sub(guest.0);
        let backed = TierBytes {
            fast: self.backed(Tier::Fast).await?,
            slow: self.backed(Tier::Slow).await?,
        };
        let own = |tier: Tier, other: Tier| {
            let holes = size.get(other).0.saturating_sub(backed.get(other).0);
            let missing = held.saturating_sub(holes);
            ByteCount(size.get(tier).0.saturating_sub(missing))
        };
        Ok(TierBytes {
            fast: own(Tier::Fast, Tier::Slow),
            slow: own(Tier::Slow, Tier::Fast),
        })
    }
}

impl<H: Hypervisor, B: Backing> Provisioner for VirtioBalloon<H, B> {
    fn name(&self) -> &'static str {
        "virtio-balloon"
    }

    async fn actual(&mut self, deadline: Instant) -> Result<TierBytes, ProvisionError> {
        let guest = within(&self.hypervisor, deadline, self.hypervisor.balloon_size()).await?;
        self.at_most(guest).await
    }

    async fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        let backed_before = self.backed_in_all().await?;
        *self.wanted.get_mut(tier) = target;
        let whole = ByteCount(self.wanted.fast.0.saturating_add(self.wanted.slow.0));
        within(
            &self.hypervisor,
            deadline,
            self.hypervisor.request_balloon_size(whole),
        )
        .await?;
        let guest = loop {
            let change = self.hypervisor.size_change();
            let guest = within(&self.hypervisor, deadline, self.hypervisor.balloon_size()).await?;
            let now = Instant::now();
            if guest == whole || now + LAST_LOOK >= deadline {
                break guest;
            }
            let _ = timeout_at(now + LOOK_EVERY, change).await;
        };
        let owned = *self.at_most(guest).await?.get(tier);
        // A retry does not change the tier from which the guest takes memory.
        let reason =
            (guest != whole).then(|| format!("the guest is at {guest} instead of {whole} in all"));
        let returned = backed_before.saturating_sub(self.backed_in_all().await?);
        Ok(Progress {
            owned,
            returned_to_host: ByteCount(returned),
            reason,
        })
    }
}
