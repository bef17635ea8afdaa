//! Classifies the virtual address space of one process into ranges by hotness.
//!
//! # Problem
//! A few hundred to a few thousand sampled addresses an epoch must tell which part of a space of
//! gigabytes to terabytes is hot, soon after it became hot, with a state that does not grow with
//! the space.
//!
//! # Terms
//! - *granule*: the smallest part that is told apart, 2 MiB by default, and its number in the
//!   address space. A [`Block`](crate::Block) is what moves, always 2 MiB: a granule holds one or more.
//! - *range*: a contiguous run of granules with one count.
//! - *count*: decayed samples; a sample counts 1 in its epoch, 1/2 in the next, and so on.
//!
//! # Approach
//! The ranges start as the process's VMAs. Samples go into a sparse decayed histogram by granule,
//! so that a split can give each side what really fell there. At the end of an epoch every range
//! with enough samples is searched for a part that stands out. A part that is off what the
//! range's mean predicts by at least `tau_split` samples and by four standard deviations, and
//! that is `alpha` times as dense or as sparse as the rest, is
//! cut out, and the pieces are searched again: one epoch goes as deep as its samples justify.
//! Neighbours that cannot be told apart are merged, and edges move to where they are likeliest.
//!
//! The Demeter paper (SOSP'25) splits in the middle, gives each half half of the count, and asks
//! for `alpha × tau_split × vCPUs` more samples than the neighbours have. Here a split knows what
//! fell on either side, so `alpha` is a ratio of densities and the certainty comes from the
//! samples themselves, however many sources they have.
//!
//! # Properties
//! - The ranges partition the space they cover: sorted, disjoint, no gap within a VMA.
//! - Split and merge conserve counts: their sum is the decayed sum of the samples placed, to
//!   within 1/16 sample per halving and granule.
//! - Without samples every count reaches zero, and the space returns to one range per VMA.
//! - There are never more than `max_ranges` ranges.
//! - The same samples in the same order give the same ranges.

mod edge;
mod histogram;
mod saved;
mod segment;
mod space;

use histogram::{Entry, FRACTION_BITS, Histogram};
use segment::{Side, standing_out};

use crate::significance::z_squared;
use crate::{GuestVirtAddr, Tuning, VirtRange};

/// A cut needs this many squared standard deviations.
const SPLIT_Z2: f64 = 16.0;

/// Neighbours with less than this cannot be told apart. Well below [`SPLIT_Z2`], so that what
/// was just cut is not merged again.
const MERGE_Z2: f64 = 4.0;

/// Parameters of a [`Classifier`].
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassifierConfig {
    /// log2 of the granule's bytes; 21 (2 MiB, a huge page) to 30 (1 GiB).
    pub granule_bits: u32,
    /// Samples by which a part must be off what its range's mean predicts.
    pub tau_split: u32,
    /// How many times as dense, or as sparse, as the rest of its range a part must be.
    pub alpha: f64,
    /// The most ranges in one process; at least 2.
    pub max_ranges: usize,
}

impl Default for ClassifierConfig {
    fn default() -> Self {
        Tuning::default().classifier()
    }
}

/// A range as others see it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct ClassifiedRange {
    /// Where it lies; aligned to granules, so that it may reach beyond the VMA's edges.
    pub range: VirtRange,
    /// Its decayed count, in samples.
    pub count: f64,
    /// The epoch in which its edges were last cut.
    pub born_epoch: u32,
}

/// Classifies one process's address space. See the module's text.
#[derive(Debug, Clone)]
pub struct Classifier {
    config: ClassifierConfig,
    epoch: u32,
    /// Whether this epoch's first fold, which halves, has been.
    decayed: bool,
    histogram: Histogram,
    ranges: Vec<Range>,
    next: Vec<Range>,
    unplaced: u64,
}

/// A run of granules, `[start, end)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Range {
    start: u32,
    end: u32,
    born: u32,
    /// Weight of its granules in the histogram.
    located: u64,
    /// Weight whose granule was forgotten for want of room.
    residual: u64,
}

impl Range {
    fn len(&self) -> u32 {
        self.end - self.start
    }

    fn weight(&self) -> u64 {
        self.located + self.residual
    }

    fn samples(&self) -> f64 {
        to_samples(self.weight())
    }

    /// Located samples per granule; never zero, because not having seen any is no proof.
    fn likely_density(&self) -> f64 {
        (to_samples(self.located) + 0.5) / f64::from(self.len())
    }
}

/// `of` of `whole` equal parts of a weight.
fn part(weight: u64, of: u32, whole: u32) -> u64 {
    (u128::from(weight) * u128::from(of) / u128::from(whole)) as u64
}

fn to_samples(weight: u64) -> f64 {
    weight as f64 / f64::from(1u32 << FRACTION_BITS)
}

impl Classifier {
    /// An empty classifier: covers nothing until [`Self::set_space`].
    ///
    /// Values out of bounds are brought to the nearest bound.
    pub fn new(config: ClassifierConfig) -> Self {
        let config = ClassifierConfig {
            granule_bits: config.granule_bits.clamp(21, 30),
            max_ranges: config.max_ranges.max(2),
            ..config
        };
        Self {
            config,
            epoch: 0,
            decayed: false,
            histogram: Histogram::new(),
            ranges: Vec::with_capacity(config.max_ranges),
            next: Vec::with_capacity(config.max_ranges),
            unplaced: 0,
        }
    }

    /// Covers exactly these VMAs, in any order, from now on. What is known of the parts that
    /// stay is kept; parts above 2^47 bytes (five-level paging) are left out.
    ///
    /// When there are more VMAs than half of `max_ranges`, those with the smallest gaps between
    /// them count as one.
    pub fn set_space(&mut self, vmas: &[VirtRange]) {
        let spans = space::spans(vmas, self.config.granule_bits, self.config.max_ranges / 2);
        self.next.clear();
        let mut old = self.ranges.iter().copied().peekable();
        for span in &spans {
            let mut at = span.start;
            while at < span.end {
                while old.next_if(|r| r.end <= at).is_some() {}
                let piece = match old.peek() {
                    Some(r) if r.start <= at => {
                        let end = r.end.min(span.end);
                        let kept = part(r.residual, end - at, r.len());
                        Range {
                            start: at,
                            end,
                            residual: kept,
                            ..*r
                        }
                    }
                    known => {
                        let end = known.map_or(span.end, |r| r.start.min(span.end));
                        Range {
                            start: at,
                            end,
                            born: self.epoch,
                            located: 0,
                            residual: 0,
                        }
                    }
                };
                at = piece.end;
                self.next.push(piece);
            }
        }
        while self.next.len() > self.config.max_ranges {
            pair_up(&mut self.next);
        }
        std::mem::swap(&mut self.ranges, &mut self.next);
        let mut spans = spans.iter().peekable();
        self.histogram.retain(|e| {
            while spans.next_if(|s| s.end <= e.granule()).is_some() {}
            spans.peek().is_some_and(|s| s.start <= e.granule())
        });
        self.locate();
    }

    /// Takes a sample that stands for `samples` accesses.
    #[inline]
    pub fn add(&mut self, addr: GuestVirtAddr, samples: u32) {
        let granule = addr.0 >> self.config.granule_bits;
        let Ok(granule) = u32::try_from(granule) else {
            self.unplaced += u64::from(samples);
            return;
        };
        if self.histogram.push(granule, samples) {
            self.fold();
        }
    }

    /// Ends the epoch: decays, counts, splits, merges.
    pub fn end_epoch(&mut self) {
        self.fold();
        self.decayed = false;
        self.epoch = self.epoch.saturating_add(1);
        self.drop_strangers();
        self.locate();
        self.split();
        self.merge();
        self.refine();
    }

    /// The ranges, by address.
    pub fn ranges(&self) -> impl ExactSizeIterator<Item = ClassifiedRange> + '_ {
        let bits = self.config.granule_bits;
        self.ranges.iter().map(move |r| ClassifiedRange {
            range: VirtRange::new(
                GuestVirtAddr(u64::from(r.start) << bits),
                GuestVirtAddr(u64::from(r.end) << bits),
            )
            .expect("a range has at least one granule"),
            count: r.samples(),
            born_epoch: r.born,
        })
    }

    /// Samples so far that fell outside of the space.
    pub fn unplaced(&self) -> u64 {
        self.unplaced
    }

    /// Bytes of state, whatever the size of the space.
    pub fn state_bytes(&self) -> usize {
        self.histogram.state_bytes()
            + (self.ranges.capacity() + self.next.capacity()) * size_of::<Range>()
    }

    /// Folds pending samples in; the first fold of an epoch halves what was there.
    fn fold(&mut self) {
        let decay = !self.decayed;
        self.decayed = true;
        if decay {
            for r in &mut self.ranges {
                r.residual /= 2;
            }
        }
        let ranges = &mut self.ranges;
        self.histogram.fold(decay, |e: Entry| {
            let i = ranges.partition_point(|r| r.end <= e.granule());
            if let Some(r) = ranges.get_mut(i).filter(|r| r.start <= e.granule()) {
                r.residual += e.weight();
            }
        });
    }

    /// Forgets samples outside of every range.
    fn drop_strangers(&mut self) {
        let mut ranges = self.ranges.iter().peekable();
        let mut strange = 0;
        self.histogram.retain(|e| {
            while ranges.next_if(|r| r.end <= e.granule()).is_some() {}
            let known = ranges.peek().is_some_and(|r| r.start <= e.granule());
            if !known {
                strange += e.weight() >> FRACTION_BITS;
            }
            known
        });
        self.unplaced += strange;
    }

    /// Sums the histogram by range. Every entry lies in a range.
    fn locate(&mut self) {
        let mut entries = self.histogram.entries();
        for r in &mut self.ranges {
            let n = entries.iter().take_while(|e| e.granule() < r.end).count();
            r.located = entries[..n].iter().map(|e| e.weight()).sum();
            entries = &entries[n..];
        }
    }

    /// Cuts out the parts that stand out, from every range, again and again, within bounds.
    fn split(&mut self) {
        self.next.clear();
        let config = self.config;
        let mut entries = self.histogram.entries();
        // What is still to be looked at, next on top. A cut takes one and puts back up to three.
        let mut todo = Vec::with_capacity(8);
        for (i, range) in self.ranges.iter().enumerate() {
            todo.push(*range);
            while let Some(range) = todo.pop() {
                let n = entries
                    .iter()
                    .take_while(|e| e.granule() < range.end)
                    .count();
                let known = self.next.len() + todo.len() + self.ranges.len() - i;
                let room = known + 2 <= self.config.max_ranges;
                match room
                    .then(|| cut(&range, &entries[..n], &config, self.epoch))
                    .flatten()
                {
                    Some(pieces) => todo.extend(pieces.into_iter().rev().flatten()),
                    None => {
                        entries = &entries[n..];
                        self.next.push(range);
                    }
                }
            }
        }
        std::mem::swap(&mut self.ranges, &mut self.next);
    }

    /// Moves edges to where the samples say they are.
    fn refine(&mut self) {
        let entries = self.histogram.entries();
        let mut before = 0;
        for i in 1..self.ranges.len() {
            let (left, right) = (self.ranges[i - 1], self.ranges[i]);
            let edge = right.start;
            before += entries[before..]
                .iter()
                .take_while(|e| e.granule() < edge)
                .count();
            if left.end != edge {
                continue;
            }
            let side = |far, range: &Range| edge::Side {
                far,
                density: range.likely_density(),
            };
            let (l, r) = (side(left.start, &left), side(right.end, &right));
            if let Some(at) = edge::better(entries, before, edge, l, r) {
                let within = |e: &&Entry| (at.min(edge)..at.max(edge)).contains(&e.granule());
                let near = &entries[before.saturating_sub(edge::REACH)..];
                let near = &near[..near.len().min(2 * edge::REACH)];
                let moved: u64 = near.iter().filter(within).map(|e| e.weight()).sum();
                let (from, to) = if at < edge { (i - 1, i) } else { (i, i - 1) };
                self.ranges[from].located -= moved;
                self.ranges[to].located += moved;
                self.ranges[i - 1].end = at;
                self.ranges[i].start = at;
            }
        }
    }

    /// Merges neighbours that cannot be told apart.
    fn merge(&mut self) {
        self.ranges.dedup_by(|next, last| {
            let same = last.end == next.start
                && z_squared(
                    last.samples(),
                    f64::from(last.len()),
                    next.samples(),
                    f64::from(next.len()),
                ) < MERGE_Z2;
            if same {
                *last = join(last, next);
            }
            same
        });
    }
}

/// The pieces of `range` before, in and after the part that stands out; `None` if nothing does.
/// `entries` are those of the range.
fn cut(
    range: &Range,
    entries: &[Entry],
    config: &ClassifierConfig,
    epoch: u32,
) -> Option<[Option<Range>; 3]> {
    let tau = f64::from(config.tau_split);
    if range.len() < 2 || to_samples(range.located) < tau {
        return None;
    }
    let stands_out = |side| {
        let s = standing_out(entries, range.start, range.end, range.located, side)?;
        let (weight, len) = (to_samples(s.weight), f64::from(s.end - s.start));
        let rest = to_samples(range.located - s.weight);
        let rest_len = f64::from(range.len()) - len;
        let expected = to_samples(range.located) * len / f64::from(range.len());
        let (density, rest_density) = (weight / len, rest / rest_len);
        let ratio = density.max(rest_density) / density.min(rest_density);
        ((weight - expected).abs() >= tau
            && ratio >= config.alpha
            && z_squared(weight, len, rest, rest_len) >= SPLIT_Z2)
            .then_some(s)
    };
    let s = stands_out(Side::Hot).or_else(|| stands_out(Side::Cold))?;
    let before: u64 = entries
        .iter()
        .take_while(|e| e.granule() < s.start)
        .map(|e| e.weight())
        .sum();
    // Nobody knows where the residual fell: it is spread evenly, and no rounding loses any.
    let residual_before = |granule: u32| part(range.residual, granule - range.start, range.len());
    let piece = |start, end, located| {
        (start < end).then_some(Range {
            start,
            end,
            born: epoch,
            located,
            residual: residual_before(end) - residual_before(start),
        })
    };
    Some([
        piece(range.start, s.start, before),
        piece(s.start, s.end, s.weight),
        piece(s.end, range.end, range.located - before - s.weight),
    ])
}

fn join(a: &Range, b: &Range) -> Range {
    Range {
        start: a.start,
        end: b.end,
        born: a.born.min(b.born),
        located: a.located + b.located,
        residual: a.residual + b.residual,
    }
}

/// Joins touching ranges two by two: the blunt way back below the bound.
fn pair_up(ranges: &mut Vec<Range>) {
    let mut joined = false;
    ranges.dedup_by(|next, last| {
        joined = !joined && last.end == next.start;
        if joined {
            *last = join(last, next);
        }
        joined
    });
}

#[cfg(test)]
mod tests;
