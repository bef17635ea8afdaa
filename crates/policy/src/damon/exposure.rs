//! How hot regions are, from looks at their accessed bits over short and long times.
//!
//! # Problem
//! DAMON clears the accessed bit of one page of a region and looks again one sampling interval
//! later. Found set, the bit says "once or more". So one interval cannot serve all memory: a huge
//! page is hit 512 times as often as a small one of the same heat. What is always found accessed
//! has an unknown heat, and a cold huge page may look as hot as a hot small one, or hotter. Taken at face
//! value this exchanges the wrong memory, and for ever. And an estimate from five looks is not
//! worth as much as hundreds of samples.
//!
//! # Approach
//! As a photographer does: several exposures. Regions are looked at with a long interval, and
//! again with shorter ones while many of them are always found accessed. Accesses that arrive
//! independently at a rate r leave an interval T untouched with probability exp(-rT): a share f of
//! looks that found an access stands for r = -ln(1 - f) / T per page. The longest exposure that is
//! not saturated is the most certain one. A region that is saturated in the shortest exposure may be
//! accessed at any rate between what that exposure can tell and the hottest region's: the middle is
//! assumed, on a scale of ratios. Taken for the hottest it would keep hot memory out of fast
//! memory, taken for what the exposure can tell it would have to give way to lukewarm memory.
//!
//! Rates become samples, which the policy weighs by their number. So the hottest regions have as many as
//! there were looks that found an access, colder ones fewer by their rates, and no region more than it had
//! such looks. A long pass that contradicts those before silences all until as many agree as are
//! needed, and each contradiction doubles that number: a program that sweeps through its memory
//! moves nothing. A long pass that finds hardly anything twice has seen something come by, and contradicts
//! by itself: two of them may find the same memory by chance. The policy forgets half of its samples in each epoch: [`Exposures::samples`]
//! tops up what it still holds to what was seen, and what was seen is forgotten by halves, too, as new
//! looks come.
//!
//! Pages change their size: a huge page that moves may be split. What was found of a region is then restated for its new
//! page-table entries, so that it is as hot as before: each of 512 small pages is accessed 512 times more seldom. Nobody
//! asks for the size of what a look found untouched; it is taken to be as before.
//!
//! What is known of a region is older than the last look, so it cannot tell what came of a move. Sightings can: a
//! region's samples by the last round of passes alone. A plan is made of what was found before, partly by chance; what is
//! to confirm it must owe nothing to that.
//!
//! # Properties
//! - A region has at most as many samples as it had looks that found an access; samples lie inside it.
//! - Of two regions of one size that had as many looks and are not saturated, the one that is
//!   accessed at the higher rate never has fewer samples (but for rounding), whatever their page sizes.
//! - What a look finds untouched is no hotter than before, whatever size its pages have now; a huge page that is split
//!   is as hot as it was.
//! - Nothing accessed yields nothing; without new looks the policy holds what was seen, to within a
//!   sample a region, and no more.
//! - What the last long pass did not find accessed has no sightings, and nothing has that it did not look at. Where the
//!   last round tells how hot everything is, sightings owe nothing to what was found before.
//! - While passes contradict each other the policy is told nothing, nor of what only comes by.
//! - What stays as hot as it was seldom contradicts what was found before, however hot it is.
//! - Regions to look at again are in order and disjoint, whatever layouts passes had.
//! - There are never more regions than [`REGIONS_KEPT`] in an exposure.

use std::collections::BTreeMap;
use std::time::Duration;

use super::{Region, Regions};
use crate::addr::{GuestVirtAddr, Pid, VirtRange};
use crate::sample::Sample;

/// Regions remembered for each exposure.
pub(super) const REGIONS_KEPT: usize = 8192;

/// A share of looks from which on the rate cannot be told.
const SATURATED: f64 = 0.85;

/// Passes for which a region stays saturated.
const SATURATED_FOR: u32 = 8;

/// Part of the regions found accessed that may be saturated: with more, a shorter exposure is due.
const SATURATED_PART: f64 = 0.05;

/// Part of older evidence that is kept when new looks come, and when they contradict it.
const KEPT: f64 = 0.5;
const SURPRISED_KEPT: f64 = 0.125;

/// A pass of fewer looks cannot tell what came by from what stays.
const FLEETING_LOOKS_MIN: u32 = 3;

/// Less than this part of what was found is in regions that were found accessed more than once: something came by.
const STAYING_MIN: f64 = 0.2;

/// Less than this part of the accesses that were expected where memory was hot contradicts that.
const CONTRADICTION: f64 = 0.5;

/// Passes that must agree before the policy is told what they found. Each contradiction doubles
/// them: memory that is hot for a moment only is not worth moving.
const NEEDED_AT_FIRST: u32 = 1;
const NEEDED_MAX: u32 = 32;

/// From so many on, waiting for agreement is no hurry.
const NEEDED_IN_VAIN: u32 = 8;

/// A region with so many times as many page-table entries, or as few, has other pages.
const OTHER_ENTRIES: f64 = 2.0;

/// So many more looks are taken to have found nothing in a region that was always found accessed: of many regions that are
/// found accessed at half of five looks, some are found at all of them.
const DOUBTED_LOOKS: f64 = 4.0;

/// Fewer expected accesses tell nothing.
const EXPECTED_MIN: f64 = 8.0;

/// Evidence of fewer looks than this is forgotten.
const LOOKS_MIN: f64 = 0.9;

/// A region of a process, in order of address.
type Key = (Pid, GuestVirtAddr, GuestVirtAddr);

/// What looks at a region found.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Seen {
    /// Pages that each of its page-table entries stands for: its size in entries.
    entries: f64,
    /// Looks, and those of them that found an access; older ones weigh less.
    looks: f64,
    found: f64,
    /// For so many more passes it counts as saturated in the shortest exposure: what is so by chance
    /// must not be hot in one pass and cold in the next.
    saturated_for: u32,
    /// The last pass's looks, and those of them that found an access.
    last_looks: f64,
    last_found: f64,
}

impl Seen {
    fn share(&self) -> f64 {
        self.found / self.looks
    }

    /// Whether its rate cannot be told.
    fn is_saturated(&self) -> bool {
        self.share() >= SATURATED
    }

    /// What the last pass alone has found, if it has looked.
    fn last(&self) -> Option<Self> {
        let last = Self {
            looks: self.last_looks,
            found: self.last_found,
            ..*self
        };
        let saturated_for = u32::from(last.is_saturated());
        (last.looks > 0.0).then_some(Self {
            saturated_for,
            ..last
        })
    }

    /// The square of the true share, without bias: where few looks found an access, the square of
    /// what they found is mostly chance.
    fn share_squared(&self) -> f64 {
        let variance = self.share() * (1.0 - self.share()) / (self.looks - 1.0).max(1.0);
        self.share() * self.share() - variance
    }

    /// The same of a saturated region, which was picked for what may be chance.
    fn doubted_share_squared(&self) -> f64 {
        self.share() * self.found / (self.looks + DOUBTED_LOOKS)
    }

    /// The same heat, found by looks of this `interval`, of a region with so many entries.
    fn restated(self, entries: f64, interval: Duration) -> Self {
        let per_entry = self.rate(interval) / entries;
        Self {
            entries,
            found: -self.looks * (-per_entry * interval.as_secs_f64()).exp_m1(),
            saturated_for: 0,
            ..self
        }
    }

    /// Accesses a second, over all entries, of a region that was looked at for `interval` each time.
    /// One look too few to be sure counts as half a look that found nothing.
    fn rate(&self, interval: Duration) -> f64 {
        let untouched = (self.looks - self.found).max(0.5);
        let per_look = (self.looks.max(1.0) / untouched).ln().max(0.0);
        self.entries * per_look / interval.as_secs_f64()
    }
}

/// Looks with one interval.
#[derive(Debug, Clone, Default)]
struct Exposure {
    interval: Duration,
    /// Whether it was looked at since the last long pass began.
    is_of_this_round: bool,
    seen: BTreeMap<Key, Seen>,
}

impl Exposure {
    /// Whether memory that was found accessed no longer is. Each region weighs as much as it was
    /// accessed: what is seldom accessed is now found and now not, and means nothing. What was always found
    /// accessed was perhaps a hundred times, and will be again: it must not outvote the rest, but what is missed
    /// there counts, with a doubt.
    fn is_contradicted_by(&self, looks: u32, regions: &[Region]) -> bool {
        let known = |region| Some((self.seen.get(&key_of(region))?, region));
        let known = || regions.iter().filter_map(known);
        let saturated = known().filter(|(seen, _)| seen.is_saturated());
        let others = known().filter(|(seen, _)| !seen.is_saturated());
        is_missed(looks, others, Seen::share_squared)
            || is_missed(looks, saturated, Seen::doubted_share_squared)
    }
}

/// Whether looks found far less than was known of each region, with such an estimate of the square of its share.
fn is_missed<'a>(
    looks: u32,
    regions: impl Iterator<Item = (&'a Seen, &'a Region)>,
    share_squared: impl Fn(&Seen) -> f64,
) -> bool {
    let (mut expected, mut found) = (0.0, 0.0);
    for (seen, region) in regions {
        expected += f64::from(looks) * share_squared(seen);
        found += f64::from(region.accesses.min(looks)) * seen.share();
    }
    expected >= EXPECTED_MIN && found < CONTRADICTION * expected
}

/// Whether the looks of a pass found something that only came by, as a sweep does: no region most of the time, and
/// hardly any twice. Independent accesses seldom do that: at one in ten looks a quarter is found in regions that are
/// found again.
fn is_fleeting(looks: u32, regions: &[Region]) -> bool {
    let found = || regions.iter().map(|region| region.accesses.min(looks));
    let all: u64 = found().map(u64::from).sum();
    let again: u64 = found().filter(|&n| n > 1).map(u64::from).sum();
    looks >= FLEETING_LOOKS_MIN
        && all as f64 >= EXPECTED_MIN
        && (again as f64) < STAYING_MIN * all as f64
        && found().all(|n| n * 2 <= looks)
}

/// Entries of the page tables that map it, if anybody knows.
fn entries_of(region: &Region) -> Option<f64> {
    Some(region.range.len().0 as f64 / region.page_bytes?.get() as f64)
}

fn key_of(region: &Region) -> Key {
    (region.pid, region.range.start(), region.range.end())
}

/// Those of sorted regions that begin where the one before has ended: where mappings have changed, DAMON lays regions
/// out anew, and old ones are remembered for a while.
fn disjoint(keys: impl IntoIterator<Item = Key>) -> Regions {
    let mut regions = Regions::new();
    for (pid, start, end) in keys {
        let is_free = |(before, range): &(Pid, VirtRange)| *before != pid || range.end() <= start;
        if let Some(range) = VirtRange::new(start, end)
            && regions.last().is_none_or(is_free)
        {
            regions.push((pid, range));
        }
    }
    regions
}

/// How hot a region is, as far as known.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Heat {
    /// Accesses a second.
    rate: f64,
    /// Looks that found an access.
    found: f64,
    is_saturated: bool,
}

/// What the policy shall hold of a region.
#[derive(Debug, Clone, Copy)]
struct Due {
    key: Key,
    /// Samples, of which the policy still holds so many.
    wanted: f64,
    held: f64,
    /// The most that may be given at once.
    most: f64,
}

/// What all exposures have found. See the module's text.
#[derive(Debug, Clone, Default)]
pub struct Exposures {
    /// Longest first.
    exposures: Vec<Exposure>,
    /// By region; what is wanted is out of date while `has_news`.
    due: Vec<Due>,
    has_news: bool,
    trust: Trust,
}

/// Whether what is found now can be expected to hold.
#[derive(Debug, Clone, Copy)]
struct Trust {
    /// Long passes in a row that did not contradict those before.
    agreed: u32,
    /// So many are needed before the policy is told.
    needed: u32,
    /// Whether this long pass or the short ones after it have contradicted: they count as one.
    is_surprised: bool,
}

impl Default for Trust {
    fn default() -> Self {
        Self {
            agreed: 0,
            needed: NEEDED_AT_FIRST,
            is_surprised: false,
        }
    }
}

impl Trust {
    fn agree(&mut self) {
        self.is_surprised = false;
        self.agreed += 1;
        if self.agreed > self.needed {
            self.needed = self.needed.saturating_sub(1).max(1);
        }
    }

    fn contradict(&mut self) {
        self.agreed = 0;
        if !std::mem::replace(&mut self.is_surprised, true) {
            self.needed = (self.needed * 2).min(NEEDED_MAX);
        }
    }
}

impl Exposures {
    /// Takes what was found by `looks` looks, `interval` after each access bit was cleared. `rung`
    /// is the exposure's number, longest first. Returns whether it contradicts what was known.
    pub fn add(&mut self, rung: usize, interval: Duration, looks: u32, regions: &[Region]) -> bool {
        self.has_news = true;
        if self.exposures.len() <= rung {
            self.exposures.resize_with(rung + 1, Exposure::default);
        }
        self.restate(regions);
        if rung == 0 {
            for exposure in &mut self.exposures {
                exposure.is_of_this_round = false;
            }
        }
        let exposure = &mut self.exposures[rung];
        exposure.is_of_this_round = true;
        exposure.interval = interval.max(Duration::from_micros(1));
        let is_surprise = exposure.is_contradicted_by(looks, regions)
            || (rung == 0 && is_fleeting(looks, regions));
        let kept = if is_surprise { SURPRISED_KEPT } else { KEPT };
        for seen in exposure.seen.values_mut() {
            seen.looks *= kept;
            seen.found *= kept;
            seen.last_looks = 0.0;
            seen.last_found = 0.0;
        }
        exposure.seen.retain(|_, seen| seen.looks >= LOOKS_MIN);
        for region in regions {
            let key = key_of(region);
            if exposure.seen.len() >= REGIONS_KEPT && !exposure.seen.contains_key(&key) {
                continue;
            }
            let seen = exposure.seen.entry(key).or_insert(Seen {
                entries: 1.0,
                looks: 0.0,
                found: 0.0,
                saturated_for: 0,
                last_looks: 0.0,
                last_found: 0.0,
            });
            seen.entries = entries_of(region).unwrap_or(seen.entries);
            seen.last_looks = f64::from(looks.max(1));
            seen.last_found = f64::from(region.accesses.min(looks));
            seen.looks += seen.last_looks;
            seen.found += seen.last_found;
            seen.saturated_for = match seen.is_saturated() {
                true => SATURATED_FOR,
                // No chance.
                false if region.accesses.saturating_mul(2) <= looks => 0,
                false => seen.saturated_for.saturating_sub(1),
            };
        }
        if rung == 0 {
            self.trust.agree();
        }
        if is_surprise {
            self.trust.contradict();
        }
        is_surprise
    }

    /// Whether looks of the longest exposure at some regions found that what was hot no longer is.
    pub(super) fn are_contradicted_by(&self, looks: u32, regions: &[Region]) -> bool {
        let long = self.exposures.first();
        long.is_some_and(|exposure| exposure.is_contradicted_by(looks, regions))
    }

    /// Restates what is known of regions whose pages are known to have another size now.
    fn restate(&mut self, regions: &[Region]) {
        for Exposure { interval, seen, .. } in &mut self.exposures {
            for region in regions {
                let Some(entries) = entries_of(region) else {
                    continue;
                };
                let same = entries / OTHER_ENTRIES..=entries * OTHER_ENTRIES;
                if let Some(seen) = seen.get_mut(&key_of(region))
                    && !same.contains(&seen.entries)
                {
                    *seen = seen.restated(entries, *interval);
                }
            }
        }
    }

    /// Whether passes agree so often that the policy is told what they found.
    pub(super) fn is_settled(&self) -> bool {
        self.trust.agreed >= self.trust.needed
    }

    /// Whether the next pass may decide what the policy is told, and soon.
    pub(super) fn is_urgent(&self) -> bool {
        !self.is_settled() && self.trust.needed < NEEDED_IN_VAIN
    }

    /// Whether so many regions are saturated at this rung that a shorter exposure is due.
    pub fn is_saturated(&self, rung: usize) -> bool {
        self.saturated(rung).len() as f64 > SATURATED_PART * self.accessed() as f64
    }

    /// Regions whose heat this exposure's last pass could not tell; in order, and disjoint.
    pub(super) fn saturated(&self, rung: usize) -> Regions {
        let exposure = self.exposures.get(rung);
        let seen = exposure.into_iter().flat_map(|e| &e.seen);
        let saturated = seen.filter(|(_, seen)| seen.last_found > 0.0 && seen.is_saturated());
        disjoint(saturated.map(|(key, _)| *key))
    }

    /// How many regions the last long pass found accessed.
    pub(super) fn accessed(&self) -> usize {
        let long = self.exposures.first().map(|e| e.seen.values());
        let seen = long.into_iter().flatten();
        seen.filter(|seen| seen.last_found > 0.0).count()
    }

    /// Whether there is any region of which the policy holds samples.
    pub(super) fn has_samples(&self) -> bool {
        self.due.iter().any(|due| due.wanted >= 1.0)
    }

    /// The hottest regions that the policy holds samples of and the last long pass found accessed, at most so many; in
    /// order, and disjoint.
    pub(super) fn hottest(&self, most: usize) -> Regions {
        let long = self.exposures.first();
        let is_accessed =
            |key: &Key| long.is_some_and(|e| e.seen.get(key).is_some_and(|s| s.last_found > 0.0));
        let due = self.due.iter();
        let mut due: Vec<_> = due
            .filter(|due| due.wanted >= 1.0 && is_accessed(&due.key))
            .collect();
        due.sort_by(|a, b| b.wanted.total_cmp(&a.wanted));
        due.truncate(most);
        let mut keys: Vec<_> = due.iter().map(|due| due.key).collect();
        keys.sort_unstable();
        disjoint(keys)
    }

    /// Whether there were looks with this exposure.
    pub(super) fn knows(&self, rung: usize) -> bool {
        self.exposures.get(rung).is_some_and(|e| !e.seen.is_empty())
    }

    /// Forgets all other processes.
    pub(super) fn retain(&mut self, pids: &[Pid]) {
        for exposure in &mut self.exposures {
            exposure.seen.retain(|(pid, ..), _| pids.contains(pid));
        }
        self.due.retain(|due| pids.contains(&due.key.0));
        self.has_news = true;
    }

    /// Forgets everything.
    pub fn clear(&mut self) {
        *self = Self::default();
    }

    /// Appends at most `max` samples to `out`: what the policy lacks after it has forgotten half of
    /// what it held.
    pub fn samples(&mut self, max: usize, out: &mut Vec<Sample>) {
        if std::mem::take(&mut self.has_news) {
            self.settle_what_is_due();
        }
        let mut rounding = Rounding::new(max);
        for due in &mut self.due {
            due.held /= 2.0;
            let count = rounding.take((due.wanted - due.held).max(0.0), due.most);
            due.held += count;
            out.extend(spread(&due.key, count as u64));
        }
    }

    /// Appends at most `max` sightings to `out`: the samples that each region would have if nobody had looked before this
    /// round's passes. Only where these cannot tell how hot a region is, because all its looks found an access and no
    /// shorter ones followed, what was known before does. None of a region that the long pass did not find accessed.
    pub fn sightings(&self, max: usize, out: &mut Vec<Sample>) {
        let Some(long) = self.exposures.first() else {
            return;
        };
        let heats = self.heats_by(|exposure, seen| match exposure.is_of_this_round {
            true => seen.last().unwrap_or(*seen),
            false => *seen,
        });
        let per_access = samples_per_access(&heats);
        let mut rounding = Rounding::new(max);
        for (key, heat) in &heats {
            if long.seen.get(key).is_none_or(|seen| seen.last_found == 0.0) {
                continue;
            }
            let sighted = (heat.rate * per_access).min(heat.found);
            let count = rounding.take(sighted, f64::INFINITY);
            out.extend(spread(key, count as u64));
        }
    }

    /// Works out how many samples of each region the policy shall hold.
    fn settle_what_is_due(&mut self) {
        let heats = self.heats();
        let per_access = if self.is_settled() {
            samples_per_access(&heats)
        } else {
            0.0
        };
        let mut held = self.due.iter().map(|due| (due.key, due.held)).peekable();
        let due = heats.into_iter().map(|(key, heat)| {
            let wanted = (heat.rate * per_access).min(heat.found);
            while held.next_if(|(other, _)| *other < key).is_some() {}
            Due {
                key,
                wanted,
                held: held
                    .next_if(|(other, _)| *other == key)
                    .map_or(0.0, |(_, held)| held),
                most: heat.found.ceil(),
            }
        });
        self.due = due.collect();
    }

    /// Every region's heat, by the longest exposure that is not saturated.
    fn heats(&self) -> BTreeMap<Key, Heat> {
        self.heats_by(|_, seen| *seen)
    }

    /// The same, of what `part` takes of the looks.
    fn heats_by(&self, part: impl Fn(&Exposure, &Seen) -> Seen) -> BTreeMap<Key, Heat> {
        let mut heats: BTreeMap<Key, Heat> = BTreeMap::new();
        for (rung, exposure) in self.exposures.iter().enumerate() {
            let is_shortest = rung + 1 == self.exposures.len();
            for (&key, seen) in &exposure.seen {
                let seen = part(exposure, seen);
                let is_saturated = match is_shortest {
                    true => seen.saturated_for > 0,
                    false => seen.is_saturated(),
                };
                let rate = seen.rate(exposure.interval);
                let heat = heats.entry(key).or_insert(Heat {
                    rate: 0.0,
                    found: 0.0,
                    is_saturated: true,
                });
                if heat.is_saturated {
                    // A saturated exposure is a lower bound for the shorter ones.
                    heat.rate = heat.rate.max(rate);
                    heat.found = heat.found.max(seen.found);
                    heat.is_saturated = is_saturated;
                }
            }
        }
        let hottest = heats.values().map(|h| h.rate).fold(0.0, f64::max);
        for heat in heats.values_mut().filter(|h| h.is_saturated) {
            heat.rate = (heat.rate * hottest).sqrt();
        }
        heats
    }
}

/// Makes whole samples of what regions are owed: rounding the running sum carries what one loses on to the next.
struct Rounding {
    owed: f64,
    given: f64,
    /// How many more there may be of all.
    room: f64,
}

impl Rounding {
    fn new(max: usize) -> Self {
        Self {
            owed: 0.0,
            given: 0.0,
            room: max as f64,
        }
    }

    /// What one that is owed so many gets, at most `most`.
    fn take(&mut self, owed: f64, most: f64) -> f64 {
        self.owed += owed;
        let count = (self.owed - self.given + 1e-9).round();
        let count = count.clamp(0.0, most).min(self.room);
        self.given += count;
        self.room -= count;
        count
    }
}

/// Samples for an access a second: the hottest regions, with half of all that was found, get as many
/// as there were looks that found an access, and colder ones fewer.
fn samples_per_access(heats: &BTreeMap<Key, Heat>) -> f64 {
    let density = |(key, heat): &(&Key, &Heat)| heat.rate / (key.2.0 - key.1.0).max(1) as f64;
    let mut by_density: Vec<_> = heats.iter().filter(|(_, heat)| heat.rate > 0.0).collect();
    by_density.sort_unstable_by(|a, b| density(b).total_cmp(&density(a)));
    let half = by_density.iter().map(|(_, heat)| heat.found).sum::<f64>() / 2.0;
    let (mut found, mut rate) = (0.0, 0.0);
    for (_, heat) in by_density {
        if found >= half {
            break;
        }
        found += heat.found;
        rate += heat.rate;
    }
    if rate > 0.0 { found / rate } else { 0.0 }
}

/// `count` samples in the middles of as many equal parts of a region.
fn spread(&(pid, start, end): &Key, count: u64) -> impl Iterator<Item = Sample> {
    let len = VirtRange::new(start, end).map_or(0, |range| u128::from(range.len().0));
    (0..count).map(move |part| {
        let offset = len * (2 * u128::from(part) + 1) / (2 * u128::from(count));
        Sample {
            pid,
            addr: GuestVirtAddr(start.0 + offset as u64),
            weight: 1,
        }
    })
}

#[cfg(test)]
mod tests;
