//! Which pages of a backing file a guest's driver holds for the host.

use demeter_policy::{ByteCount, PAGE_SIZE};

use crate::backing::FileOffset;

/// Pages that a word of the bitmap tells of.
const WORD_PAGES: u64 = 64;

/// A set of pages by their offset in a file: a bitmap of the whole file.
///
/// So its size is that of the file divided by 32,768, however a guest cuts its ranges; the system
/// backs no more of it than was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct HeldSet {
    words: Vec<u64>,
    pages: u64,
}

impl HeldSet {
    /// No page of a file of `size`.
    pub(super) fn new(size: ByteCount) -> Self {
        Self {
            words: vec![0; size.0.div_ceil(PAGE_SIZE * WORD_PAGES) as usize],
            pages: 0,
        }
    }

    /// How much is held.
    pub(super) fn total(&self) -> ByteCount {
        ByteCount(self.pages * PAGE_SIZE)
    }

    /// Adds the pages of `[offset, offset + len)`, both multiples of the page size. If any of them
    /// is there already, or is not in the file, nothing is added and the answer is false.
    #[must_use]
    pub(super) fn insert(&mut self, offset: FileOffset, len: ByteCount) -> bool {
        let size = self.words.len() as u64 * WORD_PAGES * PAGE_SIZE;
        let is_inside = offset.0.checked_add(len.0).is_some_and(|end| end <= size);
        if !is_inside || self.overlaps(offset, len) {
            return false;
        }
        for (word, mask) in words(offset, len) {
            self.words[word] |= mask;
        }
        self.pages += len.0 / PAGE_SIZE;
        true
    }

    /// Whether any page of `[offset, offset + len)` is held.
    pub(super) fn overlaps(&self, offset: FileOffset, len: ByteCount) -> bool {
        words(offset, len).any(|(word, mask)| self.word(word) & mask != 0)
    }

    /// Adds all pages of `other`, a set of pages of the same file.
    pub(super) fn absorb(&mut self, other: &Self) {
        for (mine, theirs) in self.words.iter_mut().zip(&other.words) {
            self.pages += u64::from((theirs & !*mine).count_ones());
            *mine |= theirs;
        }
    }

    /// The pages from `from` on that are here and not in `other`, as runs of (offset, length), in
    /// order. They are made as they are taken: of memory in single pages there are more than a list
    /// should hold.
    pub(super) fn runs_not_in<'a>(
        &'a self,
        other: Option<&'a Self>,
        from: FileOffset,
    ) -> impl Iterator<Item = (FileOffset, ByteCount)> + Send + 'a {
        let first = from.0 / PAGE_SIZE;
        let first_word = (first / WORD_PAGES) as usize;
        let words = self.words.iter().enumerate().skip(first_word);
        let mut parts = words
            .filter(|(_, bits)| **bits != 0)
            .flat_map(move |(word, bits)| {
                let wanted = match word == first_word {
                    true => u64::MAX << (first % WORD_PAGES),
                    false => u64::MAX,
                };
                let others = other.map_or(0, |other| other.word(word));
                parts(word as u64 * WORD_PAGES, bits & wanted & !others)
            })
            .peekable();
        std::iter::from_fn(move || {
            let (page, mut count) = parts.next()?;
            // What goes on in the next word is one run.
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

/// The runs of ones in a word: (page, count), where the word's first bit is `first_page`.
fn parts(first_page: u64, mut left: u64) -> impl Iterator<Item = (u64, u64)> {
    std::iter::from_fn(move || {
        let first = (left != 0).then(|| left.trailing_zeros())?;
        let count = (left >> first).trailing_ones();
        left &= !mask(first, count);
        Some((first_page + u64::from(first), count.into()))
    })
}

/// `count` ones (1 to 64) from bit `first` on.
fn mask(first: u32, count: u32) -> u64 {
    (u64::MAX >> (64 - count)) << first
}

/// The bits of a range of pages: (word, mask).
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

    /// The file's pages.
    const PAGES: u64 = 3700;

    fn pages() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0u64..3000, 1u64..700), 0..12)
    }

    /// Inserts all ranges that fit, here and in a plain set.
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

    proptest! {
        #[test]
        fn it_is_a_set_of_pages(a in pages(), b in pages(), from in 0..PAGES) {
            let (mut held, plain) = both(&a);
            let (other, other_plain) = both(&b);
            prop_assert_eq!(held.total().0, plain.len() as u64 * PAGE_SIZE);
            let begin = FileOffset(0);
            let runs: Vec<_> = held.runs_not_in(Some(&other), begin).collect();
            let difference: BTreeSet<_> = plain.difference(&other_plain).copied().collect();
            prop_assert_eq!(&pages_of(&runs), &difference);
            let rest: Vec<_> = held
                .runs_not_in(Some(&other), FileOffset(from * PAGE_SIZE))
                .collect();
            let expected: BTreeSet<_> = difference.range(from..).copied().collect();
            prop_assert_eq!(pages_of(&rest), expected);
            // Runs are whole: no two of them touch.
            prop_assert!(runs.windows(2).all(|w| w[0].0.0 + w[0].1.0 < w[1].0.0));
            held.absorb(&other);
            let union: BTreeSet<_> = plain.union(&other_plain).copied().collect();
            prop_assert_eq!(held.total().0, union.len() as u64 * PAGE_SIZE);
            let runs: Vec<_> = held.runs_not_in(None, begin).collect();
            prop_assert_eq!(pages_of(&runs), union);
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
