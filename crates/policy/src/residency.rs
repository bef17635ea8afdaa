//! The known places of blocks.

mod known;

use std::collections::BTreeMap;
use std::ops::Range;

use known::Packed;
pub(crate) use known::{FAILURES_MAX, Known};

use crate::tier::Direction;
use crate::{
    BLOCK_SIZE, ByLevel, ByteCount, GuestVirtAddr, Level, Pid, Socket, TierBytes, VirtRange,
};

/// The number of a 2 MiB block in a virtual address space, the unit of moves.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u64);

impl Block {
    /// The block that contains `addr`.
    pub fn of(addr: GuestVirtAddr) -> Self {
        Self(addr.0 / BLOCK_SIZE)
    }

    /// The blocks that overlap `range`.
    pub fn all_of(range: &VirtRange) -> impl Iterator<Item = Self> + use<> {
        Self::numbers_of(range).map(Self)
    }

    /// The numbers of the blocks that overlap `range`.
    pub fn numbers_of(range: &VirtRange) -> std::ops::Range<u64> {
        range.start().0 / BLOCK_SIZE..range.end().0.div_ceil(BLOCK_SIZE)
    }

    /// Its first address; saturates at the last address.
    pub fn start(self) -> GuestVirtAddr {
        GuestVirtAddr(self.0.saturating_mul(BLOCK_SIZE))
    }
}

/// Where one block lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Spread {
    /// Its bytes in each tier. Absent memory counts in none.
    pub bytes: ByLevel<ByteCount>,
    /// The socket nearest to the node with most of its bytes.
    pub socket: Socket,
}

impl Spread {
    /// The bytes on both sides of the boundary below a tier: in that tier, and in all slower ones. Memory in a still
    /// faster tier is not counted.
    pub fn at(&self, level: Level) -> TierBytes {
        let slower = level.slower().map(|slower| self.bytes.get(slower).0);
        TierBytes {
            fast: *self.bytes.get(level),
            slow: ByteCount(slower.fold(0, u64::saturating_add)),
        }
    }

    /// Resident bytes.
    pub fn resident(&self) -> ByteCount {
        ByteCount(
            self.bytes
                .0
                .iter()
                .fold(0, |sum, b| b.0.saturating_add(sum)),
        )
    }

    /// The tier, of `among`, with most of its bytes; if equal the second, else the faster.
    pub(crate) fn main_of(&self, among: impl Fn(Level) -> bool) -> Level {
        let bytes = |level: Level| self.bytes.get(level).0;
        let others = [Level::Third, Level::Fourth, Level::First];
        let mut main = Level::Second;
        for level in others.into_iter().filter(|&level| among(level)) {
            if bytes(level) > bytes(main) || !among(main) {
                main = level;
            }
        }
        main
    }

    /// The tier with most of its bytes.
    pub(crate) fn main(&self) -> Level {
        self.main_of(|_| true)
    }
}

impl From<ByLevel<ByteCount>> for Spread {
    /// On a machine of one socket.
    fn from(bytes: ByLevel<ByteCount>) -> Self {
        let socket = Socket::default();
        Self { bytes, socket }
    }
}

impl From<TierBytes> for Spread {
    /// On a machine of one socket and two tiers.
    fn from(TierBytes { fast, slow }: TierBytes) -> Self {
        ByLevel([fast, slow, ByteCount(0), ByteCount(0)]).into()
    }
}

/// A moved block: its first tier and its present one.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Away {
    /// The tier in which it was first found.
    pub home: Level,
    /// The tier to which it was moved.
    pub now: Level,
}

/// Number of blocks in a chunk of 1 GiB.
pub(crate) const CHUNK_BLOCKS: usize = 512;

/// Maximum number of chunks whose blocks one epoch visits, which bounds its CPU time.
pub(crate) const CHUNKS_MAX: usize = 32;

/// Known blocks in 1 GiB of a process's addresses.
#[derive(Debug, Clone, Copy)]
pub(crate) struct KnownChunk<'a> {
    /// Its first block.
    pub(crate) first: Block,
    /// All its blocks.
    known: &'a [Packed; CHUNK_BLOCKS],
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

/// The known blocks of 1 GiB of addresses.
#[derive(Debug, Clone)]
pub(crate) struct Chunk {
    /// The upper bits of its addresses.
    number: u64,
    known: Box<[Packed; CHUNK_BLOCKS]>,
    /// Sum over all known blocks.
    sum: ByLevel<ByteCount>,
    known_blocks: u32,
    /// The epoch from which no block backs off.
    aside_until: u32,
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

impl Chunk {
    fn new(number: u64) -> Self {
        Self {
            number,
            known: Box::new([Packed::default(); CHUNK_BLOCKS]),
            sum: ByLevel::default(),
            known_blocks: 0,
            aside_until: 0,
        }
    }

    fn first_block(&self) -> u64 {
        self.number * CHUNK_BLOCKS as u64
    }

    /// Replaces the knowledge of a block, and updates the sums.
    fn replace(&mut self, at: usize, now: Option<Known>) {
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

fn index(block: Block) -> (u64, usize) {
    let chunk = CHUNK_BLOCKS as u64;
    (block.0 / chunk, (block.0 % chunk) as usize)
}

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

/// The index of a chunk, or the one where it would be inserted.
#[inline]
fn find(chunks: &[Chunk], number: u64) -> Result<usize, usize> {
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
fn known_in(chunk: &Chunk) -> impl Iterator<Item = (Block, Known)> {
    let first = chunk.first_block();
    let known = chunk.known.iter().enumerate();
    known.filter_map(move |(at, packed)| Some((Block(first + at as u64), packed.unpack()?)))
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn range(first: u64, end: u64) -> VirtRange {
        VirtRange::new(Block(first).start(), Block(end).start()).unwrap()
    }

    const FAST: TierBytes = TierBytes {
        fast: ByteCount(BLOCK_SIZE),
        slow: ByteCount(0),
    };

    #[test]
    fn what_was_absent_is_forgotten_when_it_is_accessed() {
        let mut map = ResidencyMap::default();
        map.set(Pid(1), Block(1), FAST);
        map.set(Pid(1), Block(2), TierBytes::default());
        let accessed = [1, 2, 2, 3].map(|b| map.accessed(Pid(1), Block(b)).was_absent);
        assert_eq!(accessed, [false, true, false, false]);
        assert_eq!(map.get(Pid(1), Block(1)), Some(FAST.into()));
        assert_eq!(map.get(Pid(1), Block(2)), None);
    }

    #[test]
    fn back_off_doubles_and_success_forgets_it() {
        let mut map = ResidencyMap::default();
        map.set(Pid(1), Block(5), FAST);
        let movable = |m: &ResidencyMap, epoch| m.movable(Pid(1), &range(0, 10), epoch).count();
        assert_eq!(movable(&map, 0), 1);
        map.failed(Pid(1), Block(5), 0);
        assert_eq!((movable(&map, 3), movable(&map, 4)), (0, 1));
        map.failed(Pid(1), Block(5), 4);
        assert_eq!((movable(&map, 11), movable(&map, 12)), (0, 1));
        map.failed(Pid(1), Block(5), 12);
        map.moved(Pid(1), Block(5), UP, FAST.into());
        assert_eq!(movable(&map, 12), 1);
        for epoch in 0..1000 {
            map.failed(Pid(1), Block(5), epoch);
        }
        assert_eq!(map.set_aside(1000), 1);
        assert_eq!(movable(&map, 999 + (4 << 8)), 1);
    }

    const SLOW: TierBytes = TierBytes {
        fast: ByteCount(0),
        slow: ByteCount(BLOCK_SIZE),
    };

    const UP: (Level, Direction) = (Level::First, Direction::Promotion);
    const DOWN: (Level, Direction) = (Level::First, Direction::Demotion);

    /// The place of a block that is wholly in one tier.
    fn all_in(level: Level) -> Spread {
        let bytes = |at| ByteCount(if at == level { BLOCK_SIZE } else { 0 });
        ByLevel::from_fn(bytes).into()
    }

    #[test]
    fn home_is_where_a_block_was_found_over_several_moves() {
        let mut map = ResidencyMap::default();
        map.set(Pid(1), Block(5), all_in(Level::Third));
        let mut moved = |boundary, direction, to| {
            let spread = all_in(to);
            map.moved(Pid(1), Block(5), (boundary, direction), spread);
            map.away_of(Pid(1), Block(5))
        };
        let away = |now| {
            let home = Level::Third;
            Some(Away { home, now })
        };
        use Direction::{Demotion, Promotion};
        use Level::{First, Second, Third};
        assert_eq!(moved(Second, Promotion, Second), away(Second));
        assert_eq!(moved(First, Promotion, First), away(First));
        assert_eq!(moved(First, Demotion, Second), away(Second));
        assert_eq!(moved(Second, Demotion, Third), None);
    }

    proptest! {
        #[test]
        fn unknown_blocks_are_those_without_a_place(
            known in prop::collection::btree_set(0u64..1600, 0..800),
            (first, len) in (0u64..1600, 1u64..1600),
            full in prop::option::of(0u64..3),
        ) {
            let mut map = ResidencyMap::default();
            let full = full.map_or(0..0, |chunk| chunk * 512..(chunk + 1) * 512);
            known.iter().copied().chain(full).for_each(|b| map.set(Pid(1), Block(b), FAST));
            let range = range(first, first + len);
            let unknown: Vec<Block> = map.unknown(Pid(1), &range).collect();
            let blocks = Block::all_of(&range);
            let expected = blocks.filter(|&b| map.get(Pid(1), b).is_none());
            prop_assert_eq!(unknown, expected.collect::<Vec<_>>());
        }
    }

    #[test]
    fn a_block_is_away_until_it_is_back_or_something_else_moves_it() {
        let mut map = ResidencyMap::default();
        map.set(Pid(1), Block(5), FAST);
        assert_eq!(map.away_of(Pid(1), Block(5)), None);
        map.moved(Pid(1), Block(5), DOWN, SLOW.into());
        map.set(Pid(1), Block(5), SLOW);
        let demoted = Away {
            home: Level::First,
            now: Level::Second,
        };
        assert_eq!(map.away_of(Pid(1), Block(5)), Some(demoted));
        assert_eq!(map.away().0[0].0[1], 1);
        map.moved(Pid(1), Block(5), UP, FAST.into());
        assert_eq!(map.away_of(Pid(1), Block(5)), None, "it is where it was");
        map.moved(Pid(1), Block(5), DOWN, SLOW.into());
        map.set(Pid(1), Block(5), FAST);
        assert_eq!(
            map.away_of(Pid(1), Block(5)),
            None,
            "somebody has brought it back"
        );
        assert_eq!(map.away(), ByLevel::default());
    }

    #[test]
    fn sums_by_chunk_are_those_of_the_blocks() {
        let mut map = ResidencyMap::default();
        for b in (0..2000).step_by(3) {
            map.set(Pid(1), Block(b), if b % 2 == 0 { FAST } else { SLOW });
        }
        map.set(Pid(1), Block(3), FAST);
        map.accessed(Pid(1), Block(6));
        for (first, end) in [(0, 2000), (1, 512), (511, 513), (100, 1600)] {
            let blocks = map.movable(Pid(1), &range(first, end), 0);
            let sum = blocks.fold((0, 0), |sum, (_, p)| (sum.0 + p.fast.0, sum.1 + p.slow.0));
            let whole = map.placement(Pid(1), &range(first, end));
            assert_eq!((whole.fast.0, whole.slow.0), sum);
        }
    }

    #[test]
    fn restricting_forgets_what_is_unmapped() {
        let mut map = ResidencyMap::default();
        for b in 0..10 {
            map.set(Pid(1), Block(b), FAST);
        }
        map.restrict(Pid(1), &[range(2, 4), range(9, 12)]);
        let left: Vec<_> = map
            .movable(Pid(1), &range(0, 20), 0)
            .map(|(b, _)| b.0)
            .collect();
        assert_eq!(left, [2, 3, 9]);
        assert_eq!(
            map.placement(Pid(1), &range(3, 10)).fast,
            ByteCount(2 * BLOCK_SIZE)
        );
        map.forget(Pid(1));
        assert_eq!(map.get(Pid(1), Block(2)), None);
    }
}
