//! Memstrata's rule for dividing fast memory between VMs, without its hardware.
//!
//! Zhong et al., OSDI 2024. The authors' memory controller tiers, and dedicated fast pages go to VMs that lose. The system
//! `memstrata` has both. Here each guest's agent tiers, and all fast memory is dedicated, so that the rule alone is
//! compared with the controller's policies. Sources are the abstract and others' notes on the paper.
//!
//! # Approach
//! Every 10 s each VM's loss against fast memory alone is taken. A VM that loses more than 5 % gets memory of the VMs
//! that lose less. VMs with the largest loss come first, and VMs with the smallest loss give first. At most a tenth of a
//! VM's memory changes in each period.
//!
//! The authors estimate the loss by a classifier of hardware counters. Here it is exact, which can only help.
//!
//! # Properties
//! - No fast memory appears or disappears.
//! - A VM keeps its guarantee and stays within its limit.

use demeter_policy::provision::Claim;
use demeter_policy::{BLOCK_SIZE, ByteCount};
use demeter_scenario::Machine;

use crate::machine::actor::Vcpu;
use crate::machine::ledger::Cause;

/// Time between two decisions, seconds.
const PERIOD_S: u64 = 10;

/// Loss above which a VM gets memory.
const OUTLIER: f64 = 0.05;

/// Divisor of a VM's memory: the most that changes per period.
const MOVED_SHARE: u64 = 10;

/// Time that a VM's programs spent since the start.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub(super) struct Lost {
    /// Waiting for slow memory, picoseconds.
    slow_ps: u64,
    /// In all, without idle time, picoseconds.
    worked_ps: u64,
}

impl Lost {
    pub(super) fn of(vcpus: &[Vcpu]) -> Self {
        Self {
            slow_ps: vcpus.iter().map(|vcpu| vcpu.bill.of(Cause::Slow)).sum(),
            worked_ps: vcpus.iter().map(Vcpu::worked_ps).sum(),
        }
    }
}

/// The policy's state.
#[derive(Debug)]
pub(super) struct Memstrata {
    /// Share of a wait for slow memory that fast memory would save.
    saved: f64,
    before: Vec<Lost>,
}

impl Memstrata {
    pub(super) fn new(machine: &Machine, vms: usize) -> Self {
        let [fast, slow] = [machine.fast.latency_ns, machine.slow.latency_ns];
        Self {
            saved: 1.0 - fast as f64 / slow.max(1) as f64,
            before: vec![Lost::default(); vms],
        }
    }

    /// Fast memory of each VM from now on; `None` between two periods.
    pub(super) fn divide(
        &mut self,
        second: u64,
        lost: &[Lost],
        claims: &[Claim],
    ) -> Option<Vec<ByteCount>> {
        if !second.is_multiple_of(PERIOD_S) {
            return None;
        }
        let losses = lost.iter().zip(&self.before).map(|(now, before)| {
            let slow_ps = now.slow_ps.saturating_sub(before.slow_ps) as f64;
            let worked_ps = now.worked_ps.saturating_sub(before.worked_ps) as f64;
            let more_ps = slow_ps * self.saved;
            more_ps / (worked_ps - more_ps).max(1.0)
        });
        let losses: Vec<f64> = losses.collect();
        self.before = lost.to_vec();
        Some(moved(&losses, claims))
    }
}

/// Fast memory of each VM after one period.
fn moved(losses: &[f64], claims: &[Claim]) -> Vec<ByteCount> {
    let mut fast: Vec<u64> = claims.iter().map(|claim| claim.current.fast.0).collect();
    let most = |claim: &Claim| {
        let all = claim.current.fast.0 + claim.current.slow.0;
        all / MOVED_SHARE / BLOCK_SIZE * BLOCK_SIZE
    };
    let mut by_loss: Vec<usize> = (0..claims.len()).collect();
    by_loss.sort_by(|&a, &b| losses[a].total_cmp(&losses[b]));
    let (givers, takers): (Vec<usize>, Vec<usize>) =
        by_loss.into_iter().partition(|&vm| losses[vm] <= OUTLIER);
    for &taker in takers.iter().rev() {
        let room = claims[taker].limit.fast.0.saturating_sub(fast[taker]);
        let mut wants = most(&claims[taker]).min(room);
        for &giver in &givers {
            let claim = &claims[giver];
            let given = claim.current.fast.0 - fast[giver];
            let left = most(claim).saturating_sub(given);
            let spare = fast[giver].saturating_sub(claim.guarantee.fast.0);
            let gives = wants.min(left).min(spare);
            fast[giver] -= gives;
            fast[taker] += gives;
            wants -= gives;
        }
    }
    fast.into_iter().map(ByteCount).collect()
}

#[cfg(test)]
mod tests {
    use demeter_policy::{MIB, PerTier};

    use super::*;

    fn claim(fast_mib: u64, guarantee_mib: u64) -> Claim {
        let tiers = |fast: u64, slow: u64| PerTier {
            fast: ByteCount(fast * MIB),
            slow: ByteCount(slow * MIB),
        };
        Claim {
            share: 1,
            guarantee: tiers(guarantee_mib, 0),
            limit: tiers(1000, 1000),
            current: tiers(fast_mib, 400 - fast_mib),
            usage: None,
            pinned: false,
            service: None,
        }
    }

    fn moved_mib(losses: &[f64], claims: &[Claim]) -> Vec<u64> {
        let moved = moved(losses, claims);
        moved.into_iter().map(|bytes| bytes.0 / MIB).collect()
    }

    #[test]
    fn who_loses_most_gets_a_tenth_from_who_loses_least() {
        let claims = [claim(100, 10), claim(100, 10), claim(100, 10)];
        assert_eq!(moved_mib(&[0.5, 0.01, 0.02], &claims), [140, 60, 100]);
        assert_eq!(moved_mib(&[0.5, 0.4, 0.02], &claims), [140, 100, 60]);
        // All VMs lose much, or all lose little.
        assert_eq!(moved_mib(&[0.5, 0.4, 0.06], &claims), [100, 100, 100]);
        assert_eq!(moved_mib(&[0.05, 0.0, 0.0], &claims), [100, 100, 100]);
        let floors = [claim(100, 10), claim(100, 90), claim(100, 95)];
        assert_eq!(moved_mib(&[0.5, 0.01, 0.02], &floors), [115, 90, 95]);
    }

    #[test]
    fn a_loss_is_what_fast_memory_would_save() {
        // Fast memory takes half the time of slow memory.
        let mut memstrata = Memstrata {
            saved: 0.5,
            before: vec![Lost::default(); 2],
        };
        let claims = [claim(100, 10), claim(100, 10)];
        // Half of 12 of 100 is 6 of 94; half of 8 is 4 of 96.
        let lost = [12, 8].map(|slow_ps| Lost {
            slow_ps,
            worked_ps: 100,
        });
        assert_eq!(memstrata.divide(9, &lost, &claims), None);
        let sizes = memstrata.divide(10, &lost, &claims).unwrap();
        assert_eq!(sizes, [140, 60].map(|mib| ByteCount(mib * MIB)));
        // Nothing since then.
        let sizes = memstrata.divide(20, &lost, &claims).unwrap();
        assert_eq!(sizes, [100, 100].map(|mib| ByteCount(mib * MIB)));
    }
}
