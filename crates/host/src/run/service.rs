//! A VM's service level: the largest slowdown against a VM whose memory is all fast.
//!
//! # Approach
//! The agent estimates the slowdown for each size of fast memory, as an interval. The VM needs the smallest size whose
//! upper bound keeps to the level. Sizes are smoothed, and small changes of an estimate are ignored, so that noise
//! moves no memory.
//!
//! # Properties
//! - Estimates that stay within [`STEP`] change the size at most once.
//! - A level that is not met, or not known to be met, has a reason.

use demeter_policy::benefit::Benefit;
use demeter_policy::provision::{Policy, Smoothed};
use demeter_policy::{ByteCount, MIB};

use crate::controller::VmStatus;
use crate::view::{ServiceView, no_estimate};

/// Unit of the size: the minimum change of a size by a policy.
const STEP: u64 = 16 * MIB;

/// A VM's service level, and the fast memory that it needs for it.
#[derive(Debug)]
pub(super) struct Service {
    percent: u32,
    smoothed: Smoothed,
    needs: Option<ByteCount>,
}

impl Service {
    /// The level of a slowdown of at most `percent`.
    pub fn new(percent: u32) -> Self {
        Self {
            percent,
            smoothed: Smoothed::default(),
            needs: None,
        }
    }

    /// Its largest slowdown, percent.
    pub fn percent(&self) -> u32 {
        self.percent
    }

    /// Fast memory that the VM needs, in whole [`STEP`]s; `None` while unknown.
    pub fn needs(&self) -> Option<ByteCount> {
        self.needs
    }

    /// Forgets all estimates: they were about another guest.
    pub fn forget(&mut self) {
        *self = Self::new(self.percent);
    }

    /// Takes a new estimate.
    pub fn update(&mut self, benefit: &Benefit) {
        let Some(measured) = benefit.fast_for(self.percent) else {
            // No size is known to suffice.
            self.forget();
            return;
        };
        let mean = self.smoothed.update(measured).0;
        let keeps = |ByteCount(needs): ByteCount| mean <= needs && needs - mean < 2 * STEP;
        if !self.needs.is_some_and(keeps) {
            // A false estimate may be any number.
            let needs = mean.checked_next_multiple_of(STEP);
            self.needs = Some(ByteCount(needs.unwrap_or(u64::MAX)));
        }
    }

    /// For people. `protocol` is the version that the VM's agent speaks.
    pub fn view(
        &self,
        vm: &VmStatus,
        benefit: Option<&Benefit>,
        protocol: Option<u16>,
        policy: Policy,
    ) -> ServiceView {
        ServiceView {
            slowdown_max_percent: self.percent,
            needs_bytes: self.needs.map(|needs| needs.0),
            unmet: match self.needs {
                Some(needs) => self.missing(needs, vm, policy),
                None => Some(self.unknown(benefit, protocol)),
            },
        }
    }

    /// The reason why the size is unknown.
    fn unknown(&self, benefit: Option<&Benefit>, protocol: Option<u16>) -> String {
        match benefit {
            Some(_) => format!(
                "no size of fast memory keeps its slowdown below {} % by its agent's estimate",
                self.percent
            ),
            None => no_estimate(protocol),
        }
    }

    /// The reason why the VM has less than it needs, if it has.
    fn missing(&self, needs: ByteCount, vm: &VmStatus, policy: Policy) -> Option<String> {
        let mib = |bytes: ByteCount| bytes.0 / MIB;
        let (limit, desired) = (vm.limits.limit.fast, vm.desired.fast);
        let owned = vm.owned.map_or(ByteCount(0), |owned| owned.fast);
        let why = if needs > limit {
            format!("its limit is {} MiB", mib(limit))
        } else if desired < needs && policy == Policy::Static {
            format!(
                "it gets {} MiB; policy static changes no size, so set one or choose another policy",
                mib(desired)
            )
        } else if desired < needs {
            let missing = ByteCount(needs.0 - desired.0);
            format!(
                "the pool leaves it {} MiB, so {} MiB are missing; lower another VM, or enlarge the pool",
                mib(desired),
                missing.0.div_ceil(MIB)
            )
        } else if owned < needs {
            format!("it owns {} MiB so far", mib(owned))
        } else {
            return None;
        };
        Some(format!(
            "it needs {} MiB fast for a slowdown of at most {} %, and {why}",
            mib(needs),
            self.percent
        ))
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::benefit::{BenefitPoint, Waits};
    use demeter_policy::{PerTier, TierBytes};

    use super::*;
    use crate::controller::{Limits, State};

    /// A program that always waits. It is half as fast without fast memory, and `mib` serve all its accesses.
    fn benefit(mib: u64) -> Benefit {
        let point = |fast, served_permille| BenefitPoint {
            fast: ByteCount(fast),
            served_permille,
        };
        let latency_ns = PerTier {
            fast: 100,
            slow: 200,
        };
        let waits = Waits {
            min_permille: 0,
            max_permille: 1000,
        };
        Benefit::new(
            vec![point(0, 0), point(mib * MIB, 1000)],
            latency_ns,
            1000,
            waits,
        )
        .unwrap()
    }

    fn needs_mib(service: &Service) -> Option<u64> {
        service.needs().map(|needs| needs.0 / MIB)
    }

    #[test]
    fn noise_does_not_change_the_size_and_a_new_load_does() {
        let mut service = Service::new(10);
        assert_eq!(service.needs(), None);
        // Nine tenths of 1000 MiB.
        service.update(&benefit(1000));
        assert_eq!(needs_mib(&service), Some(912));
        for mib in [1008, 1000, 1010, 995, 1005] {
            service.update(&benefit(mib));
            assert_eq!(needs_mib(&service), Some(912), "{mib}");
        }
        for _ in 0..40 {
            service.update(&benefit(500));
        }
        let needs = needs_mib(&service).unwrap();
        assert!((450..=482).contains(&needs), "{needs}");
        service.forget();
        assert_eq!(service.needs(), None);
        // A lie.
        let mut lied = Service::new(1);
        lied.update(&benefit(1000).beside(ByteCount(u64::MAX)));
        assert!(lied.needs() > Some(ByteCount(u64::MAX / 2)));
    }

    #[test]
    fn each_level_that_is_not_met_has_its_reason() {
        let tiers = |fast_mib: u64| TierBytes {
            fast: ByteCount(fast_mib * MIB),
            slow: ByteCount(0),
        };
        let status = |limit, desired, owned| VmStatus {
            state: State::Here,
            limits: Limits {
                guarantee: tiers(0),
                limit: tiers(limit),
                oom: ByteCount(0),
            },
            desired: tiers(desired),
            committed: tiers(desired),
            owned: Some(tiers(owned)),
            may_hold: tiers(owned),
            runs: true,
            reason: None,
        };
        let mut service = Service::new(10);
        service.update(&benefit(1000));
        for (vm, policy, why) in [
            (status(900, 900, 900), Policy::Wss, "its limit is 900 MiB"),
            (status(2000, 900, 900), Policy::Static, "policy static"),
            (status(2000, 902, 900), Policy::Wss, "10 MiB are missing"),
            (
                status(2000, 912, 900),
                Policy::Wss,
                "it owns 900 MiB so far",
            ),
            (status(2000, 912, 912), Policy::Static, ""),
        ] {
            let unmet = service.missing(ByteCount(912 * MIB), &vm, policy);
            assert_eq!(unmet.is_some(), !why.is_empty(), "{why}");
            assert!(unmet.unwrap_or_default().contains(why), "{why}");
        }
        let view = Service::new(10).view(&status(1, 1, 1), None, None, Policy::Wss);
        assert!(view.unmet.unwrap().contains("no agent is connected"));
    }
}
