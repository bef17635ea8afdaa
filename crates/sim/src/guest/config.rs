//! Memory layout and allocation policy of a guest.

use demeter_policy::{ByteCount, Level, Socket};

use super::Watermarks;
use crate::machine::memory::NodeIndex;
use crate::reclaim::Lists;

/// Memory layout and allocation policy of a guest.
#[derive(Debug, Clone)]
pub(crate) struct GuestConfig {
    /// Levels of page tables.
    pub(crate) levels: u32,
    /// log2 of a page's bytes.
    pub(crate) page_bits: u32,
    /// The nodes, by number.
    pub(crate) nodes: Vec<NodeConfig>,
    /// The nodes that first touches try, in order, by the socket of their process.
    pub(crate) orders: Vec<Vec<NodeIndex>>,
    /// Whether faults allocate huge pages, and khugepaged collapses small ones.
    pub(crate) huge_pages: bool,
    /// Whether a fault falls back to huge pages of the slow node.
    pub(crate) huge_in_slow: bool,
    /// Pages that go to the fast node and to the slow one in turn, where fresh memory is interleaved.
    pub(crate) interleave: Option<[u32; 2]>,
    /// Watermarks of all nodes but those of the slowest tier.
    pub(crate) watermarks: Watermarks,
    /// The page lists that reclaim uses.
    pub(crate) lists: Lists,
    /// Address space that the program reserves before each mapping.
    pub(crate) reserved: ByteCount,
}

/// A node of a guest.
#[derive(Debug, Clone, Copy)]
pub(crate) struct NodeConfig {
    /// Its size; zero for a node without memory.
    pub(crate) bytes: ByteCount,
    /// Its tier.
    pub(crate) level: Level,
    /// Its socket.
    pub(crate) socket: Socket,
}

impl NodeConfig {
    /// A fast and a slow node of these sizes; the slow one may be empty.
    pub(crate) fn of_tiers([fast, slow]: [ByteCount; 2]) -> Vec<Self> {
        let node = |bytes, level| Self {
            bytes,
            level,
            socket: Socket::default(),
        };
        vec![node(fast, Level::First), node(slow, Level::Second)]
    }
}
