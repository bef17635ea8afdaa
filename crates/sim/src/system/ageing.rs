//! Tiering by the hypervisor: TPP moved into the host (H-TPP).
//!
//! The hypervisor sees guest-physical addresses only. It takes pages of the slow tier out of the
//! second-level tables, so that an access exits to it; a page that does so twice is promoted. When
//! fast memory is short it demotes pages that were not accessed since its last look. To see the
//! next access to a page whose bit it cleared, it has to forget everything that was cached from
//! the VM's tables.

use super::reclaimer::Reclaimer;
use crate::hypervisor::{Backing, Hypervisor};
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::PageSize;

/// The hypervisor's part for one VM.
#[derive(Debug, Default)]
pub(crate) struct Ageing {
    cursor: u64,
    hand: u64,
    /// By guest-physical page: whether it is on the active list.
    active: Vec<bool>,
    reclaimer: Reclaimer,
}

impl Ageing {
    /// Makes the slow tier's pages in the next `bytes` of guest-physical memory exit when they are
    /// accessed.
    pub(crate) fn scan(
        &mut self,
        bytes: u64,
        end_gpa: u64,
        host: &Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
    ) {
        let start = if self.cursor >= end_gpa {
            0
        } else {
            self.cursor
        };
        self.cursor = (start + bytes).min(end_gpa);
        let (mut seen, mut marked) = (0u64, false);
        backing.tree.for_each(start..self.cursor, |_, entry, size| {
            seen += 1;
            if size == PageSize::Base && host.tier_of(entry.index()) == TierId::Slow {
                entry.set_hint(true);
                marked = true;
            }
        });
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
        actor.invept(u64::from(marked));
    }

    /// A page that was taken out was accessed.
    pub(crate) fn fault(
        &mut self,
        gpa: u64,
        host: &mut Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
    ) {
        if let Some((entry, _)) = backing.tree.find_mut(gpa) {
            entry.set_hint(false);
        }
        actor.charge_page(Cause::Exit, actor.costs.ept_violation_ps);
        actor.wait_for_tables(1 << actor.k);
        let page = self.page(gpa, backing);
        if !std::mem::replace(&mut self.active[page], true) {
            return;
        }
        if host.is_short() {
            self.reclaimer.wake();
        } else {
            // While it was taken out nobody could have its translation.
            host.migrate(backing, gpa, TierId::Fast, actor);
        }
    }

    /// A moment at which reclaim may run, if it was woken.
    pub(crate) fn tick(
        &mut self,
        end_gpa: u64,
        host: &mut Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
    ) {
        let mut reclaimer = std::mem::take(&mut self.reclaimer);
        reclaimer.turn(actor, |actor, until_ps| {
            self.reclaim(end_gpa, host, backing, actor, until_ps)
        });
        self.reclaimer = reclaimer;
    }

    /// Demotes until enough is free, two rounds over the VM's memory are done, or it is
    /// `until_ps`; true when there is no more to do.
    fn reclaim(
        &mut self,
        end_gpa: u64,
        host: &mut Hypervisor,
        backing: &mut Backing,
        actor: &mut Actor<'_>,
        until_ps: u64,
    ) -> bool {
        let page_bytes = 1 << backing.tree.page_bits();
        for _ in 0..2 * end_gpa / page_bytes {
            if !host.is_short() {
                return true;
            }
            if actor.now_ps() >= until_ps {
                return false;
            }
            let gpa = if self.hand >= end_gpa { 0 } else { self.hand };
            self.hand = gpa + page_bytes;
            let page = self.page(gpa, backing);
            let Some((entry, PageSize::Base)) = backing.tree.find_mut(gpa) else {
                continue;
            };
            if host.tier_of(entry.index()) != TierId::Fast {
                continue;
            }
            let accessed = entry.take_accessed();
            actor.charge_page(Cause::Track, actor.costs.scan_entry_ps);
            if accessed {
                self.active[page] = true;
                actor.invept(1 << actor.k);
            } else if self.active[page] {
                self.active[page] = false;
            } else if host.migrate(backing, gpa, TierId::Slow, actor) {
                actor.invept(1 << actor.k);
            }
        }
        true
    }

    fn page(&mut self, gpa: u64, backing: &Backing) -> usize {
        let page = (gpa >> backing.tree.page_bits()) as usize;
        if self.active.len() <= page {
            self.active.resize(page + 1, false);
        }
        page
    }
}
