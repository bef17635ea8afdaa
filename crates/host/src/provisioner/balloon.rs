//! Demeter's balloon: the guest's driver holds pages of a node, the host takes them back.
//!
//! # Problem
//! A guest names the memory that it does without. The host gives exactly that back, while the
//! guest may lie, and may be reset at any moment. No byte of any other memory may be touched, and
//! no page that a guest uses again.
//!
//! # Approach
//! A new view of the guest begins with a proof that its agent is in this VM: the driver shows a
//! number that was made up just now in a page of each node, and it is read from the file of the tier.
//!
//! Every range is checked when it is named: whole pages, in the VM's memory of that tier, not held
//! already, within what was asked for. The first one that is not marks the guest as hostile, and
//! nothing that the same answer named is touched. What is held is kept as a set of pages of the
//! backing file, so that two addresses for one page count once.
//!
//! A reset between an answer and the punch would make live memory of what was held. So the guest
//! has to answer a ping in the same session right before every batch of punches, which is small
//! (`punch.rs`); whoever hears of a reset drops the call, and the batch ends with the hole that is
//! being made. And its driver gives nothing back by itself meanwhile: the out-of-memory allowance is
//! zero from before the question until all punches are done.
//!
//! What the host believes to be held is asked anew whenever the agent or the guest was started
//! anew, when the driver gave memory back by itself, and after every deflation. Pages that turn out
//! to be held and were not known are punched as well; pages that were known and are not held any
//! more are the guest's again. Where the file occupies more than the VM owns, all that is held is
//! punched once more.
//!
//! # Properties
//! - Nothing is punched on the word of an agent that is not in this VM.
//! - Only pages that the guest named, that lie in its own memory of that tier, are punched.
//! - Of what was held before a reset, no more is punched after it than one batch.
//! - What is owned is the size of the tier's memory less what was checked and punched.
//! - The guest may own at most the target and its allowance, until it is told another target.

mod ask;
mod punch;

use std::sync::Arc;

use demeter_policy::{ByteCount, NodeId, PerTier, Tier, TierBytes};
use demeter_proto::{BootId, Message, SessionId};
use tokio::sync::Semaphore;
use tokio::time::{Duration, Instant, timeout_at};

use super::held::HeldSet;
use super::{Progress, ProvisionError, Provisioner};
use crate::agent::{Agent, Away, GuestSession};
use crate::backing::Backing;
use ask::away;

/// The most that is asked for at once, so that an answer comes in time.
const ASK_MAX: ByteCount = ByteCount(256 << 20);

/// No further question is asked when less than this is left until the deadline: a guest may take
/// one and a half seconds to find memory that it can do without.
const MARGIN: Duration = Duration::from_millis(1800);

/// A VM whose guest has the balloon driver and an agent.
#[derive(Debug)]
pub struct Balloon<B> {
    agent: Agent,
    backing: Arc<B>,
    /// Held while a thread punches; it may outlive the call that wanted it.
    punching: Arc<Semaphore>,
    nodes: PerTier<NodeId>,
    oom: ByteCount,
    view: Option<View>,
    /// What the guest may come to own of slow memory by itself.
    ceiling: Option<ByteCount>,
    /// What the punches of the current call gave back to the host.
    returned: ByteCount,
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
            backing: Arc::new(backing),
            punching: Arc::new(Semaphore::new(1)),
            nodes,
            oom,
            view: None,
            ceiling: None,
            returned: ByteCount(0),
        }
    }

    /// What the VM owns by what is known to be held.
    fn owned(&self, view: &View, tier: Tier) -> ByteCount {
        let held = view.held.get(tier).total();
        ByteCount(self.backing.size(tier).0.saturating_sub(held.0))
    }

    /// The view, asked anew if anything has disturbed it.
    async fn view(&mut self) -> Result<View, ProvisionError> {
        let oom_returned = self.oom_returned();
        let current = |view: &View, peer: &GuestSession| {
            (view.session, view.oom_returned) == (peer.session, oom_returned)
        };
        let peer = self.peer()?;
        match self.view.take_if(|view| current(view, &peer)) {
            Some(view) => Ok(view),
            None => self.view_anew().await,
        }
    }

    /// The view as the guest tells it now.
    async fn view_anew(&mut self) -> Result<View, ProvisionError> {
        let peer = self.peer()?;
        let before = self.view.take();
        let held = before.filter(|view| view.boot_id == peer.boot_id);
        if held.is_none() {
            self.ceiling = None;
        }
        let mut view = View {
            boot_id: peer.boot_id,
            session: peer.session,
            held: held.map_or_else(PerTier::default, |view| view.held),
            oom_returned: self.oom_returned(),
        };
        for tier in Tier::ALL {
            self.prove(tier).await?;
        }
        for tier in Tier::ALL {
            self.list(&mut view, tier).await?;
        }
        Ok(view)
    }

    /// Who is there, if it has the nodes.
    fn peer(&self) -> Result<GuestSession, ProvisionError> {
        let peer = self.agent.peer().borrow().clone();
        let peer = peer.ok_or_else(away)?;
        for tier in Tier::ALL {
            let node = *self.nodes.get(tier);
            if !peer.has(node) {
                let reason = format!("the guest has no node {node}");
                return Err(ProvisionError::Refused(reason));
            }
        }
        Ok(peer)
    }

    fn oom_returned(&self) -> ByteCount {
        let stats = self.agent.stats();
        let stats = stats.borrow();
        stats
            .as_ref()
            .map_or(ByteCount(0), |stats| stats.oom_returned)
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
        self.returned = ByteCount(0);
        let mut view = self.view().await?;
        let reason = loop {
            let before = self.owned(&view, tier);
            let partly = if before > target {
                let bytes = ASK_MAX.min(ByteCount(before.0 - target.0));
                self.inflate(&mut view, tier, bytes).await?
            } else if before < target {
                let bytes = ASK_MAX.min(ByteCount(target.0 - before.0));
                self.deflate(&mut view, tier, bytes).await?
            } else {
                break None;
            };
            let owned = self.owned(&view, tier);
            let why = match partly {
                Some(why) => why,
                None if owned == before => "the guest did nothing".to_owned(),
                None if owned == target || Instant::now() + MARGIN < deadline => continue,
                None => "there was not enough time for all of it".to_owned(),
            };
            break Some(why);
        };
        let owned = self.owned(&view, tier);
        if tier == Tier::Slow {
            self.ceiling = Some(ByteCount(target.min(owned).0.saturating_add(self.oom.0)));
        }
        self.allow(&view).await?;
        self.view = Some(view);
        Ok(Progress {
            owned,
            returned_to_host: self.returned,
            reason,
        })
    }
}

impl<B: Backing> Provisioner for Balloon<B> {
    fn name(&self) -> &'static str {
        "demeter-balloon"
    }

    fn overrun(&self) -> TierBytes {
        let Some(view) = &self.view else {
            return TierBytes::default();
        };
        TierBytes::from_fn(|tier| {
            let may_have = match tier {
                Tier::Fast => self.owned(view, tier),
                // What the driver may give back by itself is told a moment later.
                Tier::Slow => self.owned(view, tier).max(self.ceiling.unwrap_or_default()),
            };
            // A file that does not answer shows nothing; whoever punches next hears of it.
            let backed = self.backing.backed(tier).unwrap_or_default();
            ByteCount(backed.0.saturating_sub(may_have.0))
        })
    }

    async fn actual(&mut self, deadline: Instant) -> Result<TierBytes, ProvisionError> {
        let ask = async {
            let view = self.view_anew().await?;
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

fn late() -> ProvisionError {
    ProvisionError::Timeout("the guest's agent".to_owned())
}

#[cfg(test)]
mod tests;
