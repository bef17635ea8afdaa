//! The protocol between driver and engine: inputs and requests.

use crate::tier::Direction;
use crate::{
    Block, ByLevel, ByteCount, Level, Observation, Pid, Relocation, Sample, Share, Socket, Spread,
    VirtRange,
};

/// An input to the engine.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input<'a> {
    /// An epoch begins, after the time of [`Request::Sleep`].
    ///
    /// If a strategy classifies apart, an epoch may also begin between two batches. A requested batch that has not
    /// started is then requested again later.
    Epoch,
    /// A process is managed from now on.
    Started(Pid),
    /// A process has ended, or is no longer managed.
    Ended(Pid),
    /// All movable memory of a process.
    Space {
        /// The process.
        pid: Pid,
        /// Its mappings, sorted and disjoint.
        vmas: &'a [VirtRange],
    },
    /// The process's share of fast memory from now on; without one it belongs to the others. Moves that give it its
    /// share need not pay.
    Share {
        /// The process.
        pid: Pid,
        /// Its share.
        share: Option<Share>,
    },
    /// The socket on which a process runs; the first by default. An exchange prefers to demote memory that lies near
    /// this socket, so that promoted memory finds room there.
    Near {
        /// The process.
        pid: Pid,
        /// The socket.
        socket: Socket,
    },
    /// Free memory of a tier near a socket, of machines with several. It comes before [`Input::Nodes`]. A promotion
    /// uses free memory near its process, then an exchange with memory there, then free memory elsewhere.
    Room {
        /// The tier and the socket.
        place: (Level, Socket),
        /// Free memory that moves may use.
        free: ByteCount,
    },
    /// The machine's sizes or CPUs have changed.
    Machine {
        /// Size of each tier.
        sizes: ByLevel<ByteCount>,
        /// CPUs that programs run on.
        cpus: u32,
    },
    /// Fast memory that the balloon waits for, and that is kept free for it; zero if it no longer waits.
    BalloonWants(ByteCount),
    /// From now on each n-th sample is taken. At first `n` is 1.
    Thinned(u32),
    /// Whether observing and moving are paused from now on.
    Paused(bool),

    /// Answers [`Request::Refresh`], after all changes were reported.
    Refreshed,
    /// One of the samples for [`Request::Samples`].
    Sample(Sample),
    /// The result of looks at one block, from trackers that scan accessed bits.
    Looked(Observation),
    /// Answers [`Request::Samples`], after all of them.
    SamplesEnd {
        /// Samples that the tracker lost.
        lost: u64,
        /// Records that were malformed or without a known process.
        rejected: u64,
        /// Whether the events repeat earlier ones, because nothing was scanned since.
        is_repeat: bool,
    },
    /// Answers [`Request::LookUp`]: the place of each block, in order.
    Located(&'a [Spread]),
    /// Answers [`Request::LookUp`] if it failed.
    LookUpFailed,
    /// Answers [`Request::ReadNodes`].
    Nodes(ByLevel<NodeFacts>),
    /// Answers [`Request::Move`].
    Moved {
        /// Verified new place of each block, in order.
        placements: &'a [Spread],
        /// Duration, nanoseconds.
        took_ns: u64,
        /// CPU time of all movers, nanoseconds: what programs did meanwhile is no cost.
        cpu_ns: u64,
    },
    /// Answers [`Request::Move`] if the whole call failed, for example because the process has ended.
    MoveFailed,
    /// Answers [`Request::Collapse`], whether its blocks could be collapsed or not.
    Collapsed {
        /// Duration, nanoseconds.
        took_ns: u64,
        /// CPU time, nanoseconds.
        cpu_ns: u64,
    },
    /// Answers [`Request::Reclaim`].
    Reclaimed,
}

/// The state of a tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// Free memory.
    pub free: ByteCount,
    /// Memory to leave to the kernel: one of its watermarks, including the zones' reserves.
    pub kept: ByteCount,
    /// Latency of a load under the tier's load now, nanoseconds; `None` where nobody measures it.
    pub latency_ns: Option<u32>,
}

impl NodeFacts {
    /// Memory that programs can take before the kernel starts to reclaim.
    pub fn usable(&self) -> ByteCount {
        ByteCount(self.free.0.saturating_sub(self.kept.0))
    }

    /// Memory that the tier lacks until any is usable.
    pub fn missing(&self) -> ByteCount {
        ByteCount(self.kept.0.saturating_sub(self.free.0))
    }
}

/// A request of the engine. It stays until it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// List processes and their mappings, report changes, then answer [`Input::Refreshed`].
    Refresh,
    /// Report the samples or observations since the last time, then answer [`Input::SamplesEnd`].
    Samples {
        /// The limit; further samples count as lost.
        most: usize,
        /// Blocks that a scanning tracker should scan first.
        wanted: &'a [(Pid, Block)],
    },
    /// Look up the places of these blocks: [`Input::Located`] or [`Input::LookUpFailed`].
    LookUp {
        /// The process.
        pid: Pid,
        /// Its blocks.
        blocks: &'a [Block],
    },
    /// Read the state of tiers now: [`Input::Nodes`].
    ReadNodes,
    /// Move these blocks and look up their new places: [`Input::Moved`] or [`Input::MoveFailed`].
    Move {
        /// The process.
        pid: Pid,
        /// The boundary: the one below this tier.
        level: Level,
        /// The direction across the boundary.
        direction: Direction,
        /// The blocks: at least one, at most [`BATCH_BLOCKS`](super::BATCH_BLOCKS) for each of the
        /// [movers](super::Engine::movers). Each of these threads moves its part of them at the same time.
        blocks: &'a [Relocation],
    },
    /// Let the small pages of these blocks become huge ones where they lie: [`Input::Collapsed`].
    Collapse {
        /// The process.
        pid: Pid,
        /// The blocks, at least one. A batch of moves has the same maximum.
        blocks: &'a [Relocation],
    },
    /// Let the kernel reclaim fast memory: [`Input::Reclaimed`].
    Reclaim,
    /// Sleep for this number of epochs: [`Input::Epoch`].
    Sleep {
        /// Number of epochs.
        epochs: u32,
    },
}

/// An input that does not fit; the engine is unchanged.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Misuse {
    /// An answer to another request, or an unexpected epoch.
    #[error("input `{input}` does not answer request `{asked}`")]
    NotAsked {
        /// The input.
        input: &'static str,
        /// The request.
        asked: &'static str,
    },
    /// An answer with the wrong number of blocks.
    #[error("the answer has {told} blocks, the request {asked}")]
    Count {
        /// Number of requested blocks.
        asked: usize,
        /// Number of answered blocks.
        told: usize,
    },
    /// A block with more bytes than its size.
    #[error("a block of 2 MiB cannot hold {0} bytes")]
    Overfull(u64),
    /// An impossible amount of memory.
    #[error("{0} bytes are more memory than a machine can have")]
    TooMuch(u64),
    /// An unknown process.
    #[error("process {0} is not known")]
    UnknownProcess(Pid),
    /// A process that is known already.
    #[error("process {0} is known already")]
    KnownProcess(Pid),
    /// Mappings that overlap or are out of order.
    #[error("the mappings of process {0} overlap or are not sorted")]
    Unsorted(Pid),
}

impl Input<'_> {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Epoch => "epoch",
            Self::Started(_) => "started",
            Self::Ended(_) => "ended",
            Self::Space { .. } => "space",
            Self::Share { .. } => "share",
            Self::Near { .. } => "near",
            Self::Room { .. } => "room",
            Self::Machine { .. } => "machine",
            Self::BalloonWants(_) => "balloon wants",
            Self::Thinned(_) => "thinned",
            Self::Paused(_) => "paused",
            Self::Refreshed => "refreshed",
            Self::Sample(_) => "sample",
            Self::Looked(_) => "looked",
            Self::SamplesEnd { .. } => "samples end",
            Self::Located(_) => "located",
            Self::LookUpFailed => "look-up failed",
            Self::Nodes(_) => "nodes",
            Self::Moved { .. } => "moved",
            Self::MoveFailed => "move failed",
            Self::Collapsed { .. } => "collapsed",
            Self::Reclaimed => "reclaimed",
        }
    }
}

impl Request<'_> {
    /// Its name.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Refresh => "refresh",
            Self::Samples { .. } => "samples",
            Self::LookUp { .. } => "look up",
            Self::ReadNodes => "read nodes",
            Self::Move { .. } => "move",
            Self::Collapse { .. } => "collapse",
            Self::Reclaim => "reclaim",
            Self::Sleep { .. } => "sleep",
        }
    }
}
