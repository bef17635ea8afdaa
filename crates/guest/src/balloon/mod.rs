//! The balloon: memory of a node that the guest's kernel holds for the host.
//!
//! The kernel module in `kernel/demeter_balloon` owns the held memory, so that it survives the agent. This module has
//! the driver's client ([`Balloon`], [`LiveBalloon`]). [`relay`] answers the host's requests, and [`link`](mod@link)
//! carries them.

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
/// Every call does a bounded amount of work, and says why it stopped. All amounts are multiples of the page size.
pub trait Balloon: Send {
    /// Holds up to `bytes` more of `node`: whole blocks first, then pages.
    ///
    /// Without `reclaim` it takes only memory that is free above the kernel's watermarks.
    fn inflate(
        &mut self,
        node: NodeId,
        bytes: ByteCount,
        reclaim: bool,
    ) -> Result<Inflated, BalloonError>;

    /// Returns up to `bytes` of held memory of `node` to the kernel.
    fn deflate(&mut self, node: NodeId, bytes: ByteCount) -> Result<Deflated, BalloonError>;

    /// Lists held memory of `node` by address, from `cursor` on; start with the default cursor.
    fn list(&mut self, node: NodeId, cursor: Cursor) -> Result<Listed, BalloonError>;

    /// Lets the driver return up to `bytes` of `node` by itself when memory runs out.
    ///
    /// The amount is a total until the next call.
    fn allow_oom(&mut self, node: NodeId, bytes: ByteCount) -> Result<(), BalloonError>;

    /// Writes `nonce` to a page of the driver's own in `node`. Returns the page's address.
    ///
    /// This page is never held for the host.
    fn prove(&mut self, node: NodeId, nonce: Nonce) -> Result<GuestPhysAddr, BalloonError>;

    /// Amounts of held and returned memory.
    fn stats(&mut self, node: NodeId) -> Result<NodeBalloon, BalloonError>;

    /// A descriptor that is readable after the driver returned memory by itself; `None` if it never does.
    fn event_fd(&self) -> Option<BorrowedFd<'_>>;

    /// Whether the driver returned memory by itself since the last call.
    fn take_event(&mut self) -> Result<bool, BalloonError>;
}

/// The result of [`Balloon::inflate`].
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Inflated {
    /// Newly held ranges, by address, disjoint, with touching ranges joined.
    pub ranges: Vec<GpaRange>,
    /// Why it stopped.
    pub stop: Stop,
}

/// The result of [`Balloon::deflate`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Deflated {
    /// Memory returned to the kernel.
    pub moved: ByteCount,
    /// Why it stopped.
    pub stop: Stop,
}

/// A part of the list of held memory.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Listed {
    /// By address, disjoint, with touching ranges joined.
    pub ranges: Vec<GpaRange>,
    /// Where the next call continues, if there is more.
    pub next: Option<Cursor>,
}

/// A position in the list of held memory; the default is its start.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cursor(u64);

/// Held memory of one node.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct NodeBalloon {
    /// Held now.
    pub held: ByteCount,
    /// Memory that the driver returned by itself under memory pressure, since it was loaded.
    pub oom_returned: ByteCount,
}

/// Why a call stopped.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Stop {
    /// It did everything it was asked for.
    Done,
    /// It reached its bound, or a signal arrived: call again.
    Again,
    /// The node has no free memory.
    NoMemory,
    /// Nothing more is held.
    Empty,
}

/// An error of the balloon driver.
#[derive(Debug, thiserror::Error)]
pub enum BalloonError {
    /// The driver is not usable.
    #[error("no balloon driver: {why}; {hint}")]
    Unavailable {
        /// The missing part.
        why: String,
        /// The way to fix it.
        hint: &'static str,
    },
    /// The driver refused a call.
    #[error("the balloon driver refuses to {what}: {source}")]
    Call {
        /// The call.
        what: String,
        /// The system's error.
        source: io::Error,
    },
    /// The driver's answer is invalid.
    #[error("the balloon driver answered {0}; load the one that came with this agent")]
    Nonsense(String),
}

/// Sorts ranges by address and joins touching ones.
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
