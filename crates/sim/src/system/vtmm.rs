//! vTMM: the hypervisor reads the guest's page tables, and sorts pages by temperature.
//!
//! Sha et al., EuroSys 2023. It tracks by the accessed bits of the guest's tables, which the guest provides. It
//! classifies by a bucket sort, and migrates pages through the second-level tables. The only source is the abstract, so
//! two points are assumed: a scan per second, and a temperature as in `xen-history`.
//!
//! # Problem
//! A hypervisor that scans its own tables must read all of them, and flush all their cached translations.
//!
//! # Approach
//! A walk that sets a bit stores to a page of the guest's tables. Page-modification logging reports these stores, so
//! only modified table pages are read. The log holds 512 pages; when it is full, the CPU exits. A page's temperature is
//! the number of the last 32 scans in which it was accessed. It also selects the page's queue. The hottest queues that
//! fit into fast memory are hot. The next queue stays in place, and all others are cold. Hot pages of slow memory are
//! exchanged for cold pages of fast memory until the next scan, the hottest for the coldest. Translations are flushed
//! once after a scan (assumed), and once after moves.
//!
//! Fast memory is a pool for all VMs. While the pool is short, it reclaims pages without recent accesses, so a VM's
//! part follows its usage.
//!
//! Not modelled: a page that was written to during its copy is logged again.
//!
//! # Properties
//! - The hot queues fit into fast memory; with the next queue they would not.

use std::ops::RangeInclusive;

use demeter_policy::{ByteCount, GuestPhysAddr, GuestVirtAddr, Tier};

use super::xen_history::History;
use super::{Context, Manager, Needs, Tiering};
use crate::guest::{Guest, Watermarks};
use crate::machine::ledger::Cause;
use crate::machine::radix::{HUGE_BITS, PageSize};

/// Time between two scans (assumed).
const SCAN_PS: u64 = 1_000_000_000_000;

/// Entries per table page, and per log.
const ENTRIES: u64 = 512;
const LOGGED: u64 = 512;

/// The range of temperatures.
const TEMPERATURES: RangeInclusive<u32> = 0..=32;

/// A page and its position.
#[derive(Debug, Clone, Copy)]
struct Page {
    gpa: GuestPhysAddr,
    tier: Tier,
}

/// Pages by temperature.
type Queues = Vec<Vec<Page>>;

/// vTMM's state of one VM.
#[derive(Debug, Default)]
pub(crate) struct Vtmm {
    /// By guest-virtual page from the first mapping on; used where a page begins.
    histories: Vec<History>,
    base: u64,
    /// Number of logged pages.
    logged: u64,
}

impl Vtmm {
    /// Reads the logged pages of the guest's tables.
    fn scan(&mut self, ctx: &mut Context<'_>) -> Queues {
        let Context {
            guest,
            hypervisor,
            backing,
            actor,
        } = ctx;
        let page_bits = guest.page_bits();
        let mut queues: Queues = TEMPERATURES.map(|_| vec![]).collect();
        let (mut tables, mut last) = (0, None);
        for vma in guest.vmas().to_vec() {
            let range = vma.start()..vma.end();
            guest.tables.for_each(range, |at, entry, size| {
                let accessed = entry.take_accessed();
                let table = Some(table_of(at, size));
                if accessed && table != last {
                    tables += 1;
                    last = table;
                }
                let index = ((at.0 - self.base) >> page_bits) as usize;
                let Some(history) = self.histories.get_mut(index) else {
                    return;
                };
                history.push(accessed, *TEMPERATURES.end());
                let pages = match size {
                    PageSize::Base => 1,
                    _ => 1 << (HUGE_BITS - page_bits),
                };
                for frame in entry.index()..entry.index() + pages {
                    let gpa = GuestPhysAddr(u64::from(frame) << page_bits);
                    if let Some(backed) = backing.tree.frame(gpa) {
                        let tier = hypervisor.tier_of(backed);
                        queues[history.ones() as usize].push(Page { gpa, tier });
                    }
                }
            });
        }
        actor.charge(Cause::Track, tables * ENTRIES * actor.costs.scan_entry_ps);
        self.logged += tables;
        actor.charge(Cause::Exit, self.logged / LOGGED * actor.costs.exit_ps);
        self.logged %= LOGGED;
        actor.invept(u64::from(tables > 0));
        queues
    }

    /// Migrates pages until `until_ps`.
    fn move_some(queues: &Queues, until_ps: u64, ctx: &mut Context<'_>) {
        let Context {
            hypervisor,
            backing,
            actor,
            ..
        } = ctx;
        let page_bytes = 1 << backing.tree.page_bits();
        let in_fast = queues.iter().flatten();
        let in_fast = in_fast.filter(|page| page.tier == Tier::Fast).count() as u64;
        let capacity = in_fast + hypervisor.promotable_bytes() / page_bytes;
        let sizes: Vec<u64> = queues.iter().map(|queue| queue.len() as u64).collect();
        let border = border(&sizes, capacity);
        let up = queues[border..].iter().rev().flatten();
        let mut up = up.filter(|page| page.tier == Tier::Slow);
        let down = queues[..border.saturating_sub(1)].iter().flatten();
        let mut down = down.filter(|page| page.tier == Tier::Fast);
        let mut unused = queues[0].iter().filter(|page| page.tier == Tier::Fast);
        let mut moved = false;
        while actor.now_ps() < until_ps {
            let page = match hypervisor.is_short() {
                true => down.next().map(|page| (page, Tier::Slow)),
                false => up.next().map(|page| (page, Tier::Fast)),
            };
            let Some((page, to)) = page else {
                break;
            };
            moved |= hypervisor.migrate(backing, page.gpa, to, actor);
        }
        while actor.now_ps() < until_ps && hypervisor.wants_more() {
            let Some(page) = unused.next() else {
                break;
            };
            moved |= hypervisor.migrate(backing, page.gpa, Tier::Slow, actor);
        }
        actor.invept(u64::from(moved));
    }
}

/// The table page that holds a page's entry.
fn table_of(gva: GuestVirtAddr, size: PageSize) -> (PageSize, u64) {
    let bits = match size {
        PageSize::Base => HUGE_BITS,
        _ => HUGE_BITS + 9,
    };
    (size, gva.0 >> bits)
}

/// The coolest hot queue: the hottest queues down to it fit.
fn border(sizes: &[u64], capacity: u64) -> usize {
    let mut left = capacity;
    let fits = |&queue: &usize| {
        let fits = sizes[queue] <= left;
        left -= if fits { sizes[queue] } else { 0 };
        fits
    };
    let hot = (0..sizes.len()).rev().take_while(fits);
    hot.last().unwrap_or(sizes.len())
}

impl Manager for Vtmm {
    fn needs(&self) -> Needs {
        Needs {
            tiering: Tiering::Hypervisor,
            watermarks: Watermarks::LINUX,
            ..Needs::default()
        }
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        if let (Some(first), Some(last)) = (guest.limits().first(), guest.limits().last()) {
            self.base = first.start().0;
            let pages = ((last.end().0 - self.base) >> guest.page_bits()) + 1;
            self.histories = vec![History::default(); pages as usize];
        }
        now_ps + SCAN_PS
    }

    /// A history for each page of any size; queues are rebuilt from them.
    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        let log = LOGGED * size_of::<u64>() as u64;
        ByteCount(guest.mapped_pages() * size_of::<History>() as u64 + log)
    }

    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let due_ps = ctx.actor.now_ps() + SCAN_PS;
        let queues = self.scan(ctx);
        Self::move_some(&queues, due_ps, ctx);
        due_ps
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn the_hot_queues_fit_and_one_more_would_not(
            sizes in prop::collection::vec(0u64..100, 1..40), capacity in 0u64..2000,
        ) {
            let border = border(&sizes, capacity);
            let hot: u64 = sizes[border..].iter().sum();
            prop_assert!(hot <= capacity);
            prop_assert!(border == 0 || hot + sizes[border - 1] > capacity);
        }
    }
}
