//! Demeter's balloon: the guest's driver holds pages of a node, the host takes them back.
//!
//! # Problem
//! A guest names the memory that it does without. The host gives exactly that back, while the
//! guest may lie, and may be reset at any moment. No byte of any other memory may be touched, and
//! no page that a guest uses again.
//!
//! # Approach
//! Every range is checked when it is named: whole pages, in the VM's memory of that tier, not held
//! already, within what was asked for. The first one that is not marks the guest as hostile, and
//! nothing that the same answer named is touched. What is held is kept as a set of pages of the
//! backing file, so that two addresses for one page count once.
//!
//! A reset between an answer and the punch would make live memory of what was held. So the guest
//! has to answer a ping in the same session right before every batch of punches. And its driver
//! gives nothing back by itself meanwhile: the out-of-memory allowance is zero from before the
//! question until all punches are done.
//!
//! What the host believes to be held is asked anew whenever the agent or the guest was started
//! anew, when the driver gave memory back by itself, and after every deflation. Pages that turn out
//! to be held and were not known are punched as well; pages that were known and are not held any
//! more are the guest's again.
//!
//! # Properties
//! - Only pages that the guest named, that lie in its own memory of that tier, are punched.
//! - What is owned is the size of the tier's memory less what was checked and punched.
//! - The guest may own at most the target and its allowance, until it is told another target.

use demeter_policy::{ByteCount, NodeId, PAGE_SIZE, PerTier, PhysRange, Tier, TierBytes};
use demeter_proto::{BootId, GpaRange, Message, Outcome, Resize, SessionId};
use tokio::time::{Duration, Instant, timeout_at};

use super::held::HeldSet;
use super::{Progress, ProvisionError, Provisioner};
use crate::agent::{Agent, Away};
use crate::backing::{Backing, Extent};

/// The most that is asked for at once, so that an answer comes in time.
const ASK_MAX: ByteCount = ByteCount(256 << 20);

/// No new question is asked when less than this is left until the deadline: a guest may take one
/// and a half seconds to find memory that it can do without.
const MARGIN: Duration = Duration::from_millis(1800);

/// Punches between two pings.
const PUNCHES_PER_PING: usize = 512;

/// A VM whose guest has the balloon driver and an agent.
#[derive(Debug)]
pub struct Balloon<B> {
    agent: Agent,
    backing: B,
    nodes: PerTier<NodeId>,
    oom: ByteCount,
    view: Option<View>,
    /// What the guest may come to own of slow memory by itself.
    ceiling: Option<ByteCount>,
}

/// What is known to be held, as long as nothing has disturbed it.
#[derive(Debug)]
struct View {
    boot_id: BootId,
    session: SessionId,
    held: PerTier<HeldSet>,
    /// What the driver had given back by itself by then.
    oom_returned: ByteCount,
}

impl<B: Backing> Balloon<B> {
    /// A balloon in the guest behind `agent`, whose memory of each tier is the guest's node
    /// `nodes`. The driver may give back `oom` of slow memory by itself.
    pub fn new(agent: Agent, backing: B, nodes: PerTier<NodeId>, oom: ByteCount) -> Self {
        Self {
            agent,
            backing,
            nodes,
            oom,
            view: None,
            ceiling: None,
        }
    }

    /// What the VM owns by what is known to be held.
    fn owned(&self, view: &View, tier: Tier) -> ByteCount {
        let held = view.held.get(tier).total();
        ByteCount(self.backing.size(tier).0.saturating_sub(held.0))
    }

    /// The view, asked anew if anything has disturbed it.
    async fn view(&mut self) -> Result<View, ProvisionError> {
        let peer = self.agent.peer().borrow().clone();
        let peer = peer.ok_or_else(away)?;
        if let Some(node) = Tier::ALL
            .map(|tier| *self.nodes.get(tier))
            .into_iter()
            .find(|&node| !peer.has(node))
        {
            return Err(ProvisionError::Refused(format!(
                "the guest has no node {node}"
            )));
        }
        let oom_returned = self.oom_returned();
        let current = |view: &View| {
            (view.boot_id, view.session, view.oom_returned)
                == (peer.boot_id, peer.session, oom_returned)
        };
        if let Some(view) = self.view.take_if(|view| current(view)) {
            return Ok(view);
        }
        let mut view = match self.view.take().filter(|view| view.boot_id == peer.boot_id) {
            Some(view) => View {
                session: peer.session,
                oom_returned,
                ..view
            },
            None => {
                self.ceiling = None;
                View {
                    boot_id: peer.boot_id,
                    session: peer.session,
                    held: PerTier::default(),
                    oom_returned,
                }
            }
        };
        for tier in Tier::ALL {
            self.list(&mut view, tier).await?;
        }
        Ok(view)
    }

    fn oom_returned(&self) -> ByteCount {
        let stats = self.agent.stats();
        let stats = stats.borrow();
        stats
            .as_ref()
            .map_or(ByteCount(0), |stats| stats.oom_returned)
    }

    /// Asks what is held, and makes the view so.
    async fn list(&mut self, view: &mut View, tier: Tier) -> Result<(), ProvisionError> {
        let node = *self.nodes.get(tier);
        self.allow_nothing().await?;
        let question = |request| Message::List { request, node };
        let mut answers = self.agent.ask(question).await.map_err(|Away| away())?;
        let mut named = HeldSet::default();
        loop {
            match answers.next().await.map_err(|Away| away())? {
                Message::Held(part) if part.node == node => {
                    self.take_named(tier, &part.ranges, &HeldSet::default(), &mut named)?;
                }
                Message::Done(done) if done.node == node => {
                    fulfilled(done.outcome, done.reason)?;
                    break;
                }
                _ => return Err(hostile("it answers what it was not asked")),
            }
        }
        self.punch(view.session, tier, &named.runs_not_in(view.held.get(tier)))
            .await?;
        *view.held.get_mut(tier) = named;
        Ok(())
    }

    /// Asks the guest to hold `bytes` more. Answers why it holds less more, if it does.
    async fn inflate(
        &mut self,
        view: &mut View,
        tier: Tier,
        bytes: ByteCount,
    ) -> Result<Option<String>, ProvisionError> {
        let node = *self.nodes.get(tier);
        self.allow_nothing().await?;
        let question = |request| {
            Message::Inflate(Resize {
                request,
                node,
                bytes,
            })
        };
        let mut answers = self.agent.ask(question).await.map_err(|Away| away())?;
        let mut named = HeldSet::default();
        let reason = loop {
            match answers.next().await.map_err(|Away| away())? {
                Message::Inflated(part) if part.node == node => {
                    self.take_named(tier, &part.ranges, view.held.get(tier), &mut named)?;
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
        self.punch(view.session, tier, &named.runs_not_in(&HeldSet::default()))
            .await?;
        view.held.get_mut(tier).absorb(&named);
        Ok(reason)
    }

    /// Asks the guest to take `bytes` back, and then what it still holds.
    async fn deflate(
        &mut self,
        view: &mut View,
        tier: Tier,
        bytes: ByteCount,
    ) -> Result<Option<String>, ProvisionError> {
        let node = *self.nodes.get(tier);
        self.allow_nothing().await?;
        let question = |request| {
            Message::Deflate(Resize {
                request,
                node,
                bytes,
            })
        };
        let mut answers = self.agent.ask(question).await.map_err(|Away| away())?;
        let reason = match answers.next().await.map_err(|Away| away())? {
            Message::Done(done) if done.node == node => fulfilled(done.outcome, done.reason)?,
            _ => return Err(hostile("it answers what it was not asked")),
        };
        self.list(view, tier).await?;
        Ok(reason)
    }

    /// Checks ranges that the guest says it holds, and notes their pages in `named`. None of them
    /// may be in `held`, or be named twice.
    fn take_named(
        &self,
        tier: Tier,
        ranges: &[GpaRange],
        held: &HeldSet,
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
            if held.overlaps(extent.offset, extent.len) || !named.insert(extent.offset, extent.len)
            {
                return Err(hostile(&format!("it names {range} twice")));
            }
        }
        Ok(())
    }

    /// Gives pages back to the host that the guest holds, as long as it is in this session.
    async fn punch(
        &mut self,
        session: SessionId,
        tier: Tier,
        runs: &[(u64, ByteCount)],
    ) -> Result<(), ProvisionError> {
        for batch in runs.chunks(PUNCHES_PER_PING) {
            self.agent.confirm(session).await.map_err(|Away| away())?;
            for &(offset, len) in batch {
                let extent = Extent { tier, offset, len };
                let punched = self.backing.punch(extent);
                punched.map_err(|source| ProvisionError::Backing { tier, source })?;
            }
        }
        Ok(())
    }

    async fn allow_nothing(&mut self) -> Result<(), ProvisionError> {
        let nothing = Message::Allow { oom: ByteCount(0) };
        self.agent.tell(nothing).await.map_err(|Away| away())
    }

    /// Lets the driver give back by itself what the guest may own beyond what it owns. Comes after
    /// all punches.
    async fn allow(&mut self, view: &View) -> Result<(), ProvisionError> {
        let owned = self.owned(view, Tier::Slow);
        let room = self
            .ceiling
            .map_or(0, |ceiling| ceiling.0.saturating_sub(owned.0));
        let oom = ByteCount(room.min(self.oom.0));
        self.agent
            .tell(Message::Allow { oom })
            .await
            .map_err(|Away| away())
    }

    /// [`Provisioner::set`] without its deadline, which ends it between two questions.
    async fn approach(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        let before = self.backed(tier)?;
        let mut view = self.view().await?;
        let reason = loop {
            let owned = self.owned(&view, tier);
            if owned == target {
                break None;
            }
            if Instant::now() + MARGIN > deadline {
                break Some("there was not enough time for all of it".to_owned());
            }
            let reason = if owned > target {
                let bytes = ASK_MAX.min(ByteCount(owned.0 - target.0));
                self.inflate(&mut view, tier, bytes).await?
            } else {
                let bytes = ASK_MAX.min(ByteCount(target.0 - owned.0));
                self.deflate(&mut view, tier, bytes).await?
            };
            let stuck = self.owned(&view, tier) == owned;
            let stuck = stuck.then(|| "the guest did nothing".to_owned());
            if let Some(reason) = reason.or(stuck) {
                break Some(reason);
            }
        };
        let owned = self.owned(&view, tier);
        if tier == Tier::Slow {
            self.ceiling = Some(ByteCount(target.min(owned).0.saturating_add(self.oom.0)));
        }
        self.allow(&view).await?;
        let returned_to_host = ByteCount(before.0.saturating_sub(self.backed(tier)?.0));
        self.view = Some(view);
        Ok(Progress {
            owned,
            returned_to_host,
            reason,
        })
    }

    fn backed(&self, tier: Tier) -> Result<ByteCount, ProvisionError> {
        let backed = self.backing.backed(tier);
        backed.map_err(|source| ProvisionError::Backing { tier, source })
    }
}

impl<B: Backing> Provisioner for Balloon<B> {
    fn name(&self) -> &'static str {
        "demeter-balloon"
    }

    async fn actual(&mut self, deadline: Instant) -> Result<TierBytes, ProvisionError> {
        let ask = async {
            let mut view = self.view().await?;
            for tier in Tier::ALL {
                self.list(&mut view, tier).await?;
            }
            self.allow(&view).await?;
            let owned = PerTier::from_fn(|tier| self.owned(&view, tier));
            self.view = Some(view);
            Ok(owned)
        };
        timeout_at(deadline, ask).await.map_err(|_| late())?
    }

    async fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        let approach = self.approach(tier, target, deadline);
        timeout_at(deadline, approach).await.map_err(|_| late())?
    }
}

/// Why a request was not fulfilled whole; an error if it was not fulfilled at all.
fn fulfilled(outcome: Outcome, reason: String) -> Result<Option<String>, ProvisionError> {
    match outcome {
        Outcome::Ok => Ok(None),
        Outcome::Partial => Ok(Some(reason)),
        Outcome::NoDriver => Err(ProvisionError::NoDriver),
        Outcome::Refused => Err(ProvisionError::Refused(reason)),
    }
}

fn away() -> ProvisionError {
    ProvisionError::Unreachable("the guest's agent".to_owned())
}

fn late() -> ProvisionError {
    ProvisionError::Timeout("the guest's agent".to_owned())
}

fn hostile(what: &str) -> ProvisionError {
    ProvisionError::Hostile(what.to_owned())
}

#[cfg(test)]
mod tests;
