//! Nomad: asynchronous promotion, and demotion without a copy.
//!
//! Xiang et al., OSDI 2024; constants from the authors' kernel. It tracks by hint faults like TPP, classifies by a
//! queue of candidates, and migrates by transactions (`guest/shadow.rs`).
//!
//! # Problem
//! TPP promotes a page while its program waits in the fault, and needs several faults until a page is active. If the
//! hot set does not fit, each promotion causes a demotion, and all time goes to copies.
//!
//! # Approach
//! A page that faults becomes a candidate. Each fault examines some candidates. An active candidate that was accessed
//! again is queued for promotion. An accessed but inactive candidate is marked; its bit is cleared without a flush
//! (assumed). A kernel thread copies queued pages while they stay mapped. If a page was written to meanwhile, the copy
//! is repeated. Reclaim maps shadows if there are any.
//!
//! In the model, a copy lasts as long as slices of accesses, much longer than a copy of 4 KiB. A page written to in
//! that time therefore counts as written to during its copy only in proportion of the two durations. For pages that are
//! written to many times meanwhile, this is too rare.
//!
//! # Properties
//! - A queue holds no more pages than the kernel's, and no page twice.

use std::collections::VecDeque;

use demeter_policy::{ByteCount, GuestVirtAddr, Tier};

use super::reclaimer::Reclaimer;
use super::scan::{Cursor, Pace};
use super::{Context, Managed, Manager, NEVER_PS, Needs};
use crate::guest::{Guest, Watermarks};
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Capacity of the candidate queue, candidates examined per fault, and capacity of the promotion queue.
const CANDIDATES: usize = 128;
const LOOK_BACK: usize = 20;
const QUEUED: usize = 512;

/// Number of failed copies until a page is dropped.
const TRIES: u32 = 10;

/// Polling interval of the promotion thread on an empty queue (assumed: it is woken).
const IDLE_PS: u64 = 2_000_000_000;

/// Copy time after which the promotion thread checks its copies; about one slice of a program's accesses.
const BATCH_PS: u64 = 1_000_000_000;

/// A page that waits for promotion, or is being copied.
#[derive(Debug, Clone, Copy)]
struct Queued {
    gva: GuestVirtAddr,
    tries: u32,
}

/// A copy in progress.
#[derive(Debug, Clone, Copy)]
struct Copy {
    page: Queued,
    began_ps: u64,
    /// Time to copy one real page.
    copy_ps: u64,
}

/// The kernel part of Nomad.
#[derive(Debug)]
pub(crate) struct Nomad {
    reclaimer: Reclaimer,
    pace: Pace,
    cursor: Cursor<GuestVirtAddr>,
    candidates: VecDeque<GuestVirtAddr>,
    queue: VecDeque<Queued>,
    copies: Vec<Copy>,
    /// Expected number of failed copies since the last failure, in units of 2^-20.
    failures: u64,
    scan_due_ps: u64,
    promote_due_ps: u64,
}

impl Nomad {
    /// A state without candidates.
    pub(crate) fn new(managed: &Managed) -> Self {
        Self {
            reclaimer: Reclaimer::default(),
            pace: Pace::new(managed.footprint.0, managed.threads, true),
            cursor: Cursor::default(),
            candidates: VecDeque::new(),
            queue: VecDeque::new(),
            copies: vec![],
            failures: 0,
            scan_due_ps: NEVER_PS,
            promote_due_ps: NEVER_PS,
        }
    }

    /// Marks the slow node's pages to fault.
    fn scan(&mut self, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        let began_ps = actor.now_ps();
        let areas: Vec<_> = guest.vmas().iter().map(|v| v.start()..v.end()).collect();
        let mut marked = false;
        let ended = self.cursor.scan(&areas, |stretch| {
            let any = guest.make_fault(stretch, Tier::Slow, actor);
            marked |= any;
            any
        });
        if marked {
            actor.flush_own();
        }
        if ended {
            self.pace.pass_ended();
        }
        self.scan_due_ps = self.pace.after(began_ps, actor.now_ps());
    }

    /// Examines the oldest candidates; each stands for `2^k` pages.
    fn look_back(&mut self, k: u32, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        let looks = limit(LOOK_BACK, k).min(self.candidates.len());
        let look_ps = looks as u64 * actor.costs.scan_entry_ps;
        actor.charge(Cause::Hint, look_ps << k);
        for _ in 0..looks {
            let Some(gva) = self.candidates.pop_front() else {
                return;
            };
            let Some((entry, _)) = guest.tables.find_mut(gva) else {
                continue;
            };
            let (frame, accessed) = (entry.index(), entry.take_accessed());
            let Some(is_active) = guest.is_active(frame) else {
                continue;
            };
            if guest.tier_of(frame) == Tier::Fast {
                continue;
            }
            if accessed && is_active {
                if self.queue.len() < limit(QUEUED, k) {
                    self.queue.push_back(Queued { gva, tries: 0 });
                }
                continue;
            }
            if accessed {
                guest.mark_accessed(gva);
                actor.contend(Cause::Hint, 1 << k);
            }
            self.candidates.push_back(gva);
        }
    }

    /// Turn of the promotion thread: completes copies in progress and starts new ones.
    fn promote(&mut self, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        for copy in std::mem::take(&mut self.copies) {
            let took_ps = (actor.now_ps() - copy.began_ps).max(1);
            if guest.is_dirty(copy.page.gva) {
                self.failures += (copy.copy_ps << 20) / took_ps.max(copy.copy_ps);
            }
            if self.failures >= 1 << 20 {
                self.failures -= 1 << 20;
                guest.abort_copy(copy.page.gva, actor);
                if copy.page.tries + 1 < TRIES {
                    self.queue.push_back(Queued {
                        tries: copy.page.tries + 1,
                        ..copy.page
                    });
                }
            } else {
                let moved = guest.commit_copy(copy.page.gva, actor);
                self.pace.promoted(moved);
            }
        }
        let until_ps = actor.now_ps() + BATCH_PS;
        while actor.now_ps() < until_ps {
            if guest.is_short() {
                self.reclaimer.wake(actor.now_ps());
                break;
            }
            let Some(page) = self.queue.pop_front() else {
                break;
            };
            let size = guest.tables.find(page.gva).map(|(_, size)| size);
            if size == Some(PageSize::Huge) {
                // Transactions apply to base pages only.
                let moved = guest.migrate(page.gva, Tier::Fast, true, actor);
                self.pace.promoted(moved);
            } else if let Some(copy_ps) = guest.begin_copy(page.gva, actor) {
                self.copies.push(Copy {
                    page,
                    began_ps: actor.now_ps(),
                    copy_ps,
                });
            }
        }
        let now_ps = actor.now_ps();
        let is_idle = self.copies.is_empty();
        self.promote_due_ps = now_ps + if is_idle { IDLE_PS } else { 0 };
    }
}

/// Adds a candidate to a queue of capacity `most`; drops the oldest if it is full.
fn add(candidates: &mut VecDeque<GuestVirtAddr>, gva: GuestVirtAddr, most: usize) {
    if candidates.contains(&gva) {
        return;
    }
    if candidates.len() >= most {
        candidates.pop_front();
    }
    candidates.push_back(gva);
}

/// Capacity of a queue of `pages` real pages, if a page stands for `2^k`.
fn limit(pages: usize, k: u32) -> usize {
    (pages >> k).max(2)
}

impl Manager for Nomad {
    fn needs(&self) -> Needs {
        Needs {
            watermarks: Watermarks::TPP,
            ..Needs::default()
        }
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        self.scan_due_ps = self.pace.start(now_ps, filling);
        self.promote_due_ps = now_ps + IDLE_PS;
        self.scan_due_ps.min(self.promote_due_ps)
    }

    /// Turn of the scanner or of the promotion thread.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        if ctx.actor.now_ps() >= self.scan_due_ps {
            self.scan(ctx);
        } else {
            self.promote(ctx);
            self.guest_took_memory(ctx);
        }
        self.scan_due_ps.min(self.promote_due_ps)
    }

    fn hint_fault(&mut self, gva: GuestVirtAddr, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        if guest.write_fault(gva, actor) {
            return;
        }
        let hint = guest.hint_fault(gva, actor);
        if hint.is_some_and(|hint| hint.node == Tier::Slow) {
            let Some((_, size)) = guest.tables.find(gva) else {
                return;
            };
            let start = guest.page_start(gva, size);
            let k = if size == PageSize::Base { actor.k } else { 0 };
            self.look_back(k, ctx);
            add(&mut self.candidates, start, limit(CANDIDATES, k));
        }
    }

    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        let queues = size_of::<GuestVirtAddr>() * self.candidates.len()
            + size_of::<Queued>() * (self.queue.len() + self.copies.len());
        ByteCount(guest.shadow_bytes() + ((queues as u64) << guest.k()))
    }

    fn guest_took_memory(&mut self, ctx: &mut Context<'_>) {
        if ctx.guest.wants_more() {
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
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn candidates_are_few_and_each_is_one(
            pages in prop::collection::vec(0u64..300, 1..600), k in 0u32..9,
        ) {
            let mut candidates = VecDeque::new();
            for page in pages {
                let gva = GuestVirtAddr(page << 12);
                add(&mut candidates, gva, limit(CANDIDATES, k));
                let mut all: Vec<_> = candidates.iter().map(|gva| gva.0).collect();
                all.sort_unstable();
                all.dedup();
                prop_assert_eq!(all.len(), candidates.len());
                prop_assert!(all.len() <= (CANDIDATES >> k).max(2));
                prop_assert!(candidates.contains(&gva));
            }
        }
    }
}
