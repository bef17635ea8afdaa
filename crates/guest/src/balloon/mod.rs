//! The balloon: memory of a node that the guest's kernel holds for the host.
//!
//! The kernel module in `kernel/demeter_balloon` owns what is held, so that the death of the agent
//! changes nothing. Here is its client ([`Balloon`], [`LiveBalloon`]) and what stands between it
//! and the host: [`relay`] answers the host's requests, [`link`](mod@link) carries them.

mod abi;
pub mod conformance;
pub mod link;
mod live;
pub mod port;
pub mod readings;
pub mod relay;
#[cfg(any(test, fuzzing))]
pub mod simulated;
mod vsock;
mod watermarks;

use std::io;
use std::os::fd::BorrowedFd;

use demeter_policy::{ByteCount, GuestPhysAddr, NodeId};
pub use demeter_proto::{GpaRange, Nonce};

pub use live::LiveBalloon;

/// A balloon driver: holds memory by node.
///
/// Every call is bounded in its work and says why it did no more. All amounts are multiples of
/// the page size.
pub trait Balloon: Send {
    /// Holds up to `bytes` more of `node`: whole blocks while there are any, then pages. Without
    /// `reclaim` only memory that is free above the kernel's watermarks is taken.
    fn inflate(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        reclaim: bool,
    ) -> Result<Inflated, BalloonError>;

    /// Gives up to `bytes` of what is held of `node` back to the kernel.
    fn deflate(&mut self, node: NodeId, bytes: ByteCount) -> Result<Deflated, BalloonError>;

    /// What is held of `node`, by address, from `cursor` on (at first the default one).
    fn list(&mut self, node: NodeId, cursor: Cursor) -> Result<Listed, BalloonError>;

    /// Lets the driver give back up to `bytes` of `node` by itself when the kernel runs out of
    /// memory, in total until the next call.
    fn allow_oom(&mut self, node: NodeId, bytes: ByteCount) -> Result<(), BalloonError>;

    /// Writes `nonce` to the beginning of a page of the driver's own in `node`, which is never held,
    /// and tells where that lies.
    fn prove(&mut self, node: NodeId, nonce: Nonce) -> Result<GuestPhysAddr, BalloonError>;

    /// How much is held.
    fn stats(&mut self, node: NodeId) -> Result<NodeBalloon, BalloonError>;

    /// Becomes readable when the driver gave something back by itself; `None` if it never does.
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Whether the driver gave something back by itself since the last call.
    fn take_event(&mut self) -> Result<bool, BalloonError>;
}

/// What a call that inflates did.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inflated {
    /// Newly held, by address, disjoint, touching ranges joined.
    pub ranges: Vec<GpaRange>,
    /// Why it did no more.
    pub stop: Stop,
}

/// What a call that deflates did.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deflated {
    /// Given back.
    pub moved: ByteCount,
    /// Why it did no more.
    pub stop: Stop,
}

/// A part of the list of what is held.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// By address, disjoint, touching ranges joined.
    pub ranges: Vec<GpaRange>,
    /// Where the list goes on, if it may.
    pub next: Option<Cursor>,
}

/// A place in the list of what is held; the default is its beginning.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor(u64);

/// What is held of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeBalloon {
    /// Held now.
    pub held: ByteCount,
    /// Given back by the driver itself, out of memory, since it was loaded.
    pub oom_returned: ByteCount,
}

/// Why a call did no more.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It did everything.
    Done,
    /// It reached its bound, or a signal arrived: call again.
    Again,
    /// The node has no memory to spare.
    NoMemory,
    /// Nothing more is held.
    Empty,
}

/// Why the balloon cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// There is none.
    #[error("no balloon driver: {why}; {hint}")]
    Unavailable {
        /// What is missing.
        why: String,
        /// What the person can do.
        hint: &'static str,
    },
    /// The driver refused a call.
    #[error("the balloon driver refuses to {what}: {source}")]
    Call {
        /// What was asked.
        what: String,
        /// What the system said.
        source: io::Error,
    },
    /// Its answer makes no sense.
    #[error("the balloon driver answered {0}; load the one that came with this agent")]
    Nonsense(String),
}

/// Sorts ranges by address and joins those that touch.
fn join(mut ranges: Vec<GpaRange>) -> Vec<GpaRange> {
    ranges.sort_unstable();
    ranges.dedup_by(|next, last| {
        let touches = last.start.0.checked_add(last.bytes.0) == Some(next.start.0);
        if touches {
            last.bytes.0 += next.bytes.0;
        }
        touches
    });
    ranges
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn touching_ranges_are_joined_and_others_are_not() {
        let range = |start, bytes| GpaRange {
            start: GuestPhysAddr(start),
            bytes: ByteCount(bytes),
        };
        let joined = join(vec![range(8, 2), range(0, 4), range(4, 4), range(11, 1)]);
        assert_eq!(joined, [range(0, 10), range(11, 1)]);
    }
}
