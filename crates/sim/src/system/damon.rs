//! DAMON as a rival: `migrate_hot` and `migrate_cold` on physical memory, as in Linux 6.12 with the lab's settings.
//!
//! # Problem
//! The kernel should tier by DAMON's findings, without user space.
//!
//! # Approach
//! Each node has a kdamond. After each aggregation, a scheme acts on the regions that match its pattern. It promotes
//! hot regions of the slow node, or demotes cold ones of the fast node. A quota limits the bytes per second that it
//! acts on, whether or not they move. The scheme takes regions with the highest scores in address order, from where it
//! stopped last. Half of a score is access frequency, half is age. Each page is checked again before it moves.
//!
//! A promotion without free fast memory moves the page within the slow node, in vain (`migrate_*` accepts any node with
//! free memory).
//!
//! Not modelled: automatic tuning of newer kernels. [`super::DamonAuto`] has it.
//!
//! # Properties
//! - In any second, schemes act on no more bytes than the quota.

use std::mem;

use demeter_policy::{ByteCount, GuestPhysAddr, GuestVirtAddr, MIB, Tier};

use super::{Context, Managed, Manager, NEVER_PS, Needs};
use crate::damon::{Attrs, Bounds, Kdamond, Region, Watched};
use crate::guest::{Guest, Watermarks};
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;

/// The lab's settings (`crates/lab/src/inside/rivals/damon.rs`): samples per aggregation, sampling interval, minimum
/// and maximum number of regions per node, and MiB per second of a scheme.
pub(super) const LOOKS: u32 = 20;
const SAMPLE_MS: u32 = 20;
const REGIONS: (u64, u64) = (50, 300);
const RATE_MIB_PER_S: u32 = 64;
const QUOTA_PS: u64 = 1000 * PS_PER_MS;

/// Hot: accessed in at least this many samples. Cold: in at most this many, for two seconds.
const PATTERN: Pattern = Pattern {
    hot_accesses_min: LOOKS / 10,
    cold_accesses_max: LOOKS / 20,
    cold_ms: 2000,
};

/// The highest score, and the maximum age of a region in doublings (`DAMOS_MAX_SCORE`, `DAMON_MAX_AGE_IN_LOG`).
const SCORE_MAX: usize = 99;
const AGE_DOUBLINGS_MAX: i64 = 32;

/// The action of a kdamond on the regions of its node.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Action {
    /// Promotes hot regions.
    MigrateHot,
    /// Demotes cold regions.
    MigrateCold,
}

/// The regions that are hot or cold.
#[derive(Debug, Clone, Copy)]
pub(super) struct Pattern {
    /// The fewest looks that find a hot one accessed.
    pub(super) hot_accesses_min: u32,
    /// The most looks that find a cold one accessed.
    pub(super) cold_accesses_max: u32,
    /// For how long it has to be cold.
    pub(super) cold_ms: u64,
}

/// The schemes of both nodes.
#[derive(Debug)]
pub(crate) struct Damon {
    /// The slow node's scheme, then the fast node's.
    schemes: [Scheme; 2],
    watermarks: Watermarks,
}

impl Damon {
    /// Schemes with the lab's settings.
    pub(crate) fn new(managed: &Managed<'_>) -> Self {
        let sample_ms = managed.knob(|s| s.sample_ms).unwrap_or(SAMPLE_MS);
        let rate_mib = managed.knob(|s| s.rate_mib_per_s).unwrap_or(RATE_MIB_PER_S);
        let scheme = |action| Scheme {
            action,
            pattern: PATTERN,
            regions: REGIONS,
            sample_ps: u64::from(sample_ms) * PS_PER_MS,
            quota: Quota::new(u64::from(rate_mib) * MIB),
            kdamond: None,
        };
        Self {
            schemes: [Action::MigrateHot, Action::MigrateCold].map(scheme),
            watermarks: Watermarks::LINUX.scaled(managed.knob(|s| s.watermark_scale_factor)),
        }
    }
}

impl Manager for Damon {
    fn needs(&self) -> Needs {
        Needs {
            watermarks: self.watermarks,
            ..Needs::default()
        }
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        now_ps
    }

    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        let regions = self.schemes.iter().filter_map(|s| s.kdamond.as_ref());
        let regions = regions.map(|kdamond| size_of_val(kdamond.regions()) as u64);
        ByteCount(regions.sum())
    }

    /// Turn of the kdamond that has waited longest.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        if let Some(scheme) = self.schemes.iter_mut().min_by_key(|s| s.due_ps())
            && scheme.due_ps() <= actor.now_ps()
        {
            scheme.turn(guest, actor);
        }
        let due = self.schemes.iter().map(Scheme::due_ps);
        due.min().unwrap_or(NEVER_PS)
    }
}

/// A kdamond and its action.
#[derive(Debug)]
pub(super) struct Scheme {
    pub(super) action: Action,
    pub(super) pattern: Pattern,
    /// The least and the most regions.
    pub(super) regions: (u64, u64),
    /// Between two looks.
    pub(super) sample_ps: u64,
    pub(super) quota: Quota,
    /// None before its first turn.
    pub(super) kdamond: Option<Kdamond<GuestPhysAddr>>,
}

impl Scheme {
    pub(super) fn due_ps(&self) -> u64 {
        self.kdamond.as_ref().map_or(0, Kdamond::due_ps)
    }

    fn turn(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        match self.kdamond.take() {
            None => self.kdamond = Some(self.begin(guest, actor)),
            Some(mut kdamond) => {
                if kdamond.look(guest, actor) {
                    let regions = mem::take(kdamond.regions_mut());
                    *kdamond.regions_mut() =
                        self.apply(regions, |region| region.accesses, guest, actor);
                }
                kdamond.go_on(guest, actor);
                self.kdamond = Some(kdamond);
            }
        }
    }

    pub(super) fn begin(&self, guest: &mut Guest, actor: &mut Actor<'_>) -> Kdamond<GuestPhysAddr> {
        let (node, seed) = match self.action {
            Action::MigrateHot => (Tier::Slow, 1),
            Action::MigrateCold => (Tier::Fast, 2),
        };
        let attrs = Attrs {
            sample_ps: self.sample_ps,
            looks: LOOKS,
            bounds: Bounds {
                least: self.regions.0,
                most: self.regions.1,
                page_bytes: 1 << guest.page_bits(),
            },
        };
        Kdamond::start(guest.span(node), attrs, seed, guest, actor)
    }

    /// Acts on matching regions within the quota. Returns all regions. If the quota ends within a region, that region
    /// is split. `accesses`: the samples of one aggregation that found a region accessed.
    pub(super) fn apply(
        &mut self,
        regions: Vec<Region<GuestPhysAddr>>,
        accesses: impl Fn(&Region<GuestPhysAddr>) -> u32,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Vec<Region<GuestPhysAddr>> {
        let fitting = regions
            .iter()
            .filter(|region| self.fits(region.age, accesses(region)));
        let scored: Vec<_> = fitting
            .map(|region| (self.score(region.age, accesses(region)), region.bytes()))
            .collect();
        let score_min = self.quota.begin(actor.now_ps(), &scored);
        let page_bytes = 1 << guest.page_bits();
        let mut all = Vec::with_capacity(regions.len() + 2);
        let mut left: Vec<_> = regions.into_iter().rev().collect();
        while let Some(mut region) = left.pop() {
            let skipped = self.quota.skipped(&region);
            if skipped > 0 && skipped < region.bytes() {
                left.push(region.split_off(skipped));
            }
            let (age, seen) = (region.age, accesses(&region));
            let is_due = skipped == 0 && self.fits(age, seen) && self.score(age, seen) >= score_min;
            let room = self.quota.room() / page_bytes * page_bytes;
            if is_due && room > 0 {
                if room < region.bytes() {
                    left.push(region.split_off(room));
                }
                self.quota.charge(&region);
                self.migrate(&region, guest, actor);
                region.age = 0;
            }
            all.push(region);
        }
        self.quota.wrap(all.last());
        all
    }

    /// Aggregations in milliseconds.
    fn ms(&self, aggregations: u64) -> u64 {
        aggregations * (self.sample_ps * u64::from(LOOKS) / PS_PER_MS)
    }

    /// Whether it acts on a region, by its age in aggregations and the looks that found it accessed.
    fn fits(&self, age: u64, accesses: u32) -> bool {
        let pattern = self.pattern;
        match self.action {
            Action::MigrateHot => accesses >= pattern.hot_accesses_min,
            Action::MigrateCold => {
                accesses <= pattern.cold_accesses_max && self.ms(age) >= pattern.cold_ms
            }
        }
    }

    /// The priority of a region.
    fn score(&self, age: u64, accesses: u32) -> usize {
        let hot = hotness(accesses, self.ms(age) / 1000);
        match self.action {
            Action::MigrateHot => hot,
            Action::MigrateCold => SCORE_MAX - hot,
        }
    }

    /// Moves those pages of a region that still match.
    fn migrate(&self, region: &Region<GuestPhysAddr>, guest: &mut Guest, actor: &mut Actor<'_>) {
        let (to, wants_young) = match self.action {
            Action::MigrateHot => (Tier::Fast, true),
            Action::MigrateCold => (Tier::Slow, false),
        };
        let look_ps = actor.costs.damon_look_ps / 2;
        let mut pages: Vec<(GuestVirtAddr, PageSize)> = vec![];
        let mut at = region.range.start.0;
        while at < region.range.end.0 {
            let gpa = GuestPhysAddr(at);
            at += 1 << guest.page_bits();
            let Some(gva) = guest.mapped_from(gpa) else {
                continue;
            };
            let Some((entry, size)) = gpa.entry(guest) else {
                continue;
            };
            let is_young = entry.take_accessed();
            let start = guest.page_start(gva, size);
            // A huge page counts once, even if the region begins inside it.
            if pages.last() == Some(&(start, size)) {
                continue;
            }
            match size {
                PageSize::Base => actor.charge_page(Cause::Track, look_ps),
                _ => actor.charge(Cause::Track, look_ps),
            }
            if is_young == wants_young {
                pages.push((start, size));
            }
            if size != PageSize::Base {
                at = at.max(gpa.0 - (gva.0 - start.0) + guest.bytes(size));
            }
        }
        let mut room = match to {
            Tier::Fast => guest.usable(Tier::Fast).0,
            Tier::Slow => u64::MAX,
        };
        let (mut fitting, mut in_vain) = (vec![], vec![]);
        for (page, size) in pages {
            match room.checked_sub(guest.bytes(size)) {
                Some(left) => {
                    room = left;
                    fitting.push(page);
                }
                None => in_vain.push(page),
            }
        }
        guest.migrate_pages(&fitting, to, actor);
        guest.migrate_in_vain(&in_vain, actor);
    }
}

/// Heat of a region, 0 to [`SCORE_MAX`]. Access count and age in seconds have equal weight (`damon_hot_score`, with
/// damo's weights).
fn hotness(accesses: u32, age_s: u64) -> usize {
    let often = i64::from(accesses * 100 / LOOKS);
    let doublings = i64::from(u64::BITS - age_s.leading_zeros()).min(AGE_DOUBLINGS_MAX);
    let age = if often == 0 { -doublings } else { doublings };
    let long = (age + AGE_DOUBLINGS_MAX) * 100 / AGE_DOUBLINGS_MAX / 2;
    let score = (often + long) / 2 * SCORE_MAX as i64 / 100;
    score.clamp(0, SCORE_MAX as i64) as usize
}

/// The quota of a scheme, in bytes per second.
#[derive(Debug)]
pub(super) struct Quota {
    pub(super) bytes: u64,
    /// Bytes used in this second.
    charged: u64,
    since_ps: Option<u64>,
    /// Address at which to continue in the next second, if the quota ran out.
    goes_on_at: Option<u64>,
}

impl Quota {
    pub(super) fn new(bytes: u64) -> Self {
        Self {
            bytes,
            charged: 0,
            since_ps: None,
            goes_on_at: None,
        }
    }

    /// Starts a pass over regions: returns the lowest score that the quota covers, for a list of scores and bytes.
    fn begin(&mut self, now_ps: u64, scored: &[(usize, u64)]) -> usize {
        if self.since_ps.is_none_or(|since| now_ps - since >= QUOTA_PS) {
            self.since_ps = Some(now_ps);
            self.charged = 0;
        }
        let mut by_score = [0; SCORE_MAX + 1];
        for &(score, bytes) in scored {
            by_score[score] += bytes;
        }
        let mut bytes = 0;
        let suffices = |&score: &usize| {
            bytes += by_score[score];
            bytes < self.bytes
        };
        (0..=SCORE_MAX)
            .rev()
            .take_while(suffices)
            .last()
            .map_or(SCORE_MAX, |score| score.saturating_sub(1))
    }

    fn room(&self) -> u64 {
        self.bytes.saturating_sub(self.charged)
    }

    /// Bytes at the start of a region that were handled before. Once that point is passed, returns 0.
    fn skipped(&mut self, region: &Region<GuestPhysAddr>) -> u64 {
        let Some(at) = self.goes_on_at.filter(|_| self.room() > 0) else {
            return 0;
        };
        if at >= region.range.end.0 {
            return region.bytes();
        }
        self.goes_on_at = None;
        at.saturating_sub(region.range.start.0)
    }

    /// After the last region, continues with the first.
    fn wrap(&mut self, last: Option<&Region<GuestPhysAddr>>) {
        let end = last.map(|last| last.range.end);
        self.goes_on_at = self
            .goes_on_at
            .filter(|&at| end.is_some_and(|end| at < end.0));
    }

    fn charge(&mut self, region: &Region<GuestPhysAddr>) {
        self.charged += region.bytes();
        if self.charged >= self.bytes {
            self.goes_on_at = Some(region.range.end.0);
        }
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    #[test]
    fn often_and_long_is_hot_and_never_for_long_is_cold() {
        let order = [
            hotness(0, 1 << 20),
            hotness(0, 1),
            hotness(2, 0),
            hotness(20, 0),
            hotness(20, 100),
        ];
        assert!(order.is_sorted_by(|a, b| a < b), "{order:?}");
        assert!(hotness(20, u64::MAX) == SCORE_MAX && hotness(0, u64::MAX) == 0);
    }

    proptest! {
        #[test]
        fn the_quota_suffices_for_what_is_above_its_lowest_score(
            scored in prop::collection::vec((0..=SCORE_MAX, 1u64..50), 0..40), bytes in 1u64..500,
        ) {
            let least = Quota::new(bytes).begin(0, &scored);
            let above = |least: usize| -> u64 {
                scored.iter().filter(|(s, _)| *s >= least).map(|(_, bytes)| bytes).sum()
            };
            prop_assert!(above(least + 1) < bytes);
            prop_assert!(least == 0 || above(least) >= bytes);
        }
    }
}
