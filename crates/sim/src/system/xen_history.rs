//! A hypervisor with an access history for each frame, on shadow page tables.
//!
//! Lee, Gupta and Schwan, MSPC 2013 (Georgia Tech); constants from the authors' Xen of May 2014. It tracks by accessed
//! bits in the process's own time, and classifies by the ones in a history of 32 bits. It migrates pages by changing
//! the shadow tables, unnoticed by the guest.
//!
//! # Problem
//! An accessed bit tells whether a page was accessed, but not how often.
//!
//! # Approach
//! After every 100 ms of the process's run time, all bits are added to histories. A page of slow memory whose history
//! reaches 22 ones is listed. Each pass promotes listed pages, at most 1,024 pages of 4 KiB, which is 40 MB a second.
//! If fast memory is full, a page with an empty history is demoted. (The authors' code demotes by the time of the last
//! scan, which only stands still while a process does not run.) All translations are flushed once per pass. A guest's
//! store to its page tables exits, to update the shadow. Memory starts in the slow tier.
//!
//! The model walks nested tables, where the authors' machine walked the shadow tables only. Second copies of read-only
//! pages are not modelled, nor are they in the authors' code.
//!
//! # Properties
//! - A history has as many ones as the last 32 scans have accesses.
//! - A page is listed when it reaches 22 ones, and not again while it keeps them.

use std::collections::VecDeque;

use demeter_policy::{ByteCount, GuestPhysAddr, Tier};

use super::{Context, Manager, Needs, Tiering};
use crate::guest::{Guest, Watermarks};
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Run time between two scans.
const SCAN_PS: u64 = 100_000_000_000;

/// Number of ones in a hot page's history.
const HOT: u32 = 22;

/// Real pages of the list that a pass examines, and that it moves.
const LOOKS: u64 = 2048;
const MOVES: u64 = 1024;

/// Weight of a page in the working set, in quarters, by the ones in its history (the authors' weights).
fn quarters(ones: u32) -> u64 {
    match ones {
        26.. => 4,
        20..=25 => 3,
        14..=19 => 2,
        8..=13 => 1,
        _ => 0,
    }
}

/// Access history of a page; the highest bit is the last scan's.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct History(u32);

impl History {
    /// Adds the bit of a scan; returns true when the page reaches `hot` ones.
    pub(super) fn push(&mut self, accessed: bool, hot: u32) -> bool {
        let was_hot = self.is_hot(hot);
        self.0 = self.0 >> 1 | u32::from(accessed) << 31;
        !was_hot && self.is_hot(hot)
    }

    /// Whether it has at least `hot` ones.
    fn is_hot(self, hot: u32) -> bool {
        self.ones() >= hot
    }

    /// Number of the last 32 scans in which it was accessed.
    pub(super) fn ones(self) -> u32 {
        self.0.count_ones()
    }
}

/// The hypervisor's state of one VM.
#[derive(Debug, Default)]
pub(crate) struct XenHistory {
    /// By guest-physical page, each of `2^page_bits` bytes.
    histories: Vec<History>,
    page_bits: u32,
    /// Pages that became hot.
    hot: VecDeque<u32>,
    /// Position of the search for a cold page.
    hand: usize,
    /// Real pages that may move now.
    allowed: u64,
}

impl XenHistory {
    /// Clears all accessed bits and updates histories.
    fn scan(&mut self, ctx: &mut Context<'_>) {
        let all = GuestPhysAddr(0)..ctx.guest.end_gpa();
        let page_bits = ctx.backing.tree.page_bits();
        let mut seen = 0;
        ctx.backing.tree.for_each(all, |gpa, entry, size| {
            seen += 1;
            let page = gpa.0 >> page_bits;
            let Some(history) = self.histories.get_mut(page as usize) else {
                return;
            };
            let became_hot = history.push(entry.take_accessed(), HOT);
            let is_slow = ctx.hypervisor.tier_of(entry.index()) == Tier::Slow;
            if became_hot && is_slow && size == PageSize::Base {
                self.hot.push_back(page as u32);
            }
        });
        let actor = &mut ctx.actor;
        actor.charge_page(Cause::Track, seen * actor.costs.scan_entry_ps);
    }

    /// Moves listed pages within the limits.
    fn move_some(&mut self, ctx: &mut Context<'_>) {
        let (k, page_bits) = (ctx.actor.k, ctx.backing.tree.page_bits());
        // A simulated page may stand for more pages than a pass moves.
        self.allowed = (self.allowed + MOVES).min(MOVES.max(1 << k));
        let looks = (LOOKS >> k).max(1).min(self.hot.len() as u64);
        for _ in 0..looks {
            if self.allowed < 1 << k {
                return;
            }
            let Some(page) = self.hot.pop_front() else {
                return;
            };
            if !self.histories[page as usize].is_hot(HOT) {
                continue;
            }
            let gpa = GuestPhysAddr(u64::from(page) << page_bits);
            if ctx.hypervisor.is_short() {
                let cold = self.find_cold(ctx);
                self.hot.push_front(page);
                let Some(cold) = cold else {
                    return;
                };
                ctx.hypervisor
                    .migrate(ctx.backing, cold, Tier::Slow, &mut ctx.actor);
                self.allowed -= 1 << k;
            } else if ctx
                .hypervisor
                .migrate(ctx.backing, gpa, Tier::Fast, &mut ctx.actor)
            {
                self.allowed -= 1 << k;
            }
        }
    }

    /// Finds a page of fast memory with an empty history.
    fn find_cold(&mut self, ctx: &mut Context<'_>) -> Option<GuestPhysAddr> {
        let page_bits = ctx.backing.tree.page_bits();
        for _ in 0..self.histories.len() {
            self.hand = (self.hand + 1) % self.histories.len();
            if self.histories[self.hand] != History::default() {
                continue;
            }
            let gpa = GuestPhysAddr((self.hand as u64) << page_bits);
            if let Some((entry, PageSize::Base)) = ctx.backing.tree.find(gpa)
                && ctx.hypervisor.tier_of(entry.index()) == Tier::Fast
            {
                return Some(gpa);
            }
        }
        None
    }
}

impl Manager for XenHistory {
    fn needs(&self) -> Needs {
        Needs {
            tiering: Tiering::Hypervisor,
            watermarks: Watermarks::LINUX,
            first_touch: Tier::Slow,
            ..Needs::default()
        }
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        let pages = guest.end_gpa().0 >> guest.page_bits();
        self.page_bits = guest.page_bits();
        self.histories.resize(pages as usize, History::default());
        now_ps + SCAN_PS
    }

    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let began_ps = ctx.actor.now_ps();
        self.scan(ctx);
        self.move_some(ctx);
        ctx.actor.invept(1);
        // The run time of each virtual CPU counts.
        began_ps + SCAN_PS / ctx.actor.busy.max(1) as u64
    }

    fn working_set(&self) -> Option<ByteCount> {
        let quarters: u64 = self.histories.iter().map(|h| quarters(h.ones())).sum();
        (quarters > 0).then_some(ByteCount((quarters << self.page_bits) / 4))
    }

    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        let entries = size_of_val(&self.histories[..]) + self.hot.len() * size_of::<u32>();
        ByteCount((entries as u64) << guest.k())
    }

    fn pages_by_ones(&self) -> Vec<u64> {
        let mut pages = vec![0; 32];
        for history in &self.histories {
            if let Some(ones) = history.ones().checked_sub(1) {
                pages[ones as usize] += 1;
            }
        }
        pages
    }

    /// The guest stores to its page tables for each page that it maps.
    fn guest_took_memory(&mut self, ctx: &mut Context<'_>) {
        let actor = &mut ctx.actor;
        actor.charge_page(Cause::Exit, actor.costs.exit_ps);
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn pages_count_for_the_working_set_by_their_ones() {
        let mut system = XenHistory {
            page_bits: 12,
            ..XenHistory::default()
        };
        assert_eq!(system.working_set(), None);
        let ones = |ones: u32| History(u32::MAX.checked_shr(32 - ones).unwrap_or(0));
        system.histories = [0, 1, 13, 22, 32, 32].map(ones).into();
        // A quarter, three quarters, and two whole pages.
        assert_eq!(system.working_set(), Some(ByteCount(3 * 4096)));
        let pages = system.pages_by_ones();
        assert_eq!((pages[0], pages[21], pages[31]), (1, 1, 2));
        assert_eq!(pages.iter().sum::<u64>(), 5);
    }

    proptest! {
        #[test]
        fn a_history_counts_the_last_scans(bits in prop::collection::vec(any::<bool>(), 1..200)) {
            let mut history = History::default();
            for i in 0..bits.len() {
                let before = history.is_hot(HOT);
                let listed = history.push(bits[i], HOT);
                let from = (i + 1).saturating_sub(32);
                let ones = bits[from..=i].iter().filter(|&&b| b).count() as u32;
                prop_assert_eq!(history.0.count_ones(), ones);
                prop_assert_eq!(listed, !before && ones >= HOT);
            }
        }
    }
}
