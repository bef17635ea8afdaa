//! Memory of nodes that comes online and goes offline while the guest runs.
//!
//! The kernel migrates all pages of a node away before its memory goes offline.

use demeter_policy::GuestVirtAddr;

use super::Guest;
use crate::machine::actor::Actor;
use crate::machine::memory::NodeIndex;

impl Guest {
    /// Takes all free memory of a node offline.
    pub(crate) fn hold(&mut self, node: NodeIndex) {
        while self.nodes[node.0].hold_block().is_some() {}
    }

    /// Brings a node's memory online.
    pub(crate) fn come(&mut self, node: NodeIndex) {
        while self.nodes[node.0].release_block() {}
    }

    /// Migrates a node's memory to the nearest other nodes with room, and takes offline what is
    /// free then.
    pub(crate) fn leave(&mut self, node: NodeIndex, actor: &mut Actor<'_>) {
        let used = self.nodes[node.0].frames();
        let used = used.filter_map(|frame| self.frames.used(frame));
        let pages: Vec<GuestVirtAddr> = used
            .map(|used| GuestVirtAddr(u64::from(used.page) << self.page_bits))
            .collect();
        for at in pages {
            let order = self.orders[self.socket_of(self.pid_of(at))].clone();
            let mut others = order.into_iter().filter(|&other| other != node);
            others.find(|&other| {
                self.has_room_for(at, other) && self.migrate(at, other, true, actor)
            });
        }
        self.hold(node);
    }

    /// Whether a node has memory above its watermark for the page of an address.
    fn has_room_for(&self, at: GuestVirtAddr, node: NodeIndex) -> bool {
        let size = self.tables.find(at).map(|(_, size)| self.bytes(size));
        size.is_some_and(|bytes| self.has(node, (bytes >> self.page_bits) as u32, None))
    }
}
