//! Chooses the node of a tier for moved memory.
//!
//! # Approach
//! Hot memory goes to the node of the faster tier that is nearest to the CPUs that use it. Cold memory goes to the
//! nearest node of the next slower tier. If that node is full, the next one follows. Memory in another socket's fast
//! node is still better placed than in slow memory, and any slower tier can take cold memory.
//!
//! # Properties
//! - There is always a result.
//! - A full node is chosen only if all are full.
//! - With two tiers of one node each there is no choice.

use std::collections::BTreeMap;

use crate::{BLOCK_SIZE, ByteCount, Level, NodeId};

/// Distance to an unknown node.
const FAR: u32 = u32::MAX;

/// Free memory of each node that moves may use.
pub type Rooms = BTreeMap<NodeId, ByteCount>;

/// Distances (SLIT, 10 is local) from one node to another.
pub type Distances = BTreeMap<(NodeId, NodeId), u32>;

/// The part of a node's free memory that counts as its tier's, which has `nodes` nodes. Half a block here and half a block
/// there make no block, so a node among several counts for nothing where no block fits. A little may be missing, as in the
/// engine.
pub fn room_of_one(free: ByteCount, nodes: usize) -> ByteCount {
    match nodes > 1 && free.0 < BLOCK_SIZE - BLOCK_SIZE / 8 {
        true => ByteCount(0),
        false => free,
    }
}

/// Chooses target nodes. See the module's text.
#[derive(Debug, Clone)]
pub struct Placer {
    tiers: Vec<Vec<NodeId>>,
    distances: Distances,
}

impl Placer {
    /// Creates a placer for the nodes of each tier, the fastest tier first.
    pub fn new(tiers: Vec<Vec<NodeId>>, distances: Distances) -> Self {
        Self { tiers, distances }
    }

    /// Whether a promotion or demotion across some tier boundary has several target nodes.
    pub fn has_choice(&self) -> bool {
        self.tiers.iter().map(Vec::len).sum::<usize>() > 2
    }

    /// Chooses the node in `tier` for `bytes` that the CPUs of `near` use, and reserves the memory.
    pub fn promote(
        &self,
        tier: Level,
        near: NodeId,
        bytes: ByteCount,
        rooms: &mut Rooms,
    ) -> NodeId {
        self.choose(&self.nearest(tier, near), bytes, rooms)
    }

    /// Chooses the node for `bytes` that leave a node of `tier`, and reserves the memory.
    pub fn demote(&self, tier: Level, from: NodeId, bytes: ByteCount, rooms: &mut Rooms) -> NodeId {
        let slower = tier.slower().flat_map(|slower| self.nearest(slower, from));
        self.choose(&slower.collect::<Vec<_>>(), bytes, rooms)
    }

    /// The nodes of a tier, the nearest first.
    fn nearest(&self, tier: Level, from: NodeId) -> Vec<NodeId> {
        let mut nodes = self.tiers.get(tier.index()).cloned().unwrap_or_default();
        nodes.sort_by_key(|&node| (self.distance(from, node), node));
        nodes
    }

    fn distance(&self, from: NodeId, to: NodeId) -> u32 {
        self.distances.get(&(from, to)).copied().unwrap_or(FAR)
    }

    /// The first node with room for `bytes`, or the node with the most room.
    fn choose(&self, nodes: &[NodeId], bytes: ByteCount, rooms: &mut Rooms) -> NodeId {
        let room = |node: &NodeId| rooms.get(node).map_or(0, |room| room.0);
        let fits = |node: &&NodeId| room(node) >= bytes.0;
        let roomiest = || nodes.iter().rev().max_by_key(|node| room(node));
        let chosen = nodes.iter().find(fits).or_else(roomiest);
        // A tier has a node, and every tier except the last has a slower one.
        let chosen = chosen.copied().unwrap_or(NodeId(0));
        if let Some(room) = rooms.get_mut(&chosen) {
            room.0 = room.0.saturating_sub(bytes.0);
        }
        chosen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;
    use crate::MIB;

    const BLOCK: ByteCount = ByteCount(2 * MIB);

    /// Two sockets, each with DRAM (0 and 1) and CXL memory (2 and 3), and far memory (4) at socket 0.
    fn placer() -> Placer {
        let distances: [[u32; 5]; 5] = [
            [10, 21, 14, 24, 28],
            [21, 10, 24, 14, 31],
            [14, 24, 10, 26, 30],
            [24, 14, 26, 10, 33],
            [28, 31, 30, 33, 10],
        ];
        let from = |(from, row): (u32, [u32; 5])| {
            let to = move |(to, distance)| ((NodeId(from), NodeId(to)), distance);
            (0..).zip(row).map(to)
        };
        let distances = (0..).zip(distances).flat_map(from).collect();
        let tiers = [&[0, 1][..], &[2, 3], &[4]];
        let numbers = |tier: &[u32]| tier.iter().copied().map(NodeId).collect();
        Placer::new(tiers.map(numbers).into(), distances)
    }

    #[test]
    fn parts_of_a_block_on_several_nodes_are_no_room() {
        let room = |bytes, nodes| room_of_one(ByteCount(bytes), nodes).0;
        assert_eq!([room(MIB, 2), room(2 * MIB - 1, 2)], [0, 2 * MIB - 1]);
        assert_eq!([room(5 * MIB, 2), room(MIB, 1)], [5 * MIB, MIB]);
    }

    fn rooms(mib: [u64; 5]) -> Rooms {
        let room = |(id, mib): (u32, u64)| (NodeId(id), ByteCount(mib * MIB));
        (0..).zip(mib).map(room).collect()
    }

    #[test]
    fn hot_memory_goes_to_its_socket_and_then_to_the_other_one() {
        let placer = placer();
        // Its last block of room is nearer than any room of the other socket.
        let mut rooms = rooms([5, 100, 0, 0, 0]);
        let went = [(); 3].map(|()| placer.promote(Level::First, NodeId(0), BLOCK, &mut rooms).0);
        assert_eq!(went, [0, 0, 1]);
        assert_eq!(
            placer.promote(Level::First, NodeId(1), BLOCK, &mut rooms),
            NodeId(1)
        );
    }

    #[test]
    fn cold_memory_goes_to_the_nearest_slower_node_with_room() {
        let placer = placer();
        let went = |from, mib| {
            placer
                .demote(Level::First, NodeId(from), BLOCK, &mut rooms(mib))
                .0
        };
        assert_eq!(went(0, [0, 0, 50, 50, 50]), 2);
        assert_eq!(went(1, [0, 0, 50, 50, 50]), 3);
        assert_eq!(went(0, [0, 0, 1, 50, 50]), 3);
        assert_eq!(went(0, [0, 0, 1, 1, 50]), 4);
        // If no node has room, the one with the most free memory is chosen.
        assert_eq!(went(0, [0, 0, 0, 1, 0]), 3);
        assert_eq!(
            placer.demote(Level::Second, NodeId(2), BLOCK, &mut rooms([9; 5])),
            NodeId(4)
        );
    }

    proptest! {
        #[test]
        fn a_full_node_is_named_only_where_all_are(
            mib in prop::array::uniform5(0u64..20), near in 0u32..2, is_first: bool,
        ) {
            let placer = placer();
            let before = rooms(mib);
            let mut after = before.clone();
            let tier = if is_first { Level::First } else { Level::Second };
            let nodes = placer.tiers[tier.index()].clone();
            let chosen = placer.promote(tier, NodeId(near), BLOCK, &mut after);
            prop_assert!(nodes.contains(&chosen));
            let has_room = |node: &NodeId| before[node] >= BLOCK;
            prop_assert!(has_room(&chosen) || !nodes.iter().any(has_room));
            let taken = before[&chosen].0 - after[&chosen].0;
            prop_assert_eq!(taken, BLOCK.0.min(before[&chosen].0));
        }
    }
}
