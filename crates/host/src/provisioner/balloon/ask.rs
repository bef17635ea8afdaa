//! The balloon's questions to a guest, and their answers.

use std::io;

use demeter_policy::{ByteCount, NodeId, PAGE_SIZE, PhysRange, Tier};
use demeter_proto::{GpaRange, Message, Nonce, Outcome, Resize};

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::time::Instant;

use super::listing::Listing;
use super::punch::{holes, next_batch};
use super::{ASK_MAX, Guest, MARGIN, View};
use crate::agent::{Answers, Away};
use crate::backing::{Backing, Extent};
use crate::provisioner::ProvisionError;
use crate::provisioner::held::HeldSet;

impl<B: Backing> Guest<B> {
    /// Proves that the agent runs in this VM: its driver shows a fresh nonce in the file that would
    /// be punched. The guest's data is not used before that.
    pub(super) async fn prove(&mut self, tier: Tier) -> Result<(), ProvisionError> {
        let node = *self.nodes.get(tier);
        let nonce = nonce().map_err(|source| ProvisionError::Backing { tier, source })?;
        let question = |request| Message::Prove {
            request,
            node,
            nonce,
        };
        let mut answers = self.agent.ask(question).await.map_err(|Away| away())?;
        let page = match answers.next().await.map_err(|Away| away())? {
            Message::Proof { page, node: of, .. } if of == node => page,
            Message::Done(done) => {
                fulfilled(done.outcome, done.reason)?;
                return Err(ProvisionError::Refused(ELSEWHERE.into()));
            }
            _ => return Err(hostile("it answers what it was not asked")),
        };
        let page = PhysRange::new(page, ByteCount(PAGE_SIZE))
            .filter(|page| page.start().0.is_multiple_of(PAGE_SIZE));
        let read = match page {
            Some(page) => self.read_page(tier, page).await,
            None => Ok(None),
        };
        match read.map_err(|source| ProvisionError::Backing { tier, source })? {
            Some(found) if Nonce(found) == nonce => Ok(()),
            // Another VM or a proxy may have answered, so this guest is not marked.
            _ => Err(ProvisionError::Refused(ELSEWHERE.into())),
        }
    }

    /// The beginning of a page in the VM's memory of `tier`; `None` if there is no such page.
    async fn read_page(&self, tier: Tier, page: PhysRange) -> io::Result<Option<[u8; 16]>> {
        let backing = self.backing.clone();
        let outside = self.agent.outside();
        let reading = outside.ask("reading the VM's memory", move |wait| {
            let mut found = [0; 16];
            match backing.resolve(tier, page) {
                Ok(extent) => backing.read(extent, &mut found, wait)?,
                Err(_) if is_plugged(page, backing.plugged()) => {
                    backing.read_plugged(page.start(), &mut found, wait)?;
                }
                Err(_) => return Ok(None),
            }
            Ok(Some(found))
        });
        reading.await?
    }

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
            match answers.next().await.map_err(|Away| away())? {
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
            let done = match answers.next().await.map_err(|Away| away())? {
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
        self.agent.ask(question).await.map_err(|Away| away())
    }

    /// Checks the ranges that the guest names and adds their pages to `held`; each must be new and
    /// is passed to `added`. Plugged memory belongs to no tier, so naming it is allowed and has no
    /// effect. Returns its size.
    pub(super) fn take_named(
        &self,
        tier: Tier,
        ranges: &[GpaRange],
        held: &mut HeldSet,
        mut added: impl FnMut(Extent),
    ) -> Result<ByteCount, ProvisionError> {
        let mut plugged = ByteCount(0);
        for range in ranges {
            let aligned = (range.start.0 | range.bytes.0).is_multiple_of(PAGE_SIZE);
            let range = PhysRange::new(range.start, range.bytes)
                .filter(|_| aligned)
                .ok_or_else(|| {
                    let (start, bytes) = (range.start, range.bytes.0);
                    hostile(&format!(
                        "{start} and {bytes:#x} bytes is not a range of whole pages"
                    ))
                })?;
            for part in parts(range, self.backing.plugged()) {
                if is_plugged(part, self.backing.plugged()) {
                    plugged.0 = plugged.0.saturating_add(part.len().0);
                    continue;
                }
                let extent = self.backing.resolve(tier, part);
                let extent = extent.map_err(|error| hostile(&error.to_string()))?;
                if !held.insert(extent.offset, extent.len) {
                    return Err(hostile(&format!("it names {range} twice")));
                }
                added(extent);
            }
        }
        Ok(plugged)
    }

    pub(super) async fn backed(&self, tier: Tier) -> Result<ByteCount, ProvisionError> {
        let backing = self.backing.clone();
        let outside = self.agent.outside();
        let asked = outside.ask("the VM's memory file", move |wait| {
            backing.backed(tier, wait)
        });
        let backed = asked.await.unwrap_or_else(|stuck| Err(stuck.into()));
        backed.map_err(|source| ProvisionError::Backing { tier, source })
    }

    /// Sets the allowance to zero, so that held pages stay held until the next allowance.
    pub(super) async fn allow_nothing(&mut self) -> Result<(), ProvisionError> {
        // Wait first: pages being punched must not go back to the guest.
        self.punching_ended().await;
        let nothing = Message::Allow { oom: ByteCount(0) };
        self.agent.tell(nothing).await.map_err(|Away| away())
    }
}

/// Appends a run, merged with the last one if they touch.
fn append(runs: &mut Vec<Extent>, run: Extent) {
    match runs.last_mut() {
        Some(last) if last.offset.0 + last.len.0 == run.offset.0 => last.len.0 += run.len.0,
        _ => runs.push(run),
    }
}

/// Splits a range at each border of plugged memory; `plugged` is in order.
fn parts(range: PhysRange, plugged: &[PhysRange]) -> impl Iterator<Item = PhysRange> {
    let first = plugged.partition_point(|run| run.end() <= range.start());
    let edges = plugged[first..]
        .iter()
        .flat_map(|run| [run.start(), run.end()]);
    let mut edges = edges
        .filter(move |&edge| edge > range.start())
        .take_while(move |&edge| edge < range.end())
        .chain([range.end()]);
    let mut at = range.start();
    std::iter::from_fn(move || {
        let edge = edges.find(|&edge| edge > at)?;
        let part = PhysRange::new(at, ByteCount(edge.0 - at.0));
        at = edge;
        part
    })
}

fn is_plugged(part: PhysRange, plugged: &[PhysRange]) -> bool {
    plugged.iter().any(|run| run.covers(&part))
}

/// Error for an agent that cannot show a nonce in this VM's memory.
const ELSEWHERE: &str = "the agent does not speak for this VM: it could not show a nonce in the VM's \
                         memory; check that `agent` and `qmp` in the configuration are sockets of the \
                         same VM";

/// A random nonce.
fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 16];
    let mut filled = 0;
    while filled < nonce.len() {
        filled += getrandom(&mut nonce[filled..], GetRandomFlags::empty())?;
    }
    Ok(Nonce(nonce))
}

/// The reason why a request was fulfilled in part only; an error if not at all.
pub(super) fn fulfilled(
    outcome: Outcome,
    reason: String,
) -> Result<Option<String>, ProvisionError> {
    match outcome {
        Outcome::Ok => Ok(None),
        Outcome::Partial => Ok(Some(reason)),
        Outcome::NoDriver => Err(ProvisionError::NoDriver),
        Outcome::Refused => Err(ProvisionError::Refused(reason)),
    }
}

pub(super) fn away() -> ProvisionError {
    ProvisionError::Unreachable("the guest's agent".to_owned())
}

pub(super) fn hostile(what: &str) -> ProvisionError {
    ProvisionError::Hostile(what.to_owned())
}

#[cfg(test)]
mod tests {
    use demeter_policy::GuestPhysAddr;
    use proptest::prelude::*;

    use super::*;

    fn pages(start: u64, count: u64) -> PhysRange {
        PhysRange::new(
            GuestPhysAddr(start * PAGE_SIZE),
            ByteCount(count * PAGE_SIZE),
        )
        .unwrap()
    }

    proptest! {
        /// The parts add up to the range, and no part crosses an edge.
        #[test]
        fn a_range_is_cut_at_every_edge(
            start in 0u64..40,
            count in 1u64..40,
            lengths in prop::collection::vec((0u64..4, 1u64..8), 0..8),
        ) {
            let mut at = 0;
            let mut plugged = vec![];
            for (gap, length) in lengths {
                plugged.push(pages(at + gap, length));
                at += gap + length;
            }
            let parts: Vec<_> = parts(pages(start, count), &plugged).collect();
            let bytes: u64 = parts.iter().map(|part| part.len().0).sum();
            prop_assert_eq!(bytes, count * PAGE_SIZE);
            prop_assert_eq!(parts[0].start().0, start * PAGE_SIZE);
            prop_assert!(parts.windows(2).all(|two| two[0].end() == two[1].start()));
            for part in parts {
                let apart = |run: &PhysRange| run.end() <= part.start() || part.end() <= run.start();
                prop_assert!(is_plugged(part, &plugged) || plugged.iter().all(apart));
            }
        }
    }
}
