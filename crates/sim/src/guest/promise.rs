//! Fast memory that is reserved for ranges before their first touch, for the oracle.

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Level, Pid, VirtRange};

use super::Guest;
use crate::machine::memory::NodeIndex;

impl Guest {
    /// Reserves fast memory for the first touch of these ranges (sorted, disjoint): each block of the nearest node of the
    /// fastest tier that has room. The last of all such nodes takes what fits nowhere.
    pub(crate) fn promise(&mut self, ranges: &[VirtRange]) {
        let frames = (BLOCK_SIZE >> self.page_bits) as u32;
        for range in ranges {
            let nodes = self.fastest_first(self.socket_of(self.pid_of(range.start())));
            let mut start = range.start();
            while start < range.end() {
                let end = GuestVirtAddr(start.0 + BLOCK_SIZE).min(range.end());
                let has_room = |node: &&NodeIndex| self.has(**node, frames, None);
                let node = nodes.iter().find(has_room).or(nodes.last());
                let (Some(&node), Some(piece)) = (node, VirtRange::new(start, end)) else {
                    break;
                };
                self.promised_frames[node.0] += frames;
                self.promised.push((piece, node));
                start = end;
            }
        }
    }

    /// The node of which memory is reserved for an address.
    pub(super) fn promised_to(&self, gva: GuestVirtAddr) -> Option<NodeIndex> {
        let at = self
            .promised
            .partition_point(|(range, _)| range.end() <= gva);
        let (range, node) = self.promised.get(at)?;
        range.contains(gva).then_some(*node)
    }

    /// The nodes that are not of the slowest tier, those of faster tiers first, and the nearest to a socket first of each.
    fn fastest_first(&self, socket: usize) -> Vec<NodeIndex> {
        let slowest = self.levels.iter().max();
        let nodes = self.orders[socket].iter().copied();
        let mut nodes: Vec<NodeIndex> = nodes
            .filter(|&node| Some(&self.level_of(node)) != slowest)
            .collect();
        nodes.sort_by_key(|&node| self.level_of(node));
        nodes
    }

    /// The nodes that count as fast for a process: the fastest tier's. Where processes run on several sockets, only the
    /// nearest one does.
    pub(crate) fn fast_nodes(&self, pid: Pid) -> Vec<NodeIndex> {
        let mut nodes = self.fastest_first(self.socket_of(pid));
        nodes.retain(|&node| self.level_of(node) == Level::First);
        if self.orders.len() > 1 && self.processes().nth(1).is_some() {
            nodes.truncate(1);
        }
        nodes
    }
}
