//! What a tracker on DAMON, the kernel's monitor of data accesses, decides: when accessed bits are looked
//! at, for how long, and what is made of it. A driver carries it out: the guest's tracker on a live
//! kernel, the simulated agent on the simulated one.
//!
//! The kernel clears the accessed bit of one page of each region and looks again one sampling
//! interval later. Each look costs microseconds, so looks are few and long: a long pass tells hot
//! small pages from cold ones; while many regions are always found accessed, as huge pages are,
//! shorter passes follow at once. Then there is a rest for as long as the CPU bound wants, and five
//! times as long while the agent is calm. exposure.rs says what can be made of the looks.
//!
//! One thing stays hidden: the kernel clears accessed bits without flushing the TLB. A page that
//! never leaves the TLB during a pass looks untouched.

mod budget;
mod exposure;

use std::num::NonZero;
use std::time::Duration;

use crate::addr::{BLOCK_SIZE, Pid, VirtRange};
use crate::sample::Sample;
use budget::Budget;
pub use exposure::Exposures;

/// The most that looking may take of one CPU, %, if nobody says otherwise.
pub const CPU_PERCENT: f64 = 3.0;

/// How a pass looks at regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// From clearing an accessed bit to looking at it.
    pub interval: Duration,
    /// Looks at each region.
    pub looks: u32,
}

impl Pass {
    /// How long it takes, but for what kdamond itself needs.
    pub fn length(&self) -> Duration {
        self.interval * self.looks
    }
}

/// A region of one aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Looks that found it accessed.
    pub accesses: u32,
    /// Bytes that each of its page-table entries maps; nothing where nobody has asked.
    pub page_bytes: Option<NonZero<u64>>,
}

/// Longest first; a pass's place in this list is its *rung*. The first one ends within an epoch, kdamond's
/// own work included; the others are waited for. Intervals are no round figures, so that they do not keep
/// step with a program.
pub const PASSES: [Pass; 4] = [
    Pass {
        interval: Duration::from_micros(80_021),
        looks: 4,
    },
    Pass {
        interval: Duration::from_micros(10_007),
        looks: 5,
    },
    Pass {
        interval: Duration::from_micros(1499),
        looks: 5,
    },
    Pass {
        interval: Duration::from_micros(251),
        looks: 8,
    },
];

/// The first one of a calm agent: enough to see that memory which was hot no longer is. At half of the cost
/// it comes twice as often.
const CALM_PASS: Pass = Pass {
    looks: 2,
    ..PASSES[0]
};

/// An interval is taken to be no longer than so many times what was asked for, whatever a clock says.
const STRETCH_MAX: u32 = 100;

/// Regions, over all targets: one for each block where memory is small enough, so that none is split or merged;
/// else DAMON adapts their sizes.
const REGIONS_MAX: u64 = 400;
const REGIONS_MIN_PER_TARGET: u64 = 10;

/// What was seen of processes' memory, and when to look again. Times are since any fixed moment.
#[derive(Debug, Clone)]
pub struct Observer {
    exposures: Exposures,
    budget: Budget,
    calm: bool,
}

impl Observer {
    /// One that has seen nothing yet, and may spend so much of one CPU, %.
    pub fn new(cpu_percent: f64, now: Duration) -> Self {
        Self {
            exposures: Exposures::default(),
            budget: Budget::new(cpu_percent, now),
            calm: false,
        }
    }

    /// Whether a long pass may begin, or the CPU bound wants a rest.
    pub fn may_look(&mut self, now: Duration) -> bool {
        self.budget.allows(now)
    }

    /// How to look at this rung.
    pub fn pass(&self, rung: usize) -> Pass {
        match rung {
            0 if self.is_at_rest() => CALM_PASS,
            _ => PASSES[rung.min(PASSES.len() - 1)],
        }
    }

    /// Takes what a pass has found, whose first aggregation was reported so long after its start.
    /// Returns how long an interval really was: from one look at a region to the next, kdamond goes through
    /// all others, too, and may have to wait for a CPU.
    pub fn found(
        &mut self,
        rung: usize,
        pass: &Pass,
        elapsed: Duration,
        regions: &[Region],
    ) -> Duration {
        let most = pass.interval * STRETCH_MAX;
        let interval = (elapsed / pass.looks.max(1)).clamp(pass.interval, most);
        self.exposures.add(rung, interval, pass.looks, regions);
        interval
    }

    /// The rung to look at as soon as this one has found something, if any.
    pub fn follow_up(&self, rung: usize) -> Option<usize> {
        let next = rung + 1;
        let is_due = !self.is_at_rest() || !self.exposures.knows(next);
        let follows = next < PASSES.len() && is_due && self.exposures.is_saturated(rung);
        follows.then_some(next)
    }

    /// Pays for what was looked at since `began`. Returns whether a calm agent's rest follows.
    pub fn pay(&mut self, began: Duration, spent: Duration) -> bool {
        let is_at_rest = self.is_at_rest();
        self.budget.spend(began, spent, is_at_rest);
        is_at_rest
    }

    /// The agent has decided and moved what it wanted. If it is calm it found nothing to do: news can wait.
    pub fn epoch_ended(&mut self, is_calm: bool) {
        if self.calm && !is_calm {
            self.budget.wake();
        }
        self.calm = is_calm;
    }

    /// Whether the agent is calm: it sleeps for longer than a pass takes, and has the time to wait for one
    /// when it wakes.
    pub fn is_calm(&self) -> bool {
        self.calm
    }

    /// Calm, and nothing was seen lately that the next pass has to confirm.
    fn is_at_rest(&self) -> bool {
        self.calm && !self.exposures.is_urgent()
    }

    /// Appends at most `max` samples to `out`: what the policy lacks after it has forgotten half of
    /// what it held.
    pub fn samples(&mut self, max: usize, out: &mut Vec<Sample>) {
        self.exposures.samples(max, out);
    }

    /// Appends at most `max` sightings to `out`: what the last looks found, and how hot it is known to be.
    pub fn sightings(&self, max: usize, out: &mut Vec<Sample>) {
        self.exposures.sightings(max, out);
    }

    /// Forgets all other processes.
    pub fn retain(&mut self, pids: &[Pid]) {
        self.exposures.retain(pids);
    }

    /// Forgets what it has seen.
    pub fn clear(&mut self) {
        self.exposures.clear();
    }
}

/// How many regions a kdamond keeps of so many targets with so many mapped bytes: at least so many
/// for each target, at most so many for all. DAMON splits regions while there are fewer than half
/// of the most.
pub fn region_bounds(targets: u64, mapped_bytes: u64) -> (u64, u64) {
    let targets = targets.max(1);
    let blocks = mapped_bytes.div_ceil(BLOCK_SIZE).min(REGIONS_MAX);
    let min = (blocks / targets).max(REGIONS_MIN_PER_TARGET);
    (min, (min * targets).max(REGIONS_MAX))
}

#[cfg(test)]
mod harm;

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn region_bounds_hold_for_any_number_of_targets() {
        for targets in [0, 1, 2, 16, 64] {
            for mapped in [0, 1, 800 << 20, u64::MAX] {
                let (min, max) = region_bounds(targets, mapped);
                // The kernel takes no less than three, and no fewer at the most than at the least.
                assert!(min >= 3 && min * targets <= max);
            }
        }
        // Small memory has a region for each block, and DAMON splits none of them.
        let (min, max) = region_bounds(1, 800 << 20);
        assert!(min == 400 && min >= max / 2);
    }
}
