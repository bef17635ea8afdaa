//! Lists a guest's held memory in parts and punches it in batches.

use demeter_policy::{ByteCount, GuestPhysAddr, Tier};
use demeter_proto::{GpaRange, LISTS_BY_PARTS, Message};

use super::answers::{fulfilled, hostile};
use super::punch::{holes, next_batch};
use super::{Guest, View};
use crate::backing::{Backing, FileOffset};
use crate::provisioner::ProvisionError;
use crate::provisioner::held::HeldSet;

/// Progress of a tier's listing. The view's set has the pages named so far.
#[derive(Debug, Default)]
pub(super) struct Listing {
    plugged: ByteCount,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing was asked yet; the old set is stale.
    #[default]
    Due,
    /// All pages below this address were named.
    Asking(GuestPhysAddr),
    /// All pages were named. Whether they were touched after punching is unknown.
    Named,
    /// All pages were named. Pages below this offset and in sealed parts were punched.
    GivingBack { below: FileOffset },
}

impl<B: Backing> Guest<B> {
    /// Continues the listing of a tier, if one is due, and updates the view. Punching starts after
    /// the last part. A dropped call keeps its progress.
    pub(super) async fn list(&mut self, view: &mut View, tier: Tier) -> Result<(), ProvisionError> {
        let Some(listing) = view.listing.get_mut(tier) else {
            return Ok(());
        };
        // Older guests send whole lists only, so an interrupted list starts again.
        let is_begun = matches!(listing.state, State::Asking(_));
        if is_begun && self.peer()?.version < LISTS_BY_PARTS {
            *listing = Listing::default();
        }
        let (held, seals) = (view.held.get_mut(tier), view.seals.get_mut(tier));
        self.allow_nothing().await?;
        if let State::Due = listing.state {
            *held = HeldSet::new(self.backing.size(tier));
            listing.state = State::Asking(GuestPhysAddr(0));
        }
        while let State::Asking(from) = listing.state {
            if !self.list_part(tier, from, listing, held).await? {
                // Set before waiting, so that the list is not asked for twice.
                listing.state = State::Named;
            }
            self.steps += 1;
        }
        if let State::Named = listing.state {
            match self.is_touched(tier, held).await? {
                true => seals.break_all(),
                false => seals.break_changed(held),
            }
            listing.state = State::GivingBack {
                below: FileOffset(0),
            };
        }
        let State::GivingBack { below } = &mut listing.state else {
            return Ok(());
        };
        let mut holes = holes(tier, held.broken_runs(seals, *below)).peekable();
        while let Some(batch) = next_batch(&mut holes) {
            let end = batch.last().map(|hole| hole.offset.0 + hole.len.0);
            self.punch(view.session, tier, batch).await?;
            *below = end.map_or(*below, FileOffset);
            self.steps += 1;
        }
        drop(holes);
        seals.close(held);
        *view.plugged.get_mut(tier) = listing.plugged;
        *view.listing.get_mut(tier) = None;
        Ok(())
    }

    /// Asks for one part and returns whether there is more. Each message is recorded at once, so a
    /// call that is cut off between two messages continues after the first.
    async fn list_part(
        &mut self,
        tier: Tier,
        from: GuestPhysAddr,
        listing: &mut Listing,
        held: &mut HeldSet,
    ) -> Result<bool, ProvisionError> {
        let node = *self.nodes.get(tier);
        let question = |request| Message::List {
            request,
            node,
            from,
        };
        let mut answers = self.agent.ask(question).await?;
        let mut more = false;
        loop {
            match answers.next().await? {
                Message::Held(part) if part.node == node => {
                    let plugged = self.take_named(tier, &part.ranges, held, |_| {})?;
                    listing.plugged.0 = listing.plugged.0.saturating_add(plugged.0);
                    if let Some(end) = part.ranges.last().and_then(GpaRange::end) {
                        listing.state = State::Asking(end);
                    }
                    more = part.more;
                }
                Message::Done(done) if done.node == node => {
                    fulfilled(done.outcome, done.reason)?;
                    break;
                }
                _ => return Err(hostile("it answers what it was not asked")),
            }
        }
        let goes_on = matches!(listing.state, State::Asking(end) if end > from);
        if more && !goes_on {
            // Each part must name new pages; otherwise the list would never end.
            return Err(hostile("its list makes no progress"));
        }
        Ok(more)
    }

    /// Whether held memory was touched, by the guest or by a host process that read it.
    async fn is_touched(&self, tier: Tier, held: &HeldSet) -> Result<bool, ProvisionError> {
        let owned = self.backing.size(tier).0.saturating_sub(held.total().0);
        Ok(self.backed(tier).await?.0 > owned)
    }

    async fn backed(&self, tier: Tier) -> Result<ByteCount, ProvisionError> {
        let backing = self.backing.clone();
        let outside = self.agent.outside();
        let asked = outside.ask("the VM's memory file", move |wait| {
            backing.backed(tier, wait)
        });
        let backed = asked.await.unwrap_or_else(|stuck| Err(stuck.into()));
        backed.map_err(|source| ProvisionError::Backing { tier, source })
    }
}
