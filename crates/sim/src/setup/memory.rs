//! The memory of host and guests.

use demeter_policy::{BLOCK_SIZE, ByteCount};

use super::WorldSetup;
use crate::guest::{GuestConfig, NodeConfig};
use crate::hypervisor::Hypervisor;
use crate::machine::memory::{Memory, NodeModel};
use crate::machine::radix::{table_bytes, touched_table_bytes};
use crate::resizable::Sizes;
use crate::system::{Needs, Tiering};

impl WorldSetup {
    /// The host's memory and hypervisor for a number of VMs, and the bytes of each VM's second-level tables.
    pub(super) fn host_memory(&self, needs: &Needs, count: u64) -> (Hypervisor, Memory, u64) {
        let Sizes { nodes, host, .. } = &self.sizes;
        let own: u64 = nodes.iter().map(|node| node.0).sum();
        let guest_tables = table_bytes(own).next_multiple_of(BLOCK_SIZE);
        let host_tables = table_bytes(guest_tables + own + BLOCK_SIZE);
        // Unused table memory of a tiering hypervisor would be a gift to its guest, so tables get exact backing.
        let backed_tables = match (needs.tiering, &self.translation) {
            (Tiering::Hypervisor, None) => touched_table_bytes(own, 1 << self.page_bits()),
            _ => guest_tables,
        };
        // Spare pages through which pages move between VMs.
        let spare = match needs.tiering {
            Tiering::Hardware => BLOCK_SIZE,
            Tiering::Guest | Tiering::Hypervisor => 0,
        };
        // The guest's tables lie in the first node with memory.
        let with_tables = host.iter().position(|node| node.0 > 0);
        let size = |(node, bytes): (usize, &ByteCount)| {
            let tables = if Some(node) == with_tables {
                backed_tables
            } else {
                0
            };
            ByteCount(count * (tables + bytes.0 + spare))
        };
        let host_nodes: Vec<ByteCount> = host.iter().enumerate().map(size).collect();
        let hypervisor = Hypervisor::new(
            self.page_bits(),
            ByteCount(count * host_tables),
            &host_nodes,
            needs.watermarks,
        );
        let starts = match self.translation {
            // Without a hypervisor, the guest's memory is the machine's.
            Some(translation) if !translation.mode.is_nested() => vec![guest_tables + nodes[0].0],
            _ => hypervisor.node_starts(),
        };
        let memory = Memory::new(&self.cpu, &self.nodes, &starts);
        (hypervisor, memory, host_tables)
    }

    /// The configuration of each VM's guest, under a system with these needs.
    pub(super) fn guest_config(&self, needs: &Needs) -> GuestConfig {
        let sizes = self.sizes.nodes.iter();
        let nodes = match needs.tiering {
            Tiering::Guest => {
                let node = |(&bytes, node): (&ByteCount, &NodeModel)| NodeConfig {
                    bytes,
                    level: node.level,
                    socket: node.socket,
                };
                sizes.zip(&self.nodes).map(node).collect()
            }
            Tiering::Hypervisor | Tiering::Hardware => {
                let all = sizes.map(|node| node.0).sum();
                NodeConfig::of_tiers([ByteCount(all), ByteCount(0)])
            }
        };
        GuestConfig {
            levels: self.cpu.levels,
            page_bits: self.page_bits(),
            nodes,
            orders: self.orders.clone(),
            huge_pages: self.huge_pages,
            huge_in_slow: needs.huge_in_slow && !self.is_lab,
            interleave: needs.interleave,
            reserved: self.reserved,
            watermarks: needs.watermarks,
            lists: needs.lists.clone(),
        }
    }
}
