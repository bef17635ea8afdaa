//! A computed B+-tree: positions of its nodes, and the lines read by a lookup.
//!
//! The tree is full and bulk-loaded bottom-up, as databases build an index. Leaves come first in key order, then each
//! level of inner nodes, the root last.

use super::memory::{LINE, load};
use crate::Batch;

/// Bytes of a node: four cache lines, so a node costs about as much as a page walk.
pub(crate) const NODE: u64 = 256;
/// Keys per node: 8 bytes of key and 8 of pointer or value each, minus one pair for the header.
pub(crate) const FANOUT: u64 = NODE / 16 - 1;

/// Maximum loads of a lookup: two per level; 2^64 keys need 17 levels.
pub(crate) const LOADS_MAX: usize = 34;

/// A tree over `keys` keys.
#[derive(Debug, Clone)]
pub(crate) struct Tree {
    keys: u64,
    /// Levels from the root down.
    levels: Vec<TreeLevel>,
}

#[derive(Debug, Clone)]
struct TreeLevel {
    /// Byte offset of its first node in the tree.
    start: u64,
    /// Number of keys below one of its nodes.
    keys_per_node: u64,
}

impl Tree {
    /// A tree over `keys` keys, at least one.
    pub(crate) fn new(keys: u64) -> Self {
        let mut levels = Vec::new();
        let (mut start, mut keys_per_node) = (0, FANOUT);
        loop {
            levels.push(TreeLevel {
                start,
                keys_per_node,
            });
            let nodes = keys.div_ceil(keys_per_node);
            if nodes == 1 {
                break;
            }
            start += nodes * NODE;
            keys_per_node = keys_per_node.saturating_mul(FANOUT);
        }
        levels.reverse();
        Self { keys, levels }
    }

    /// The largest tree that fits into `bytes`, at least one node.
    pub(crate) fn of_bytes(bytes: u64) -> Self {
        // All inner levels together need less than 1 / (FANOUT - 1) of the leaf nodes, plus one partial node per level.
        let leaves = (bytes / NODE).saturating_sub(20) * (FANOUT - 1) / FANOUT;
        Self::new(leaves.max(1) * FANOUT)
    }

    /// Number of keys.
    pub(crate) fn keys(&self) -> u64 {
        self.keys
    }

    /// Bytes of all nodes.
    pub(crate) fn bytes(&self) -> u64 {
        self.levels[0].start + NODE
    }

    /// Bytes of the leaves; inner nodes follow them.
    pub(crate) fn leaf_bytes(&self) -> u64 {
        self.keys.div_ceil(FANOUT) * NODE
    }

    /// Appends the loads of a lookup of `key` (below the count). In each node from the root to the leaf it reads the
    /// middle line, where the search begins, and the line where it ends.
    #[inline]
    pub(crate) fn lookup(&self, base: u64, key: u64, out: &mut Batch) {
        for level in &self.levels {
            let node = base + level.start + key / level.keys_per_node * NODE;
            let slot = key % level.keys_per_node / (level.keys_per_node / FANOUT);
            out.push(load(node + NODE / 2));
            out.push(load(node + LINE * (slot * 4 / FANOUT)));
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use proptest::prelude::*;

    #[test]
    fn a_small_tree_by_hand() {
        // 15 keys per leaf: 31 keys need 3 leaves, followed by a root.
        let tree = Tree::new(31);
        assert_eq!((tree.leaf_bytes(), tree.bytes()), (3 * NODE, 4 * NODE));
        let mut batch = Batch::default();
        tree.lookup(0x1000, 30, &mut batch);
        let read: Vec<u64> = batch.accesses().iter().map(|a| a.gva().0).collect();
        // Slot 2 of the root, slot 0 of the third leaf.
        assert_eq!(read, [0x1380, 0x1300, 0x1280, 0x1200]);
    }

    proptest! {
        #[test]
        fn it_fits_and_lookups_stay_inside(bytes in NODE..1 << 40, random: u64) {
            let tree = Tree::of_bytes(bytes);
            prop_assert!(tree.bytes() <= bytes, "{} of {}", tree.bytes(), bytes);
            prop_assert!(bytes < 1 << 20 || tree.bytes() > bytes / 10 * 9);
            let mut batch = Batch::default();
            tree.lookup(0, random % tree.keys(), &mut batch);
            prop_assert!(batch.accesses().len() <= LOADS_MAX);
            prop_assert!(batch.accesses().iter().all(|a| a.gva().0 < tree.bytes()));
        }

        #[test]
        fn neighbours_share_their_path(key in 0u64..1 << 30) {
            let tree = Tree::new(1 << 30);
            let path = |key| {
                let mut batch = Batch::default();
                tree.lookup(0, key, &mut batch);
                batch.accesses().iter().map(|a| a.gva().0 / NODE).collect::<Vec<_>>()
            };
            let first = key / FANOUT * FANOUT;
            let last = (first + FANOUT - 1).min((1 << 30) - 1);
            prop_assert_eq!(path(first), path(last));
        }
    }
}
