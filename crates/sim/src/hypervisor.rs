//! The hypervisor: host memory, second-level tables, exits.
//!
//! Host-physical memory holds the second-level tables of all VMs, then the nodes in the order of their numbers: on most
//! machines the fast tier, then the slow tier.

use demeter_policy::{BLOCK_SIZE, ByteCount, GuestPhysAddr, Tier};

use crate::guest::{Node, Watermarks, node_of, node_starts, reserve};
use crate::machine::actor::Actor;
use crate::machine::flat::Flat;
use crate::machine::ledger::Cause;
use crate::machine::memory::NodeIndex;
use crate::machine::radix::{HUGE_BITS, PageSize, Radix};
use crate::machine::segment::Segments;

/// The host's physical memory.
#[derive(Debug, Clone)]
pub(crate) struct Hypervisor {
    nodes: Vec<Node>,
    page_bits: u32,
}

/// The backing of a VM's memory.
#[derive(Debug, Clone)]
pub(crate) struct Backing {
    /// The second-level tables.
    pub(crate) tree: Radix<GuestPhysAddr>,
    /// The first 4 KiB page of host memory that holds tables.
    pub(crate) first_page: u32,
    /// Bytes promoted and demoted by the hypervisor.
    pub(crate) moved_bytes: [u64; 2],
    /// The policy that chooses tiers.
    policy: BackingPolicy,
    /// Segments, which translate without tables.
    pub(crate) segments: Segments,
    /// Whether there is no hypervisor: guest-physical addresses are host addresses.
    pub(crate) is_native: bool,
}

/// The choice of a node for a page on first touch.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) enum BackingPolicy {
    /// The host's node with the number of the guest's.
    ByNode {
        /// Start of each of the guest's nodes but the first, in ascending order.
        starts: Vec<GuestPhysAddr>,
        /// The page size of backing memory.
        pages: PageSize,
    },
    /// Page by page from this tier while it has free pages.
    First(Tier),
}

/// Error: the host has no free memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("the host's memory is full")]
pub(crate) struct HostFull;

impl Hypervisor {
    /// A host with free memory in nodes of these sizes. `tables` bytes below them hold second-level tables. `watermarks`
    /// apply to the first node if a system tiers in the host.
    pub(crate) fn new(
        page_bits: u32,
        tables: ByteCount,
        nodes: &[ByteCount],
        watermarks: Watermarks,
    ) -> Self {
        let per_block = 1u32 << (HUGE_BITS - page_bits);
        let frames = |bytes: ByteCount| bytes.0.div_ceil(BLOCK_SIZE) as u32 * per_block;
        let mut end = frames(tables);
        let mut watermarks = std::iter::once(watermarks);
        let mut node = |&bytes: &ByteCount| {
            let start = end;
            end += frames(bytes);
            let watermarks = watermarks.next().unwrap_or(Watermarks::NONE);
            Node::new(start..end, per_block, watermarks)
        };
        Self {
            nodes: nodes.iter().map(&mut node).collect(),
            page_bits,
        }
    }

    /// The address where each node but the first begins. The tables below all nodes lie in the first one with memory.
    pub(crate) fn node_starts(&self) -> Vec<u64> {
        let starts = node_starts(&self.nodes).into_iter();
        starts
            .map(|frame| u64::from(frame) << self.page_bits)
            .collect()
    }

    /// The node of a host frame.
    pub(crate) fn node_of(&self, frame: u32) -> NodeIndex {
        node_of(&self.nodes, frame)
    }

    /// The tier of a host frame on a machine of two nodes.
    pub(crate) fn tier_of(&self, frame: u32) -> Tier {
        if frame >= self.nodes[1].frames().start {
            Tier::Slow
        } else {
            Tier::Fast
        }
    }

    /// Bytes of the fast tier.
    pub(crate) fn fast_bytes(&self) -> u64 {
        (self.nodes[0].frames().len() as u64) << self.page_bits
    }

    /// Whether free fast memory is below the watermark of promotions.
    pub(crate) fn is_short(&self) -> bool {
        self.nodes[0].is_short()
    }

    /// Bytes that promotions can use before something must be demoted.
    pub(crate) fn promotable_bytes(&self) -> u64 {
        u64::from(self.nodes[0].promotable()) << self.page_bits
    }

    /// Whether reclaim has not reached its target.
    pub(crate) fn wants_more(&self) -> bool {
        self.nodes[0].wants_more()
    }

    /// Checks that every frame is free or backs exactly one page.
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

    /// Handles an access to unbacked guest-physical memory.
    pub(crate) fn violation(
        &mut self,
        backing: &mut Backing,
        gpa: GuestPhysAddr,
        actor: &mut Actor<'_>,
    ) -> Result<(), HostFull> {
        let (size, frame) = match &backing.policy {
            BackingPolicy::ByNode { starts, pages } => {
                let node = starts.iter().filter(|&&start| gpa >= start).count();
                let node = &mut self.nodes[node];
                let frame = match pages {
                    PageSize::Base => node.take_page(),
                    _ => node.take_block(),
                };
                (*pages, frame.ok_or(HostFull)?)
            }
            BackingPolicy::First(tier) => {
                let [first, second] = match *tier {
                    Tier::Fast => [0, 1],
                    Tier::Slow => [1, 0],
                };
                let has_room = self.nodes[first].usable() > 0;
                let frame = has_room.then(|| self.nodes[first].take_page()).flatten();
                let frame = frame.or_else(|| self.nodes[second].take_page());
                // A guest takes precedence over the watermark.
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
        actor.clear(Cause::Exit, self.node_of(frame), bytes);
        Ok(())
    }

    /// Frees the memory that backs a block of a VM. The caller must invalidate cached translations.
    pub(crate) fn release_block(&mut self, backing: &mut Backing, start: GuestPhysAddr) {
        let end = GuestPhysAddr(start.0 + BLOCK_SIZE);
        let mut backed = vec![];
        backing.tree.for_each(start..end, |at, entry, size| {
            backed.push((at, entry.index(), size));
        });
        for (at, frame, size) in backed {
            backing.tree.unmap(at);
            let NodeIndex(node) = self.node_of(frame);
            let node = &mut self.nodes[node];
            match size {
                PageSize::Base => node.give_page(frame),
                _ => node.give_block(frame),
            }
        }
    }

    /// Backs all of a VM's memory contiguously with pages of this size, before anything else is backed. Returns the
    /// first frame.
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

    /// Backs all of a VM's memory page by page. Each of its `slow` slow pages is paired with a fast page; the unpaired
    /// fast pages are spread evenly.
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
    pub(crate) fn free_pages(&self, tier: Tier) -> u32 {
        self.nodes[tier as usize].free()
    }

    /// All pages of the host's memory.
    pub(crate) fn pages(&self) -> u32 {
        self.nodes.last().map_or(0, |node| node.frames().end)
    }

    /// Migrates the base page at a guest-physical address to a tier; returns whether it moved. The caller must
    /// invalidate cached translations.
    pub(crate) fn migrate(
        &mut self,
        backing: &mut Backing,
        gpa: GuestPhysAddr,
        to: Tier,
        actor: &mut Actor<'_>,
    ) -> bool {
        let Some((entry, PageSize::Base)) = backing.tree.find_mut(gpa) else {
            return false;
        };
        let old = entry.index();
        let from = if old >= self.nodes[1].frames().start {
            Tier::Slow
        } else {
            Tier::Fast
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

impl Backing {
    /// A backing without pages. `first_page`: the 4 KiB page of host memory where the tables begin.
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
