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
//! anew, when the driver gave memory back by itself, and after every deflation. What is held by then is one
//! set of pages, for which the set before it makes room; of that one a digest of every 16 MiB is kept. Where
//! the digest is another one now, what is held is punched; where it is the same, it was. Pages that are not
//! held any more are the guest's again. Memory that was plugged in later (a DIMM) is of no tier: a guest may hold
//! it, as the driver cannot tell it from other memory of the node, and it counts for nothing. Where the file occupies more than the VM owns, all that is held is
//! punched once more.
//!
//! A list may be long: memory in single pages has 262,144 pieces a GiB. So it is asked part by part and
//! punched batch by batch, and how far that came outlives the call's deadline, as long as the guest is in
//! the same session: the allowance stays zero meanwhile, so that what was named stays held.
//!
//! # Properties
//! - Nothing is punched on the word of an agent that is not in this VM.
//! - Only pages that the guest named, that lie in its own memory of that tier, are punched.
//! - Of what was held before a reset, no more is punched after it than one batch.
//! - What is owned is the size of the tier's memory less what was checked and punched.
//! - The guest may own at most the target and its allowance, until it is told another target.
//! - Whatever the guest says, what is kept of it is one bit a page of its memory, and a 64th of that: 32.5 KiB
//!   a GiB. What is on its way besides is bounded by `ASK_MAX`: a list of at most as many runs as it has pages.
//! - A guest that answers truly comes to be known, however many pieces it names and however soon the
//!   deadlines are.

mod ask;
mod listing;
mod punch;

use std::sync::Arc;

use demeter_policy::{ByteCount, NodeId, PerTier, Tier, TierBytes};
use demeter_proto::{BootId, Message, SessionId};
use tokio::sync::Semaphore;
use tokio::time::error::Elapsed;
use tokio::time::{Duration, Instant, timeout_at};

use super::held::{HeldSet, Seals};
use super::{Progress, ProvisionError, Provisioner};
use crate::agent::{AgentClient, Away, GuestSession};
use crate::backing::Backing;
use ask::away;
use listing::Listing;

/// The most that is asked for at once, so that an answer comes in time.
const ASK_MAX: ByteCount = ByteCount(256 << 20);

/// No further question is asked when less than this is left until the deadline: a guest may take
/// one and a half seconds to find memory that it can do without.
const MARGIN: Duration = Duration::from_millis(1800);

/// A VM whose guest has the balloon driver and an agent.
#[derive(Debug)]
pub struct Balloon<B> {
    guest: Guest<B>,
    oom: ByteCount,
    view: Option<View>,
    /// What the guest may come to own of slow memory by itself.
    ceiling: Option<ByteCount>,
}

/// The guest that is spoken with, and the files behind its memory.
#[derive(Debug)]
struct Guest<B> {
    agent: AgentClient,
    backing: Arc<B>,
    /// Held while a thread punches; it may outlive the call that wanted it.
    punching: Arc<Semaphore>,
    nodes: PerTier<NodeId>,
    /// What the punches of the current call gave back to the host.
    returned: ByteCount,
    /// Parts that were listed and batches that were punched, ever.
    steps: u64,
}

/// What is known to be held, as long as nothing has disturbed it.
#[derive(Debug)]
struct View {
    boot_id: BootId,
    session: SessionId,
    /// What the driver had given back by itself by then.
    oom_returned: ByteCount,
    /// What the guest named, and all of it was given back where no listing is due.
    held: PerTier<HeldSet>,
    /// Of what was given back to the host, and is not known to be the guest's again.
    seals: PerTier<Seals>,
    /// So much is held besides of memory that was plugged in, by the guest's word.
    plugged: TierBytes,
    /// What is still to be found out of a tier. Set before the guest is asked to change anything, so
    /// that a call that ends at any point leaves a view that is true.
    listing: PerTier<Option<Listing>>,
}

impl View {
    fn is_whole(&self) -> bool {
        Tier::ALL
            .into_iter()
            .all(|tier| self.listing.get(tier).is_none())
    }
}

impl<B: Backing> Balloon<B> {
    /// A balloon in the guest behind `agent`, whose memory of each tier is the guest's node
    /// `nodes`. The driver may give back `oom` of slow memory by itself.
    pub fn new(agent: AgentClient, backing: B, nodes: PerTier<NodeId>, oom: ByteCount) -> Self {
        Self {
            guest: Guest {
                agent,
                backing: Arc::new(backing),
                punching: Arc::new(Semaphore::new(1)),
                nodes,
                returned: ByteCount(0),
                steps: 0,
            },
            oom,
            view: None,
            ceiling: None,
        }
    }

    /// Makes the view what the guest holds now. `is_current` is whether one that nothing has
    /// disturbed will do.
    async fn look(
        &mut self,
        is_current: bool,
    ) -> Result<(&mut Guest<B>, &mut View), ProvisionError> {
        let peer = self.guest.peer()?;
        let oom_returned = self.guest.oom_returned();
        let before = self.view.take();
        let before = before.filter(|view| view.boot_id == peer.boot_id);
        if before.is_none() {
            self.ceiling = None;
        }
        let undisturbed = before
            .as_ref()
            .is_some_and(|view| (view.session, view.oom_returned) == (peer.session, oom_returned));
        let size = |tier| self.guest.backing.size(tier);
        let mut view = match before {
            Some(view) => view,
            None => View {
                boot_id: peer.boot_id,
                session: peer.session,
                oom_returned,
                held: PerTier::from_fn(|tier| HeldSet::new(size(tier))),
                seals: PerTier::from_fn(|tier| Seals::new(size(tier))),
                plugged: TierBytes::default(),
                listing: PerTier::default(),
            },
        };
        // A list that was begun is gone on with.
        if !undisturbed || (view.is_whole() && !is_current) {
            view.session = peer.session;
            view.oom_returned = oom_returned;
            view.listing = PerTier::from_fn(|_| Some(Listing::default()));
        }
        let view = self.view.insert(view);
        if !view.is_whole() {
            for tier in Tier::ALL {
                self.guest.prove(tier).await?;
            }
            for tier in Tier::ALL {
                self.guest.list(view, tier).await?;
            }
        }
        Ok((&mut self.guest, view))
    }

    /// [`Provisioner::actual`] without its deadline.
    async fn ask(&mut self) -> Result<TierBytes, ProvisionError> {
        let (guest, view) = self.look(false).await?;
        let owned = PerTier::from_fn(|tier| guest.owned(view, tier));
        self.allow(*owned.get(Tier::Slow)).await?;
        Ok(owned)
    }

    /// [`Provisioner::set`] without its deadline, which ends it between two questions.
    async fn approach(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        self.guest.returned = ByteCount(0);
        let (guest, view) = self.look(true).await?;
        let reason = loop {
            let before = guest.owned(view, tier);
            let plugged = *view.plugged.get(tier);
            let partly = if before > target {
                let bytes = ASK_MAX.min(ByteCount(before.0 - target.0));
                guest.inflate(view, tier, bytes).await?
            } else if before < target {
                let bytes = ByteCount(target.0 - before.0);
                guest.deflate(view, tier, bytes, deadline).await?
            } else {
                break None;
            };
            let owned = guest.owned(view, tier);
            let why = match partly {
                Some(why) => why,
                None if owned == before && *view.plugged.get(tier) == plugged => {
                    "the guest did nothing".to_owned()
                }
                None if owned == target || Instant::now() + MARGIN < deadline => continue,
                None => "there was not enough time for all of it".to_owned(),
            };
            break Some(why);
        };
        let owned = guest.owned(view, tier);
        let slow = guest.owned(view, Tier::Slow);
        let returned_to_host = guest.returned;
        if tier == Tier::Slow {
            self.ceiling = Some(ByteCount(target.min(owned).0.saturating_add(self.oom.0)));
        }
        self.allow(slow).await?;
        Ok(Progress {
            owned,
            returned_to_host,
            reason,
        })
    }

    /// Lets the driver give back by itself what the guest may own beyond what it owns. Comes after
    /// all punches.
    async fn allow(&mut self, owned: ByteCount) -> Result<(), ProvisionError> {
        let room = self
            .ceiling
            .map_or(0, |ceiling| ceiling.0.saturating_sub(owned.0));
        let oom = ByteCount(room.min(self.oom.0));
        let told = self.guest.agent.tell(Message::Allow { oom }).await;
        told.map_err(|Away| away())
    }

    /// What a call came to that had to end by its deadline. `steps` is how far things were when it
    /// began.
    fn ended<T>(
        &mut self,
        result: Result<Result<T, ProvisionError>, Elapsed>,
        steps: u64,
    ) -> Result<T, ProvisionError> {
        match result {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                // Whatever it was, nothing is built upon what was heard before it.
                self.view = None;
                Err(error)
            }
            Err(Elapsed { .. }) if self.guest.steps > steps => Err(ProvisionError::Unfinished),
            Err(Elapsed { .. }) => Err(ProvisionError::Timeout("the guest's agent".to_owned())),
        }
    }
}

impl<B: Backing> Guest<B> {
    /// What the VM owns by what is known to be held.
    fn owned(&self, view: &View, tier: Tier) -> ByteCount {
        let held = view.held.get(tier).total();
        ByteCount(self.backing.size(tier).0.saturating_sub(held.0))
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
}

impl<B: Backing> Provisioner for Balloon<B> {
    fn name(&self) -> &'static str {
        "demeter-balloon"
    }

    async fn overrun(&self) -> TierBytes {
        let Some(view) = self.view.as_ref().filter(|view| view.is_whole()) else {
            return TierBytes::default();
        };
        let may_have = TierBytes::from_fn(|tier| {
            let owned = self.guest.owned(view, tier);
            match tier {
                Tier::Fast => owned,
                // What the driver may give back by itself is told a moment later.
                Tier::Slow => owned.max(self.ceiling.unwrap_or_default()),
            }
        });
        let mut overrun = TierBytes::default();
        for tier in Tier::ALL {
            // A file that does not answer shows nothing; whoever punches next hears of it.
            let backed = self.guest.backed(tier).await.unwrap_or_default();
            overrun.get_mut(tier).0 = backed.0.saturating_sub(may_have.get(tier).0);
        }
        overrun
    }

    async fn actual(&mut self, deadline: Instant) -> Result<TierBytes, ProvisionError> {
        let steps = self.guest.steps;
        let asked = timeout_at(deadline, self.ask()).await;
        self.ended(asked, steps)
    }

    async fn set(
        &mut self,
        tier: Tier,
        target: ByteCount,
        deadline: Instant,
    ) -> Result<Progress, ProvisionError> {
        let steps = self.guest.steps;
        let approached = timeout_at(deadline, self.approach(tier, target, deadline)).await;
        self.ended(approached, steps)
    }
}

#[cfg(test)]
mod tests;
