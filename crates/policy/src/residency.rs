//! The known places of blocks.

mod chunk;
mod known_block;
mod spread;

use std::collections::BTreeMap;
use std::ops::Range;

pub(crate) use chunk::{CHUNK_BLOCKS, KnownChunk};
use chunk::{Chunk, find, index, known_in};
use known_block::Packed;
pub(crate) use known_block::{FAILURES_MAX, Known};
pub use spread::{Away, Spread};

use crate::tier::Direction;
use crate::{BLOCK_SIZE, Block, ByLevel, ByteCount, Level, Pid, TierBytes, VirtRange};

/// Maximum number of chunks whose blocks one epoch visits, which bounds its CPU time.
pub(crate) const CHUNKS_MAX: usize = 32;

/// The known places of all processes' blocks.
///
/// A block that could not be moved backs off: it stays known, but is not offered for a while.
///
/// A chunk of 512 blocks is an array; chunks without known blocks do not exist. Sums are kept by chunk, so that the
/// placement of a range costs its chunks and not its blocks.
#[derive(Debug, Clone, Default)]
pub struct ResidencyMap {
    spaces: BTreeMap<Pid, Vec<Chunk>>,
    /// Number of moved blocks, by first tier and present tier.
    away: ByLevel<ByLevel<u64>>,
}

/// Facts about an accessed block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accessed {
    /// Whether it was absent when looked up. That is outdated now, so its place is unknown again.
    pub(crate) was_absent: bool,
    /// The move, if it was moved from its first tier.
    pub(crate) away: Option<Away>,
}

/// Epochs for which a block backs off after its first failure; each further failure doubles them.
const BACK_OFF_EPOCHS: u32 = 4;

/// The most doublings.
const BACK_OFF_DOUBLINGS: u8 = 8;

impl ResidencyMap {
    /// Sets the place of a block. If others have moved it, that becomes its first tier.
    pub fn set(&mut self, pid: Pid, block: Block, spread: impl Into<Spread>) {
        let now = Known::at(spread.into());
        let (chunk, at) = self.chunk_of(pid, block);
        let before = chunk.known[at].unpack();
        let is_same_tier = |k: &Known| k.spread().main() == now.spread().main();
        let kept = before.map_or(now, |before| Known {
            pages: now.pages,
            socket: now.socket,
            away: before.away.filter(|_| is_same_tier(&before)),
            ..before
        });
        chunk.replace(at, Some(kept));
        self.count_away(before.and_then(|k| k.away), kept.away);
    }

    /// The known place of a block.
    pub fn get(&self, pid: Pid, block: Block) -> Option<Spread> {
        self.known_of(pid, block).map(|known| known.spread())
    }

    /// Number of moved blocks that are not back, by first tier and present tier.
    pub(crate) fn away(&self) -> ByLevel<ByLevel<u64>> {
        self.away
    }

    /// The move of a block that is not back.
    pub(crate) fn away_of(&self, pid: Pid, block: Block) -> Option<Away> {
        self.known_of(pid, block)?.away
    }

    /// Notes an access to a block.
    #[inline]
    pub(crate) fn accessed(&mut self, pid: Pid, block: Block) -> Accessed {
        let known = self.known_of(pid, block);
        let was_absent = known.is_some_and(|k| k.is_absent());
        if was_absent {
            self.change(pid, block, |_| None);
        }
        Accessed {
            was_absent,
            away: known.and_then(|k| k.away),
        }
    }

    /// Notes that a block could not be moved; it backs off, longer each time.
    pub fn failed(&mut self, pid: Pid, block: Block, epoch: u32) {
        self.change(pid, block, |known| {
            let doublings = known.failures.min(BACK_OFF_DOUBLINGS);
            Some(Known {
                aside_until: epoch.saturating_add(BACK_OFF_EPOCHS << doublings),
                failures: known.failures.saturating_add(1).min(FAILURES_MAX),
                ..known
            })
        });
    }

    /// Notes that a block was moved over the boundary below `level`: clears its failures, and records or ends its move.
    pub(crate) fn moved(
        &mut self,
        pid: Pid,
        block: Block,
        (level, direction): (Level, Direction),
        spread: Spread,
    ) {
        let is_slower = |other: Level| other > level;
        self.change(pid, block, |known| {
            let (from, now) = match direction {
                Direction::Promotion => (known.spread().main_of(is_slower), level),
                Direction::Demotion => (level, spread.main_of(is_slower)),
            };
            let home = known.away.map_or(from, |away| away.home);
            Some(Known {
                away: (home != now).then_some(Away { home, now }),
                // A promotion collapses by itself.
                is_collapsed: known.is_collapsed || direction == Direction::Promotion,
                ..Known::at(spread)
            })
        });
    }

    /// Notes that a block's small pages were collapsed, or cannot be.
    pub(crate) fn collapsed(&mut self, pid: Pid, block: Block) {
        self.change(pid, block, |known| {
            Some(Known {
                is_collapsed: true,
                ..known
            })
        });
    }

    /// Removes blocks of `pid` outside of `space` (sorted, disjoint).
    pub fn restrict(&mut self, pid: Pid, space: &[VirtRange]) {
        let Some(chunks) = self.spaces.get_mut(&pid) else {
            return;
        };
        for chunk in chunks.iter_mut() {
            let first = chunk.first_block();
            let (start, end) = (
                Block(first).start(),
                Block(first + CHUNK_BLOCKS as u64).start(),
            );
            let near = &space[space.partition_point(|r| r.end() <= start)..];
            let is_whole = |r: &VirtRange| r.start() <= start && end <= r.end();
            if near.first().is_some_and(is_whole) {
                continue;
            }
            let near = &near[..near.partition_point(|r| r.start() < end)];
            let is_mapped = |block: Block| {
                let next = near.partition_point(|r| r.end() <= block.start());
                let next = near.get(next);
                next.is_some_and(|r| r.start().0 < block.start().0 + BLOCK_SIZE)
            };
            for at in 0..CHUNK_BLOCKS {
                let known = chunk.known[at].unpack();
                if let Some(known) = known
                    && !is_mapped(Block(first + at as u64))
                {
                    chunk.replace(at, None);
                    if let Some(Away { home, now }) = known.away {
                        *self.away.get_mut(home).get_mut(now) -= 1;
                    }
                }
            }
        }
        chunks.retain(|chunk| chunk.known_blocks > 0);
    }

    /// Removes a process.
    pub fn forget(&mut self, pid: Pid) {
        for (_, known) in self.all(pid) {
            self.count_away(known.away, None);
        }
        self.spaces.remove(&pid);
    }

    /// The known blocks of a range that do not back off in `epoch`, by address.
    pub fn movable(
        &self,
        pid: Pid,
        range: &VirtRange,
        epoch: u32,
    ) -> impl Iterator<Item = (Block, TierBytes)> + '_ {
        self.known(pid, range)
            .filter(move |(_, k)| k.is_movable(epoch))
            .map(|(b, k)| (b, k.placement()))
    }

    /// Number of known blocks in a range.
    pub(crate) fn known_blocks(&self, pid: Pid, range: &VirtRange) -> usize {
        self.known(pid, range).count()
    }

    /// The placement of the known part of a range.
    pub fn placement(&self, pid: Pid, range: &VirtRange) -> TierBytes {
        let blocks = Block::numbers_of(range);
        let mut sum = TierBytes::default();
        for chunk in self.chunks_of(pid, &blocks) {
            let first = chunk.first_block();
            let end = first + CHUNK_BLOCKS as u64;
            let part = match blocks.start <= first && end <= blocks.end {
                true => Spread::from(chunk.sum).at(Level::First),
                false => {
                    let within = blocks.start.clamp(first, end) - first
                        ..blocks.end.clamp(first, end) - first;
                    let known = chunk.known[within.start as usize..within.end as usize].iter();
                    let known = known.filter_map(|packed| packed.unpack());
                    let known = known.map(|known| known.placement());
                    known.fold(TierBytes::default(), |sum, k| TierBytes {
                        fast: ByteCount(sum.fast.0 + k.fast.0),
                        slow: ByteCount(sum.slow.0 + k.slow.0),
                    })
                }
            };
            sum.fast.0 += part.fast.0;
            sum.slow.0 += part.slow.0;
        }
        sum
    }

    /// The known blocks of a process by chunk, with sums on both sides of the boundary below `level`.
    pub(crate) fn known_by_chunk(
        &self,
        pid: Pid,
        level: Level,
    ) -> impl Iterator<Item = KnownChunk<'_>> + '_ {
        self.chunks(pid).iter().map(move |chunk| KnownChunk {
            first: Block(chunk.first_block()),
            known: &chunk.known,
            sum: Spread::from(chunk.sum).at(level),
        })
    }

    /// Number of known blocks of all processes.
    pub fn known_in_all(&self) -> u64 {
        let chunks = self.spaces.values().flatten();
        chunks.map(|chunk| u64::from(chunk.known_blocks)).sum()
    }

    /// Memory used, bytes, without the allocator's overhead.
    pub fn state_bytes(&self) -> usize {
        let chunks: usize = self.spaces.values().map(Vec::len).sum();
        chunks * (size_of::<Chunk>() + size_of::<[Packed; CHUNK_BLOCKS]>())
    }

    /// Number of blocks that back off in `epoch`.
    pub fn set_aside(&self, epoch: u32) -> usize {
        let chunks = self.spaces.values().flatten();
        let chunks = chunks.filter(|chunk| chunk.aside_until > epoch);
        chunks
            .flat_map(known_in)
            .filter(|(_, known)| !known.is_movable(epoch))
            .count()
    }

    /// All known blocks of a process, by address.
    pub(crate) fn all(&self, pid: Pid) -> Vec<(Block, Known)> {
        self.chunks(pid).iter().flat_map(known_in).collect()
    }

    /// Restores the saved knowledge of a block.
    pub(crate) fn restore(&mut self, pid: Pid, block: Block, known: Known) {
        let (chunk, at) = self.chunk_of(pid, block);
        let before = chunk.known[at].unpack().and_then(|k| k.away);
        chunk.replace(at, Some(known));
        chunk.aside_until = chunk.aside_until.max(known.aside_until);
        self.count_away(before, known.away);
    }

    fn known(&self, pid: Pid, range: &VirtRange) -> impl Iterator<Item = (Block, Known)> + '_ {
        let blocks = Block::numbers_of(range);
        let chunks = self.chunks_of(pid, &blocks).iter();
        chunks
            .flat_map(known_in)
            .filter(move |(block, _)| blocks.contains(&block.0))
    }

    /// The unknown blocks of a range, by address. It does not visit the blocks of chunks without any.
    pub(crate) fn unknown(
        &self,
        pid: Pid,
        range: &VirtRange,
    ) -> impl Iterator<Item = Block> + use<'_> {
        let Range { start, end } = Block::numbers_of(range);
        let size = CHUNK_BLOCKS as u64;
        let numbers = start / size..end.div_ceil(size);
        numbers.flat_map(move |number| {
            let chunk = self.chunk(pid, number);
            let is_full = chunk.is_some_and(|chunk| chunk.known_blocks == CHUNK_BLOCKS as u32);
            let within = match is_full {
                true => 0..0,
                false => start.max(number * size)..end.min((number + 1) * size),
            };
            let is_unknown =
                move |b: &u64| chunk.is_none_or(|c| !c.known[(b % size) as usize].is_known());
            within.filter(is_unknown).map(Block)
        })
    }

    /// The chunks with known blocks that overlap a range.
    fn chunks_of(&self, pid: Pid, blocks: &Range<u64>) -> &[Chunk] {
        let chunks = self.chunks(pid);
        let first =
            chunks.partition_point(|c| c.first_block() + CHUNK_BLOCKS as u64 <= blocks.start);
        let end = chunks.partition_point(|c| c.first_block() < blocks.end);
        &chunks[first..end.max(first)]
    }

    fn chunks(&self, pid: Pid) -> &[Chunk] {
        self.spaces.get(&pid).map_or(&[], |chunks| chunks)
    }

    fn known_of(&self, pid: Pid, block: Block) -> Option<Known> {
        let (number, at) = index(block);
        self.chunk(pid, number)?.known[at].unpack()
    }

    fn chunk(&self, pid: Pid, number: u64) -> Option<&Chunk> {
        let chunks = self.chunks(pid);
        Some(&chunks[find(chunks, number).ok()?])
    }

    /// The chunk of a block, created if missing.
    fn chunk_of(&mut self, pid: Pid, block: Block) -> (&mut Chunk, usize) {
        let (number, at) = index(block);
        let chunks = self.spaces.entry(pid).or_default();
        let chunk = match find(chunks, number) {
            Ok(chunk) => chunk,
            Err(chunk) => {
                chunks.insert(chunk, Chunk::new(number));
                chunk
            }
        };
        (&mut chunks[chunk], at)
    }

    /// Changes the knowledge of a block, if it is known.
    fn change(&mut self, pid: Pid, block: Block, to: impl FnOnce(Known) -> Option<Known>) {
        let Some(before) = self.known_of(pid, block) else {
            return;
        };
        let now = to(before);
        let (chunk, at) = self.chunk_of(pid, block);
        chunk.replace(at, now);
        chunk.aside_until = chunk.aside_until.max(now.map_or(0, |k| k.aside_until));
        self.count_away(before.away, now.and_then(|k| k.away));
    }

    fn count_away(&mut self, before: Option<Away>, after: Option<Away>) {
        if let Some(Away { home, now }) = before {
            *self.away.get_mut(home).get_mut(now) -= 1;
        }
        if let Some(Away { home, now }) = after {
            *self.away.get_mut(home).get_mut(now) += 1;
        }
    }
}

#[cfg(test)]
mod tests;
