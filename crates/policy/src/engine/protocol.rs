//! What a driver tells an engine, and what an engine asks of its driver.

use crate::{
    Block, ByLevel, ByteCount, Level, Observation, Pid, Placement, Relocation, Sample, Share,
    Spread, Tier, VirtRange,
};

/// Something that a driver tells.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Input<'a> {
    /// An epoch begins: what [`Request::Sleep`] asked for has passed. Where a strategy classifies
    /// apart, one may also begin between two batches of moves; a batch that was asked for and is
    /// not begun is then asked for again later.
    Epoch,
    /// A process is to be looked after from now on.
    Started(Pid),
    /// A process has ended, or is no longer to be looked after.
    Ended(Pid),
    /// All memory of a process that may be moved.
    Space {
        /// Whose.
        pid: Pid,
        /// Its mappings, sorted and disjoint.
        vmas: &'a [VirtRange],
    },
    /// The share of fast memory that a process may have from now on; without one it belongs to the others. Moves that
    /// give it its share need not pay.
    Share {
        /// Whose.
        pid: Pid,
        /// Which.
        share: Option<Share>,
    },
    /// The socket on whose CPUs a process runs; 0 by default. An exchange rather demotes memory of a process on the same
    /// socket, so that what is promoted finds room there.
    Near {
        /// Which process.
        pid: Pid,
        /// A number for each socket.
        socket: u32,
    },
    /// Sizes and CPUs of the machine have changed.
    Machine {
        /// Size of each tier.
        sizes: ByLevel<ByteCount>,
        /// CPUs that programs run on.
        cpus: u32,
    },
    /// The balloon waits for so much fast memory, which is left free for it. Zero when it waits
    /// no longer.
    BalloonWants(ByteCount),
    /// Whether to neither observe nor move from now on.
    Paused(bool),

    /// Answers [`Request::Refresh`], after what has changed was told.
    Refreshed,
    /// One of the samples that [`Request::Samples`] asked for.
    Sample(Sample),
    /// The result of one look at a block's accessed bits, where these take the place of samples.
    Looked(Observation),
    /// Answers [`Request::Samples`], after all of them.
    SamplesEnd {
        /// Samples that the tracker lost.
        lost: u64,
        /// Records that were malformed or belonged to nobody.
        rejected: u64,
        /// They repeat what was told before: nobody has looked since.
        is_repeat: bool,
    },
    /// Answers [`Request::LookUp`]: where each block lies, in the order asked for.
    Located(&'a [Spread]),
    /// Answers [`Request::LookUp`] where nobody could look.
    LookUpFailed,
    /// Answers [`Request::ReadNodes`].
    Nodes(ByLevel<NodeFacts>),
    /// Answers [`Request::Move`].
    Moved {
        /// Where each block lies now, verified, in the order asked for.
        placements: &'a [Spread],
        /// Time that it took, nanoseconds.
        took_ns: u64,
    },
    /// Answers [`Request::Move`] where the whole call failed, for the process has gone for example.
    MoveFailed,
    /// Answers [`Request::Reclaim`].
    Reclaimed,
}

/// How full a tier is.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeFacts {
    /// Free memory.
    pub free: ByteCount,
    /// What of it is to be left to the kernel: one of its watermarks, with what zones keep back.
    pub kept: ByteCount,
}

impl NodeFacts {
    /// What programs can take before the kernel begins to reclaim.
    pub fn usable(&self) -> ByteCount {
        ByteCount(self.free.0.saturating_sub(self.kept.0))
    }
}

/// Where a move goes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, Default)]
pub enum Direction {
    /// From slow to fast memory.
    #[default]
    Promotion,
    /// From fast to slow memory.
    Demotion,
}

impl Direction {
    /// The side of a boundary that it goes to.
    pub fn to(self) -> Tier {
        match self {
            Self::Promotion => Tier::Fast,
            Self::Demotion => Tier::Slow,
        }
    }

    /// How much of a block is still on the side that it should have left.
    pub fn left(self, placement: &Placement) -> ByteCount {
        match self {
            Self::Promotion => placement.slow,
            Self::Demotion => placement.fast,
        }
    }
}

/// What an engine asks for, one thing at a time. It is asked for until it is answered.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Request<'a> {
    /// Look which processes there are and what they map, tell what has changed, then
    /// [`Input::Refreshed`].
    Refresh,
    /// Tell the samples since the last time, or what looks have found, then [`Input::SamplesEnd`].
    Samples {
        /// The most that are taken; what is over counts as lost.
        most: usize,
        /// Blocks that a tracker which chooses where to look shall look at first.
        wanted: &'a [(Pid, Block)],
    },
    /// Look where these blocks lie: [`Input::Located`] or [`Input::LookUpFailed`].
    LookUp {
        /// Whose blocks.
        pid: Pid,
        /// Which.
        blocks: &'a [Block],
    },
    /// Read how full the nodes are at this moment: [`Input::Nodes`].
    ReadNodes,
    /// Move these blocks and look where they are then: [`Input::Moved`] or [`Input::MoveFailed`].
    Move {
        /// Whose blocks.
        pid: Pid,
        /// Over the boundary below this tier.
        level: Level,
        /// Into that tier, or out of it.
        direction: Direction,
        /// Which; at least one, at most [`BATCH_BLOCKS`](super::BATCH_BLOCKS).
        blocks: &'a [Relocation],
    },
    /// Let the kernel reclaim fast memory: [`Input::Reclaimed`].
    Reclaim,
    /// Nothing until so many epochs have passed: [`Input::Epoch`].
    Sleep {
        /// How many.
        epochs: u32,
    },
}

/// An input that does not fit. The engine is as it was before.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
pub enum Misuse {
    /// An answer to something else, or an epoch that nobody waits for.
    #[error("`{input}` was told, `{asked}` was asked for")]
    NotAsked {
        /// What was told.
        input: &'static str,
        /// What was asked for.
        asked: &'static str,
    },
    /// An answer for more or fewer blocks.
    #[error("{asked} blocks were asked for, {told} answered")]
    Count {
        /// How many were asked for.
        asked: usize,
        /// How many were answered.
        told: usize,
    },
    /// A block that holds more than a block can.
    #[error("a block of 2 MiB cannot hold {0} bytes")]
    Overfull(u64),
    /// An amount of memory that no machine has.
    #[error("{0} bytes are more memory than a machine can have")]
    TooMuch(u64),
    /// A process that nobody has told of.
    #[error("process {0} is not known")]
    UnknownProcess(Pid),
    /// A process that was told of before.
    #[error("process {0} is known already")]
    KnownProcess(Pid),
    /// Mappings that overlap or are out of order.
    #[error("the mappings of process {0} overlap or are not sorted")]
    Unsorted(Pid),
}

impl Input<'_> {
    /// What it is, in a word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Epoch => "epoch",
            Self::Started(_) => "started",
            Self::Ended(_) => "ended",
            Self::Space { .. } => "space",
            Self::Share { .. } => "share",
            Self::Near { .. } => "near",
            Self::Machine { .. } => "machine",
            Self::BalloonWants(_) => "balloon wants",
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
            Self::Reclaimed => "reclaimed",
        }
    }
}

impl Request<'_> {
    /// What it is, in a word.
    pub fn name(&self) -> &'static str {
        match self {
            Self::Refresh => "refresh",
            Self::Samples { .. } => "samples",
            Self::LookUp { .. } => "look up",
            Self::ReadNodes => "read nodes",
            Self::Move { .. } => "move",
            Self::Reclaim => "reclaim",
            Self::Sleep { .. } => "sleep",
        }
    }
}
