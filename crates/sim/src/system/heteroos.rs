//! HeteroOS: the hypervisor finds hot pages, and the guest migrates them.
//!
//! Kannan et al., ISCA 2017, after HeteroVisor (VEE 2015); constants from the authors' Xen of 2015. It tracks by the
//! accessed bits of the guest's page tables, and classifies by a history of 32 bits per page. It sends hot pages to the
//! guest, whose kernel migrates them.
//!
//! # Problem
//! A hypervisor that migrates pages does not know their purpose. If guests scan their own tables, every guest needs a
//! scanner.
//!
//! # Approach
//! Every 500 ms, the hypervisor clears the bits of the next 16,384 pages and flushes translations once. A page that
//! reaches ten ones in its history is added to a list of at most 256,000 pages, which the guest reads. The guest
//! promotes listed pages while fast memory is free; its own reclaim frees memory.
//!
//! Not modelled: the guest's placement of allocations by their purpose.
//!
//! # Properties
//! - A pass covers all mappings, block by block.

use std::collections::VecDeque;

use demeter_policy::{BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, Tier, VirtRange};

use super::reclaimer::Reclaimer;
use super::xen_history::History;
use super::{Context, Manager};
use crate::guest::Guest;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Time between two scans.
const SCAN_PS: u64 = 500_000_000_000;

/// Real pages per scan.
const PAGES: u64 = 16_384;

/// Number of ones in a hot page's history.
const HOT: u32 = 10;

/// Maximum number of real pages on the list.
const LISTED: usize = 256_000;

/// Real pages that the guest moves in one call (assumed).
const BATCH: usize = 512;

/// The hypervisor's and the guest's part of HeteroOS.
#[derive(Debug, Default)]
pub(crate) struct HeteroOs {
    /// Position of the scan.
    next: u64,
    /// By base page from the first mapping on; used where a page begins.
    histories: Vec<History>,
    base: u64,
    hot: VecDeque<GuestVirtAddr>,
    reclaimer: Reclaimer,
}

/// The next mapped part of a block, from `next` on. At the end of a pass it wraps to the first.
fn stretch(vmas: &[VirtRange], next: u64) -> Option<(u64, u64)> {
    let vma = vmas.iter().find(|v| v.end().0 > next).or(vmas.first())?;
    let start = match next < vma.end().0 {
        true => next.max(vma.start().0),
        false => vma.start().0,
    };
    let end = Block::of(GuestVirtAddr(start)).start().0 + BLOCK_SIZE;
    Some((start, vma.end().0.min(end)))
}

impl HeteroOs {
    /// Runs the hypervisor's scan.
    fn scan(&mut self, ctx: &mut Context<'_>) {
        let Context { guest, actor, .. } = ctx;
        let vmas = guest.vmas().to_vec();
        let (page_bits, middle) = (guest.page_bits(), guest.first_slow_frame());
        let most = LISTED >> actor.k;
        let mut seen = 0;
        // At most one pass, even with few pages.
        let blocks: usize = vmas.iter().map(|vma| Block::all_of(vma).count()).sum();
        for _ in 0..blocks {
            let Some((start, end)) = stretch(&vmas, self.next) else {
                return;
            };
            self.next = end;
            let range = GuestVirtAddr(start)..GuestVirtAddr(end);
            guest.tables.for_each(range, |at, entry, size| {
                seen += match size {
                    PageSize::Base => 1 << actor.k,
                    _ => 1,
                };
                let index = ((at.0 - self.base) >> page_bits) as usize;
                let Some(history) = self.histories.get_mut(index) else {
                    return;
                };
                let became_hot = history.push(entry.take_accessed(), HOT);
                if became_hot && entry.index() >= middle && self.hot.len() < most {
                    self.hot.push_back(at);
                }
            });
            if seen >= PAGES {
                break;
            }
        }
        actor.charge(Cause::Track, seen * actor.costs.scan_entry_ps);
        actor.invept(1);
    }
}

impl Manager for HeteroOs {
    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        if let (Some(first), Some(last)) = (guest.limits().first(), guest.limits().last()) {
            self.base = first.start().0;
            let pages = ((last.end().0 - self.base) >> guest.page_bits()) + 1;
            self.histories = vec![History::default(); pages as usize];
        }
        now_ps + SCAN_PS
    }

    /// Runs the hypervisor's scan, then the guest's moves.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let due_ps = ctx.actor.now_ps() + SCAN_PS;
        self.scan(ctx);
        let Context { guest, actor, .. } = ctx;
        let batch = (BATCH >> actor.k).max(1);
        while !self.hot.is_empty() && actor.now_ps() < due_ps {
            if guest.is_short() {
                self.reclaimer.wake(actor.now_ps());
                break;
            }
            let batch: Vec<_> = self.hot.drain(..batch.min(self.hot.len())).collect();
            guest.migrate_pages(&batch, Tier::Fast, actor);
        }
        due_ps
    }

    /// The list, and a history for each page of any size.
    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        let listed = (self.hot.len() * size_of::<GuestVirtAddr>()) << guest.k();
        ByteCount(guest.mapped_pages() * size_of::<History>() as u64 + listed as u64)
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
        fn a_pass_covers_all_mappings(
            sizes in prop::collection::vec((1u64..3000, 1u64..9000), 1..6),
        ) {
            let mut at = 0;
            let page = 4096;
            let vmas: Vec<_> = sizes
                .into_iter()
                .map(|(gap, size)| {
                    let start = at + gap * page;
                    at = start + size * page;
                    VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(at)).unwrap()
                })
                .collect();
            let all: u64 = vmas.iter().map(|v| v.len().0).sum();
            let (mut next, mut covered) = (0, 0);
            while covered < 2 * all {
                let (start, end) = stretch(&vmas, next).unwrap();
                prop_assert!(start < end && end - start <= BLOCK_SIZE);
                prop_assert!(vmas.iter().any(|v| v.start().0 <= start && end <= v.end().0));
                covered += end - start;
                next = end;
                // Each pass ends with the last mapping.
                prop_assert_eq!(next == at, covered % all == 0);
            }
        }
    }
}
