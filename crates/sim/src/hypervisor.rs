//! The hypervisor: host memory, second-level tables, exits.
//!
//! Host-physical memory holds the second-level tables of all VMs, then the fast tier, then the
//! slow one.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestPhysAddr};

use crate::guest::{Node, Watermarks};
use crate::machine::actor::Actor;
use crate::machine::flat::Flat;
use crate::machine::ledger::Cause;
use crate::machine::memory::TierId;
use crate::machine::radix::{Address, HUGE_BITS, PageSize, Radix};
use crate::machine::segment::Segments;

/// Frames of the host's memory.
#[derive(Debug, Clone)]
pub(crate) struct Hypervisor {
    nodes: [Node; 2],
    page_bits: u32,
}

/// What backs a VM's memory.
#[derive(Debug, Clone)]
pub(crate) struct Backing {
    /// The second-level tables.
    pub(crate) tree: Radix<GuestPhysAddr>,
    /// The 4 KiB page of host memory where they begin.
    pub(crate) first_page: u32,
    /// Bytes that the hypervisor has promoted and demoted.
    pub(crate) moved_bytes: [u64; 2],
    /// How tiers are chosen.
    policy: BackingPolicy,
    /// What is translated without tables.
    pub(crate) segments: Segments,
    /// Whether there is no hypervisor: guest-physical memory is the host's.
    pub(crate) is_native: bool,
}

/// Which tier backs a page when it is first touched.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) enum BackingPolicy {
    /// What lies at or above this guest-physical address is the guest's slow node, backed by the
    /// slow tier; all else by the fast tier.
    ByNode {
        /// Where the slow node begins.
        slow: GuestPhysAddr,
        /// In blocks of 2 MiB, or page by page.
        pages: PageSize,
    },
    /// Page by page: this tier while it lasts.
    First(TierId),
}

/// The host has no memory left.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the host's memory is full")]
pub(crate) struct HostFull;

impl Hypervisor {
    /// A host whose memory is free; `tables` bytes of it are for second-level tables. `watermarks`
    /// are those of the fast tier, for systems that manage the tiers here. Returns it with the
    /// address where the slow tier begins.
    pub(crate) fn new(
        page_bits: u32,
        tables: ByteCount,
        fast: ByteCount,
        slow: ByteCount,
        watermarks: Watermarks,
    ) -> (Self, u64) {
        let per_block = 1u32 << (HUGE_BITS - page_bits);
        let frames = |bytes: ByteCount| bytes.0.div_ceil(BLOCK_SIZE) as u32 * per_block;
        let first = frames(tables);
        let middle = first + frames(fast);
        let end = middle + frames(slow);
        let hypervisor = Self {
            nodes: [
                Node::new(first..middle, per_block, watermarks),
                Node::new(middle..end, per_block, Watermarks::NONE),
            ],
            page_bits,
        };
        (hypervisor, u64::from(middle) << page_bits)
    }

    /// The tier of a host frame.
    pub(crate) fn tier_of(&self, frame: u32) -> TierId {
        if frame >= self.nodes[1].frames().start {
            TierId::Slow
        } else {
            TierId::Fast
        }
    }

    /// Bytes of the fast tier.
    pub(crate) fn fast_bytes(&self) -> u64 {
        (self.nodes[0].frames().len() as u64) << self.page_bits
    }

    /// Whether promotions find less free fast memory than they leave free.
    pub(crate) fn is_short(&self) -> bool {
        self.nodes[0].is_short()
    }

    /// Bytes that promotions may still take before somebody has to make room.
    pub(crate) fn promotable_bytes(&self) -> u64 {
        u64::from(self.nodes[0].promotable()) << self.page_bits
    }

    /// Whether reclaim still has to free memory.
    pub(crate) fn wants_more(&self) -> bool {
        self.nodes[0].wants_more()
    }

    /// Checks that every frame is free or backs one page.
    #[cfg(test)]
    pub(crate) fn check_frames(&self, backings: &mut [&mut Backing]) {
        let mut used = std::collections::BTreeSet::new();
        for backing in backings {
            backing.tree.for_each(
                GuestPhysAddr(0)..GuestPhysAddr(1 << 42),
                |_, entry, size| {
                    let frames = match size {
                        PageSize::Base => 1,
                        _ => (BLOCK_SIZE >> self.page_bits) as u32,
                    };
                    for frame in entry.index()..entry.index() + frames {
                        assert!(used.insert(frame), "frame {frame} backs two pages");
                    }
                },
            );
        }
        let free: u32 = self.nodes.iter().map(Node::free).sum();
        let all: usize = self.nodes.iter().map(|n| n.frames().len()).sum();
        assert_eq!(free as usize + used.len(), all);
    }

    /// Handles an access to guest-physical memory that nothing backs yet.
    pub(crate) fn violation(
        &mut self,
        backing: &mut Backing,
        gpa: GuestPhysAddr,
        actor: &mut Actor<'_>,
    ) -> Result<(), HostFull> {
        let (size, frame) = match backing.policy {
            BackingPolicy::ByNode { slow, pages } => {
                let node = &mut self.nodes[usize::from(gpa >= slow)];
                let frame = match pages {
                    PageSize::Base => node.take_page(),
                    _ => node.take_block(),
                };
                (pages, frame.ok_or(HostFull)?)
            }
            BackingPolicy::First(tier) => {
                let [first, second] = match tier {
                    TierId::Fast => [0, 1],
                    TierId::Slow => [1, 0],
                };
                let has_room = self.nodes[first].usable() > 0;
                let frame = has_room.then(|| self.nodes[first].take_page()).flatten();
                let frame = frame.or_else(|| self.nodes[second].take_page());
                // The watermark gives way before a guest does.
                let frame = frame.or_else(|| self.nodes[first].take_page());
                (PageSize::Base, frame.ok_or(HostFull)?)
            }
        };
        let (bytes, real) = match size {
            PageSize::Base => (1 << self.page_bits, self.page_bits - 12),
            _ => (BLOCK_SIZE, 0),
        };
        backing
            .tree
            .map(GuestPhysAddr(gpa.0 & !(bytes - 1)), size, frame);
        actor.charge(Cause::Exit, actor.costs.ept_violation_ps << real);
        actor.clear(Cause::Exit, self.tier_of(frame), bytes);
        Ok(())
    }

    /// Takes the memory back that backs a block of a VM. What was cached from the tables is the
    /// caller's to invalidate.
    pub(crate) fn release_block(&mut self, backing: &mut Backing, start: GuestPhysAddr) {
        let end = GuestPhysAddr(start.0 + BLOCK_SIZE);
        let mut backed = vec![];
        backing.tree.for_each(start..end, |at, entry, size| {
            backed.push((at, entry.index(), size));
        });
        for (at, frame, size) in backed {
            backing.tree.unmap(at);
            let node = &mut self.nodes[self.tier_of(frame) as usize];
            match size {
                PageSize::Base => node.give_page(frame),
                _ => node.give_block(frame),
            }
        }
    }

    /// Backs all of a VM's memory with pages of this size, in one piece; nothing else is backed yet.
    /// Tells the first frame.
    pub(crate) fn reserve(
        &mut self,
        backing: &mut Backing,
        end: GuestPhysAddr,
        size: PageSize,
    ) -> Result<u32, HostFull> {
        reserve(
            &mut backing.tree,
            &mut self.nodes,
            GuestPhysAddr(0)..end,
            size,
            None,
        )
        .ok_or(HostFull)
    }

    /// Backs all of a VM's memory page by page, of which `slow` pages are slow: each of these in a pair with
    /// a fast one, and the fast ones that are left evenly in between.
    pub(crate) fn back_in_pairs(
        &mut self,
        backing: &mut Backing,
        end: GuestPhysAddr,
        slow: u64,
        flat: &mut Flat,
    ) -> Result<(), HostFull> {
        let pages = end.0 >> self.page_bits;
        let dedicated = pages.checked_sub(2 * slow).ok_or(HostFull)?;
        let mut in_pairs = Vec::with_capacity(slow as usize);
        let mut joined = 0;
        for page in 0..pages {
            let is_dedicated = (page + 1) * dedicated / pages > page * dedicated / pages;
            let is_slow = !is_dedicated && in_pairs.len() as u64 == slow;
            let frame = self.nodes[usize::from(is_slow)].take_page();
            let frame = frame.ok_or(HostFull)?;
            let gpa = GuestPhysAddr(page << self.page_bits);
            backing.tree.map(gpa, PageSize::Base, frame);
            if is_slow {
                flat.join(in_pairs[joined], frame);
                joined += 1;
            } else if !is_dedicated {
                in_pairs.push(frame);
            }
        }
        Ok(())
    }

    /// Free pages of a tier.
    pub(crate) fn free_pages(&self, tier: TierId) -> u32 {
        self.nodes[tier as usize].free()
    }

    /// All pages of the host's memory.
    pub(crate) fn pages(&self) -> u32 {
        self.nodes[1].frames().end
    }

    /// Moves the base page of a VM at a guest-physical address to a tier; true when it did. What
    /// was cached from the tables is the caller's to invalidate.
    pub(crate) fn migrate(
        &mut self,
        backing: &mut Backing,
        gpa: GuestPhysAddr,
        to: TierId,
        actor: &mut Actor<'_>,
    ) -> bool {
        let Some((entry, PageSize::Base)) = backing.tree.find_mut(gpa) else {
            return false;
        };
        let old = entry.index();
        let from = if old >= self.nodes[1].frames().start {
            TierId::Slow
        } else {
            TierId::Fast
        };
        if from == to {
            return false;
        }
        let Some(new) = self.nodes[to as usize].take_page() else {
            return false;
        };
        entry.set_index(new);
        self.nodes[from as usize].give_page(old);
        actor.charge_page(Cause::Migrate, actor.costs.migrate_page_ps);
        actor.copy(Cause::Migrate, from, to, 1 << self.page_bits);
        backing.moved_bytes[to as usize] += 1 << self.page_bits;
        true
    }
}

/// Maps a range to memory in one piece, with pages of this size: of the last page no more may be
/// there than the range needs. With `piece` something else takes a block behind each piece of so many
/// bytes. Tells the first frame; nothing where the nodes are not free or too small.
pub(crate) fn reserve<A: Address>(
    tree: &mut Radix<A>,
    nodes: &mut [Node; 2],
    range: std::ops::Range<A>,
    size: PageSize,
    piece: Option<u64>,
) -> Option<u32> {
    let page_bits = tree.page_bits();
    let range = range.start.number()..range.end.number();
    let mut first = None;
    let mut others = 0;
    for (i, at) in range.clone().step_by(BLOCK_SIZE as usize).enumerate() {
        let block = nodes.iter_mut().find_map(Node::take_block)?;
        let expected =
            *first.get_or_insert(block) + ((i as u32 + others) << (HUGE_BITS - page_bits));
        if block != expected {
            return None;
        }
        if piece.is_some_and(|bytes| (at + BLOCK_SIZE - range.start).is_multiple_of(bytes)) {
            nodes.iter_mut().find_map(Node::take_block)?;
            others += 1;
        }
        match size {
            PageSize::Base => {
                for page in 0..1u32 << (HUGE_BITS - page_bits) {
                    let at = at + (u64::from(page) << page_bits);
                    tree.map(A::of(at), size, block + page);
                }
            }
            PageSize::Huge => tree.map(A::of(at), size, block),
            PageSize::Giant => {
                if at.is_multiple_of(1 << (HUGE_BITS + 9)) {
                    tree.map(A::of(at), size, block);
                }
            }
        }
    }
    first
}

impl Backing {
    /// Nothing backed yet. `first_page`: the 4 KiB page of host memory where the tables begin.
    pub(crate) fn new(levels: u32, page_bits: u32, first_page: u32, policy: BackingPolicy) -> Self {
        Self {
            tree: Radix::new(levels, page_bits),
            first_page,
            moved_bytes: [0; 2],
            policy,
            segments: Segments::default(),
            is_native: false,
        }
    }
}
