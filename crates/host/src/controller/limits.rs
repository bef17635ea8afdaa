//! Limits of a VM's size.

use demeter_policy::{ByteCount, PerTier, Tier, TierBytes};

use super::Refusal;
use crate::VmName;

/// Guarantee, limit and out-of-memory allowance of a VM.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// Minimum size.
    pub guarantee: TierBytes,
    /// Maximum size.
    pub limit: TierBytes,
    /// Out-of-memory allowance: slow memory that the driver may give back by itself. Part of the
    /// desired size; at most the slow guarantee.
    pub oom: ByteCount,
}

impl Limits {
    /// Checks a wish against guarantee and limit.
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

    /// The nearest allowed wish.
    pub(super) fn clamp(&self, wish: TierBytes) -> TierBytes {
        PerTier::from_fn(|tier| {
            (*wish.get(tier))
                .min(*self.limit.get(tier))
                .max(*self.guarantee.get(tier))
        })
    }

    /// These limits for a VM that has no more than `most`.
    pub(super) fn within(&self, most: TierBytes) -> Self {
        let limit = PerTier::from_fn(|tier| {
            let limit = *self.limit.get(tier).min(most.get(tier));
            limit.max(*self.guarantee.get(tier))
        });
        Self { limit, ..*self }
    }

    /// The out-of-memory allowance in a tier.
    pub(super) fn oom_of(&self, tier: Tier) -> u64 {
        match tier {
            Tier::Fast => 0,
            Tier::Slow => self.oom.0,
        }
    }
}
