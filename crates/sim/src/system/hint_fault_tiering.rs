//! Tiering by hint faults in the guest's kernel: Linux's own, and TPP.
//!
//! A scanner marks pages of the slow node; a page that faults and is judged hot is promoted at
//! once, if fast memory has room; if not, reclaim is woken to make some. TPP wakes it earlier,
//! whenever less is free than it wants.

use demeter_policy::{GuestVirtAddr, MIB};

use super::reclaimer::Reclaimer;
use super::scan::{Cursor, Pace, Scanning};
use super::{Context, Managed, Manager, Needs};
use crate::guest::{Guest, Watermarks};
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::reclaim::{Generations, Lists};

/// A fault that comes within this time shows a hot page (`hot_threshold_ms`).
const HOT_MS: u32 = 1000;

/// Whose kernel it is.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// Linux's of today, `numa_balancing=2`: a page is hot that faults soon after it was marked.
    Linux,
    /// TPP's: a page is hot that faults while it is active, having faulted twice before.
    Tpp,
}

/// The kernel's part.
#[derive(Debug)]
pub(crate) struct HintFaultTiering {
    kernel: Kernel,
    reclaimer: Reclaimer,
    scanning: Scanning,
    pace: Pace,
    cursor: Cursor<GuestVirtAddr>,
    watermarks: Watermarks,
    /// Whether reclaim ages memory by generations, or by two lists.
    multi_gen_lru: bool,
    /// Bytes that may be promoted in a second, if that is limited.
    rate: Option<u64>,
    /// The second that goes on, and bytes promoted in it.
    promoted: (u64, u64),
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
        let default = Scanning::default();
        let bytes = managed.knob(|s| s.scan_size_mib);
        let period_ms = managed.knob(|s| s.scan_period_min_ms);
        let period_max_ms = managed.knob(|s| s.scan_period_max_ms);
        let scanning = Scanning {
            bytes: bytes.map_or(default.bytes, |mib| u64::from(mib) * MIB),
            period_ps: period_ms.map_or(default.period_ps, |ms| u64::from(ms) * PS_PER_MS),
            period_max_ps: period_max_ms
                .map_or(default.period_max_ps, |ms| u64::from(ms) * PS_PER_MS),
        };
        let rate_mib = managed.knob(|s| s.rate_mib_per_s);
        Self {
            kernel,
            reclaimer: Reclaimer::default(),
            scanning,
            pace: Pace::with(scanning, managed.footprint.0, managed.threads, counts_all),
            cursor: Cursor::default(),
            watermarks: watermarks.scaled(managed.knob(|s| s.watermark_scale_factor)),
            multi_gen_lru: managed
                .knob(|s| s.multi_gen_lru)
                .unwrap_or(kernel == Kernel::Linux),
            rate: rate_mib.map(|mib| u64::from(mib) * MIB),
            promoted: (0, 0),
        }
    }

    /// Makes the slow node's pages fault, or those of both nodes from the fast one on. Returns when the
    /// next scan is due.
    pub(super) fn scan(&mut self, from: TierId, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let began_ps = actor.now_ps();
        let areas: Vec<_> = guest.vmas().iter().map(|v| v.start()..v.end()).collect();
        let mut marked = false;
        let ended = self
            .cursor
            .scan_bytes(self.scanning.bytes, &areas, |stretch| {
                let any = guest.make_fault(stretch, from, actor);
                marked |= any;
                any
            });
        if marked {
            actor.flush_own();
        }
        if ended {
            self.pace.pass_ended();
        }
        self.pace.after(began_ps, actor.now_ps())
    }

    /// A page has faulted: tells where it lies, if it is hot.
    pub(super) fn found_hot(&self, gva: GuestVirtAddr, ctx: &mut Context<'_>) -> Option<TierId> {
        let Context { guest, actor, .. } = ctx;
        let hint = guest.hint_fault(gva, actor)?;
        let is_hot = match self.kernel {
            Kernel::Linux => hint.since_ms < HOT_MS,
            Kernel::Tpp => {
                // A page changes its list under the lock of all lists.
                guest.mark_accessed(gva);
                actor.contend(Cause::Hint, hint.pages);
                hint.active
            }
        };
        is_hot.then_some(hint.node)
    }

    /// Promotes a page that has faulted, if there is room.
    pub(super) fn promote(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        if guest.is_short() {
            self.reclaimer.wake(actor.now_ps());
        } else if self.is_within_rate(actor.now_ps()) {
            // While it was marked nobody could have its translation.
            let before = guest.counts.promoted_bytes;
            let moved = guest.migrate(gva, TierId::Fast, false, actor);
            self.promoted.1 += guest.counts.promoted_bytes - before;
            self.pace.promoted(moved);
            self.guest_took_memory(ctx);
        }
    }
}

impl HintFaultTiering {
    /// Whether more may be promoted in this second (`numa_balancing_promote_rate_limit_MBps`).
    fn is_within_rate(&mut self, now_ps: u64) -> bool {
        let second = now_ps / (1000 * PS_PER_MS);
        if self.promoted.0 != second {
            self.promoted = (second, 0);
        }
        self.rate.is_none_or(|rate| self.promoted.1 < rate)
    }
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

    /// The scanner's turn.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        self.scan(TierId::Slow, ctx)
    }

    fn hint_fault(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        if self.found_hot(gva, ctx) == Some(TierId::Slow) {
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
