//! Translates guest-physical addresses to positions in memory files.
//!
//! # Problem
//! A guest names ranges of its physical memory. The hole must be punched into the right file at the
//! right offset and nowhere else, whatever the guest names. Memory is not contiguous: it has holes
//! below 1 MiB and below 4 GiB, and a node may begin in the middle of a run.
//!
//! # Approach
//! The map is a sorted list of pieces that QEMU reported. A piece is a run of addresses that is
//! contiguous in one file; pieces that touch in the guest and in the file are merged. A range is
//! found by binary search and must lie in one piece.
//!
//! # Properties
//! - A range resolves exactly when all its pages are contiguous in the file of the requested tier.
//!   Its extent is where the pieces say.
//! - Pieces that overlap, in guest memory or in a file, make no map.

use demeter_policy::{ByteCount, GuestPhysAddr, PhysRange, Tier};

use crate::backing::{Extent, FileOffset, NotInTier};

/// A run of guest memory and its place in its tier's file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Piece {
    /// Guest-physical addresses.
    pub range: PhysRange,
    /// The tier, and so the file.
    pub tier: Tier,
    /// Position of the first byte in the tier's file. Several files count as laid end to end.
    pub offset: FileOffset,
}

impl Piece {
    /// End of the piece in the file, exclusive.
    fn offset_end(&self) -> FileOffset {
        FileOffset(self.offset.0.saturating_add(self.range.len().0))
    }

    /// The merged piece, if `next` continues `self` in the guest and in the file.
    fn joined(&self, next: &Self) -> Option<Self> {
        let follows = self.tier == next.tier
            && self.range.end() == next.range.start()
            && self.offset_end() == next.offset;
        let bytes = ByteCount(self.range.len().0.checked_add(next.range.len().0)?);
        let range = PhysRange::new(self.range.start(), bytes)?;
        follows.then_some(Self { range, ..*self })
    }
}

/// The memory map of a VM.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct MemoryMap {
    /// Sorted by address, disjoint, and fully merged.
    pieces: Vec<Piece>,
}

/// Two pieces overlap.
#[derive(Debug, Clone, Copy, PartialEq, Eq, thiserror::Error)]
#[error("two pieces of memory overlap at {0}")]
pub struct Overlap(pub GuestPhysAddr);

impl MemoryMap {
    /// Makes a map of pieces in any order.
    pub fn new(mut pieces: Vec<Piece>) -> Result<Self, Overlap> {
        pieces.sort_unstable_by_key(|piece| (piece.tier, piece.offset));
        for two in pieces.windows(2) {
            if two[0].tier == two[1].tier && two[0].offset_end() > two[1].offset {
                return Err(Overlap(two[1].range.start()));
            }
        }
        pieces.sort_unstable_by_key(|piece| piece.range);
        let mut map = Self::default();
        for piece in pieces {
            match map.pieces.last_mut() {
                Some(last) if last.range.end() > piece.range.start() => {
                    return Err(Overlap(piece.range.start()));
                }
                Some(last) => match last.joined(&piece) {
                    Some(joined) => *last = joined,
                    None => map.pieces.push(piece),
                },
                None => map.pieces.push(piece),
            }
        }
        Ok(map)
    }

    /// The place of a range in the file of `tier`.
    pub fn resolve(&self, tier: Tier, range: PhysRange) -> Result<Extent, NotInTier> {
        let after = self
            .pieces
            .partition_point(|piece| piece.range.start() <= range.start());
        let piece = after
            .checked_sub(1)
            .map(|index| &self.pieces[index])
            .filter(|piece| piece.tier == tier && piece.range.covers(&range))
            .ok_or(NotInTier { range, tier })?;
        let into = range.start().0 - piece.range.start().0;
        Ok(Extent {
            tier,
            offset: FileOffset(piece.offset.0.saturating_add(into)),
            len: range.len(),
        })
    }
}

#[cfg(test)]
mod tests {
    use demeter_policy::PAGE_SIZE;
    use proptest::prelude::*;

    use super::*;

    fn pages(first: u64, count: u64) -> PhysRange {
        let start = GuestPhysAddr(first * PAGE_SIZE);
        PhysRange::new(start, ByteCount(count * PAGE_SIZE)).unwrap()
    }

    /// Pieces of a few pages that often touch, in the guest, in the file, or in both.
    fn maps() -> impl Strategy<Value = Vec<Piece>> {
        let piece = (0..3u64, 0..2u64, 1..5u64, any::<bool>());
        (prop::collection::vec(piece, 0..8), 0..50u64).prop_map(|(parts, shift)| {
            let mut at = 0;
            let mut offset = shift;
            parts
                .into_iter()
                .map(|(hole, hole_in_file, count, fast)| {
                    at += hole;
                    offset += hole_in_file;
                    let piece = Piece {
                        range: pages(at, count),
                        tier: if fast { Tier::Fast } else { Tier::Slow },
                        offset: FileOffset(offset * PAGE_SIZE),
                    };
                    at += count;
                    offset += count;
                    piece
                })
                .collect()
        })
    }

    /// A plain search for one page.
    fn page_of(pieces: &[Piece], tier: Tier, page: u64) -> Option<u64> {
        let page = pages(page, 1);
        let holds = |p: &&Piece| p.tier == tier && p.range.covers(&page);
        let piece = pieces.iter().find(holds)?;
        Some(piece.offset.0 + page.start().0 - piece.range.start().0)
    }

    proptest! {
        #[test]
        fn a_range_resolves_as_its_pages_do(
            pieces in maps().prop_shuffle(),
            first in 0..60u64,
            count in 1..12u64,
            fast in any::<bool>(),
        ) {
            let tier = if fast { Tier::Fast } else { Tier::Slow };
            let map = MemoryMap::new(pieces.clone()).unwrap();
            let offsets: Option<Vec<_>> =
                (first..first + count).map(|page| page_of(&pieces, tier, page)).collect();
            let want = offsets
                .filter(|all| all.windows(2).all(|two| two[0] + PAGE_SIZE == two[1]))
                .map(|all| Extent { tier, offset: FileOffset(all[0]), len: ByteCount(count * PAGE_SIZE) });
            prop_assert_eq!(map.resolve(tier, pages(first, count)).ok(), want);
        }

        #[test]
        fn overlapping_pieces_make_no_map(
            pieces in maps(),
            which in any::<prop::sample::Index>(),
            in_file in any::<bool>(),
        ) {
            prop_assume!(!pieces.is_empty());
            let twin = *which.get(&pieces);
            let mut pieces = pieces;
            pieces.push(if in_file {
                Piece { range: pages(1000, twin.range.len().0 / PAGE_SIZE), ..twin }
            } else {
                Piece { offset: FileOffset(1000 * PAGE_SIZE), ..twin }
            });
            prop_assert!(MemoryMap::new(pieces).is_err());
        }

        #[test]
        fn any_numbers_are_survived(start in any::<u64>(), bytes in 1..=u64::MAX, offset in any::<u64>()) {
            let Some(range) = PhysRange::new(GuestPhysAddr(start), ByteCount(bytes)) else {
                return Ok(());
            };
            let piece = Piece { range, tier: Tier::Fast, offset: FileOffset(offset) };
            let map = MemoryMap::new(vec![piece]).unwrap();
            prop_assert!(map.resolve(Tier::Fast, range).is_ok());
            prop_assert!(map.resolve(Tier::Slow, range).is_err());
            prop_assert!(MemoryMap::new(vec![piece, piece]).is_err());
        }
    }
}
