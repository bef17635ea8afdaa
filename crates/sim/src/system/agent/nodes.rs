//! Reads the guest's nodes and the places of blocks, as the agent reads them from /sys and by `move_pages`.

use demeter_policy::{Block, ByLevel, ByteCount, Level, NodeId, Spread, VirtRange, room_of_one};

use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_NS;
use crate::machine::memory::NodeIndex;

/// The placement of a block.
pub(super) fn place(block: Block, guest: &mut Guest) -> Spread {
    let range = VirtRange::new(block.start(), Block(block.0 + 1).start());
    range.map_or_else(Spread::default, |range| guest.spread(&range))
}

/// The size of each tier.
pub(super) fn sizes_of(guest: &Guest) -> ByLevel<ByteCount> {
    let mut sizes = ByLevel::<ByteCount>::default();
    for node in guest.all_nodes() {
        let size = u64::from(guest.frames_of(node)) << guest.page_bits();
        sizes.get_mut(guest.level_of(node)).0 += size;
    }
    sizes
}

/// Memory of a tier that programs can take, summed by node: one node's reserve cannot be used on another.
pub(super) fn usable_of(guest: &Guest, level: Level) -> ByteCount {
    let nodes = || {
        guest
            .all_nodes()
            .filter(|&node| guest.level_of(node) == level)
    };
    let count = nodes().count();
    ByteCount(
        nodes()
            .map(|node| room_of_one(guest.usable(node), count).0)
            .sum(),
    )
}

/// Latency of a tier under load. As in a live agent, it is known where each tier is one node.
pub(super) fn loaded_ns(guest: &Guest, actor: &Actor<'_>, level: Level) -> Option<u32> {
    let nodes = guest.nodes_with_memory();
    let mut levels: Vec<Level> = nodes.map(|node| guest.level_of(node)).collect();
    levels.sort_unstable();
    let mut of_tier = guest.nodes_with_memory();
    let node = of_tier.find(|&node| guest.level_of(node) == level)?;
    let is_simple = levels.windows(2).all(|pair| pair[0] != pair[1]);
    let ns = actor.latency_ps(node) / PS_PER_NS;
    u32::try_from(ns).ok().filter(|_| is_simple)
}

/// The number of a node, as the placer knows it.
pub(super) fn id(node: NodeIndex) -> NodeId {
    NodeId(node.0 as u32)
}
