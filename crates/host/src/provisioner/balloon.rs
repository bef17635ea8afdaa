//! Demeter's balloon: the guest's driver holds pages of a node, and the host punches them out.
//!
//! # Problem
//! A guest names the pages that it gives up. The host must free exactly these pages, although the
//! guest may lie and may be reset at any moment. It must touch no other memory, and no page that
//! the guest uses again.
//!
//! # Approach
//! Each new view of the guest begins with a proof that its agent runs in this VM. The driver writes
//! a fresh nonce into a page of each node, and the host reads it from the tier's file.
//!
//! Each named range is checked at once: whole pages, in the VM's memory of that tier, not held
//! already, within the size that was asked for. The first wrong range marks the guest as hostile,
//! and no range of the same answer is punched. Held memory is kept as a set of pages of the backing
//! file, so that two addresses of one page count once.
//!
//! A reset between an answer and the punch would turn held memory into live memory. So the guest
//! must answer a ping in the same session before each small batch of punches (`punch.rs`). A reset
//! drops the call, and the batch ends with the current hole. The out-of-memory allowance is zero
//! from before the question until all punches are done, so the driver gives nothing back meanwhile.
//!
//! The host lists held memory again after a restart of the agent or guest, after the driver gave
//! memory back by itself, and after every deflation. The new list replaces the old set of pages; of
//! the old set, only a digest of every 16 MiB is kept. Held pages are punched where the digest has
//! changed; pages that are no longer held belong to the guest again. If the file occupies more than
//! the VM owns, all held pages are punched again.
//!
//! Memory plugged in later (a DIMM) belongs to no tier. The driver cannot tell it from the node's
//! other memory, so the guest may hold it, and it does not count.
//!
//! A list may be long: memory in single pages has 262,144 pieces a GiB. So the host asks for it in
//! parts and punches in batches. This progress survives the call's deadline within the same
//! session. The allowance stays zero meanwhile, so that listed memory stays held.
//!
//! # Properties
//! - Nothing is punched on the word of an agent that is not in this VM.
//! - Only pages that the guest named and that lie in its own memory of that tier are punched.
//! - After a reset, at most one batch of the memory held before it is punched.
//! - A VM owns its tier's memory less the checked and punched pages.
//! - The guest owns at most the target plus its allowance, until it gets another target.
//! - Whatever the guest says, the host keeps one bit a page of guest memory and a 64th of that:
//!   32.5 KiB a GiB. Data in flight is bounded by `ASK_MAX`: a list has at most as many runs as
//!   pages.
//! - Every listing of an honest guest completes, however many pieces it has and however short the
//!   deadlines are.

mod answers;
mod listing;
mod named;
mod prove;
mod punch;
mod resize;

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
use crate::outside;
use listing::Listing;

/// Maximum size of one request, so that the answer comes in time.
const ASK_MAX: ByteCount = ByteCount(256 << 20);

/// Time that must be left until the deadline to ask again. A guest may need 1.5 s to find free
/// memory.
const MARGIN: Duration = Duration::from_millis(1800);

/// A VM whose guest has the balloon driver and an agent.
#[derive(Debug)]
pub struct Balloon<B> {
    guest: Guest<B>,
    oom: ByteCount,
    view: Option<View>,
    /// Maximum slow memory that the guest may own, including memory that it reclaims by itself.
    ceiling: Option<ByteCount>,
}

/// The connected guest and the files behind its memory.
#[derive(Debug)]
struct Guest<B> {
    agent: AgentClient,
    backing: Arc<B>,
    /// Held while a thread punches, which may outlive the call that started it.
    punching: Arc<Semaphore>,
    nodes: PerTier<NodeId>,
    /// Memory that the current call's punches returned to the host.
    returned: ByteCount,
    /// Total number of parts listed and batches punched.
    steps: u64,
}

/// The host's knowledge of held memory, valid until a disturbance.
#[derive(Debug)]
struct View {
    boot_id: BootId,
    session: SessionId,
    /// The driver's count of self-returned memory when the view was made.
    oom_returned: ByteCount,
    /// Pages that the guest named. All of them are punched unless a listing is due.
    held: PerTier<HeldSet>,
    /// Digests of pages that were punched and may still be held.
    seals: PerTier<Seals>,
    /// Held memory of no tier (plugged in later), as the guest reports it.
    plugged: TierBytes,
    /// Listings that are due or under way. Set before the guest is asked to change anything, so
    /// that the view stays true whenever the call ends.
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
    /// A balloon in the guest behind `agent`; tiers are the guest's `nodes`. The driver may give
    /// back `oom` of slow memory by itself.
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

    /// Brings the view up to date. If `is_current`, an undisturbed view is reused.
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
        // Continue a listing that has begun.
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
                None => "the time limit was reached".to_owned(),
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

    /// Sets the driver's out-of-memory allowance to what the guest may still own. Call it after all
    /// punches.
    async fn allow(&mut self, owned: ByteCount) -> Result<(), ProvisionError> {
        let room = self
            .ceiling
            .map_or(0, |ceiling| ceiling.0.saturating_sub(owned.0));
        let oom = ByteCount(room.min(self.oom.0));
        Ok(self.guest.agent.tell(Message::Allow { oom }).await?)
    }

    /// The result of a call with a deadline. `steps` is the progress count when the call began.
    fn ended<T>(
        &mut self,
        result: Result<Result<T, ProvisionError>, Elapsed>,
        steps: u64,
    ) -> Result<T, ProvisionError> {
        match result {
            Ok(Ok(value)) => Ok(value),
            Ok(Err(error)) => {
                // Drop the view after any error, because it may be stale.
                self.view = None;
                Err(error)
            }
            Err(Elapsed { .. }) if self.guest.steps > steps => Err(ProvisionError::Unfinished),
            Err(Elapsed { .. }) => Err(ProvisionError::Timeout("the guest's agent".to_owned())),
        }
    }
}

impl<B: Backing> Guest<B> {
    /// Memory that the VM owns: all but its held pages.
    fn owned(&self, view: &View, tier: Tier) -> ByteCount {
        let held = view.held.get(tier).total();
        ByteCount(self.backing.size(tier).0.saturating_sub(held.0))
    }

    /// The connected guest's session, if it has the configured nodes.
    fn peer(&self) -> Result<GuestSession, ProvisionError> {
        let peer = self.agent.peer().borrow().clone();
        let peer = peer.ok_or(Away)?;
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

    fn read_backed(&self) -> Option<outside::ReadSizes> {
        let backing = self.guest.backing.clone();
        Some(Box::new(move |wait| {
            Ok(TierBytes {
                fast: backing.backed(Tier::Fast, wait)?,
                slow: backing.backed(Tier::Slow, wait)?,
            })
        }))
    }

    fn overrun(&self, backed: TierBytes) -> TierBytes {
        let Some(view) = self.view.as_ref().filter(|view| view.is_whole()) else {
            return TierBytes::default();
        };
        TierBytes::from_fn(|tier| {
            let owned = self.guest.owned(view, tier);
            let may_have = match tier {
                Tier::Fast => owned,
                // The driver reports self-returned memory with a delay, so allow for all of it.
                Tier::Slow => owned.max(self.ceiling.unwrap_or_default()),
            };
            ByteCount(backed.get(tier).0.saturating_sub(may_have.0))
        })
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
