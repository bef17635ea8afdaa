//! What a VM may be given.

use demeter_policy::{ByteCount, PerTier, Tier, TierBytes};

use super::Refusal;
use crate::VmName;

/// Guarantee, limit and allowance of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The least.
    pub guarantee: TierBytes,
    /// The most.
    pub limit: TierBytes,
    /// What its driver may give back to the guest by itself when that runs out of memory. Slow
    /// memory; part of what the VM is wished to have. At most its guarantee of slow memory.
    pub oom: ByteCount,
}

impl Limits {
    /// Whether a wish keeps within.
    pub(super) fn check(&self, vm: &VmName, wish: TierBytes) -> Result<(), Refusal> {
        for tier in Tier::ALL {
            let (wished, least, most) = (
                *wish.get(tier),
                *self.guarantee.get(tier),
                *self.limit.get(tier),
            );
            if wished < least {
                return Err(Refusal::UnderGuarantee {
                    vm: vm.clone(),
                    tier,
                    wished,
                    guarantee: least,
                });
            }
            if wished > most {
                return Err(Refusal::OverLimit {
                    vm: vm.clone(),
                    tier,
                    wished,
                    limit: most,
                });
            }
        }
        Ok(())
    }

    /// The nearest wish that keeps within.
    pub(super) fn clamp(&self, wish: TierBytes) -> TierBytes {
        PerTier::from_fn(|tier| {
            (*wish.get(tier))
                .min(*self.limit.get(tier))
                .max(*self.guarantee.get(tier))
        })
    }

    /// The same for a VM that has no more than `most`.
    pub(super) fn within(&self, most: TierBytes) -> Self {
        let limit = PerTier::from_fn(|tier| {
            let limit = *self.limit.get(tier).min(most.get(tier));
            limit.max(*self.guarantee.get(tier))
        });
        Self { limit, ..*self }
    }

    /// The allowance, as a part of what a tier's wish is made of.
    pub(super) fn oom_of(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Fast => 0,
            Tier::Slow => self.oom.0,
        }
    }
}
