//! Tiering by the hypervisor: TPP moved into the host (H-TPP).
//!
//! The hypervisor sees guest-physical addresses only. It takes pages of the slow tier out of the
//! second-level tables, so that an access exits to it; a page that does so often enough is promoted.
//! When fast memory is short it demotes pages that were not accessed since its last look. To see
//! the next access to a page whose bit it cleared, it has to forget everything that was cached from
//! the VM's tables: so KVM does up to Linux 6.12. Later ones leave it cached, and such a page looks idle.

use demeter_policy::GuestPhysAddr;

use super::reclaimer::Reclaimer;
use super::scan::{Cursor, Pace};
use super::{Context, Managed, Manager, Needs, Tiering};
use crate::guest::{Guest, Watermarks};
use crate::hypervisor::{Backing, Hypervisor};
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::PageSize;
use crate::reclaim::{Clock, Reclaimable, Seen};

/// How a kernel's KVM takes the accessed bits of a VM's pages (its MMU notifiers, as the merges of
/// 6.13 and 6.15 describe them).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ageing {
    /// With the lock of the VM's tables held, and a flush where a bit was set: up to 6.12.
    Flushes,
    /// With the lock held; whoever has the page's translation cached goes on unseen: 6.13 and 6.14.
    Locks,
    /// Without the lock: from 6.15.
    Lockless,
}

/// The hypervisor's part for one VM.
#[derive(Debug)]
pub(crate) struct HypervisorTpp {
    ageing: Ageing,
    pace: Pace,
    cursor: Cursor<GuestPhysAddr>,
    /// By guest-physical page.
    seen: Vec<Seen>,
    clock: Clock,
    reclaimer: Reclaimer,
}

/// A VM's pages, by guest-physical page, and who looks at them.
struct VmPages<'a, 'b> {
    ageing: Ageing,
    end_gpa: GuestPhysAddr,
    seen: &'a mut [Seen],
    host: &'a mut Hypervisor,
    backing: &'a mut Backing,
    actor: &'a mut Actor<'b>,
}

impl HypervisorTpp {
    /// Nothing seen yet.
    pub(crate) fn new(managed: &Managed, ageing: Ageing) -> Self {
        Self {
            ageing,
            pace: Pace::new(managed.footprint.0, managed.threads, true),
            cursor: Cursor::default(),
            seen: vec![],
            clock: Clock::default(),
            reclaimer: Reclaimer::default(),
        }
    }
}

impl Manager for HypervisorTpp {
    fn needs(&self) -> Needs {
        Needs {
            tiering: Tiering::Hypervisor,
            watermarks: Watermarks::TPP,
            ..Needs::default()
        }
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        let pages = guest.end_gpa().0 >> guest.page_bits();
        self.seen.resize(pages as usize + 1, Seen::default());
        self.pace.start(now_ps, filling)
    }

    /// Makes pages of the slow tier exit when they are accessed.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let actor = &mut ctx.actor;
        let began_ps = actor.now_ps();
        let (mut seen, mut marked) = (0u64, 0u64);
        let all = GuestPhysAddr(0)..ctx.guest.end_gpa();
        let ended = self.cursor.scan(std::slice::from_ref(&all), |stretch| {
            let before = marked;
            ctx.backing.tree.for_each(stretch, |_, entry, size| {
                seen += 1;
                let is_slow = ctx.hypervisor.tier_of(entry.index()) == TierId::Slow;
                if size == PageSize::Base && is_slow && !entry.is_hint() {
                    entry.set_hint(true);
                    marked += 1;
                }
            });
            marked > before
        });
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
        actor.charge_page(Cause::Track, marked * actor.costs.mark_page_ps);
        actor.invept(u64::from(marked > 0));
        if ended {
            self.pace.pass_ended();
        }
        self.pace.after(began_ps, actor.now_ps())
    }

    fn host_hint_fault(&mut self, gpa: GuestPhysAddr, ctx: &mut Context<'_>) {
        let Context { backing, actor, .. } = ctx;
        if let Some((entry, _)) = backing.tree.find_mut(gpa) {
            entry.set_hint(false);
        }
        actor.charge_page(Cause::Hint, actor.costs.ept_violation_ps);
        actor.contend(Cause::Hint, actor.costs.locks_per_host_hint << actor.k);
        let page = (gpa.0 >> backing.tree.page_bits()) as usize;
        let Some(seen) = self.seen.get_mut(page) else {
            return;
        };
        let was_active = seen.is_active();
        seen.mark_accessed();
        if !was_active {
            return;
        }
        if ctx.hypervisor.is_short() {
            self.reclaimer.wake(actor.now_ps());
        } else {
            // While it was taken out nobody could have its translation.
            let moved = ctx.hypervisor.migrate(backing, gpa, TierId::Fast, actor);
            self.pace.promoted(moved);
            self.host_took_memory(ctx);
        }
    }

    fn host_took_memory(&mut self, ctx: &mut Context<'_>) {
        if ctx.hypervisor.wants_more() {
            self.reclaimer.wake(ctx.actor.now_ps());
        }
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.reclaimer.wants_turn(now_ps)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        let end_gpa = ctx.guest.end_gpa();
        let (clock, seen, ageing) = (&mut self.clock, &mut self.seen, self.ageing);
        let (host, backing) = (&mut *ctx.hypervisor, &mut *ctx.backing);
        self.reclaimer
            .turn(now_ps, &mut ctx.actor, |actor, until_ps| {
                let mut pages = VmPages {
                    ageing,
                    end_gpa,
                    seen,
                    host,
                    backing,
                    actor,
                };
                clock.turn(&mut pages, until_ps)
            });
    }
}

impl VmPages<'_, '_> {
    fn gpa(&self, place: u32) -> GuestPhysAddr {
        GuestPhysAddr(u64::from(place) << self.backing.tree.page_bits())
    }

    /// Takes a page's bit; up to 6.12 all that was cached is forgotten for that.
    fn look(&mut self, place: u32) -> bool {
        self.actor.look_in_reclaim(1 << self.actor.k);
        let entry = self.backing.tree.find_mut(self.gpa(place));
        let accessed = entry.is_some_and(|(entry, _)| entry.take_accessed());
        let pages = 1 << self.actor.k;
        match self.ageing {
            _ if !accessed => {}
            Ageing::Flushes => self.actor.invept(pages),
            Ageing::Locks => self.actor.contend(Cause::Exit, pages),
            Ageing::Lockless => {}
        }
        accessed
    }
}

impl Reclaimable for VmPages<'_, '_> {
    fn places(&self) -> u32 {
        (self.end_gpa.0 >> self.backing.tree.page_bits()) as u32
    }

    fn fast_bytes(&self) -> u64 {
        self.host.fast_bytes()
    }

    fn page_at(&mut self, place: u32) -> Option<u32> {
        let gpa = self.gpa(place);
        let (entry, size) = self.backing.tree.find_mut(gpa)?;
        let is_fast = self.host.tier_of(entry.index()) == TierId::Fast;
        (size == PageSize::Base && is_fast).then_some(1)
    }

    fn deactivate(&mut self, place: u32) {
        self.look(place);
    }

    fn take_accessed(&mut self, place: u32) -> bool {
        self.look(place)
    }

    fn walk_accessed(&mut self, place: u32) -> bool {
        self.look(place)
    }

    fn demote(&mut self, place: u32) -> bool {
        if let Some(seen) = self.seen.get_mut(place as usize) {
            *seen = Seen::default();
        }
        let gpa = self.gpa(place);
        let moved = self
            .host
            .migrate(self.backing, gpa, TierId::Slow, self.actor);
        if moved {
            self.actor.invept(1 << self.actor.k);
        }
        moved
    }

    fn has_enough(&self) -> bool {
        !self.host.wants_more()
    }

    fn now_ps(&self) -> u64 {
        self.actor.now_ps()
    }
}
