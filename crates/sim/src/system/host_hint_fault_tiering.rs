//! Tiering by hint faults in the host's kernel: TPP in the host (H-TPP), and Linux's own tiering.
//!
//! The hypervisor sees guest-physical addresses only. It unmaps pages of the slow tier from the second-level tables, so
//! that an access exits to it. A page found hot is promoted. If fast memory is short, it demotes pages that were not
//! accessed since the last check. To detect the next access to a page with a cleared bit, KVM up to Linux 6.12 flushes
//! all cached translations of the VM's tables. Later versions do not flush, so such a page looks idle.
//!
//! Linux marks pages of the VMM's process, and notifies KVM of changed ranges only. KVM then unmaps a whole range at
//! once, including fast pages, with one flush. In KVM's tables, most pages that reclaim checks are therefore not
//! accessed, and reclaim rarely flushes.

use demeter_policy::{GuestPhysAddr, Tier};

use super::promotion::{HOT_MS, RateLimit};
use super::reclaimer::Reclaimer;
use super::scan::{Cursor, Pace, Scanning};
use super::{Context, Managed, Manager, Needs, Tiering};
use crate::guest::{Guest, Watermarks};
use crate::hypervisor::{Backing, Hypervisor};
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;
use crate::reclaim::{Generations, Lists, Reclaimable, Seen};

/// How KVM clears the accessed bits of a VM's pages (its MMU notifiers, as described in the merges of 6.13 and 6.15).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum Ageing {
    /// With the VM's table lock held, and a flush if a bit was set: up to 6.12.
    Flushes,
    /// With the lock held, without a flush, so accesses through cached translations stay unseen: 6.13 and 6.14.
    Locks,
    /// Without the lock: from 6.15.
    Lockless,
}

/// The kernel whose tiering is modelled.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Kernel {
    /// Current Linux, `numa_balancing=2`: a page that faults soon after it was marked is hot.
    Linux,
    /// TPP: a page that faults while it is active, after two earlier faults, is hot.
    Tpp,
}

/// The host kernel's state of a guest-physical page, beside the bit in KVM's table.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    seen: Seen,
    /// Accessed bit in the VMM's own table, set from a hint fault until the next check.
    young: bool,
    /// Time at which it was marked, ms, if it is marked.
    marked_ms: Option<u32>,
}

/// The host kernel's tiering of one VM.
#[derive(Debug)]
pub(crate) struct HostHintFaultTiering {
    kernel: Kernel,
    ageing: Ageing,
    scanning: Scanning,
    pace: Pace,
    cursor: Cursor<GuestPhysAddr>,
    watermarks: Watermarks,
    /// By guest-physical page.
    pages: Vec<Page>,
    lists: Lists,
    reclaimer: Reclaimer,
    rate_limit: RateLimit,
}

/// A VM's pages, by guest-physical page, and the actor that scans them.
struct VmPages<'a, 'b> {
    kernel: Kernel,
    ageing: Ageing,
    end_gpa: GuestPhysAddr,
    pages: &'a mut [Page],
    host: &'a mut Hypervisor,
    backing: &'a mut Backing,
    actor: &'a mut Actor<'b>,
}

impl HostHintFaultTiering {
    /// Linux's tiering, with KVM's ageing of 6.12.
    pub(crate) fn linux(managed: &Managed) -> Self {
        let scanning = Scanning::of(managed);
        let has_generations = managed.knob(|s| s.multi_gen_lru).unwrap_or(true);
        Self {
            kernel: Kernel::Linux,
            scanning,
            pace: Pace::with(scanning, managed.footprint.0, managed.threads, false),
            watermarks: Watermarks::LINUX.scaled(managed.knob(|s| s.watermark_scale_factor)),
            lists: match has_generations {
                true => Lists::Generations(Generations::default()),
                false => Lists::default(),
            },
            rate_limit: RateLimit::of(managed),
            ..Self::tpp(managed, Ageing::Flushes)
        }
    }

    /// TPP in the host.
    pub(crate) fn tpp(managed: &Managed, ageing: Ageing) -> Self {
        let scanning = Scanning::default();
        Self {
            kernel: Kernel::Tpp,
            ageing,
            scanning,
            pace: Pace::with(scanning, managed.footprint.0, managed.threads, true),
            cursor: Cursor::default(),
            watermarks: Watermarks::TPP,
            pages: vec![],
            lists: Lists::default(),
            reclaimer: Reclaimer::default(),
            rate_limit: RateLimit::default(),
        }
    }

    /// Handles a fault of an unmapped page. Returns whether the page is hot, or none if the kernel did not mark it.
    fn learn(&mut self, gpa: GuestPhysAddr, page_bits: u32, now_ms: u32) -> Option<bool> {
        let page = self.pages.get_mut((gpa.0 >> page_bits) as usize)?;
        let marked_ms = page.marked_ms.take()?;
        let was_active = page.seen.is_active();
        page.seen.mark_accessed();
        page.young = true;
        Some(match self.kernel {
            Kernel::Linux => now_ms.saturating_sub(marked_ms) < HOT_MS,
            Kernel::Tpp => was_active,
        })
    }
}

impl Manager for HostHintFaultTiering {
    fn needs(&self) -> Needs {
        Needs {
            tiering: Tiering::Hypervisor,
            watermarks: self.watermarks,
            ..Needs::default()
        }
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, filling: bool) -> u64 {
        let pages = guest.end_gpa().0 >> guest.page_bits();
        self.pages.resize(pages as usize + 1, Page::default());
        self.pace.start(now_ps, filling)
    }

    /// Marks pages of the slow tier to exit on access.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context {
            guest,
            hypervisor,
            backing,
            actor,
        } = ctx;
        let began_ps = actor.now_ps();
        let now_ms = (began_ps / PS_PER_MS) as u32;
        let page_bits = backing.tree.page_bits();
        let takes_all = self.kernel == Kernel::Linux;
        let (mut seen, mut marked, mut flushes) = (0u64, 0u64, 0u64);
        let pages = &mut self.pages;
        let all = GuestPhysAddr(0)..guest.end_gpa();
        let areas = std::slice::from_ref(&all);
        let ended = self
            .cursor
            .scan_bytes(self.scanning.bytes, areas, |stretch| {
                let before = marked;
                let mut taken = false;
                backing.tree.for_each(stretch, |gpa, entry, size| {
                    seen += 1;
                    let is_slow = hypervisor.tier_of(entry.index()) == Tier::Slow;
                    if size != PageSize::Base || !(is_slow || takes_all) {
                        return;
                    }
                    let was_mapped = !entry.is_hint();
                    if was_mapped {
                        entry.set_hint(true);
                        taken = true;
                        if takes_all {
                            entry.take_accessed();
                        }
                    }
                    let page = pages.get_mut((gpa.0 >> page_bits) as usize);
                    let is_new = |p: &&mut Page| was_mapped || p.marked_ms.is_none();
                    if let Some(page) = page.filter(is_new).filter(|_| is_slow) {
                        page.marked_ms = Some(now_ms);
                        marked += 1;
                    }
                });
                flushes += u64::from(taken);
                marked > before
            });
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
        actor.charge_page(Cause::Track, marked * actor.costs.mark_page_ps);
        actor.invept(flushes);
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
        let now_ps = actor.now_ps();
        let page_bits = backing.tree.page_bits();
        let is_hot = self.learn(gpa, page_bits, (now_ps / PS_PER_MS) as u32);
        let cause = match is_hot {
            // Linux did not mark this page; only KVM had unmapped it.
            None => Cause::Exit,
            Some(_) => Cause::Hint,
        };
        actor.charge_page(cause, actor.costs.ept_violation_ps);
        actor.contend(cause, actor.costs.locks_per_host_hint << actor.k);
        if is_hot != Some(true) {
            return;
        }
        if ctx.hypervisor.is_short() {
            self.reclaimer.wake(actor.now_ps());
        } else if self.rate_limit.has_room(now_ps) {
            // While it was unmapped, no TLB could hold its translation.
            let moved = ctx.hypervisor.migrate(backing, gpa, Tier::Fast, actor);
            self.rate_limit.spend(u64::from(moved) << page_bits);
            self.pace.promoted(moved);
            self.host_took_memory(ctx);
        }
    }

    fn host_took_memory(&mut self, ctx: &mut Context<'_>) {
        if self.kernel == Kernel::Tpp && ctx.hypervisor.wants_more() {
            self.reclaimer.wake(ctx.actor.now_ps());
        }
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.reclaimer.wants_turn(now_ps)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        let end_gpa = ctx.guest.end_gpa();
        let (kernel, ageing) = (self.kernel, self.ageing);
        let (lists, pages) = (&mut self.lists, &mut self.pages);
        let (host, backing) = (&mut *ctx.hypervisor, &mut *ctx.backing);
        self.reclaimer
            .turn(now_ps, &mut ctx.actor, |actor, until_ps| {
                let mut pages = VmPages {
                    kernel,
                    ageing,
                    end_gpa,
                    pages,
                    host,
                    backing,
                    actor,
                };
                lists.turn(&mut pages, until_ps)
            });
    }
}

impl VmPages<'_, '_> {
    fn gpa(&self, place: u32) -> GuestPhysAddr {
        GuestPhysAddr(u64::from(place) << self.backing.tree.page_bits())
    }

    /// Clears the page's bit in the VMM's own table; returns the old bit.
    fn take_young(&mut self, place: u32) -> bool {
        let page = self.pages.get_mut(place as usize);
        page.is_some_and(|page| std::mem::take(&mut page.young))
    }

    /// Clears a page's accessed bit. Up to 6.12 this flushes all cached translations.
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
        let is_young = self.take_young(place) && self.kernel == Kernel::Linux;
        accessed || is_young
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
        let is_fast = self.host.tier_of(entry.index()) == Tier::Fast;
        (size == PageSize::Base && is_fast).then_some(1)
    }

    fn deactivate(&mut self, place: u32) {
        self.look(place);
    }

    fn take_accessed(&mut self, place: u32) -> bool {
        self.look(place)
    }

    /// In 6.12, Linux's walk covers the VMM's tables only.
    fn walk_accessed(&mut self, place: u32) -> bool {
        match self.kernel {
            Kernel::Linux => {
                self.actor
                    .charge_page(Cause::Track, self.actor.costs.scan_entry_ps);
                self.take_young(place)
            }
            Kernel::Tpp => self.look(place),
        }
    }

    fn demote(&mut self, place: u32) -> bool {
        if let Some(page) = self.pages.get_mut(place as usize) {
            *page = Page::default();
        }
        let gpa = self.gpa(place);
        let entry = self.backing.tree.find_mut(gpa);
        let is_mapped = entry.is_some_and(|(entry, _)| !entry.is_hint());
        let moved = self.host.migrate(self.backing, gpa, Tier::Slow, self.actor);
        if moved && is_mapped {
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
