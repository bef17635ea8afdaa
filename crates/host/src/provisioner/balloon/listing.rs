//! What a guest holds, asked part by part and given back batch by batch.

use demeter_policy::{ByteCount, GuestPhysAddr, Tier};
use demeter_proto::{GpaRange, LISTS_BY_PARTS, Message};

use super::ask::{away, fulfilled, hostile};
use super::punch::{holes, next_batch};
use super::{Guest, View};
use crate::agent::Away;
use crate::backing::{Backing, FileOffset};
use crate::provisioner::ProvisionError;
use crate::provisioner::held::HeldSet;

/// How far the list of a tier has come. What was named is in the view's set.
#[derive(Debug, Default)]
pub(super) struct Listing {
    plugged: ByteCount,
    state: State,
}

#[derive(Debug, Default)]
enum State {
    /// Nothing was asked; the set is of no use any more.
    #[default]
    Due,
    /// What lies below was named.
    Asking(GuestPhysAddr),
    /// All was named; what lies below, and in parts whose seal is whole, was given back.
    GivingBack { below: FileOffset },
}

impl<B: Backing> Guest<B> {
    /// Goes on with the list of a tier, if there is one to be made, and makes the view so. Nothing is
    /// given back before all was named. Dropped, it has come as far as it has.
    pub(super) async fn list(&mut self, view: &mut View, tier: Tier) -> Result<(), ProvisionError> {
        let Some(listing) = view.listing.get_mut(tier) else {
            return Ok(());
        };
        // One that was begun, and is always a whole one, begins anew.
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
                match self.is_touched(tier, held).await? {
                    true => seals.break_all(),
                    false => seals.break_changed(held),
                }
                listing.state = State::GivingBack {
                    below: FileOffset(0),
                };
            }
            self.steps += 1;
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

    /// Asks for one part; says whether there is more. What was heard is noted at once: a call may be
    /// cut off between two messages, and then goes on behind them.
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
        let mut answers = self.agent.ask(question).await.map_err(|Away| away())?;
        let mut more = false;
        loop {
            match answers.next().await.map_err(|Away| away())? {
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
            // Each part names pages that none did before, so that there is an end.
            return Err(hostile("its list does not go on"));
        }
        Ok(more)
    }

    /// Whether somebody has touched held memory: the guest, or whoever read all of it on the host.
    async fn is_touched(&self, tier: Tier, held: &HeldSet) -> Result<bool, ProvisionError> {
        let owned = self.backing.size(tier).0.saturating_sub(held.total().0);
        Ok(self.backed(tier).await?.0 > owned)
    }
}
