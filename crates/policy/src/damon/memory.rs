//! The blocks of all processes, with one byte of state each.
//!
//! # Properties
//! - A block keeps its state while it is mapped, whatever is mapped next to it.
//! - Each block exists once, sorted by process and address.

use std::ops::Range;

use crate::{Block, Pid, VirtRange};

/// State of a block: 0 if unknown, else 2 × rung + 1, plus 1 for a huge page.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct State(u8);

impl State {
    /// The state of a known block with this rung.
    pub(super) fn known(rung: usize, is_huge: bool) -> Self {
        Self(((rung as u8) << 1 | u8::from(is_huge)) + 1)
    }

    /// Whether the block was looked at.
    pub(super) fn is_known(self) -> bool {
        self.0 > 0
    }

    /// Whether it was a huge page when it was last found accessed.
    pub(super) fn is_huge(self) -> bool {
        self.0.saturating_sub(1) & 1 == 1
    }

    /// The rung of its next look.
    pub(super) fn rung(self) -> usize {
        usize::from(self.0.saturating_sub(1) >> 1)
    }
}

/// Contiguous blocks of a process.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Run {
    pid: Pid,
    blocks: Range<u64>,
}

impl Run {
    fn len(&self) -> usize {
        (self.blocks.end - self.blocks.start) as usize
    }
}

/// All blocks.
#[derive(Debug, Clone, Default)]
pub(super) struct Memory {
    runs: Vec<Run>,
    /// Index in `states` of each run's first block.
    firsts: Vec<usize>,
    states: Vec<State>,
    unknown: usize,
}

impl Memory {
    /// Number of blocks.
    pub(super) fn len(&self) -> usize {
        self.states.len()
    }

    /// Memory used, bytes, without the allocator's overhead.
    pub(super) fn state_bytes(&self) -> usize {
        let runs = self.runs.len() * (size_of::<Run>() + size_of::<usize>());
        runs + self.states.len()
    }

    /// Number of blocks that were never looked at.
    pub(super) fn unknown(&self) -> usize {
        self.unknown
    }

    /// Index of a block.
    pub(super) fn index(&self, pid: Pid, block: Block) -> Option<usize> {
        let after = self
            .runs
            .partition_point(|r| (r.pid, r.blocks.start) <= (pid, block.0));
        let run = after.checked_sub(1)?;
        let Run { pid: of, blocks } = &self.runs[run];
        let is_inside = *of == pid && blocks.contains(&block.0);
        is_inside.then(|| self.firsts[run] + (block.0 - blocks.start) as usize)
    }

    /// The block at an index below [`Self::len`].
    pub(super) fn block(&self, index: usize) -> Option<(Pid, Block)> {
        let run = self
            .firsts
            .partition_point(|&first| first <= index)
            .checked_sub(1)?;
        let Run { pid, blocks } = self.runs.get(run)?;
        let block = blocks.start + (index - self.firsts[run]) as u64;
        blocks.contains(&block).then_some((*pid, Block(block)))
    }

    /// State of a block; `None` if it is not mapped.
    pub(super) fn state(&self, pid: Pid, block: Block) -> Option<State> {
        self.index(pid, block).map(|index| self.states[index])
    }

    /// Sets the state of a mapped block.
    pub(super) fn set_state(&mut self, pid: Pid, block: Block, state: State) {
        if let Some(index) = self.index(pid, block) {
            let before = std::mem::replace(&mut self.states[index], state);
            self.unknown -= usize::from(!before.is_known());
        }
    }

    /// Whether the block at an index was looked at.
    pub(super) fn is_known(&self, index: usize) -> bool {
        self.states.get(index).is_some_and(|state| state.is_known())
    }

    /// Sets the memory of a process, sorted; empty if it has ended. Returns whether it changed.
    pub(super) fn set(&mut self, pid: Pid, ranges: &[VirtRange]) -> bool {
        let new = runs_of(pid, ranges);
        let begin = self.runs.partition_point(|run| run.pid < pid);
        let end = self.runs.partition_point(|run| run.pid <= pid);
        if self.runs[begin..end] == new {
            return false;
        }
        let state_at = |run: usize| self.firsts.get(run).copied().unwrap_or(self.states.len());
        let (first, last) = (state_at(begin), state_at(end));
        let mut states = vec![];
        for run in &new {
            let base = states.len();
            states.resize(base + run.len(), State::default());
            let old = &self.runs[begin..end];
            let met = old.partition_point(|old| old.blocks.end <= run.blocks.start);
            let mut met = old.iter().zip(&self.firsts[begin..end]).skip(met);
            while let Some((old, &at)) = met.next()
                && old.blocks.start < run.blocks.end
            {
                let from = old.blocks.start.max(run.blocks.start);
                let count = (old.blocks.end.min(run.blocks.end) - from) as usize;
                let place = base + (from - run.blocks.start) as usize;
                let known = at + (from - old.blocks.start) as usize;
                states[place..place + count].copy_from_slice(&self.states[known..known + count]);
            }
        }
        self.states.splice(first..last, states);
        self.runs.splice(begin..end, new);
        let mut next = 0;
        let place = |run: &Run| {
            let first = next;
            next += run.len();
            first
        };
        self.firsts = self.runs.iter().map(place).collect();
        self.unknown = self.states.iter().filter(|state| !state.is_known()).count();
        true
    }

    /// Removes all other processes.
    pub(super) fn retain(&mut self, pids: &[Pid]) {
        let mut gone: Vec<Pid> = self.runs.iter().map(|run| run.pid).collect();
        gone.dedup();
        gone.retain(|pid| !pids.contains(pid));
        for pid in gone {
            self.set(pid, &[]);
        }
    }
}

/// The blocks that overlap the ranges, each once.
fn runs_of(pid: Pid, ranges: &[VirtRange]) -> Vec<Run> {
    let mut runs: Vec<Run> = vec![];
    for range in ranges {
        let blocks = Block::numbers_of(range);
        match runs.last_mut() {
            Some(last) if blocks.start <= last.blocks.end => {
                last.blocks.end = last.blocks.end.max(blocks.end);
            }
            _ => runs.push(Run { pid, blocks }),
        }
    }
    runs
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeMap;

    use proptest::prelude::*;

    use super::*;
    use crate::{BLOCK_SIZE, GuestVirtAddr};

    /// Ranges of blocks, separated by gaps.
    fn ranges(lens: &[(u64, u64)]) -> Vec<VirtRange> {
        let mut next = 0;
        let mut range = |&(gap, len): &(u64, u64)| {
            let start = next + gap;
            next = start + len;
            let at = |block: u64| GuestVirtAddr(block * BLOCK_SIZE);
            VirtRange::new(at(start), at(next)).unwrap()
        };
        lens.iter().map(&mut range).collect()
    }

    fn blocks(memory: &Memory) -> Vec<(Pid, Block)> {
        (0..memory.len())
            .map(|i| memory.block(i).unwrap())
            .collect()
    }

    #[test]
    fn ranges_that_share_a_block_have_it_once() {
        let at = |kib: u64| GuestVirtAddr(kib << 10);
        let ranges = [(1024, 2560), (3072, 5120)]
            .map(|(start, end)| VirtRange::new(at(start), at(end)).unwrap());
        let mut memory = Memory::default();
        assert!(memory.set(Pid(1), &ranges));
        assert_eq!(blocks(&memory), [0, 1, 2].map(|b| (Pid(1), Block(b))));
        assert!(!memory.set(Pid(1), &ranges));
    }

    proptest! {
        #[test]
        fn what_is_known_of_a_block_stays_while_it_is_mapped(
            changes in prop::collection::vec(
                (1u32..4, prop::collection::vec((0u64..5, 1u64..20), 0..5), any::<u64>()), 1..20),
        ) {
            let mut memory = Memory::default();
            let mut want: BTreeMap<(Pid, Block), State> = BTreeMap::new();
            for (pid, lens, mark) in changes {
                let (pid, ranges) = (Pid(pid), ranges(&lens));
                memory.set(pid, &ranges);
                let before = std::mem::take(&mut want);
                want.extend(before.iter().filter(|((of, _), _)| *of != pid));
                for block in ranges.iter().flat_map(Block::all_of) {
                    let known = before.get(&(pid, block)).copied().unwrap_or_default();
                    want.insert((pid, block), known);
                }
                prop_assert_eq!(blocks(&memory), want.keys().copied().collect::<Vec<_>>());
                if let Some((&(pid, block), state)) = want.iter_mut().nth(mark as usize % 7) {
                    *state = State::known(mark as usize % 4, mark % 3 == 0);
                    memory.set_state(pid, block, *state);
                }
                for (index, (&(pid, block), &state)) in want.iter().enumerate() {
                    prop_assert_eq!(memory.index(pid, block), Some(index));
                    prop_assert_eq!(memory.state(pid, block), Some(state));
                }
                let unknown = (0..memory.len()).filter(|&index| !memory.is_known(index));
                prop_assert_eq!(memory.unknown(), unknown.count());
                prop_assert_eq!(memory.index(Pid(9), Block(0)), None);
            }
        }
    }
}
