//! The protocol's messages.
//!
//! The guest sends [`Hello`] every second until it is welcomed, then [`Stats`] every second. The
//! host sends [`Message::Prove`] first, then [`Message::Inflate`], [`Message::Deflate`] and
//! [`Message::List`]. Every answer carries the request's id. A request that arrives twice in one
//! session is carried out once and gets the same answer twice.

use demeter_policy::benefit::Benefit;
use demeter_policy::{ByteCount, GuestPhysAddr, NodeId};

/// Maximum number of nodes that a guest may report.
pub const NODES_MAX: usize = 8;

/// Maximum number of ranges in one message; a longer list takes several.
pub const RANGES_MAX: usize = 4095;

/// Maximum length of a reason; [`encode`](crate::encode) cuts longer ones.
pub const REASON_BYTES_MAX: usize = 200;

/// Id of one boot of a guest: `/proc/sys/kernel/random/boot_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BootId(pub [u8; 16]);

/// Random id of one run of an agent.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub u64);

/// Id of a host's request within a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// A random number that a guest must show in its memory.
///
/// It proves to the controller that the agent runs in the very VM whose memory may be punched.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub [u8; 16]);

/// A share in thousandths, 0 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Permille(u16);

impl Permille {
    /// A share of `thousandths`, at most 1000.
    pub fn new(thousandths: u16) -> Self {
        Self(thousandths.min(1000))
    }

    /// The share in thousandths.
    pub fn get(self) -> u16 {
        self.0
    }
}

/// A range of guest-physical memory as the guest names it, unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpaRange {
    /// First address.
    pub start: GuestPhysAddr,
    /// Length.
    pub bytes: ByteCount,
}

impl GpaRange {
    /// The address after the last one; `None` on overflow.
    pub fn end(&self) -> Option<GuestPhysAddr> {
        self.start.0.checked_add(self.bytes.0).map(GuestPhysAddr)
    }
}

/// A message of either side.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Guest: introduces itself.
    Hello(Hello),
    /// Guest: memory use, every second while connected.
    Stats(Stats),
    /// Guest: newly held ranges, which the host may punch. Sent before the request's `Done`.
    Inflated(Ranges),
    /// Guest: held ranges, in answer to `List`.
    Held(Ranges),
    /// Guest: a page of the driver's own begins with the nonce of `Prove`.
    Proof {
        /// The request.
        request: RequestId,
        /// The page's node.
        node: NodeId,
        /// The page.
        page: GuestPhysAddr,
    },
    /// Guest: a request has finished, successfully or not.
    Done(Done),
    /// Host: the guest's `Hello` has arrived.
    Welcome {
        /// The session in the `Hello`.
        session: SessionId,
    },
    /// Host: hold more memory.
    Inflate(Resize),
    /// Host: return held memory to the guest's kernel.
    Deflate(Resize),
    /// Host: list held ranges by address.
    ///
    /// The answer has at least one range. Its last `Held` sets `more` if further ranges remain. So
    /// neither side keeps a long list, and an interrupted listing can continue.
    List {
        /// Id of the request.
        request: RequestId,
        /// The node.
        node: NodeId,
        /// First address of the list.
        from: GuestPhysAddr,
    },
    /// Host: have the driver write the nonce into a page of its own in the node, and name the page.
    Prove {
        /// Id of the request.
        request: RequestId,
        /// The node.
        node: NodeId,
        /// The nonce.
        nonce: Nonce,
    },
    /// Host: the most that the driver may give back by itself when the guest runs out of memory. It
    /// is a total until the next `Allow`.
    Allow {
        /// Bytes of all nodes together.
        oom: ByteCount,
    },
    /// Either side: asks for a `Pong`.
    Ping {
        /// Number that the `Pong` returns.
        nonce: u64,
    },
    /// Either side: answers a `Ping`.
    Pong {
        /// Number of the `Ping`.
        nonce: u64,
    },
}

/// A guest's introduction.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Id of the boot. A change means that the guest was reset and holds nothing.
    pub boot_id: BootId,
    /// Id of the agent's run. After a change, answers to older requests will not come.
    pub session: SessionId,
    /// Whether the balloon driver is loaded.
    pub driver: bool,
    /// The guest's nodes, at most [`NODES_MAX`].
    pub nodes: Vec<NodeTotal>,
}

/// The size of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeTotal {
    /// Number of the node in the guest's kernel.
    pub node: NodeId,
    /// All memory of the guest's kernel there, including held memory.
    pub total: ByteCount,
}

/// A guest's memory use.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Memory pressure, some tasks stalled: `some avg10` of `/proc/pressure/memory`.
    pub psi_some: Permille,
    /// Memory pressure, all tasks stalled: `full avg10`.
    pub psi_full: Permille,
    /// Share of sampled accesses that fast memory served; `None` without sampling.
    pub fast_hit: Option<Permille>,
    /// Cost and benefit of moves; `None` without an agent.
    pub relocation: Option<Relocation>,
    /// Benefit of fast memory; `None` without an agent, or before it saw an access.
    pub benefit: Option<Benefit>,
    /// Memory that the driver gave back by itself since boot. The guest had run out of memory.
    pub oom_returned: ByteCount,
    /// Use of each node, at most [`NODES_MAX`].
    pub nodes: Vec<NodeStats>,
}

/// Cost and benefit of an agent's moves since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relocation {
    /// Time spent on moves, milliseconds.
    pub cost_ms: u64,
    /// Estimated time saved by moves, milliseconds; negative if they did harm.
    pub benefit_ms: i64,
    /// Whether the agent has stopped moving because moves brought no benefit.
    pub is_resting: bool,
}

/// A guest's use of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeStats {
    /// Number of the node in the guest's kernel.
    pub node: NodeId,
    /// All memory of the guest's kernel there, including held memory.
    pub total: ByteCount,
    /// Free memory.
    pub free: ByteCount,
    /// Memory that the driver holds for the host.
    pub held: ByteCount,
    /// Estimated working set; 0 without sampling.
    pub working_set: ByteCount,
}

/// A part of a list of ranges.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Ranges {
    /// The request that this answers.
    pub request: RequestId,
    /// The node in which the ranges lie.
    pub node: NodeId,
    /// Whether another part follows.
    pub more: bool,
    /// Ranges, at most [`RANGES_MAX`].
    pub ranges: Vec<GpaRange>,
}

/// A request to hold more or less memory.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resize {
    /// Id of the request.
    pub request: RequestId,
    /// The node.
    pub node: NodeId,
    /// Size of the change.
    pub bytes: ByteCount,
}

/// Result of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// The request.
    pub request: RequestId,
    /// The node.
    pub node: NodeId,
    /// Change of held memory by this request.
    pub moved: ByteCount,
    /// Memory held in the node now.
    pub held: ByteCount,
    /// Outcome of the request.
    pub outcome: Outcome,
    /// Reason for a failure, for people; empty on success. Cleaned by [`shown`](crate::shown) in
    /// transit.
    pub reason: String,
}

/// Outcome of a request.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// The request was fulfilled.
    Ok,
    /// The request was fulfilled in part; the rest is not available now.
    Partial,
    /// Nothing was done: the balloon driver is not loaded.
    NoDriver,
    /// Nothing was done, for another reason.
    Refused,
}

/// Reason why a message cannot be encoded; its sender must split it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// More nodes than a message can carry.
    #[error("{0} nodes in one message; the protocol carries at most {NODES_MAX}")]
    Nodes(usize),
    /// More ranges than a message can carry.
    #[error("{0} ranges in one message; send them in parts of at most {RANGES_MAX}")]
    Ranges(usize),
}
