//! RAMinate: a hypervisor that keeps frequently written pages in fast memory, and pauses the VM for exchanges.
//!
//! Hirofuchi and Takano, SoCC 2016. It tracks by dirty bits of the second-level tables, classifies by a multi-level
//! queue, and exchanges pages in pairs.
//!
//! # Problem
//! Stores to slow memory cost endurance or energy and should be rare, for any guest.
//!
//! # Approach
//! Every second the dirty bits are cleared. A page with n updates is in level log2 n of eight; for each 5 s without an
//! update it drops a level. A page of fast memory that drops below the lowest level is a victim. Every 5 s, pages of
//! slow memory are exchanged for victims, from the highest level down, at most 1,000 pairs. The VM is paused meanwhile:
//! 28 ms plus 1.6 us for each pair, as the authors measured. Translations are flushed after an exchange, not after a
//! scan.
//!
//! # Properties
//! - A page's level never exceeds log2 of its updates.
//! - A page without updates leaves all levels after 5 s times the number of levels.

use std::cmp::Reverse;

use demeter_policy::{ByteCount, GuestPhysAddr, Tier};

use super::{Context, Manager, Needs, Tiering};
use crate::guest::{Guest, Watermarks};
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Time between two scans; number of scans between exchanges, and until a page drops a level.
const SCAN_PS: u64 = 1_000_000_000_000;
const EXCHANGE_SCANS: u32 = 5;
const LIFETIME_SCANS: u32 = 5;

/// Levels of the queue.
const LEVELS: u32 = 8;

/// Pairs per exchange.
const PAIRS: u64 = 1000;

/// Pause of the VM: fixed part, and part for each pair.
const PAUSE_PS: u64 = 28_000_000_000;
const PAIR_PS: u64 = 1_600_000;

/// State of a page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
struct Page {
    updates: u32,
    /// Level from 1; 0 for none.
    level: u32,
    /// Time of its last update or drop.
    since: u32,
}

impl Page {
    /// Adds the dirty bit of a scan.
    fn scan(&mut self, dirty: bool, now: u32) {
        if dirty {
            self.updates = self.updates.saturating_add(1);
            self.level = (self.updates.ilog2() + 1).min(LEVELS);
            self.since = now;
        } else if self.level > 0 && now - self.since >= LIFETIME_SCANS {
            self.level -= 1;
            self.since = now;
            self.updates = if self.level == 0 { 0 } else { self.updates };
        }
    }
}

/// RAMinate's state of one VM.
#[derive(Debug, Default)]
pub(crate) struct Raminate {
    /// By guest-physical page.
    pages: Vec<Page>,
    scans: u32,
}

impl Raminate {
    /// Clears all dirty bits.
    fn scan(&mut self, ctx: &mut Context<'_>) {
        self.scans += 1;
        let all = GuestPhysAddr(0)..ctx.guest.end_gpa();
        let page_bits = ctx.backing.tree.page_bits();
        let mut seen = 0;
        ctx.backing.tree.for_each(all, |gpa, entry, _| {
            seen += 1;
            if let Some(page) = self.pages.get_mut((gpa.0 >> page_bits) as usize) {
                page.scan(entry.take_dirty(), self.scans);
            }
        });
        let actor = &mut ctx.actor;
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
    }

    /// Exchanges pages while the VM is paused.
    fn exchange(&mut self, ctx: &mut Context<'_>) {
        let Context {
            guest,
            hypervisor,
            backing,
            actor,
        } = ctx;
        let page_bits = backing.tree.page_bits();
        let (mut written, mut victims) = (vec![], vec![]);
        let all = GuestPhysAddr(0)..guest.end_gpa();
        backing.tree.for_each(all, |gpa, entry, size| {
            let page = self.pages.get((gpa.0 >> page_bits) as usize);
            let page = page.copied().unwrap_or_default();
            match hypervisor.tier_of(entry.index()) {
                _ if size != PageSize::Base => {}
                Tier::Slow if page.level > 0 => written.push((Reverse(page.level), gpa.0)),
                Tier::Fast if page.level == 0 => victims.push(gpa.0),
                _ => {}
            }
        });
        written.sort_unstable();
        let pairs = (PAIRS >> actor.k).max(1) as usize;
        let pairs = written.iter().zip(&victims).take(pairs);
        let before_ps = actor.now_ps();
        let mut count = 0;
        for (&(_, up), &down) in pairs {
            hypervisor.migrate(backing, GuestPhysAddr(up), Tier::Fast, actor);
            hypervisor.migrate(backing, GuestPhysAddr(down), Tier::Slow, actor);
            count += 1;
        }
        if count == 0 {
            return;
        }
        actor.invept(1);
        let pause_ps = PAUSE_PS + ((count * PAIR_PS) << actor.k);
        // The measured pause includes all costs.
        let spent_ps = actor.now_ps() - before_ps;
        let (on, busy) = (actor.on, actor.busy);
        actor.charge(Cause::Migrate, pause_ps.saturating_sub(spent_ps));
        for (i, vcpu) in actor.vcpus[..busy].iter_mut().enumerate() {
            if i != on {
                vcpu.charge(Cause::Migrate, pause_ps);
            }
        }
    }
}

impl Manager for Raminate {
    fn needs(&self) -> Needs {
        Needs {
            tiering: Tiering::Hypervisor,
            watermarks: Watermarks::LINUX,
            ..Needs::default()
        }
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        let pages = guest.end_gpa().0 >> guest.page_bits();
        self.pages.resize(pages as usize, Page::default());
        now_ps + SCAN_PS
    }

    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        ByteCount((size_of_val(&self.pages[..]) as u64) << guest.k())
    }

    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let began_ps = ctx.actor.now_ps();
        self.scan(ctx);
        if self.scans.is_multiple_of(EXCHANGE_SCANS) {
            self.exchange(ctx);
        }
        began_ps + SCAN_PS
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn levels_follow_updates_and_are_left(bits in prop::collection::vec(any::<bool>(), 1..300)) {
            let (mut page, mut now) = (Page::default(), 0);
            for dirty in bits {
                now += 1;
                page.scan(dirty, now);
                prop_assert!(page.level <= LEVELS);
                prop_assert!(page.level == 0 || page.level <= page.updates.ilog2() + 1);
                prop_assert!(!dirty || page.level > 0);
            }
            for _ in 0..LEVELS * LIFETIME_SCANS {
                now += 1;
                page.scan(false, now);
            }
            prop_assert_eq!(page.level, 0);
        }
    }
}
