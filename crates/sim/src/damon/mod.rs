//! DAMON, the kernel's monitor of data accesses, as Linux 6.12 has it: a kdamond looks at the accessed bits
//! of a process's memory or of a node.
//!
//! # Problem
//! The kernel wants to know which memory is used how much, for little.
//!
//! # Approach
//! Memory is taken apart into regions ([`regions`]). Each sampling interval a page of each region is taken
//! by chance and its accessed bit is cleared; an interval later the bit tells whether the page was accessed.
//! After so many looks an aggregation ends: whoever is interested takes the counts.
//!
//! The bit is cleared without a flush. While a TLB has a page's translation no access sets the bit again, so
//! that the page looks untouched: nothing here is done for that, it follows from the model of the TLB.
//!
//! Each look takes time of the virtual CPU where the kdamond runs. All looks of an interval come at once.
//!
//! Left out: mappings that change while a kdamond is on, and the two bits in which the kernel keeps what
//! DAMON took from a page for reclaim.
//!
//! # Properties
//! - A page that is accessed in every interval, and is in no TLB, is found by every look; one that is not
//!   accessed by none.
//! - Clearing an accessed bit invalidates no translation.

mod regions;

use std::ops::Range;

use demeter_policy::{GuestPhysAddr, GuestVirtAddr};
use demeter_scenario::rng::Rng;

use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::{Address, Entry, PageSize};
pub(crate) use regions::{Bounds, Region};

/// How a kdamond looks.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attrs {
    /// From clearing an accessed bit to looking at it.
    pub(crate) sample_ps: u64,
    /// Looks that make an aggregation.
    pub(crate) looks: u32,
    /// Regions that there may be.
    pub(crate) bounds: Bounds,
}

/// Addresses that a kdamond can watch.
pub(crate) trait Watched: Address {
    /// The entry of the page that holds it, if there is one.
    fn entry(self, guest: &mut Guest) -> Option<(&mut Entry, PageSize)>;
}

impl Watched for GuestVirtAddr {
    fn entry(self, guest: &mut Guest) -> Option<(&mut Entry, PageSize)> {
        guest.tables.find_mut(self)
    }
}

impl Watched for GuestPhysAddr {
    fn entry(self, guest: &mut Guest) -> Option<(&mut Entry, PageSize)> {
        let gva = guest.mapped_from(self)?;
        guest.tables.find_mut(gva)
    }
}

/// A kdamond that is on.
#[derive(Debug, Clone)]
pub(crate) struct Kdamond<A> {
    attrs: Attrs,
    regions: Vec<Region<A>>,
    rng: Rng,
    /// Regions when they were last split.
    split_at: usize,
    /// Looks of this aggregation.
    looked: u32,
    due_ps: u64,
    spent_ps: u64,
}

impl<A: Watched> Kdamond<A> {
    /// Switches one on.
    pub(crate) fn start(
        watched: Range<A>,
        attrs: Attrs,
        seed: u64,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Self {
        let regions = regions::lay_out(&watched, &attrs.bounds);
        Self::on(regions, attrs, seed, guest, actor)
    }

    /// Switches one on that looks at these regions, in order and disjoint.
    pub(crate) fn start_at(
        regions: impl Iterator<Item = Range<A>>,
        attrs: Attrs,
        seed: u64,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Self {
        let regions = regions.map(Region::new).collect();
        Self::on(regions, attrs, seed, guest, actor)
    }

    fn on(
        regions: Vec<Region<A>>,
        attrs: Attrs,
        seed: u64,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Self {
        let mut kdamond = Self {
            regions,
            attrs,
            rng: Rng::new(seed, 0),
            split_at: 0,
            looked: 0,
            due_ps: 0,
            spent_ps: 0,
        };
        kdamond.clear(guest, actor);
        kdamond
    }

    /// When it wants to look.
    pub(crate) fn due_ps(&self) -> u64 {
        self.due_ps
    }

    /// CPU time that it has taken.
    pub(crate) fn spent_ps(&self) -> u64 {
        self.spent_ps
    }

    /// What it knows.
    pub(crate) fn regions(&self) -> &[Region<A>] {
        &self.regions
    }

    /// The same, for one who acts on regions.
    pub(crate) fn regions_mut(&mut self) -> &mut Vec<Region<A>> {
        &mut self.regions
    }

    /// Looks from the next one on at another interval. Ages, which are counted in aggregations, stand for the same
    /// time as before.
    pub(crate) fn set_sample_ps(&mut self, sample_ps: u64) {
        let before_ps = std::mem::replace(&mut self.attrs.sample_ps, sample_ps.max(1));
        for region in &mut self.regions {
            let age_ps = u128::from(region.age) * u128::from(before_ps);
            region.age = (age_ps / u128::from(self.attrs.sample_ps)) as u64;
        }
    }

    /// Counts a region's accesses over the time of one aggregation that ends now. It takes the missing part of that time
    /// from the last aggregation.
    pub(crate) fn recent_accesses(&self) -> impl Fn(&Region<A>) -> u32 + use<A> {
        let (looks, looked) = (self.attrs.looks, self.looked);
        move |region| region.accesses + region.accesses_before * (looks - looked) / looks
    }

    /// Looks whether the pages were accessed. True at the end of an aggregation, before regions count anew:
    /// [`Self::go_on`] has to follow.
    pub(crate) fn look(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) -> bool {
        self.at_each(guest, actor, |entry, region| {
            region.accesses += u32::from(entry.is_accessed());
        });
        self.looked += 1;
        let is_end = self.looked == self.attrs.looks;
        if is_end {
            regions::merge(&mut self.regions, self.attrs.looks, &self.attrs.bounds);
        }
        is_end
    }

    /// Goes on to the next look, and after the last one to the next aggregation.
    pub(crate) fn go_on(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if self.looked == self.attrs.looks {
            self.looked = 0;
            let (before, bounds) = (&mut self.split_at, &self.attrs.bounds);
            regions::split(&mut self.regions, before, bounds, &mut self.rng);
        }
        self.clear(guest, actor);
    }

    /// Switches it off: it notices when the interval is over, and has looked once more by then.
    pub(crate) fn stop(mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        self.at_each(guest, actor, |_, _| ());
    }

    /// Clears the accessed bit of a page of each region.
    fn clear(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        for region in &mut self.regions {
            let offset = self.rng.below(region.bytes());
            region.sampled = A::of(region.range.start.number() + offset);
        }
        self.at_each(guest, actor, |entry, _| {
            entry.take_accessed();
        });
        self.due_ps = actor.now_ps() + self.attrs.sample_ps;
    }

    /// Visits the page of each region, which is half of a look.
    fn at_each(
        &mut self,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
        mut visit: impl FnMut(&mut Entry, &mut Region<A>),
    ) {
        let mut visited = 0;
        for region in &mut self.regions {
            if let Some((entry, _)) = region.sampled.entry(guest) {
                visit(entry, region);
                visited += 1;
            }
        }
        let took_ps = visited * actor.costs.damon_look_ps / 2;
        actor.charge(Cause::Track, took_ps);
        self.spent_ps += took_ps;
    }
}

#[cfg(test)]
mod tests;
