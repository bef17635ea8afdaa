//! A guest's kernel: address space, page tables, nodes, faults, migration, hint faults and reclaim.
//!
//! Guest-physical memory holds the page tables, then the nodes in the order of their numbers: on most machines a fast one
//! and a slow one. If the hypervisor tiers memory, the guest has one node.
//!
//! Each process runs on one socket. Its first touches take the nearest node with room above its watermark, then any.

mod balloon;
mod config;
mod fault;
mod frames;
mod hint;
mod interleave;
mod khugepaged;
mod mappings;
mod migrate;
mod node;
mod plug;
mod promise;
mod reclaim;
mod shadow;

use std::collections::BTreeMap;
use std::ops::Range;

use demeter_policy::{
    BLOCK_SIZE, ByteCount, GuestPhysAddr, GuestVirtAddr, Level, PAGE_SIZE, Pid, Socket, Spread,
    Tier, VirtRange,
};

use crate::machine::memory::NodeIndex;
use crate::machine::radix::{HUGE_BITS, PageSize, Radix, table_bytes};
use crate::program::Region;
use crate::reclaim::Lists;
pub(crate) use config::{GuestConfig, NodeConfig};
pub(crate) use fault::OutOfMemory;
use frames::Frames;
use interleave::Interleave;
use khugepaged::Khugepaged;
use mappings::Mappings;
pub(crate) use node::{Node, Watermarks, node_of, node_starts, reserve};

/// Event counts, in real pages or bytes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(crate) struct GuestCounts {
    pub(crate) promoted_bytes: u64,
    pub(crate) demoted_bytes: u64,
    pub(crate) faults: u64,
    pub(crate) hint_faults: u64,
    pub(crate) scanned_by_reclaim: u64,
}

/// The kernel of a guest.
#[derive(Debug, Clone)]
pub(crate) struct Guest {
    /// The page tables of all processes.
    pub(crate) tables: Radix<GuestVirtAddr>,
    /// Counts.
    pub(crate) counts: GuestCounts,
    page_bits: u32,
    nodes: Vec<Node>,
    /// The tier of each node.
    levels: Vec<Level>,
    /// The socket of each node.
    sockets: Vec<Socket>,
    /// The nodes that first touches try, in order, by socket.
    orders: Vec<Vec<NodeIndex>>,
    frames: Frames,
    mappings: Mappings,
    huge_pages: bool,
    huge_in_slow: bool,
    /// None where fresh memory is not interleaved.
    interleave: Option<Interleave>,
    /// None if the kernel does not run this thread.
    khugepaged: Option<Khugepaged>,
    /// Ranges for which memory of a node is reserved; only their untouched parts.
    promised: Vec<(VirtRange, NodeIndex)>,
    /// Number of reserved frames by node.
    promised_frames: Vec<u32>,
    lists: Lists,
    /// Frames written by kernel copies, and their page sizes, since the last [`Guest::take_written`].
    written: Vec<(u32, PageSize)>,
    /// Number of first touches.
    first_touches: u64,
    /// By frame of the fast node: the slow frame with the same content.
    shadows: BTreeMap<u32, u32>,
    /// Next frame of the fast node that the balloon tries to empty.
    balloon_hand: u32,
    /// Blocks that cannot be migrated.
    #[cfg(test)]
    pub(crate) pinned: std::collections::BTreeSet<demeter_policy::Block>,
}

impl Guest {
    /// A guest with free memory. Node sizes are rounded up to 2 MiB.
    pub(crate) fn new(config: &GuestConfig) -> Self {
        let per_block = 1 << (HUGE_BITS - config.page_bits);
        let tables = table_bytes(config.nodes.iter().map(|node| node.bytes.0).sum());
        let first = (tables.div_ceil(BLOCK_SIZE) as u32) * per_block;
        let slowest = config.nodes.iter().map(|node| node.level).max();
        let mut end = first;
        let mut node = |node: &NodeConfig| {
            let start = end;
            end += node.bytes.0.div_ceil(BLOCK_SIZE) as u32 * per_block;
            let watermarks = match Some(node.level) == slowest {
                true => Watermarks::NONE,
                false => config.watermarks,
            };
            Node::new(start..end, per_block, watermarks)
        };
        let nodes: Vec<Node> = config.nodes.iter().map(&mut node).collect();
        Self {
            tables: Radix::new(config.levels, config.page_bits),
            counts: GuestCounts::default(),
            page_bits: config.page_bits,
            promised_frames: vec![0; nodes.len()],
            nodes,
            levels: config.nodes.iter().map(|node| node.level).collect(),
            sockets: config.nodes.iter().map(|node| node.socket).collect(),
            orders: config.orders.clone(),
            frames: Frames::new(first, end - first),
            mappings: Mappings::new(config.reserved),
            huge_pages: config.huge_pages,
            huge_in_slow: config.huge_in_slow,
            interleave: config.interleave.map(Interleave::new),
            khugepaged: config.huge_pages.then(Khugepaged::default),
            promised: vec![],
            lists: config.lists.clone(),
            written: vec![],
            first_touches: 0,
            shadows: BTreeMap::new(),
            balloon_hand: 0,
            #[cfg(test)]
            pinned: Default::default(),
        }
    }

    /// Maps regions in order, each on its own blocks; returns their addresses.
    pub(crate) fn map(&mut self, regions: &[Region]) -> Vec<GuestVirtAddr> {
        self.mappings.map(regions)
    }

    /// Backs all regions with contiguous memory, or with contiguous pieces of a given size, before the first touch.
    /// Returns the virtual range and its physical address.
    pub(crate) fn reserve(
        &mut self,
        size: PageSize,
        piece: Option<u64>,
    ) -> Result<(Range<GuestVirtAddr>, GuestPhysAddr), OutOfMemory> {
        let end = GuestVirtAddr(self.mappings.end().0.next_multiple_of(BLOCK_SIZE));
        let range = GuestVirtAddr(mappings::FIRST_BASE)..end;
        let first = reserve(
            &mut self.tables,
            &mut self.nodes,
            range.clone(),
            size,
            piece,
        )
        .ok_or(OutOfMemory(range.end))?;
        // Reserved memory keeps its page size.
        self.khugepaged = None;
        Ok((range, self.gpa(first)))
    }

    /// The mappings of all processes, sorted.
    pub(crate) fn vmas(&self) -> &[VirtRange] {
        self.mappings.vmas()
    }

    /// The mappings at their maximum size.
    pub(crate) fn limits(&self) -> &[VirtRange] {
        self.mappings.limits()
    }

    /// The processes and their mappings.
    pub(crate) fn processes(&self) -> impl Iterator<Item = (Pid, &[VirtRange])> {
        self.mappings.processes()
    }

    /// The socket that a process runs on.
    pub(crate) fn socket_of(&self, pid: Pid) -> usize {
        Mappings::number(pid) as usize % self.orders.len().max(1)
    }

    /// The socket of a node.
    pub(crate) fn socket_near(&self, node: NodeIndex) -> Socket {
        self.sockets[node.0]
    }

    /// The process of an address.
    pub(crate) fn pid_of(&self, gva: GuestVirtAddr) -> Pid {
        self.mappings.pid_of(gva)
    }

    /// Whether the kernel prefers huge pages.
    pub(crate) fn wants_huge(&self) -> bool {
        self.huge_pages
    }

    /// End of guest-physical memory.
    pub(crate) fn end_gpa(&self) -> GuestPhysAddr {
        let end = self.nodes.last().map_or(0, |node| node.frames().end);
        self.gpa(end)
    }

    /// Guest-physical start of each node but the first. Page tables, below all nodes, lie in the first node with memory.
    pub(crate) fn node_starts(&self) -> Vec<GuestPhysAddr> {
        let starts = node_starts(&self.nodes).into_iter();
        starts.map(|frame| self.gpa(frame)).collect()
    }

    fn gpa(&self, frame: u32) -> GuestPhysAddr {
        GuestPhysAddr(u64::from(frame) << self.page_bits)
    }

    /// Start of the page of this size that holds `gva`.
    pub(crate) fn page_start(&self, gva: GuestVirtAddr, size: PageSize) -> GuestVirtAddr {
        GuestVirtAddr(gva.0 & !(self.bytes(size) - 1))
    }

    /// log2 of a page's bytes.
    pub(crate) fn page_bits(&self) -> u32 {
        self.page_bits
    }

    /// Bytes of a page of this size.
    pub(crate) fn bytes(&self, size: PageSize) -> u64 {
        match size {
            PageSize::Base => 1 << self.page_bits,
            PageSize::Huge => BLOCK_SIZE,
            PageSize::Giant => 1 << (HUGE_BITS + 9),
        }
    }

    /// The virtual address mapped to this guest-physical address, if any.
    pub(crate) fn mapped_from(&self, gpa: GuestPhysAddr) -> Option<GuestVirtAddr> {
        let frame = (gpa.0 >> self.page_bits) as u32;
        let first = frame & !((1 << (HUGE_BITS - self.page_bits)) - 1);
        let used = match self.frames.used(frame) {
            Some(used) => used,
            None => self.frames.used(first).filter(|used| used.huge)?,
        };
        let within = if used.huge { frame - first } else { 0 };
        Some(GuestVirtAddr(
            u64::from(used.page + within) << self.page_bits,
        ))
    }

    /// The guest-physical addresses of a node.
    pub(crate) fn span(&self, node: Tier) -> Range<GuestPhysAddr> {
        let frames = self.nodes[node as usize].frames();
        self.gpa(frames.start)..self.gpa(frames.end)
    }

    /// The node of a frame.
    pub(crate) fn node_of(&self, frame: u32) -> NodeIndex {
        node_of(&self.nodes, frame)
    }

    /// The tier of a frame in a guest of two nodes.
    pub(crate) fn tier_of(&self, frame: u32) -> Tier {
        if frame >= self.nodes[1].frames().start {
            Tier::Slow
        } else {
            Tier::Fast
        }
    }

    /// All nodes.
    pub(crate) fn all_nodes(&self) -> impl Iterator<Item = NodeIndex> + use<> {
        (0..self.nodes.len()).map(NodeIndex)
    }

    /// The nodes with memory, online or not.
    pub(crate) fn nodes_with_memory(&self) -> impl Iterator<Item = NodeIndex> {
        let nodes = self.nodes.iter().zip(self.all_nodes());
        let with_memory = nodes.filter(|(node, _)| !node.frames().is_empty());
        with_memory.map(|(_, node)| node)
    }

    /// The tier of a node.
    pub(crate) fn level_of(&self, node: NodeIndex) -> Level {
        self.levels[node.0]
    }

    /// The slow node's first frame.
    pub(crate) fn first_slow_frame(&self) -> u32 {
        self.nodes[1].frames().start
    }

    /// Frames of a node that no balloon holds.
    pub(crate) fn frames_of(&self, node: impl Into<NodeIndex>) -> u32 {
        self.nodes[node.into().0].managed()
    }

    /// Free bytes of a node above the watermark of allocations.
    pub(crate) fn usable(&self, node: impl Into<NodeIndex>) -> ByteCount {
        ByteCount(u64::from(self.nodes[node.into().0].usable()) << self.page_bits)
    }

    /// Bytes that `move_pages` can use of the fast node. It allocates as a program does that must have this node.
    pub(crate) fn allocatable(&self) -> ByteCount {
        ByteCount(u64::from(self.nodes[0].allocatable()) << self.page_bits)
    }

    /// Bytes that promotions can use before they must wait for reclaim.
    pub(crate) fn promotable(&self) -> ByteCount {
        ByteCount(u64::from(self.nodes[0].promotable()) << self.page_bits)
    }

    /// Guest-physical addresses written by the kernel since the last call. There is one for each page that the host may
    /// back separately.
    pub(crate) fn take_written(&mut self) -> Vec<GuestPhysAddr> {
        let written = std::mem::take(&mut self.written).into_iter();
        let all = written.flat_map(|(first, size)| {
            let frames = (self.bytes(size) >> self.page_bits) as u32;
            (first..first + frames).map(|frame| self.gpa(frame))
        });
        all.collect()
    }

    /// Where a range lies.
    pub(crate) fn spread(&mut self, range: &VirtRange) -> Spread {
        let mut spread = Spread::default();
        let mut by_socket = [0; Socket::MAX as usize];
        let (page_bits, nodes, levels) = (self.page_bits, &self.nodes, &self.levels);
        let sockets = &self.sockets;
        let add = |_, entry: &mut crate::machine::radix::Entry, size: PageSize| {
            let node = node_of(nodes, entry.index()).0;
            let bytes = match size {
                PageSize::Base => 1 << page_bits,
                _ => BLOCK_SIZE,
            };
            spread.bytes.get_mut(levels[node]).0 += bytes;
            by_socket[usize::from(sockets[node].number())] += bytes;
        };
        self.tables.for_each(range.start()..range.end(), add);
        let numbers = (0..by_socket.len()).rev();
        let main = numbers.max_by_key(|&number| by_socket[number]);
        spread.socket = main.map_or_else(Socket::default, Socket::new);
        spread
    }

    /// The scale: a base page stands for `2^k` real ones.
    pub(crate) fn k(&self) -> u32 {
        self.page_bits - PAGE_SIZE.trailing_zeros()
    }

    /// Number of mapped real pages.
    pub(crate) fn mapped_pages(&self) -> u64 {
        let [base, huge] = self.frames.in_use();
        (base << self.k()) + huge
    }

    /// Free bytes of all nodes.
    #[cfg(test)]
    pub(crate) fn free_bytes(&self) -> ByteCount {
        let frames: u32 = self.nodes.iter().map(Node::free).sum();
        ByteCount(u64::from(frames) << self.page_bits)
    }

    /// Checks that every frame is free or mapped once, and that page tables match the kernel's records. Returns the
    /// mapped bytes.
    #[cfg(test)]
    pub(crate) fn check_frames(&mut self) -> u64 {
        let mut pages = vec![];
        self.tables
            .for_each(GuestVirtAddr(0)..GuestVirtAddr(1 << 42), |at, e, size| {
                pages.push((at, e.index(), size))
            });
        let mut mapped: std::collections::BTreeSet<u32> = self.shadows.values().copied().collect();
        for (at, first, size) in pages {
            let used = self.frames.used(first).expect("in use");
            assert_eq!(u64::from(used.page) << self.page_bits, at.0);
            assert_eq!(used.huge, size == PageSize::Huge);
            for frame in first..first + (self.bytes(size) >> self.page_bits) as u32 {
                assert!(mapped.insert(frame), "frame {frame} is mapped twice");
            }
        }
        let in_use = (mapped.len() as u64) << self.page_bits;
        let bytes = in_use - ((self.shadows.len() as u64) << self.page_bits);
        let all: u32 = self.nodes.iter().map(Node::managed).sum();
        assert_eq!(
            self.free_bytes().0 + in_use,
            u64::from(all) << self.page_bits
        );
        bytes
    }

    /// Bytes of the simulator's own memory.
    #[cfg(test)]
    pub(crate) fn state_bytes(&self) -> usize {
        self.tables.state_bytes() + self.frames.state_bytes()
    }
}

#[cfg(test)]
pub(crate) mod tests;
