//! Punches held pages out of the backing file, in short batches.
//!
//! A batch never frees a page that the guest uses again, because of this order:
//!
//! 1. The disturbances of the VM reported so far are counted.
//! 2. The agent answers a ping of the session in which it named the pages. A guest that was reset
//!    before its answer is in another session. A guest that was restored from a snapshot may be in
//!    the same one.
//! 3. The hypervisor answers a question that is asked after that. It reports a disturbance before
//!    any later answer. If the count is unchanged, the VM was not disturbed between step 1 and this
//!    answer, so this guest named the pages and holds them.
//! 4. The batch is punched, and the count is checked before each hole. A later disturbance stops
//!    the batch as soon as it is reported. Until then at most one batch is punched, and afterwards
//!    only the current hole.
//!
//! A disturbance reported before step 1 has already dropped the call, because callers handle events
//! first.

use std::io;
use std::iter::Peekable;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

use demeter_policy::{ByteCount, Tier};
use demeter_proto::{Message, SessionId};

use super::Guest;
use crate::backing::{Backing, Extent, FileOffset};
use crate::provisioner::ProvisionError;

/// Maximum memory that is punched between two pings.
pub(super) const BATCH_MAX: ByteCount = ByteCount(64 << 20);

/// Maximum length of one hole, which cannot be interrupted.
pub(super) const HOLE_MAX: ByteCount = ByteCount(8 << 20);

/// Maximum number of holes between two pings.
const HOLES_MAX: usize = 512;

/// Signals a thread to stop when dropped.
#[derive(Default)]
struct Stop(Arc<AtomicBool>);

impl Drop for Stop {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Result of a batch.
enum Batch {
    /// The batch returned this much memory to the host.
    Returned(ByteCount),
    /// Nothing was punched, because this device pins guest memory.
    Pinned(String),
    /// The VM was disturbed; some holes may have been punched before.
    Disturbed,
}

impl<B: Backing> Guest<B> {
    /// Punches a batch of pages that the guest holds, if it is in this session. Dropping the call
    /// stops it after the current hole.
    pub(super) async fn punch(
        &mut self,
        session: SessionId,
        tier: Tier,
        batch: Vec<Extent>,
    ) -> Result<(), ProvisionError> {
        let disturbances = self.backing.disturbances();
        self.agent.confirm(session).await?;
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

    /// Punches on a thread that may wait, until `disturbances` has grown.
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

    /// Waits until no call is punching.
    pub(super) async fn punching_ended(&self) {
        drop(self.punching.acquire().await);
    }

    /// Sets the allowance to zero, so that held pages stay held until the next allowance.
    pub(super) async fn allow_nothing(&mut self) -> Result<(), ProvisionError> {
        // Wait first: pages being punched must not go back to the guest.
        self.punching_ended().await;
        let nothing = Message::Allow { oom: ByteCount(0) };
        Ok(self.agent.tell(nothing).await?)
    }
}

/// The holes of the next batch; `None` if there are no more.
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

/// Splits runs of pages into holes of bounded length.
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
