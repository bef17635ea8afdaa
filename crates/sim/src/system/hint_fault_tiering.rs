//! Tiering by hint faults in the guest's kernel: Linux's own tiering, and TPP.
//!
//! A scanner marks pages of the slow node. A marked page that faults and is hot is promoted at once if fast memory is
//! free. If not, the fault wakes reclaim. TPP wakes reclaim earlier, as soon as free memory is below its target.

use std::ops::Range;

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Tier};

use super::promotion::{HOT_MS, RateLimit};
use super::reclaimer::Reclaimer;
use super::scan::{Cursor, Pace, Scanning};
use super::{Context, Managed, Manager, Needs};
use crate::guest::{Guest, Watermarks};
use crate::machine::ledger::Cause;
use crate::reclaim::{Generations, Lists};

/// Parts of a stretch of memory of which some may be left unmarked.
pub(super) const SIXTEENTHS: u64 = 16;

/// The kernel whose tiering is modelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// Current Linux, `numa_balancing=2`: a page that faults soon after it was marked is hot.
    Linux,
    /// TPP: a page that faults while it is active, after two earlier faults, is hot.
    Tpp,
}

/// Hint-fault tiering of the guest's kernel.
#[derive(Debug)]
pub(crate) struct HintFaultTiering {
    kernel: Kernel,
    reclaimer: Reclaimer,
    scanning: Scanning,
    pace: Pace,
    cursor: Cursor<GuestVirtAddr>,
    /// Sixteenths of each stretch of memory that are marked, all for Linux and TPP, and passes over memory so far.
    marked: u64,
    passes: u64,
    watermarks: Watermarks,
    /// Whether reclaim uses generations, not two lists.
    multi_gen_lru: bool,
    rate_limit: RateLimit,
}

impl HintFaultTiering {
    /// Linux's own tiering.
    pub(crate) fn linux(managed: &Managed) -> Self {
        Self::new(Kernel::Linux, managed)
    }

    /// TPP in the guest.
    pub(crate) fn tpp(managed: &Managed) -> Self {
        Self::new(Kernel::Tpp, managed)
    }

    fn new(kernel: Kernel, managed: &Managed) -> Self {
        let counts_all = kernel == Kernel::Tpp;
        let watermarks = match kernel {
            Kernel::Linux => Watermarks::LINUX,
            Kernel::Tpp => Watermarks::TPP,
        };
        let scanning = Scanning::of(managed);
        Self {
            kernel,
            reclaimer: Reclaimer::default(),
            scanning,
            pace: Pace::with(scanning, managed.footprint.0, managed.threads, counts_all),
            cursor: Cursor::default(),
            marked: SIXTEENTHS,
            passes: 0,
            watermarks: watermarks.scaled(managed.knob(|s| s.watermark_scale_factor)),
            multi_gen_lru: managed
                .knob(|s| s.multi_gen_lru)
                .unwrap_or(kernel == Kernel::Linux),
            rate_limit: RateLimit::of(managed),
        }
    }

    /// Marks pages to fault: the slow node's, or from `Tier::Fast` on those of both nodes. Returns the time of the
    /// next scan.
    pub(super) fn scan(&mut self, from: Tier, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let began_ps = actor.now_ps();
        let areas: Vec<_> = guest.vmas().iter().map(|v| v.start()..v.end()).collect();
        let mut marked = false;
        let (share, passes) = (self.marked, self.passes);
        let ended = self
            .cursor
            .scan_bytes(self.scanning.bytes, &areas, |stretch| {
                let mut any = false;
                for part in parts(stretch, share, passes) {
                    any |= guest.make_fault(part, from, actor);
                }
                marked |= any;
                any
            });
        if marked {
            actor.flush_own();
        }
        if ended {
            self.passes += 1;
            self.pace.pass_ended();
        }
        self.pace.after(began_ps, actor.now_ps())
    }

    /// Handles a fault; returns the page's node if it is hot.
    pub(super) fn found_hot(&self, gva: GuestVirtAddr, ctx: &mut Context<'_>) -> Option<Tier> {
        let Context { guest, actor, .. } = ctx;
        let hint = guest.hint_fault(gva, actor)?;
        let is_hot = match self.kernel {
            Kernel::Linux => hint.since_ms < HOT_MS,
            Kernel::Tpp => {
                // A page changes lists under the lock of all lists.
                guest.mark_accessed(gva);
                actor.contend(Cause::Hint, hint.pages);
                hint.active
            }
        };
        is_hot.then_some(hint.node)
    }

    /// Sets how many sixteenths of each stretch are marked from now on.
    pub(super) fn mark_sixteenths(&mut self, marked: u64) {
        self.marked = marked;
    }

    /// Wakes reclaim, because fast memory is short.
    pub(super) fn wake_reclaim(&mut self, now_ps: u64) {
        self.reclaimer.wake(now_ps);
    }

    /// Promotes a page that has faulted, if fast memory is free.
    pub(super) fn promote(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        if guest.is_short() {
            self.reclaimer.wake(actor.now_ps());
        } else if self.rate_limit.has_room(actor.now_ps()) {
            // While it was marked, no TLB could hold its translation.
            let before = guest.counts.promoted_bytes;
            let moved = guest.migrate(gva, Tier::Fast, false, actor);
            self.rate_limit.spend(guest.counts.promoted_bytes - before);
            self.pace.promoted(moved);
            self.guest_took_memory(ctx);
        }
    }
}

/// The sixteenths of a stretch that are marked: others in each pass, so that each has its turn.
fn parts(
    stretch: Range<GuestVirtAddr>,
    marked: u64,
    pass: u64,
) -> impl Iterator<Item = Range<GuestVirtAddr>> {
    let (start, end) = (stretch.start.0, stretch.end.0);
    let parts = match marked {
        SIXTEENTHS.. => 1,
        _ => SIXTEENTHS,
    };
    let at = move |part: u64| match part == parts {
        true => GuestVirtAddr(end),
        // On blocks, so that no page belongs to two parts.
        false => {
            GuestVirtAddr((start + (end - start) / parts * part).max(start) & !(BLOCK_SIZE - 1))
        }
    };
    (0..parts)
        .filter(move |part| (part + pass) % parts < marked)
        .map(move |part| GuestVirtAddr(at(part).0.max(start))..at(part + 1))
        .filter(|part| part.start < part.end)
}

impl Manager for HintFaultTiering {
    fn needs(&self) -> Needs {
        let lists = match self.multi_gen_lru {
            true => Lists::Generations(Generations::default()),
            false => Lists::default(),
        };
        Needs {
            watermarks: self.watermarks,
            lists,
            ..Needs::default()
        }
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        self.pace.start(now_ps, filling)
    }

    /// Turn of the scanner.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        self.scan(Tier::Slow, ctx)
    }

    fn hint_fault(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        if self.found_hot(gva, ctx) == Some(Tier::Slow) {
            self.promote(gva, ctx);
        }
    }

    fn guest_took_memory(&mut self, ctx: &mut Context<'_>) {
        if self.kernel == Kernel::Tpp && ctx.guest.wants_more() {
            self.reclaimer.wake(ctx.actor.now_ps());
        }
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.reclaimer.wants_turn(now_ps)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        let guest = &mut *ctx.guest;
        self.reclaimer
            .turn(now_ps, &mut ctx.actor, |actor, until_ps| {
                guest.reclaim(actor, until_ps)
            });
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::MIB;
    use proptest::prelude::*;

    use super::*;

    proptest! {
        /// In sixteen passes each part of a stretch is marked as often as it should be.
        #[test]
        fn each_part_has_its_turn(start in 0u64..5000, mib in 1u64..300, marked in 0..=SIXTEENTHS) {
            let (start, end) = (start * 4096, start * 4096 + mib * MIB);
            let mut bytes = 0;
            for pass in 0..SIXTEENTHS {
                let parts: Vec<_> = parts(GuestVirtAddr(start)..GuestVirtAddr(end), marked, pass).collect();
                prop_assert!(parts.windows(2).all(|w| w[0].end <= w[1].start));
                prop_assert!(parts.iter().all(|p| start <= p.start.0 && p.end.0 <= end));
                bytes += parts.iter().map(|p| p.end.0 - p.start.0).sum::<u64>();
            }
            prop_assert_eq!(bytes, marked * (end - start));
        }
    }
}
