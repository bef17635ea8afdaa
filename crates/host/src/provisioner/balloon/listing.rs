//! What a guest holds, asked part by part and given back batch by batch.

use demeter_policy::{ByteCount, GuestPhysAddr, Tier};
use demeter_proto::{GpaRange, Message};

use super::ask::{away, fulfilled, hostile};
use super::punch::{holes, next_batch};
use super::{Guest, View};
use crate::agent::Away;
use crate::backing::{Backing, FileOffset};
use crate::provisioner::ProvisionError;
use crate::provisioner::held::HeldSet;

/// How far the list of a tier has come.
#[derive(Debug)]
pub(super) struct Listing {
    named: HeldSet,
    plugged: ByteCount,
    state: State,
}

#[derive(Debug)]
enum State {
    /// What lies below was named.
    Asking(GuestPhysAddr),
    /// All was named; what lies below was given back. `all` is whether what was held before is given
    /// back again.
    GivingBack { below: FileOffset, all: bool },
}

impl Listing {
    /// Nothing yet, of a tier of `size`.
    pub(super) fn new(size: ByteCount) -> Self {
        Self {
            named: HeldSet::new(size),
            plugged: ByteCount(0),
            state: State::Asking(GuestPhysAddr(0)),
        }
    }
}

impl<B: Backing> Guest<B> {
    /// Goes on with the list of a tier, if there is one to be made, and makes the view so. Nothing is
    /// given back before all was named. Dropped, it has come as far as it has.
    pub(super) async fn list(&mut self, view: &mut View, tier: Tier) -> Result<(), ProvisionError> {
        let Some(listing) = view.listing.get_mut(tier) else {
            return Ok(());
        };
        self.allow_nothing().await?;
        while let State::Asking(from) = listing.state {
            if !self.list_part(tier, from, listing).await? {
                listing.state = State::GivingBack {
                    below: FileOffset(0),
                    all: self.is_touched(tier, &listing.named)?,
                };
            }
            self.steps += 1;
        }
        let State::GivingBack { below, all } = &mut listing.state else {
            return Ok(());
        };
        let known = Some(view.held.get(tier)).filter(|_| !*all);
        let mut holes = holes(tier, listing.named.runs_not_in(known, *below)).peekable();
        while let Some(batch) = next_batch(&mut holes) {
            let end = batch.last().map(|hole| hole.offset.0 + hole.len.0);
            self.punch(view.session, tier, batch).await?;
            *below = end.map_or(*below, FileOffset);
            self.steps += 1;
        }
        drop(holes);
        if let Some(listing) = view.listing.get_mut(tier).take() {
            *view.held.get_mut(tier) = listing.named;
            *view.plugged.get_mut(tier) = listing.plugged;
        }
        Ok(())
    }

    /// Asks for one part; says whether there is more. What was heard is noted at once: a call may be
    /// cut off between two messages, and then goes on behind them.
    async fn list_part(
        &mut self,
        tier: Tier,
        from: GuestPhysAddr,
        listing: &mut Listing,
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
                    let plugged = self.take_named(tier, &part.ranges, None, &mut listing.named)?;
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
    fn is_touched(&self, tier: Tier, named: &HeldSet) -> Result<bool, ProvisionError> {
        let owned = self.backing.size(tier).0.saturating_sub(named.total().0);
        Ok(self.backed(tier)?.0 > owned)
    }
}
