//! A model of DAMON, the kernel's access monitor, as in Linux 6.12. A kdamond samples accessed bits of a process's
//! memory or of a node.
//!
//! # Problem
//! The kernel needs to know how often memory is accessed, at low cost.
//!
//! # Approach
//! Memory is divided into regions ([`regions`]). In each sampling interval, the accessed bit of a random page in each
//! region is cleared. An interval later, the bit tells whether the page was accessed. After a number of samples an
//! aggregation ends, and clients read the counts.
//!
//! The bit is cleared without a flush. While a TLB holds a page's translation, no access sets the bit again, so the
//! page appears idle. No code here models that effect: it follows from the model of the TLB.
//!
//! Each sample takes time on the kdamond's virtual CPU. All samples of an interval are taken together.
//!
//! Not modelled: mappings that change while a kdamond runs, and the two page flags in which the kernel preserves
//! accessed bits for reclaim.
//!
//! # Properties
//! - A page that is accessed in every interval, and is in no TLB, is found by every sample; an idle page by none.
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

/// Sampling parameters of a kdamond.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Attrs {
    /// Interval between clearing an accessed bit and reading it.
    pub(crate) sample_ps: u64,
    /// Samples per aggregation.
    pub(crate) looks: u32,
    /// Limits of regions.
    pub(crate) bounds: Bounds,
}

/// Addresses that a kdamond can monitor.
pub(crate) trait Watched: Address {
    /// The entry of the page at this address, if any.
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

/// A running kdamond.
#[derive(Debug, Clone)]
pub(crate) struct Kdamond<A> {
    attrs: Attrs,
    regions: Vec<Region<A>>,
    rng: Rng,
    /// Number of regions at the last split.
    split_at: usize,
    /// Samples taken in this aggregation.
    looked: u32,
    due_ps: u64,
    spent_ps: u64,
}

impl<A: Watched> Kdamond<A> {
    /// Starts a kdamond.
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

    /// Starts a kdamond with these regions, in order and disjoint.
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

    /// Time of the next sample.
    pub(crate) fn due_ps(&self) -> u64 {
        self.due_ps
    }

    /// CPU time used so far.
    pub(crate) fn spent_ps(&self) -> u64 {
        self.spent_ps
    }

    /// The current regions.
    pub(crate) fn regions(&self) -> &[Region<A>] {
        &self.regions
    }

    /// The current regions, mutable.
    pub(crate) fn regions_mut(&mut self) -> &mut Vec<Region<A>> {
        &mut self.regions
    }

    /// Sets another sampling interval. Ages are counted in aggregations, and keep standing for the same time.
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

    /// Reads the sampled accessed bits. Returns true at the end of an aggregation, before counts are reset.
    /// [`Self::go_on`] must follow.
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

    /// Continues with the next sample, and after the last sample with the next aggregation.
    pub(crate) fn go_on(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if self.looked == self.attrs.looks {
            self.looked = 0;
            let (before, bounds) = (&mut self.split_at, &self.attrs.bounds);
            regions::split(&mut self.regions, before, bounds, &mut self.rng);
        }
        self.clear(guest, actor);
    }

    /// Stops the kdamond. It notices at the end of the interval, after one more sample.
    pub(crate) fn stop(mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        self.at_each(guest, actor, |_, _| ());
    }

    /// Clears the accessed bit of one page in each region.
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

    /// Visits one page of each region, which is half of a sample.
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
