//! The questions that the balloon asks a guest, and what it does with the answers.

use std::io;

use demeter_policy::{ByteCount, NodeId, PAGE_SIZE, PhysRange, Tier};
use demeter_proto::{GpaRange, Message, Nonce, Outcome, Resize};

use rustix::rand::{GetRandomFlags, getrandom};
use tokio::time::Instant;

use super::listing::Listing;
use super::punch::{holes, next_batch};
use super::{ASK_MAX, Guest, MARGIN, View};
use crate::agent::{Answers, Away};
use crate::backing::{Backing, FileOffset};
use crate::provisioner::ProvisionError;
use crate::provisioner::held::HeldSet;

impl<B: Backing> Guest<B> {
    /// Makes sure that the agent is in the VM whose memory this is: its driver shows what was made up
    /// just now, in the very file that would be punched. Nothing that it says is believed before.
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
            .filter(|page| page.start().0.is_multiple_of(PAGE_SIZE))
            .and_then(|page| self.backing.resolve(tier, page).ok());
        // Where another VM, or somebody in between, answers, it is no lie of this one.
        let page = page.ok_or_else(|| ProvisionError::Refused(ELSEWHERE.into()))?;
        let mut found = [0; 16];
        let read = self.backing.read(page, &mut found);
        read.map_err(|source| ProvisionError::Backing { tier, source })?;
        match Nonce(found) == nonce {
            true => Ok(()),
            false => Err(ProvisionError::Refused(ELSEWHERE.into())),
        }
    }

    /// Asks the guest to hold `bytes` more. Answers why it holds less more, if it does.
    pub(super) async fn inflate(
        &mut self,
        view: &mut View,
        tier: Tier,
        bytes: ByteCount,
    ) -> Result<Option<String>, ProvisionError> {
        let node = *self.nodes.get(tier);
        let size = self.backing.size(tier);
        *view.listing.get_mut(tier) = Some(Listing::new(size));
        let mut answers = self.ask_to(Message::Inflate, node, bytes).await?;
        let mut named = HeldSet::new(size);
        let reason = loop {
            match answers.next().await.map_err(|Away| away())? {
                Message::Inflated(part) if part.node == node => {
                    let held = Some(view.held.get(tier));
                    self.take_named(tier, &part.ranges, held, &mut named)?;
                    if named.total() > bytes {
                        return Err(hostile("it holds more than it was asked to"));
                    }
                }
                Message::Done(done) if done.node == node => {
                    break fulfilled(done.outcome, done.reason)?;
                }
                _ => return Err(hostile("it answers what it was not asked")),
            }
        };
        let mut holes = holes(tier, named.runs_not_in(None, FileOffset(0))).peekable();
        while let Some(batch) = next_batch(&mut holes) {
            self.punch(view.session, tier, batch).await?;
        }
        view.held.get_mut(tier).absorb(&named);
        *view.listing.get_mut(tier) = None;
        Ok(reason)
    }

    /// Asks the guest to take `bytes` back, and then what it still holds: once, since that may take
    /// longer than all the rest.
    pub(super) async fn deflate(
        &mut self,
        view: &mut View,
        tier: Tier,
        bytes: ByteCount,
        deadline: Instant,
    ) -> Result<Option<String>, ProvisionError> {
        let node = *self.nodes.get(tier);
        *view.listing.get_mut(tier) = Some(Listing::new(self.backing.size(tier)));
        let mut left = bytes;
        let reason = loop {
            let part = left.min(ASK_MAX);
            let mut answers = self.ask_to(Message::Deflate, node, part).await?;
            let done = match answers.next().await.map_err(|Away| away())? {
                Message::Done(done) if done.node == node => done,
                _ => return Err(hostile("it answers what it was not asked")),
            };
            // What it says is for the pace only; what it holds is asked afterwards.
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

    /// Asks for a change of what is held of a node; from now on the driver changes nothing by itself.
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

    /// Checks ranges that the guest says it holds, and notes their pages in `named`. None of them
    /// may be in `held`, or be named twice.
    pub(super) fn take_named(
        &self,
        tier: Tier,
        ranges: &[GpaRange],
        held: Option<&HeldSet>,
        named: &mut HeldSet,
    ) -> Result<(), ProvisionError> {
        for range in ranges {
            let aligned = (range.start.0 | range.bytes.0).is_multiple_of(PAGE_SIZE);
            let range = PhysRange::new(range.start, range.bytes)
                .filter(|_| aligned)
                .ok_or_else(|| {
                    let (start, bytes) = (range.start, range.bytes.0);
                    hostile(&format!(
                        "{start} and {bytes:#x} bytes is no range of whole pages"
                    ))
                })?;
            let extent = self.backing.resolve(tier, range);
            let extent = extent.map_err(|error| hostile(&error.to_string()))?;
            let is_held = held.is_some_and(|held| held.overlaps(extent.offset, extent.len));
            if is_held || !named.insert(extent.offset, extent.len) {
                return Err(hostile(&format!("it names {range} twice")));
            }
        }
        Ok(())
    }

    pub(super) fn backed(&self, tier: Tier) -> Result<ByteCount, ProvisionError> {
        let backed = self.backing.backed(tier);
        backed.map_err(|source| ProvisionError::Backing { tier, source })
    }

    /// What the guest holds from here on stays held, until it is allowed something again.
    pub(super) async fn allow_nothing(&mut self) -> Result<(), ProvisionError> {
        // What is still being punched must not be given back to the guest.
        self.punching_ended().await;
        let nothing = Message::Allow { oom: ByteCount(0) };
        self.agent.tell(nothing).await.map_err(|Away| away())
    }
}

/// Who cannot show a nonce in this VM's memory is not in it.
const ELSEWHERE: &str = "the agent does not speak for this VM: it could not show in the VM's memory \
                         what it was given; check that `agent` and `qmp` in the configuration are \
                         sockets of the same VM";

/// What nobody can guess.
fn nonce() -> io::Result<Nonce> {
    let mut nonce = [0; 16];
    let mut filled = 0;
    while filled < nonce.len() {
        filled += getrandom(&mut nonce[filled..], GetRandomFlags::empty())?;
    }
    Ok(Nonce(nonce))
}

/// Why a request was not fulfilled whole; an error if it was not fulfilled at all.
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
