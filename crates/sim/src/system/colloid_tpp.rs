//! Colloid on TPP's tracking: hot pages go to the quicker tier.
//!
//! Vuppalapati and Agarwal, SOSP 2024; constants from the authors' kernel. It tracks and classifies like TPP. Its moves
//! depend on one bit: whether the fast tier is slower.
//!
//! # Problem
//! TPP promotes hot pages even to a heavily loaded fast tier.
//!
//! # Approach
//! A thread on its own core reads the memory controllers' counters. While the fast tier is slower, nothing is promoted.
//! Pages of both tiers are then marked to fault, and hot pages that fault are demoted. Otherwise it works like TPP.
//!
//! The real thread reads continuously; the model reads every 2 ms.

use demeter_policy::{GuestVirtAddr, Tier};

use super::colloid::{EQUAL, Load};
use super::hemem::Spinner;
use super::{Context, HintFaultTiering, Managed, Manager, Needs};
use crate::guest::Guest;

/// Weight of the newest measurement in the average.
const NEWEST: f64 = 1.0 / 32.0;

/// The kernel part of Colloid.
#[derive(Debug)]
pub(crate) struct ColloidTpp {
    tpp: HintFaultTiering,
    load: Load,
    spinner: Spinner,
}

impl ColloidTpp {
    /// A state without measurements.
    pub(crate) fn new(managed: &Managed) -> Self {
        Self {
            tpp: HintFaultTiering::tpp(managed),
            load: Load::new(NEWEST),
            spinner: Spinner::default(),
        }
    }

    /// Whether the fast tier is slower.
    fn is_fast_slower(&self) -> bool {
        let [fast, slow] = self.load.latency_ps();
        fast - slow > EQUAL * fast
    }
}

impl Manager for ColloidTpp {
    fn needs(&self) -> Needs {
        self.tpp.needs()
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        self.spinner = Spinner::since(now_ps);
        self.tpp.start(guest, now_ps, filling)
    }

    /// Turn of the scanner.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let from = match self.is_fast_slower() {
            true => Tier::Fast,
            false => Tier::Slow,
        };
        self.tpp.scan(from, ctx)
    }

    fn worker_turn(&mut self, _began_ps: u64, ctx: &mut Context<'_>) -> bool {
        self.load.measure(&ctx.actor);
        self.spinner.spin(&mut ctx.actor);
        false
    }

    fn hint_fault(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        let Some(node) = self.tpp.found_hot(gva, ctx) else {
            return;
        };
        match (node, self.is_fast_slower()) {
            (Tier::Slow, false) => self.tpp.promote(gva, ctx),
            (Tier::Fast, true) => {
                // While it was marked, no TLB could hold its translation.
                let Context { guest, actor, .. } = ctx;
                guest.migrate(gva, Tier::Slow, false, actor);
            }
            _ => {}
        }
    }

    fn guest_took_memory(&mut self, ctx: &mut Context<'_>) {
        self.tpp.guest_took_memory(ctx);
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.tpp.reclaim_since_ps(now_ps)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        self.tpp.reclaim(now_ps, ctx);
    }
}
