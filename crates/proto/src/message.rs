//! The messages, as values.
//!
//! The guest greets with [`Hello`] every second until it is welcomed; then it sends [`Stats`]
//! every second. The host asks with [`Message::Prove`] first, then with
//! [`Message::Inflate`], [`Message::Deflate`] and [`Message::List`]; every answer carries the request's id. A request that arrives twice in one
//! session gets the same answer twice and is carried out once.

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId};

/// The most nodes that a guest may report.
pub const NODES_MAX: usize = 8;

/// The most ranges in one message; a longer list takes several.
pub const RANGES_MAX: usize = 4095;

/// The most bytes of a reason; [`encode`](crate::encode) cuts a longer one off.
pub const REASON_BYTES_MAX: usize = 200;

/// Tells one boot of a guest from the next: `/proc/sys/kernel/random/boot_id`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct BootId(pub [u8; 16]);

/// Tells one run of an agent from the next; random.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct SessionId(pub u64);

/// Names a request of the host within a session.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct RequestId(pub u64);

/// What a controller makes up at random and a guest must show in its memory: by that the controller
/// knows that the agent it speaks with is in the very VM whose memory it may take.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Nonce(pub [u8; 16]);

/// A share in thousandths, 0 to 1000.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Default)]
pub struct Permille(u16);

impl Permille {
    /// `thousandths`, or all of it where that is more than 1000.
    pub fn new(thousandths: u16) -> Self {
        Self(thousandths.min(1000))
    }

    /// Thousandths.
    pub fn get(self) -> u16 {
        self.0
    }
}

/// A range of guest-physical memory as its guest names it: unchecked.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct GpaRange {
    /// First address.
    pub start: GuestPhysAddr,
    /// Length.
    pub bytes: ByteCount,
}

impl GpaRange {
    /// The address behind the last one, if there is one.
    pub fn end(&self) -> Option<GuestPhysAddr> {
        self.start.0.checked_add(self.bytes.0).map(GuestPhysAddr)
    }
}

/// What either side may say.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Message {
    /// Guest: here I am.
    Hello(Hello),
    /// Guest: how memory is used; every second while connected.
    Stats(Stats),
    /// Guest: newly held, the host may take it back. Comes before the request's `Done`.
    Inflated(Ranges),
    /// Guest: held, in answer to `List`.
    Held(Ranges),
    /// Guest: the nonce of `Prove` lies at the beginning of a page of the driver's own.
    Proof {
        /// Which request this answers.
        request: RequestId,
        /// In which node the page lies.
        node: NodeId,
        /// The page.
        page: GuestPhysAddr,
    },
    /// Guest: a request is finished, well or not.
    Done(Done),
    /// Host: your `Hello` has arrived.
    Welcome {
        /// The session that the `Hello` named.
        session: SessionId,
    },
    /// Host: hold so much more memory.
    Inflate(Resize),
    /// Host: give so much of what is held back to your kernel.
    Deflate(Resize),
    /// Host: name what is held, by address: at least one range, and `more` in the last `Held` where there
    /// is more. So neither side has to keep a long list, and one that was begun is gone on with.
    List {
        /// Which request this is.
        request: RequestId,
        /// In which node.
        node: NodeId,
        /// From this address on.
        from: GuestPhysAddr,
    },
    /// Host: have your driver write this into a page of its own in the node, and name the page.
    Prove {
        /// Which request this is.
        request: RequestId,
        /// In which node.
        node: NodeId,
        /// What to write.
        nonce: Nonce,
    },
    /// Host: the most that the driver may give back by itself when the guest runs out of memory,
    /// in total until the next `Allow`.
    Allow {
        /// Bytes of all nodes together.
        oom: ByteCount,
    },
    /// Either: are you there?
    Ping {
        /// Comes back in the `Pong`.
        nonce: u64,
    },
    /// Either: here I am.
    Pong {
        /// As in the `Ping`.
        nonce: u64,
    },
}

/// A guest introduces itself.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Hello {
    /// Another one than last time: the guest was reset and holds nothing.
    pub boot_id: BootId,
    /// Another one than last time: answers to older requests will not come.
    pub session: SessionId,
    /// Whether the balloon driver is loaded.
    pub driver: bool,
    /// The guest's nodes, at most [`NODES_MAX`].
    pub nodes: Vec<NodeTotal>,
}

/// The size of a node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeTotal {
    /// As the guest's kernel numbers it.
    pub node: NodeId,
    /// All memory that the guest's kernel has there, with what is held.
    pub total: ByteCount,
}

/// How a guest uses its memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Stats {
    /// Memory pressure, some tasks stalled: `some avg10` of `/proc/pressure/memory`.
    pub psi_some: Permille,
    /// Memory pressure, all tasks stalled: `full avg10`.
    pub psi_full: Permille,
    /// Share of sampled accesses that fast memory served; `None` where nothing samples.
    pub fast_hit: Option<Permille>,
    /// What relocation has cost and brought; `None` where no agent runs.
    pub relocation: Option<Relocation>,
    /// What the driver gave back by itself, out of memory, since boot.
    pub oom_returned: ByteCount,
    /// By node, at most [`NODES_MAX`].
    pub nodes: Vec<NodeStats>,
}

/// What an agent's moves have cost and brought since it started.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Relocation {
    /// Time that moves took, milliseconds.
    pub cost_ms: u64,
    /// Time that they are taken to have saved, milliseconds; negative where they did harm.
    pub benefit_ms: i64,
    /// Whether the agent rests, because moving brings nothing.
    pub is_resting: bool,
}

/// How a guest uses one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct NodeStats {
    /// As the guest's kernel numbers it.
    pub node: NodeId,
    /// All memory that the guest's kernel has there, with what is held.
    pub total: ByteCount,
    /// Free memory.
    pub free: ByteCount,
    /// Memory that the driver holds for the host.
    pub held: ByteCount,
    /// Estimate of the memory that is in use again and again; 0 where nothing samples.
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
    /// At most [`RANGES_MAX`].
    pub ranges: Vec<GpaRange>,
}

/// Asks for more or for less to be held.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Resize {
    /// Which request this is.
    pub request: RequestId,
    /// In which node.
    pub node: NodeId,
    /// By how much.
    pub bytes: ByteCount,
}

/// What became of a request.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Done {
    /// Which request.
    pub request: RequestId,
    /// In which node.
    pub node: NodeId,
    /// How much more, or less, is held because of it.
    pub moved: ByteCount,
    /// What is held in the node now.
    pub held: ByteCount,
    /// How it went.
    pub outcome: Outcome,
    /// Why it did not go well, for a person; empty if it did. [`shown`](crate::shown) on its way.
    pub reason: String,
}

/// How a request went.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Outcome {
    /// All that was asked for.
    Ok,
    /// A part of it; the rest is not to be had now.
    Partial,
    /// Nothing: the balloon driver is not loaded.
    NoDriver,
    /// Nothing, for another reason.
    Refused,
}

/// Why a message cannot be sent: it is the sender who must split it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
pub enum EncodeError {
    /// More nodes than the protocol carries.
    #[error("{0} nodes in one message; the protocol carries at most {NODES_MAX}")]
    Nodes(usize),
    /// More ranges than a message takes.
    #[error("{0} ranges in one message; send them in parts of at most {RANGES_MAX}")]
    Ranges(usize),
}
