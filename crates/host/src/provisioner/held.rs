//! Sets of pages of a backing file that a guest's driver holds for the host.

use std::hash::{BuildHasher, RandomState};

use demeter_policy::{ByteCount, PAGE_SIZE};

use crate::backing::FileOffset;

/// Pages in a word of the bitmap.
const WORD_PAGES: u64 = 64;

/// Words that a seal covers: 4096 pages, 16 MiB of the file.
const PART_WORDS: usize = 64;

/// A set of pages by their offset in a file: a bitmap of the whole file.
///
/// Its size is the file's size divided by 32,768, however a guest cuts its ranges. The system
/// allocates only the parts that were written.
#[derive(Debug)]
pub(super) struct HeldSet {
    /// Empty until the first insertion, then all words.
    words: Vec<u64>,
    words_max: usize,
    pages: u64,
}

/// Digests of a set of pages, one for each part, made when all of it had been punched.
///
/// They show which parts have changed since, in a 64th of the set's size. The hash keys are random,
/// so that no guest can make two parts with the same digest.
#[derive(Debug)]
pub(super) struct Seals {
    keys: RandomState,
    /// One digest for each part; 0 if the seal is broken.
    seals: Vec<u64>,
}

impl Seals {
    /// All seals broken, for a file of `size`.
    pub(super) fn new(size: ByteCount) -> Self {
        let parts = words_of(size).div_ceil(PART_WORDS);
        Self {
            keys: RandomState::new(),
            seals: vec![0; parts],
        }
    }

    /// Breaks all seals: nothing counts as punched.
    pub(super) fn break_all(&mut self) {
        self.seals.fill(0);
    }

    /// Breaks the seals of parts that have changed.
    pub(super) fn break_changed(&mut self, held: &HeldSet) {
        for (part, seal) in self.seals.iter_mut().enumerate() {
            if *seal != digest(&self.keys, held, part) {
                *seal = 0;
            }
        }
    }

    /// Seals all parts in their present state.
    pub(super) fn close(&mut self, held: &HeldSet) {
        for (part, seal) in self.seals.iter_mut().enumerate() {
            *seal = digest(&self.keys, held, part);
        }
    }

    fn is_broken(&self, part: usize) -> bool {
        self.seals.get(part).is_none_or(|&seal| seal == 0)
    }
}

/// The digest of a part; never 0.
fn digest(keys: &RandomState, held: &HeldSet, part: usize) -> u64 {
    let mut words = held.words.chunks(PART_WORDS);
    keys.hash_one(words.nth(part)).max(1)
}

fn words_of(size: ByteCount) -> usize {
    size.0.div_ceil(PAGE_SIZE * WORD_PAGES) as usize
}

impl HeldSet {
    /// The empty set for a file of `size`. It allocates nothing yet.
    pub(super) fn new(size: ByteCount) -> Self {
        Self {
            words: vec![],
            words_max: words_of(size),
            pages: 0,
        }
    }

    /// Total held memory.
    pub(super) fn total(&self) -> ByteCount {
        ByteCount(self.pages * PAGE_SIZE)
    }

    /// Adds the pages of `[offset, offset + len)`, both multiples of the page size. Adds nothing
    /// and returns false if any of them is in the set already or outside the file.
    #[must_use]
    pub(super) fn insert(&mut self, offset: FileOffset, len: ByteCount) -> bool {
        let size = self.words_max as u64 * WORD_PAGES * PAGE_SIZE;
        let is_inside = offset.0.checked_add(len.0).is_some_and(|end| end <= size);
        if !is_inside || self.overlaps(offset, len) {
            return false;
        }
        if self.words.is_empty() {
            self.words = vec![0; self.words_max];
        }
        for (word, mask) in words(offset, len) {
            self.words[word] |= mask;
        }
        self.pages += len.0 / PAGE_SIZE;
        true
    }

    /// Whether any page of `[offset, offset + len)` is held.
    fn overlaps(&self, offset: FileOffset, len: ByteCount) -> bool {
        words(offset, len).any(|(word, mask)| self.word(word) & mask != 0)
    }

    /// Runs (offset, length) of pages from `from` on in parts with a broken seal, in order. The
    /// iterator is lazy, because memory in single pages has more runs than a list should hold.
    pub(super) fn broken_runs<'a>(
        &'a self,
        seals: &'a Seals,
        from: FileOffset,
    ) -> impl Iterator<Item = (FileOffset, ByteCount)> + Send + 'a {
        let first = from.0 / PAGE_SIZE;
        let first_word = (first / WORD_PAGES) as usize;
        let words = self.words.iter().enumerate().skip(first_word);
        let mut parts = words
            .filter(|(word, bits)| **bits != 0 && seals.is_broken(word / PART_WORDS))
            .flat_map(move |(word, bits)| {
                let wanted = match word == first_word {
                    true => u64::MAX << (first % WORD_PAGES),
                    false => u64::MAX,
                };
                parts(word as u64 * WORD_PAGES, bits & wanted)
            })
            .peekable();
        std::iter::from_fn(move || {
            let (page, mut count) = parts.next()?;
            // A run may continue in the next word.
            while let Some((_, more)) = parts.next_if(|part| part.0 == page + count) {
                count += more;
            }
            Some((FileOffset(page * PAGE_SIZE), ByteCount(count * PAGE_SIZE)))
        })
    }

    fn word(&self, word: usize) -> u64 {
        self.words.get(word).copied().unwrap_or(0)
    }
}

/// The runs of ones in a word, as (page, count). Its first bit is `first_page`.
fn parts(first_page: u64, mut left: u64) -> impl Iterator<Item = (u64, u64)> {
    std::iter::from_fn(move || {
        let first = (left != 0).then(|| left.trailing_zeros())?;
        let count = (left >> first).trailing_ones();
        left &= !mask(first, count);
        Some((first_page + u64::from(first), count.into()))
    })
}

/// `count` ones (1 to 64), starting at bit `first`.
fn mask(first: u32, count: u32) -> u64 {
    (u64::MAX >> (64 - count)) << first
}

/// The bits of a range of pages, as (word, mask).
fn words(offset: FileOffset, len: ByteCount) -> impl Iterator<Item = (usize, u64)> {
    let (mut page, end) = (offset.0 / PAGE_SIZE, (offset.0 + len.0) / PAGE_SIZE);
    std::iter::from_fn(move || {
        let first = (page % WORD_PAGES) as u32;
        let left = end.checked_sub(page).filter(|&left| left > 0)?;
        let count = u64::from(64 - first).min(left);
        let word = (page / WORD_PAGES) as usize;
        page += count;
        Some((word, mask(first, count as u32)))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    /// The file's pages: three whole parts and a partial one.
    const PAGES: u64 = 3 * 4096 + 700;

    fn ranges() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0..PAGES - 700, 1u64..700), 0..12)
    }

    /// Inserts all ranges that fit, into the set under test and a plain set.
    fn both(ranges: &[(u64, u64)]) -> (HeldSet, BTreeSet<u64>) {
        let (mut held, mut plain) = (HeldSet::new(ByteCount(PAGES * PAGE_SIZE)), BTreeSet::new());
        for &(page, count) in ranges {
            let free = (page..page + count).all(|page| !plain.contains(&page));
            let inserted = held.insert(FileOffset(page * PAGE_SIZE), ByteCount(count * PAGE_SIZE));
            assert_eq!(inserted, free);
            if free {
                plain.extend(page..page + count);
            }
        }
        (held, plain)
    }

    fn pages_of(runs: &[(FileOffset, ByteCount)]) -> BTreeSet<u64> {
        let pages = |(offset, len): &(FileOffset, ByteCount)| {
            offset.0 / PAGE_SIZE..(offset.0 + len.0) / PAGE_SIZE
        };
        runs.iter().flat_map(pages).collect()
    }

    /// The pages of a part.
    fn part(pages: &BTreeSet<u64>, part: u64) -> BTreeSet<u64> {
        pages
            .range(part * 4096..(part + 1) * 4096)
            .copied()
            .collect()
    }

    proptest! {
        #[test]
        fn it_is_a_set_of_pages(a in ranges(), from in 0..PAGES) {
            let (held, plain) = both(&a);
            prop_assert_eq!(held.total().0, plain.len() as u64 * PAGE_SIZE);
            let seals = Seals::new(ByteCount(PAGES * PAGE_SIZE));
            let runs: Vec<_> = held.broken_runs(&seals, FileOffset(from * PAGE_SIZE)).collect();
            let expected: BTreeSet<_> = plain.range(from..).copied().collect();
            prop_assert_eq!(pages_of(&runs), expected);
            // Runs are maximal: no two of them touch.
            prop_assert!(runs.windows(2).all(|w| w[0].0.0 + w[0].1.0 < w[1].0.0));
        }

        /// Exactly the seals of changed parts break.
        #[test]
        fn a_seal_breaks_exactly_where_pages_changed(a in ranges(), b in ranges(), same in any::<bool>()) {
            let (before, plain_before) = both(&a);
            let (after, plain_after) = both(if same { &a } else { &b });
            let mut seals = Seals::new(ByteCount(PAGES * PAGE_SIZE));
            seals.close(&before);
            seals.break_changed(&after);
            let runs: Vec<_> = after.broken_runs(&seals, FileOffset(0)).collect();
            let broken = pages_of(&runs);
            for of in 0..=PAGES / 4096 {
                let (was, is) = (part(&plain_before, of), part(&plain_after, of));
                let expected = if was == is { BTreeSet::new() } else { is };
                prop_assert_eq!(part(&broken, of), expected);
            }
            seals.break_all();
            let runs: Vec<_> = after.broken_runs(&seals, FileOffset(0)).collect();
            prop_assert_eq!(pages_of(&runs), plain_after);
        }
    }

    #[test]
    fn what_is_not_in_the_file_is_not_taken() {
        let mut held = HeldSet::new(ByteCount(64 * PAGE_SIZE));
        for (page, count) in [(64, 1), (63, 2), (u64::MAX / PAGE_SIZE, 2)] {
            assert!(!held.insert(FileOffset(page * PAGE_SIZE), ByteCount(count * PAGE_SIZE)));
        }
        assert_eq!(held.total(), ByteCount(0));
    }
}
