//! khugepaged: the kernel thread that collapses small pages into huge ones.
//!
//! It follows `mm/khugepaged.c` of Linux 6.12 with its defaults. A pass scans 4,096 base pages (`pages_to_scan`) and
//! then sleeps 10 s (`scan_sleep_millisecs`). A block is collapsed if at least one of its pages is mapped
//! (`max_ptes_none` = 511) and one was accessed. The huge page comes from the node that holds most of its pages. If
//! that node has no free huge page, the thread sleeps 60 s (`alloc_sleep_millisecs`).
//!
//! # Properties
//! - Mapped memory stays mapped, and no frame is used twice.
//! - A pass scans at most `pages_to_scan` pages.

use demeter_policy::{BLOCK_SIZE, Block, PAGE_SIZE};

use super::Guest;
use super::migrate::whole;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// Blocks of 2 MiB in a pass.
const BLOCKS_A_PASS: u64 = 4096 * PAGE_SIZE / BLOCK_SIZE;

/// Sleep between two passes, and after a pass that found no free huge page.
const SCAN_SLEEP_PS: u64 = 10_000_000_000_000;
const ALLOC_SLEEP_PS: u64 = 60_000_000_000_000;

/// The thread's position.
#[derive(Debug, Clone, Copy)]
pub(super) struct Khugepaged {
    /// The next block to scan.
    next: Block,
}

impl Default for Khugepaged {
    fn default() -> Self {
        Self { next: Block(0) }
    }
}

/// The state of a scanned block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Found {
    /// Nothing to collapse.
    Nothing,
    Collapsed,
    NoMemory,
}

impl Guest {
    /// Runs one pass of khugepaged. Returns the time of the next pass, or none if the kernel does not run the thread.
    pub(crate) fn run_khugepaged(&mut self, actor: &mut Actor<'_>) -> Option<u64> {
        let mut next = self.khugepaged?.next;
        let mut sleep_ps = SCAN_SLEEP_PS;
        for _ in 0..BLOCKS_A_PASS {
            let Some(block) = self.whole_block_from(next) else {
                // All blocks were scanned; the next pass starts over.
                next = Block(0);
                break;
            };
            next = Block(block.0 + 1);
            if self.look_for_huge(block, actor) == Found::NoMemory {
                sleep_ps = ALLOC_SLEEP_PS;
                break;
            }
        }
        self.khugepaged = Some(Khugepaged { next });
        Some(actor.now_ps() + sleep_ps)
    }

    /// The first block from `from` on that lies entirely in one mapping.
    fn whole_block_from(&self, from: Block) -> Option<Block> {
        let vmas = self.vmas();
        let first = vmas.partition_point(|vma| vma.end() <= from.start());
        vmas[first..].iter().find_map(|vma| {
            let start = vma.start().max(from.start()).0.div_ceil(BLOCK_SIZE);
            ((start + 1) * BLOCK_SIZE <= vma.end().0).then_some(Block(start))
        })
    }

    fn look_for_huge(&mut self, block: Block, actor: &mut Actor<'_>) -> Found {
        let (mut old, mut is_accessed) = (vec![], false);
        let mut is_huge = false;
        self.tables.for_each(whole(block), |_, entry, size| {
            is_huge |= size != PageSize::Base;
            is_accessed |= entry.is_accessed();
            old.push(entry.index());
        });
        let looked = if is_huge { 1 } else { old.len() as u64 };
        actor.charge(Cause::Kernel, looked * actor.costs.scan_entry_ps);
        let is_shared = old.iter().any(|frame| self.shadows.contains_key(frame));
        if is_huge || !is_accessed || is_shared {
            return Found::Nothing;
        }
        let to = self.node_of_most(&old);
        let per_block = (BLOCK_SIZE >> self.page_bits) as u32;
        if !self.has(to, per_block, None) {
            return Found::NoMemory;
        }
        match self.make_huge(block, &old, to, Cause::Kernel, actor) {
            true => Found::Collapsed,
            false => Found::NoMemory,
        }
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::{ByteCount, GuestVirtAddr, MIB};

    use super::*;
    use crate::guest::Watermarks;
    use crate::guest::tests::Bench;

    /// 8 MiB of fast memory and 64 MiB of slow memory, with 40 MiB used by a program.
    fn filled() -> (Bench, GuestVirtAddr) {
        let nodes = [ByteCount(8 * MIB), ByteCount(64 * MIB)];
        let mut b = Bench::with(2, nodes, true, Watermarks::LINUX);
        let base = b.map(40 * MIB);
        assert_eq!(b.fill(base, 40 * MIB), 40 * MIB);
        (b, base)
    }

    fn access(b: &mut Bench, base: GuestVirtAddr, blocks: impl IntoIterator<Item = u64>) {
        for block in blocks {
            b.load(GuestVirtAddr(base.0 + block * BLOCK_SIZE));
        }
    }

    /// The program's blocks that are huge pages.
    fn huge(b: &Bench, base: GuestVirtAddr) -> Vec<u64> {
        let is_huge = |block: &u64| {
            let found = b
                .guest
                .tables
                .find(GuestVirtAddr(base.0 + block * BLOCK_SIZE));
            found.is_some_and(|(_, size)| size == PageSize::Huge)
        };
        (0..20).filter(is_huge).collect()
    }

    #[test]
    fn a_pass_looks_at_eight_blocks_and_goes_on_from_there() {
        let (mut b, base) = filled();
        access(&mut b, base, 0..20);
        // Most of the fourth block lies in the fast node, where no huge page is free.
        let due_ps = b.act(|g, a| g.run_khugepaged(a));
        assert!(due_ps >= Some(ALLOC_SLEEP_PS));
        assert_eq!(huge(&b, base), [0, 1, 2]);
        let due_ps = b.act(|g, a| g.run_khugepaged(a));
        assert!((Some(SCAN_SLEEP_PS)..Some(ALLOC_SLEEP_PS)).contains(&due_ps));
        assert_eq!(huge(&b, base), Vec::from_iter((0..3).chain(4..12)));
        b.act(|g, a| g.run_khugepaged(a));
        assert_eq!(huge(&b, base), Vec::from_iter((0..3).chain(4..20)));
        assert_eq!(b.guest.check_frames(), 40 * MIB);
    }

    #[test]
    fn what_nobody_accessed_stays_small() {
        let (mut b, base) = filled();
        access(&mut b, base, [5]);
        b.act(|g, a| g.run_khugepaged(a));
        assert_eq!(huge(&b, base), [0, 1, 2, 5]);
    }

    #[test]
    fn a_block_of_which_a_page_is_mapped_becomes_a_whole_one() {
        let (mut b, base) = filled();
        let more = b.map(4 * MIB);
        // The second block of this mapping has one mapped page; the other blocks are full.
        let page = GuestVirtAddr(more.0 + 2 * MIB);
        b.act(|g, a| g.fault(page, a)).unwrap();
        access(&mut b, more, [1]);
        for _ in 0..4 {
            b.act(|g, a| g.run_khugepaged(a));
        }
        assert_eq!(huge(&b, more), [1]);
        assert_eq!(b.guest.check_frames(), 42 * MIB);
        // Blocks that were not accessed are unchanged.
        assert_eq!(huge(&b, base), [0, 1, 2]);
    }
}
