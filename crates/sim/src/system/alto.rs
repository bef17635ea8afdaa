//! Alto: fewer promotions where misses overlap.
//!
//! Liu et al., OSDI 2025; numbers as in the authors' kernels. It tracks, classifies and moves as the system beneath does,
//! Linux's own tiering or TPP.
//!
//! # Problem
//! A miss that overlaps with others costs less than its latency. Systems that count accesses promote such pages all the
//! same, and the move costs more than its benefit.
//!
//! # Approach
//! Once a second the counters tell how long a read from memory was outstanding, by reads: the latency over the reads in
//! flight, in cycles. The shorter that is, the less is promoted. On Linux a part of memory is marked, on TPP a part
//! of the candidates is promoted ([`BANDS`]).
//!
//! The model has no cycles of outstanding reads: it takes the program's wait for memory over its misses, lines of streams
//! included. Cycles are those of the authors' processor (assumed: 2.2 GHz). Assumed as well: in each pass other sixteenths
//! are marked. The authors throttle only where a read takes more than 100 cycles, which is always so here.
//!
//! Soar, of the same paper, places objects by a profile of an earlier run. It is not modelled: the simulator's
//! programs allocate no objects.
//!
//! # Properties
//! - The longer reads are outstanding, the more is promoted.
//! - Of any ten candidates in a row as many are promoted as the table says.

use demeter_policy::{GuestVirtAddr, Tier};

use super::hint_fault_tiering::SIXTEENTHS;
use super::{Context, HintFaultTiering, Managed, Manager, NEVER_PS, Needs};
use crate::guest::Guest;
use crate::machine::actor::{Actor, Vcpu};
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;

/// Time between two looks at the counters.
const LOOK_PS: u64 = 1000 * PS_PER_MS;

/// A cycle of the authors' processor.
const CYCLE_PS: u64 = 455;

/// Candidates of which some are promoted.
const TENTHS: u64 = 10;

/// The authors' table: cycles at most, sixteenths marked, candidates promoted of ten.
const BANDS: [(u64, u64, u64); 6] = [
    (40, 0, 0),
    (50, 1, 1),
    (60, 2, 1),
    (80, 4, 3),
    (100, 8, 5),
    (u64::MAX, SIXTEENTHS, TENTHS),
];

/// The step that is throttled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Throttled {
    Marks,
    Candidates,
}

/// Sixteenths marked and candidates promoted of ten, by the cycles for which a read is outstanding.
fn share(cycles: u64) -> (u64, u64) {
    let band = BANDS.iter().find(|(most, ..)| cycles <= *most);
    band.map_or((SIXTEENTHS, TENTHS), |&(_, marked, promoted)| {
        (marked, promoted)
    })
}

/// Lets a part of all candidates pass, spread evenly.
#[derive(Debug, Default)]
struct Gate(u64);

impl Gate {
    fn passes(&mut self, of_ten: u64) -> bool {
        self.0 += of_ten;
        let passes = self.0 >= TENTHS;
        self.0 %= TENTHS;
        passes
    }
}

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct Alto {
    throttled: Throttled,
    inner: HintFaultTiering,
    gate: Gate,
    /// Candidates that are promoted, of ten.
    promoted: u64,
    /// The counters at the last look.
    waited_ps: u64,
    misses: u64,
    look_due_ps: u64,
    scan_due_ps: u64,
}

impl Alto {
    /// On Linux's own tiering.
    pub(crate) fn on_linux(managed: &Managed<'_>) -> Self {
        Self::new(Throttled::Marks, HintFaultTiering::linux(managed))
    }

    /// On TPP.
    pub(crate) fn on_tpp(managed: &Managed<'_>) -> Self {
        Self::new(Throttled::Candidates, HintFaultTiering::tpp(managed))
    }

    fn new(throttled: Throttled, inner: HintFaultTiering) -> Self {
        Self {
            throttled,
            inner,
            gate: Gate::default(),
            promoted: TENTHS,
            waited_ps: 0,
            misses: 0,
            look_due_ps: NEVER_PS,
            scan_due_ps: NEVER_PS,
        }
    }

    /// Reads the counters. Where nothing missed all stays as it is.
    fn look(&mut self, actor: &Actor<'_>) {
        let waited = |vcpu: &Vcpu| vcpu.bill.of(Cause::Fast) + vcpu.bill.of(Cause::Slow);
        let waited_ps: u64 = actor.vcpus.iter().map(waited).sum();
        let misses: u64 = actor.vcpus.iter().map(|vcpu| vcpu.misses).sum();
        let since_ps = waited_ps - std::mem::replace(&mut self.waited_ps, waited_ps);
        let missed = misses - std::mem::replace(&mut self.misses, misses);
        if let Some(each_ps) = since_ps.checked_div(missed) {
            let (marked, promoted) = share(each_ps / CYCLE_PS);
            match self.throttled {
                Throttled::Marks => self.inner.mark_sixteenths(marked),
                Throttled::Candidates => self.promoted = promoted,
            }
        }
    }
}

impl Manager for Alto {
    fn needs(&self) -> Needs {
        self.inner.needs()
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        self.look_due_ps = now_ps + LOOK_PS;
        self.scan_due_ps = self.inner.start(guest, now_ps, filling);
        self.look_due_ps.min(self.scan_due_ps)
    }

    /// A look at the counters, or the scanner's turn.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        if self.look_due_ps <= self.scan_due_ps {
            self.look(&ctx.actor);
            self.look_due_ps = ctx.actor.now_ps() + LOOK_PS;
        } else {
            self.scan_due_ps = self.inner.scan(Tier::Slow, ctx);
        }
        self.look_due_ps.min(self.scan_due_ps)
    }

    fn hint_fault(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        let is_candidate = self.inner.found_hot(gva, ctx) == Some(Tier::Slow);
        if is_candidate && self.gate.passes(self.promoted) {
            self.inner.promote(gva, ctx);
        }
    }

    fn guest_took_memory(&mut self, ctx: &mut Context<'_>) {
        self.inner.guest_took_memory(ctx);
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.inner.reclaim_since_ps(now_ps)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        self.inner.reclaim(now_ps, ctx);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_longer_reads_are_outstanding_the_more_is_promoted() {
        assert_eq!(share(40), (0, 0));
        assert_eq!(share(41), (1, 1));
        assert_eq!(share(101), (SIXTEENTHS, TENTHS));
        let shares: Vec<_> = (0..200).map(share).collect();
        assert!(shares.is_sorted_by(|a, b| a.0 <= b.0 && a.1 <= b.1));
    }

    #[test]
    fn a_gate_lets_so_many_of_ten_pass() {
        for of_ten in 0..=TENTHS {
            let mut gate = Gate::default();
            let passed: Vec<_> = (0..100).map(|_| gate.passes(of_ten)).collect();
            for ten in passed.windows(10) {
                let count = ten.iter().filter(|&&p| p).count() as u64;
                assert_eq!(count, of_ten);
            }
        }
    }
}
