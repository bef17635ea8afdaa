//! Which pages of a backing file a guest's driver holds for the host.

use std::collections::BTreeMap;

use demeter_policy::{BLOCK_SIZE, ByteCount, PAGE_SIZE};

use crate::backing::FileOffset;

const PAGES_PER_BLOCK: u64 = BLOCK_SIZE / PAGE_SIZE;

/// A bit for each page of a block.
type Bits = [u64; PAGES_PER_BLOCK as usize / 64];

/// A set of pages by their offset in a file: a bitmap for each block that has any.
///
/// So its size is bounded by the file's, however a guest cuts its ranges.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub(super) struct HeldSet {
    blocks: BTreeMap<u64, Bits>,
    pages: u64,
}

impl HeldSet {
    /// How much is held.
    pub(super) fn total(&self) -> ByteCount {
        ByteCount(self.pages * PAGE_SIZE)
    }

    /// Adds the pages of `[offset, offset + len)`, both multiples of the page size. If any of
    /// them is there already, nothing is added and the answer is false.
    #[must_use]
    pub(super) fn insert(&mut self, offset: FileOffset, len: ByteCount) -> bool {
        if self.overlaps(offset, len) {
            return false;
        }
        for (block, word, mask) in words(offset, len) {
            self.blocks.entry(block).or_default()[word] |= mask;
        }
        self.pages += len.0 / PAGE_SIZE;
        true
    }

    /// Whether any page of `[offset, offset + len)` is held.
    pub(super) fn overlaps(&self, offset: FileOffset, len: ByteCount) -> bool {
        words(offset, len).any(|(block, word, mask)| self.word(block, word) & mask != 0)
    }

    /// Adds all pages of `other`.
    pub(super) fn absorb(&mut self, other: &Self) {
        for (block, bits) in &other.blocks {
            let mine = self.blocks.entry(*block).or_default();
            for (mine, theirs) in mine.iter_mut().zip(bits) {
                self.pages += u64::from((theirs & !*mine).count_ones());
                *mine |= theirs;
            }
        }
    }

    /// The pages that are here and not in `other`, as runs of (offset, length), in order. They are made
    /// as they are taken: of memory in single pages there are more than a list should hold.
    pub(super) fn runs_not_in(
        &self,
        other: &Self,
    ) -> impl Iterator<Item = (FileOffset, ByteCount)> + Send {
        let words = self.blocks.iter().flat_map(move |(block, bits)| {
            let left = move |(word, bits): (usize, &u64)| {
                let first_page = block * PAGES_PER_BLOCK + word as u64 * 64;
                (first_page, bits & !other.word(*block, word))
            };
            bits.iter().enumerate().map(left)
        });
        let mut parts = words
            .flat_map(|(first_page, bits)| parts(first_page, bits))
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

    fn word(&self, block: u64, word: usize) -> u64 {
        self.blocks.get(&block).map_or(0, |bits| bits[word])
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

/// The bits of a range of pages: (block, word in it, mask).
fn words(offset: FileOffset, len: ByteCount) -> impl Iterator<Item = (u64, usize, u64)> {
    let (mut page, end) = (offset.0 / PAGE_SIZE, (offset.0 + len.0) / PAGE_SIZE);
    std::iter::from_fn(move || {
        let first = (page % 64) as u32;
        let count = u64::from(64 - first).min(end.checked_sub(page).filter(|&left| left > 0)?);
        let block = page / PAGES_PER_BLOCK;
        let word = (page % PAGES_PER_BLOCK / 64) as usize;
        page += count;
        Some((block, word, mask(first, count as u32)))
    })
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use proptest::prelude::*;

    use super::*;

    fn pages() -> impl Strategy<Value = Vec<(u64, u64)>> {
        prop::collection::vec((0u64..3000, 1u64..700), 0..12)
    }

    /// Inserts all ranges that fit, here and in a plain set.
    fn both(ranges: &[(u64, u64)]) -> (HeldSet, BTreeSet<u64>) {
        let (mut held, mut plain) = (HeldSet::default(), BTreeSet::new());
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
        fn it_is_a_set_of_pages(a in pages(), b in pages()) {
            let (mut held, plain) = both(&a);
            let (other, other_plain) = both(&b);
            prop_assert_eq!(held.total().0, plain.len() as u64 * PAGE_SIZE);
            let runs: Vec<_> = held.runs_not_in(&other).collect();
            let difference: BTreeSet<_> = plain.difference(&other_plain).copied().collect();
            prop_assert_eq!(pages_of(&runs), difference);
            // Runs are whole: no two of them touch.
            prop_assert!(runs.windows(2).all(|w| w[0].0.0 + w[0].1.0 < w[1].0.0));
            held.absorb(&other);
            let union: BTreeSet<_> = plain.union(&other_plain).copied().collect();
            prop_assert_eq!(held.total().0, union.len() as u64 * PAGE_SIZE);
            prop_assert_eq!(pages_of(&held.runs_not_in(&HeldSet::default()).collect::<Vec<_>>()), union);
        }
    }
}
