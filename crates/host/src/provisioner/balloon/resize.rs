//! Asks a guest to hold more memory, or to take some back.

use demeter_policy::{ByteCount, NodeId, Tier};
use demeter_proto::{Message, Resize};
use tokio::time::Instant;

use super::answers::{fulfilled, hostile};
use super::listing::Listing;
use super::punch::{holes, next_batch};
use super::{ASK_MAX, Guest, MARGIN, View};
use crate::agent::Answers;
use crate::backing::{Backing, Extent};
use crate::provisioner::ProvisionError;

impl<B: Backing> Guest<B> {
    /// Asks the guest to hold `bytes` more. Returns the reason if it holds less.
    pub(super) async fn inflate(
        &mut self,
        view: &mut View,
        tier: Tier,
        bytes: ByteCount,
    ) -> Result<Option<String>, ProvisionError> {
        let node = *self.nodes.get(tier);
        *view.listing.get_mut(tier) = Some(Listing::default());
        let mut answers = self.ask_to(Message::Inflate, node, bytes).await?;
        let held = view.held.get_mut(tier);
        let before = held.total();
        // There are at most as many pieces as requested pages.
        let mut named = vec![];
        let mut plugged = ByteCount(0);
        let reason = loop {
            match answers.next().await? {
                Message::Inflated(part) if part.node == node => {
                    let more = self.take_named(tier, &part.ranges, held, |extent| {
                        append(&mut named, extent);
                    })?;
                    plugged.0 = plugged.0.saturating_add(more.0);
                    let more = held.total().0 - before.0;
                    if more.saturating_add(plugged.0) > bytes.0 {
                        return Err(hostile("it holds more than it was asked to"));
                    }
                }
                Message::Done(done) if done.node == node => {
                    break fulfilled(done.outcome, done.reason)?;
                }
                _ => return Err(hostile("it answers what it was not asked")),
            }
        };
        let runs = named.iter().map(|run| (run.offset, run.len));
        let mut holes = holes(tier, runs).peekable();
        while let Some(batch) = next_batch(&mut holes) {
            self.punch(view.session, tier, batch).await?;
        }
        view.seals.get_mut(tier).close(view.held.get(tier));
        let before = view.plugged.get_mut(tier);
        before.0 = before.0.saturating_add(plugged.0);
        *view.listing.get_mut(tier) = None;
        Ok(reason)
    }

    /// Asks the guest to take `bytes` back, then lists once what it still holds. Listing after each
    /// part could take longer than everything else.
    pub(super) async fn deflate(
        &mut self,
        view: &mut View,
        tier: Tier,
        bytes: ByteCount,
        deadline: Instant,
    ) -> Result<Option<String>, ProvisionError> {
        let node = *self.nodes.get(tier);
        *view.listing.get_mut(tier) = Some(Listing::default());
        let mut left = bytes;
        let reason = loop {
            let part = left.min(ASK_MAX);
            let mut answers = self.ask_to(Message::Deflate, node, part).await?;
            let done = match answers.next().await? {
                Message::Done(done) if done.node == node => done,
                _ => return Err(hostile("it answers what it was not asked")),
            };
            // The reported size only sets the pace; the listing afterwards is what counts.
            let moved = done.moved.min(part);
            left.0 -= moved.0;
            let reason = fulfilled(done.outcome, done.reason)?;
            let is_over = moved < part || left.0 == 0 || Instant::now() + MARGIN >= deadline;
            if reason.is_some() || is_over {
                break reason;
            }
        };
        self.list(view, tier).await?;
        Ok(reason)
    }

    /// Sets the allowance to zero, then asks for a change of held memory in a node.
    async fn ask_to(
        &mut self,
        change: fn(Resize) -> Message,
        node: NodeId,
        bytes: ByteCount,
    ) -> Result<Answers, ProvisionError> {
        self.allow_nothing().await?;
        let question = |request| {
            change(Resize {
                request,
                node,
                bytes,
            })
        };
        Ok(self.agent.ask(question).await?)
    }
}

/// Appends a run, merged with the last one if they touch.
fn append(runs: &mut Vec<Extent>, run: Extent) {
    match runs.last_mut() {
        Some(last) if last.offset.0 + last.len.0 == run.offset.0 => last.len.0 += run.len.0,
        _ => runs.push(run),
    }
}
