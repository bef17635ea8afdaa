//! The known blocks of 1 GiB of addresses.

use super::known_block::{Known, Packed};
use crate::{Block, ByLevel, ByteCount, Level, TierBytes};

/// Number of blocks in a chunk of 1 GiB.
pub(crate) const CHUNK_BLOCKS: usize = 512;

/// The known blocks of 1 GiB of addresses.
#[derive(Debug, Clone)]
pub(super) struct Chunk {
    /// The upper bits of its addresses.
    pub(super) number: u64,
    pub(super) known: Box<[Packed; CHUNK_BLOCKS]>,
    /// Sum over all known blocks.
    pub(super) sum: ByLevel<ByteCount>,
    pub(super) known_blocks: u32,
    /// The epoch from which no block backs off.
    pub(super) aside_until: u32,
}

impl Chunk {
    pub(super) fn new(number: u64) -> Self {
        Self {
            number,
            known: Box::new([Packed::default(); CHUNK_BLOCKS]),
            sum: ByLevel::default(),
            known_blocks: 0,
            aside_until: 0,
        }
    }

    pub(super) fn first_block(&self) -> u64 {
        self.number * CHUNK_BLOCKS as u64
    }

    /// Replaces the knowledge of a block, and updates the sums.
    pub(super) fn replace(&mut self, at: usize, now: Option<Known>) {
        let before = std::mem::replace(&mut self.known[at], Packed::pack(now));
        if let Some(before) = before.unpack() {
            for level in Level::ALL {
                self.sum.get_mut(level).0 -= before.spread().bytes.get(level).0;
            }
            self.known_blocks -= 1;
        }
        if let Some(now) = now {
            for level in Level::ALL {
                self.sum.get_mut(level).0 += now.spread().bytes.get(level).0;
            }
            self.known_blocks += 1;
        }
    }
}

/// Known blocks in 1 GiB of a process's addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownChunk<'a> {
    /// Its first block.
    pub(crate) first: Block,
    /// All its blocks.
    pub(super) known: &'a [Packed; CHUNK_BLOCKS],
    /// Their sum on both sides of the requested boundary.
    pub(crate) sum: TierBytes,
}

impl<'a> KnownChunk<'a> {
    /// The knowledge of all its blocks, by address.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = Option<Known>> + use<'a> {
        self.known.iter().map(|packed| packed.unpack())
    }

    /// The knowledge of one of its blocks.
    pub(crate) fn block(&self, at: usize) -> Option<Known> {
        self.known.get(at)?.unpack()
    }
}

pub(super) fn index(block: Block) -> (u64, usize) {
    let chunk = CHUNK_BLOCKS as u64;
    (block.0 / chunk, (block.0 % chunk) as usize)
}

/// The index of a chunk, or the one where it would be inserted.
#[inline]
pub(super) fn find(chunks: &[Chunk], number: u64) -> Result<usize, usize> {
    let is_it = |at: &usize| chunks.get(*at).is_some_and(|c| c.number == number);
    // In a mapping whose blocks are known, a chunk's distance from the first tells its index.
    let first = chunks.first().map_or(0, |chunk| chunk.number);
    let guess = usize::try_from(number.wrapping_sub(first)).ok();
    match guess.filter(is_it) {
        Some(at) => Ok(at),
        None => chunks.binary_search_by_key(&number, |c| c.number),
    }
}

/// The known blocks of a chunk, by address.
pub(super) fn known_in(chunk: &Chunk) -> impl Iterator<Item = (Block, Known)> {
    let first = chunk.first_block();
    let known = chunk.known.iter().enumerate();
    known.filter_map(move |(at, packed)| Some((Block(first + at as u64), packed.unpack()?)))
}
