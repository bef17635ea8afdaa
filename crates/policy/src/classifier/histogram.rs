//! A sparse histogram of samples by granule, with decay.
//!
//! # Problem
//! The classifier must know where samples fell, over a space of up to 2^32 granules, in a few
//! dozen KiB and a few nanoseconds per sample.
//!
//! # Approach
//! New samples are appended to a small buffer. A *fold* sorts the buffer by granule (radix sort
//! over the bits that really vary), makes one of equal granules and merges them into the sorted
//! entries, halving the old weights on the way when a new epoch began. Only granules with weight have an entry; when there
//! are more than [`CAPACITY`], the lightest leave, and the caller is told their weight.
//!
//! # Properties
//! - Entries are sorted by granule and no granule has two.
//! - A fold conserves weight: entries after = decayed entries before + pending − evicted.
//! - Without new samples every weight reaches zero.
//! - There are never more than [`CAPACITY`] entries.

/// The most granules that are remembered.
pub(super) const CAPACITY: usize = 8192;

/// Samples that are buffered before a fold; fits the 16-bit offsets of the sort.
pub(super) const PENDING: usize = 2048;

/// Weights are fixed-point: one sample weighs `1 << FRACTION_BITS`.
pub(super) const FRACTION_BITS: u32 = 4;

/// The heaviest that one granule can get; beyond it a weight saturates.
const WEIGHT_MAX: u64 = u32::MAX as u64;

/// A granule and its weight in one word: granule in the high half, so that words sort by granule.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) struct Entry(u64);

impl Entry {
    pub(super) fn new(granule: u32, weight: u32) -> Self {
        Self((u64::from(granule) << 32) | u64::from(weight))
    }

    pub(super) fn granule(self) -> u32 {
        (self.0 >> 32) as u32
    }

    pub(super) fn weight(self) -> u64 {
        self.0 & WEIGHT_MAX
    }

    /// The weight shifted right by `shift`.
    fn halved(self, shift: u32) -> Self {
        Self::new(self.granule(), (self.weight() >> shift) as u32)
    }

    /// Both weights of the one granule.
    fn plus(self, other: Self) -> Self {
        let weight = (self.weight() + other.weight()).min(WEIGHT_MAX);
        Self::new(self.granule(), weight as u32)
    }
}

#[derive(Debug, Clone)]
pub(super) struct Histogram {
    entries: Vec<Entry>,
    merged: Vec<Entry>,
    pending: Vec<Entry>,
    sorted: Vec<Entry>,
}

impl Histogram {
    pub(super) fn new() -> Self {
        Self {
            entries: Vec::with_capacity(CAPACITY + PENDING),
            merged: Vec::with_capacity(CAPACITY + PENDING),
            pending: Vec::with_capacity(PENDING),
            sorted: Vec::with_capacity(PENDING),
        }
    }

    /// The entries, sorted by granule. Samples since the last fold are not among them.
    pub(super) fn entries(&self) -> &[Entry] {
        &self.entries
    }

    /// Takes over entries, sorted and each of another granule.
    pub(super) fn restore(&mut self, entries: impl IntoIterator<Item = Entry>) {
        self.entries.clear();
        self.entries.extend(entries);
    }

    /// Buffers `samples` whole samples of `granule`. True when the buffer is full: fold now.
    #[inline]
    pub(super) fn push(&mut self, granule: u32, samples: u32) -> bool {
        let weight = samples.min(u32::MAX >> FRACTION_BITS) << FRACTION_BITS;
        self.pending.push(Entry::new(granule, weight));
        self.pending.len() >= PENDING
    }

    /// Merges what is pending; halves the old weights first when `decay`. What has to leave for
    /// want of room is handed to `evict`.
    pub(super) fn fold(&mut self, decay: bool, evict: impl FnMut(Entry)) {
        self.compact();
        self.merged.clear();
        let shift = u32::from(decay);
        let mut old = self.entries.iter().map(|e| e.halved(shift)).peekable();
        for &new in &self.pending {
            while let Some(e) = old.next_if(|e| e.granule() < new.granule()) {
                push_nonzero(&mut self.merged, e);
            }
            let same = old.next_if(|e| e.granule() == new.granule());
            self.merged.push(same.map_or(new, |e| e.plus(new)));
        }
        for e in old {
            push_nonzero(&mut self.merged, e);
        }
        self.pending.clear();
        std::mem::swap(&mut self.entries, &mut self.merged);
        if self.entries.len() > CAPACITY {
            self.evict_lightest(evict);
        }
    }

    /// Sorts what is pending and makes one of equal granules.
    fn compact(&mut self) {
        sort_by_granule(&mut self.pending, &mut self.sorted);
        self.pending.dedup_by(|next, last| {
            let same = next.granule() == last.granule();
            if same {
                *last = last.plus(*next);
            }
            same
        });
    }

    /// Keeps only the entries for which `keep` holds.
    pub(super) fn retain(&mut self, keep: impl FnMut(&Entry) -> bool) {
        self.entries.retain(keep);
    }

    /// Bytes of state, buffers included.
    pub(super) fn state_bytes(&self) -> usize {
        [&self.entries, &self.merged, &self.pending, &self.sorted]
            .iter()
            .map(|v| v.capacity() * size_of::<Entry>())
            .sum()
    }

    /// Makes room down to three quarters of the capacity, so that evictions are rare. The
    /// lightest power-of-two class goes first; of a class that need not go whole, an evenly
    /// spaced part goes.
    fn evict_lightest(&mut self, mut evict: impl FnMut(Entry)) {
        let class = |e: &Entry| e.weight().ilog2() as usize;
        let mut sizes = [0usize; 32];
        for e in &self.entries {
            sizes[class(e)] += 1;
        }
        let mut quota = [0usize; 32];
        let mut left = self.entries.len() - CAPACITY / 4 * 3;
        for (quota, &size) in quota.iter_mut().zip(&sizes) {
            *quota = size.min(left);
            left -= *quota;
        }
        let mut owed = [0usize; 32];
        self.entries.retain(|e| {
            let c = class(e);
            owed[c] += quota[c];
            let goes = owed[c] >= sizes[c];
            if goes {
                owed[c] -= sizes[c];
                evict(*e);
            }
            !goes
        });
    }
}

#[inline]
fn push_nonzero(entries: &mut Vec<Entry>, e: Entry) {
    if e.weight() > 0 {
        entries.push(e);
    }
}

/// Sorts by granule: a least-significant-digit radix sort over the span of bits in which the
/// granules differ, which for one process is short.
fn sort_by_granule(items: &mut Vec<Entry>, scratch: &mut Vec<Entry>) {
    const DIGIT_BITS_MAX: u32 = 9;
    const BUCKETS: usize = 1 << DIGIT_BITS_MAX;
    const DIGITS_MAX: usize = 32usize.div_ceil(DIGIT_BITS_MAX as usize);
    let Some(first) = items.first() else { return };
    let first = first.granule();
    let varying = items.iter().fold(0, |bits, e| bits | (e.granule() ^ first));
    if varying == 0 {
        return;
    }
    let (low, high) = (varying.trailing_zeros(), 32 - varying.leading_zeros());
    let digits = (high - low).div_ceil(DIGIT_BITS_MAX);
    let digit_bits = (high - low).div_ceil(digits);
    let mask = (BUCKETS - 1) >> (DIGIT_BITS_MAX - digit_bits);
    let digit =
        |e: &Entry, i: u32| (e.granule() >> (low + i * digit_bits)) as usize & mask & (BUCKETS - 1);
    let mut offsets = [[0u16; BUCKETS]; DIGITS_MAX];
    for e in items.iter() {
        for i in 0..digits {
            offsets[i as usize][digit(e, i)] += 1;
        }
    }
    scratch.clear();
    scratch.resize(items.len(), Entry(0));
    for i in 0..digits {
        let offsets = &mut offsets[i as usize];
        let mut sum = 0;
        for offset in offsets.iter_mut() {
            sum += std::mem::replace(offset, sum);
        }
        for e in items.iter() {
            let offset = &mut offsets[digit(e, i)];
            scratch[usize::from(*offset)] = *e;
            *offset += 1;
        }
        std::mem::swap(items, scratch);
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;

    fn total(h: &Histogram) -> u64 {
        h.entries().iter().map(|e| e.weight()).sum()
    }

    proptest! {
        #[test]
        fn a_fold_is_a_map_merge(
            epochs in prop::collection::vec(
                prop::collection::vec((any::<u32>(), 1u32..100), 0..200), 1..8),
            narrow in any::<bool>(),
        ) {
            let mut h = Histogram::new();
            let mut model: BTreeMap<u32, u64> = BTreeMap::new();
            for samples in &epochs {
                model.values_mut().for_each(|w| *w /= 2);
                for &(granule, n) in samples {
                    let granule = if narrow { granule % 50 } else { granule };
                    h.push(granule, n);
                    *model.entry(granule).or_default() += u64::from(n) << FRACTION_BITS;
                }
                model.retain(|_, w| *w > 0);
                h.fold(true, |_| panic!("there is room"));
                let got: Vec<_> = h.entries().iter().map(|e| (e.granule(), e.weight())).collect();
                let want: Vec<_> = model.iter().map(|(&b, &w)| (b, w)).collect();
                prop_assert_eq!(got, want);
            }
        }

        #[test]
        fn eviction_is_bounded_and_conserves(step in 1u32..1000, weights in prop::collection::vec(1u32..64, 16)) {
            let mut h = Histogram::new();
            let (mut pushed, mut evicted) = (0u64, 0u64);
            for i in 0..30_000u32 {
                let n = weights[i as usize % weights.len()];
                pushed += u64::from(n) << FRACTION_BITS;
                if h.push(i.wrapping_mul(step), n) {
                    h.fold(false, |e| evicted += e.weight());
                    prop_assert!(h.entries().len() <= CAPACITY);
                }
            }
            h.fold(false, |e| evicted += e.weight());
            prop_assert_eq!(total(&h) + evicted, pushed);
            prop_assert!(h.entries().windows(2).all(|w| w[0].granule() < w[1].granule()));
        }

        #[test]
        fn decay_reaches_zero(n in 1u32..=u32::MAX) {
            let mut h = Histogram::new();
            h.push(7, n);
            for _ in 0..33 {
                h.fold(true, |_| ());
            }
            prop_assert_eq!(h.entries().len(), 0);
        }
    }
}
