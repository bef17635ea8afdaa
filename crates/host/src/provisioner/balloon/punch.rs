//! Gives pages back to the host, in batches that end soon.
//!
//! Why a batch takes nothing from a guest that uses it again, in the order in which things are asked:
//!
//! 1. The disturbances of the VM that were told so far are counted.
//! 2. The agent answers a ping of the session in which it named the pages. A guest that was reset before it
//!    answered is in another session. One that was taken back to a snapshot may be in the same one.
//! 3. The hypervisor answers a question that is asked after that. It tells of a disturbance before it
//!    answers anything later. So if the count is still the same, the VM was not disturbed between 1 and
//!    this answer: it is the guest that named the pages, and it holds them.
//! 4. The batch is punched, and the count is looked at again before each hole. What happens after the
//!    answer stops it as soon as it is told. No more is punched by then than what the batch has, and no
//!    more afterwards than the hole that is being made.
//!
//! Whatever was told before 1 has ended the call before it comes here: who calls hears of events first.

use std::io;
use std::iter::Peekable;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use demeter_policy::{ByteCount, Tier};
use demeter_proto::SessionId;

use super::Guest;
use super::ask::away;
use crate::agent::Away;
use crate::backing::{Backing, Extent, FileOffset};
use crate::provisioner::ProvisionError;

/// The most that is punched between two pings.
pub(super) const BATCH_MAX: ByteCount = ByteCount(64 << 20);

/// The longest hole that is made by one call, which nothing stops.
pub(super) const HOLE_MAX: ByteCount = ByteCount(8 << 20);

/// The most holes that are made between two pings.
const HOLES_MAX: usize = 512;

/// Tells a thread to stop, when dropped.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What a batch came to.
enum Batch {
    /// So much went back to the host.
    Returned(ByteCount),
    /// Nothing was touched: this keeps memory pinned.
    Pinned(String),
    /// The VM was disturbed; holes may have been made before that.
    Disturbed,
}

impl<B: Backing> Guest<B> {
    /// Gives a batch of pages back to the host that the guest holds, if it is in this session. Dropped,
    /// it stops with the hole that is being made.
    pub(super) async fn punch(
        &mut self,
        session: SessionId,
        tier: Tier,
        batch: Vec<Extent>,
    ) -> Result<(), ProvisionError> {
        let disturbances = self.backing.disturbances();
        self.agent.confirm(session).await.map_err(|Away| away())?;
        self.backing.catch_up().await?;
        let punched = self.punch_batch(tier, batch, disturbances).await;
        match punched.map_err(|source| ProvisionError::Backing { tier, source })? {
            Batch::Returned(bytes) => {
                self.returned.0 += bytes.0;
                Ok(())
            }
            Batch::Disturbed => Err(ProvisionError::Disturbed),
            Batch::Pinned(by) => Err(ProvisionError::Refused(format!(
                "{by} keeps guest memory pinned; a VM with such a device cannot be ballooned"
            ))),
        }
    }

    /// Punches on a thread where waiting delays nobody, as long as there were no more `disturbances`.
    async fn punch_batch(
        &self,
        tier: Tier,
        batch: Vec<Extent>,
        disturbances: u64,
    ) -> io::Result<Batch> {
        let permit = self.punching.clone().acquire_owned().await;
        let stop = Stop::default();
        let stopped = stop.0.clone();
        let backing = self.backing.clone();
        let outside = self.agent.outside();
        let work = outside.ask("giving memory back", move |wait| {
            let _permit = permit;
            if let Some(by) = backing.pinned_by(wait)? {
                return Ok(Batch::Pinned(by));
            }
            let before = backing.backed(tier, wait)?;
            for hole in batch {
                if stopped.load(Ordering::Relaxed) {
                    break;
                }
                if backing.disturbances() != disturbances {
                    return Ok(Batch::Disturbed);
                }
                backing.punch(hole, wait)?;
            }
            let returned = before.0.saturating_sub(backing.backed(tier, wait)?.0);
            Ok(Batch::Returned(ByteCount(returned)))
        });
        work.await?
    }

    /// Waits until nothing is punched any more, for whichever call it was.
    pub(super) async fn punching_ended(&self) {
        drop(self.punching.acquire().await);
    }
}

/// The next holes that may be made after one ping; `None` if there are no more.
pub(super) fn next_batch(
    holes: &mut Peekable<impl Iterator<Item = Extent>>,
) -> Option<Vec<Extent>> {
    let mut left = BATCH_MAX.0;
    let mut batch = vec![];
    while batch.len() < HOLES_MAX
        && let Some(hole) = holes.next_if(|hole| hole.len.0 <= left)
    {
        left -= hole.len.0;
        batch.push(hole);
    }
    Some(batch).filter(|batch| !batch.is_empty())
}

/// Runs of pages as holes of bounded length.
pub(super) fn holes(
    tier: Tier,
    runs: impl Iterator<Item = (FileOffset, ByteCount)> + Send,
) -> impl Iterator<Item = Extent> + Send {
    runs.flat_map(move |(start, len)| {
        (0..len.0)
            .step_by(HOLE_MAX.0 as usize)
            .map(move |at| Extent {
                tier,
                offset: FileOffset(start.0 + at),
                len: ByteCount(HOLE_MAX.0.min(len.0 - at)),
            })
    })
}

#[cfg(test)]
mod tests;
