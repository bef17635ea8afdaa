//! What is known of where the pages lie.

use std::collections::BTreeMap;

use crate::{BLOCK_SIZE, ByteCount, GuestVirtAddr, Pid, Tier, VirtRange};

/// The number of a 2 MiB block in a virtual address space: the unit in which pages are moved.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Block(pub u64);

impl Block {
    /// The block that holds `addr`.
    pub fn of(addr: GuestVirtAddr) -> Self {
        Self(addr.0 / BLOCK_SIZE)
    }

    /// The blocks that `range` touches.
    pub fn all_of(range: &VirtRange) -> impl Iterator<Item = Self> + use<> {
        Self::numbers_of(range).map(Self)
    }

    /// The numbers of the blocks that `range` touches.
    pub fn numbers_of(range: &VirtRange) -> std::ops::Range<u64> {
        range.start().0 / BLOCK_SIZE..range.end().0.div_ceil(BLOCK_SIZE)
    }

    /// Its first address.
    pub fn start(self) -> GuestVirtAddr {
        GuestVirtAddr(self.0 * BLOCK_SIZE)
    }
}

/// Bytes of one block, or of many, by tier. What is not resident counts in neither.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Placement {
    /// In fast memory.
    pub fast: ByteCount,
    /// In slow memory.
    pub slow: ByteCount,
}

impl Placement {
    /// Resident bytes.
    pub fn resident(&self) -> ByteCount {
        ByteCount(self.fast.0 + self.slow.0)
    }
}

/// Where the blocks of all processes lie, as far as anybody has looked. Blocks that would not
/// move are set aside until a later epoch: they are known, but nobody is offered them.
#[derive(Debug, Clone, Default)]
pub struct ResidencyMap {
    spaces: BTreeMap<Pid, BTreeMap<Block, Known>>,
}

#[derive(Debug, Clone, Copy, Default)]
pub(crate) struct Known {
    pub(crate) placement: Placement,
    /// Not to be moved before this epoch.
    pub(crate) aside_until: u32,
    /// Failures in a row.
    pub(crate) failures: u32,
    /// Where it was moved from where it had been, and the tick until which that counts.
    pub(crate) moved: Option<(Tier, u32)>,
}

/// What an access tells of its block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Accessed {
    /// Nothing of it was resident when it was looked at: that is no longer so, and it is forgotten.
    pub(crate) was_absent: bool,
    /// Where it was moved not long ago.
    pub(crate) moved: Option<Tier>,
}

impl Known {
    fn moved_at(&self, tick: u32) -> Option<Tier> {
        let (tier, until) = self.moved?;
        (tick < until).then_some(tier)
    }
}

/// Epochs for which a block is set aside after its first failure; each further one doubles it.
const BACK_OFF_EPOCHS: u32 = 4;

/// The most doublings.
const BACK_OFF_DOUBLINGS: u32 = 8;

impl ResidencyMap {
    /// Remembers where a block was seen.
    pub fn set(&mut self, pid: Pid, block: Block, placement: Placement) {
        self.spaces
            .entry(pid)
            .or_default()
            .entry(block)
            .or_default()
            .placement = placement;
    }

    /// What is known of a block.
    pub fn get(&self, pid: Pid, block: Block) -> Option<Placement> {
        self.spaces.get(&pid)?.get(&block).map(|k| k.placement)
    }

    /// The tier that a block was moved to not long before this tick.
    pub(crate) fn moved_at(&self, pid: Pid, block: Block, tick: u32) -> Option<Tier> {
        self.spaces.get(&pid)?.get(&block)?.moved_at(tick)
    }

    /// A block was accessed at this tick.
    #[inline]
    pub(crate) fn accessed(&mut self, pid: Pid, block: Block, tick: u32) -> Accessed {
        let blocks = self.spaces.get_mut(&pid);
        let known = blocks.as_ref().and_then(|blocks| blocks.get(&block));
        let told = Accessed {
            was_absent: known.is_some_and(|k| k.placement.resident().0 == 0),
            moved: known.and_then(|k| k.moved_at(tick)),
        };
        if told.was_absent
            && let Some(blocks) = blocks
        {
            blocks.remove(&block);
        }
        told
    }

    /// A block would not move: sets it aside, for longer each time.
    pub fn failed(&mut self, pid: Pid, block: Block, epoch: u32) {
        if let Some(known) = self.spaces.get_mut(&pid).and_then(|s| s.get_mut(&block)) {
            let doublings = known.failures.min(BACK_OFF_DOUBLINGS);
            known.aside_until = epoch.saturating_add(BACK_OFF_EPOCHS << doublings);
            known.failures = known.failures.saturating_add(1);
        }
    }

    /// A block did move at this tick: its failures are forgotten, and it counts as moved.
    pub(crate) fn moved(&mut self, pid: Pid, block: Block, to: Tier, tick: u32, ticks: u32) {
        if let Some(known) = self.spaces.get_mut(&pid).and_then(|s| s.get_mut(&block)) {
            known.failures = 0;
            known.aside_until = 0;
        }
        self.count_as_moved(pid, block, to, tick, ticks);
    }

    /// A block counts as moved from this tick on for so many, unless that is back to where it was.
    pub(crate) fn count_as_moved(
        &mut self,
        pid: Pid,
        block: Block,
        to: Tier,
        tick: u32,
        ticks: u32,
    ) {
        if let Some(known) = self.spaces.get_mut(&pid).and_then(|s| s.get_mut(&block)) {
            let is_back = known.moved_at(tick).is_some_and(|tier| tier != to);
            known.moved = (!is_back).then_some((to, tick.saturating_add(ticks)));
        }
    }

    /// Forgets where blocks were moved.
    pub(crate) fn forget_moves(&mut self) {
        for known in self.spaces.values_mut().flat_map(BTreeMap::values_mut) {
            known.moved = None;
        }
    }

    /// The blocks that were moved to a tier not long before this tick and are not set aside in
    /// `epoch`, with their bytes there, by address.
    pub(crate) fn moved_to(
        &self,
        pid: Pid,
        tier: Tier,
        tick: u32,
        epoch: u32,
    ) -> impl Iterator<Item = (Block, ByteCount)> + '_ {
        let blocks = self.spaces.get(&pid).into_iter().flatten();
        blocks
            .filter(move |(_, k)| k.moved_at(tick) == Some(tier) && k.aside_until <= epoch)
            .map(move |(&block, k)| match tier {
                Tier::Fast => (block, k.placement.fast),
                Tier::Slow => (block, k.placement.slow),
            })
            .filter(|(_, bytes)| bytes.0 > 0)
    }

    /// Forgets blocks of `pid` that no range in `space` (sorted, disjoint) touches.
    pub fn restrict(&mut self, pid: Pid, space: &[VirtRange]) {
        if let Some(blocks) = self.spaces.get_mut(&pid) {
            blocks.retain(|b, _| {
                let next = space.partition_point(|r| r.end() <= b.start());
                space
                    .get(next)
                    .is_some_and(|r| r.start().0 < b.start().0 + BLOCK_SIZE)
            });
        }
    }

    /// Forgets a process.
    pub fn forget(&mut self, pid: Pid) {
        self.spaces.remove(&pid);
    }

    /// The blocks of a range that are known and not set aside in `epoch`, by address.
    pub fn movable(
        &self,
        pid: Pid,
        range: &VirtRange,
        epoch: u32,
    ) -> impl Iterator<Item = (Block, Placement)> + '_ {
        self.known(pid, range)
            .filter(move |(_, k)| k.aside_until <= epoch)
            .map(|(b, k)| (b, k.placement))
    }

    /// Blocks of a range whose place is known.
    pub(crate) fn known_blocks(&self, pid: Pid, range: &VirtRange) -> usize {
        self.known(pid, range).count()
    }

    /// Where the known part of a range lies.
    pub fn placement(&self, pid: Pid, range: &VirtRange) -> Placement {
        self.known(pid, range)
            .fold(Placement::default(), |sum, (_, k)| Placement {
                fast: ByteCount(sum.fast.0 + k.placement.fast.0),
                slow: ByteCount(sum.slow.0 + k.placement.slow.0),
            })
    }

    /// Bytes of what is known, without what an allocator adds.
    pub fn state_bytes(&self) -> usize {
        let blocks: usize = self.spaces.values().map(BTreeMap::len).sum();
        blocks * size_of::<(Block, Known)>()
    }

    /// Blocks that are set aside in `epoch`.
    pub fn set_aside(&self, epoch: u32) -> usize {
        let aside =
            |s: &BTreeMap<Block, Known>| s.values().filter(|k| k.aside_until > epoch).count();
        self.spaces.values().map(aside).sum()
    }

    /// All that is known of a process's blocks, by address.
    pub(crate) fn all(&self, pid: Pid) -> Vec<(Block, Known)> {
        let blocks = self.spaces.get(&pid).into_iter().flatten();
        blocks.map(|(&b, &k)| (b, k)).collect()
    }

    /// Takes over what was known of a block.
    pub(crate) fn restore(&mut self, pid: Pid, block: Block, known: Known) {
        self.spaces.entry(pid).or_default().insert(block, known);
    }

    fn known(&self, pid: Pid, range: &VirtRange) -> impl Iterator<Item = (Block, &Known)> + '_ {
        let (first, end) = (
            Block::of(range.start()),
            Block(range.end().0.div_ceil(BLOCK_SIZE)),
        );
        self.spaces
            .get(&pid)
            .into_iter()
            .flat_map(move |s| s.range(first..end))
            .map(|(b, k)| (*b, k))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn range(first: u64, end: u64) -> VirtRange {
        VirtRange::new(Block(first).start(), Block(end).start()).unwrap()
    }

    const FAST: Placement = Placement {
        fast: ByteCount(BLOCK_SIZE),
        slow: ByteCount(0),
    };

    #[test]
    fn what_was_absent_is_forgotten_when_it_is_accessed() {
        let mut map = ResidencyMap::default();
        map.set(Pid(1), Block(1), FAST);
        map.set(Pid(1), Block(2), Placement::default());
        let accessed = [1, 2, 2, 3].map(|b| map.accessed(Pid(1), Block(b), 0).was_absent);
        assert_eq!(accessed, [false, true, false, false]);
        assert_eq!(map.get(Pid(1), Block(1)), Some(FAST));
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
        map.moved(Pid(1), Block(5), Tier::Fast, 12, 4);
        assert_eq!(movable(&map, 12), 1);
        for epoch in 0..1000 {
            map.failed(Pid(1), Block(5), epoch);
        }
        assert_eq!(map.set_aside(1000), 1);
        assert_eq!(movable(&map, 999 + (4 << 8)), 1);
    }

    #[test]
    fn where_a_block_was_moved_counts_for_a_while_and_not_once_it_is_back() {
        let mut map = ResidencyMap::default();
        map.set(Pid(1), Block(5), FAST);
        let moved = |m: &mut ResidencyMap, tick| m.accessed(Pid(1), Block(5), tick).moved;
        assert_eq!(moved(&mut map, 0), None);
        map.moved(Pid(1), Block(5), Tier::Slow, 10, 20);
        assert_eq!(moved(&mut map, 29), Some(Tier::Slow));
        assert_eq!(moved(&mut map, 30), None);
        map.moved(Pid(1), Block(5), Tier::Fast, 29, 20);
        assert_eq!(moved(&mut map, 29), None, "it is where it was");
        // What was moved long ago is at home there.
        map.moved(Pid(1), Block(5), Tier::Slow, 40, 20);
        map.moved(Pid(1), Block(5), Tier::Fast, 70, 20);
        assert_eq!(moved(&mut map, 71), Some(Tier::Fast));
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
