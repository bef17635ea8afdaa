//! Which parts of memory a plan looks at.
//!
//! # Problem
//! A plan needs the hottest blocks in slow memory and the coldest in fast memory. In 1 TiB of memory to look at each block in
//! each epoch takes longer than an epoch should.
//!
//! # Approach
//! A plan looks at no more than [`CHUNKS_MAX`] chunks of 1 GiB. Half of them have the hottest slow blocks, a quarter have
//! the coldest fast ones, and the rest follow in turn. How hot a chunk's hottest slow block is, is known
//! from the last time that somebody looked, in relation to the chunk's mean. The mean is known at all times.
//!
//! # Properties
//! - Where there are no more chunks than that, a plan looks at all of them.
//! - Each chunk has its turn, however it looked before.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::Pid;
use crate::heat::{ChunkHeat, WINDOWS, in_turn};
use crate::residency::{CHUNK_BLOCKS, CHUNKS_MAX, KnownChunk};
use crate::saved::finite;

/// A block's events a second and resident byte, in relation to the mean of its chunk.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub(super) struct Extremes {
    /// Of the hottest slow block.
    #[serde(deserialize_with = "finite")]
    pub(super) hottest_slow: f64,
    /// Of the coldest fast block.
    #[serde(deserialize_with = "finite")]
    pub(super) coldest_fast: f64,
}

impl Default for Extremes {
    /// Before anybody has looked, all blocks of a chunk are taken to be alike.
    fn default() -> Self {
        Self {
            hottest_slow: 1.0,
            coldest_fast: 1.0,
        }
    }
}

/// The extremes of each chunk, by process and number.
#[derive(Debug, Clone, Default, Serialize, Deserialize)]
pub(super) struct Scan {
    pub(super) seen: BTreeMap<(Pid, u64), [Extremes; WINDOWS]>,
}

/// A chunk that a plan may look at.
#[derive(Debug, Clone, Copy)]
pub(super) struct Part<'a> {
    pub(super) pid: Pid,
    pub(super) heat: ChunkHeat<'a>,
    pub(super) chunk: KnownChunk<'a>,
}

impl Part<'_> {
    fn key(&self) -> (Pid, u64) {
        (self.pid, self.chunk.first.0 / CHUNK_BLOCKS as u64)
    }

    /// Events a second and resident byte.
    pub(super) fn mean_density(&self, window: usize) -> f64 {
        let rate = self.heat.mean(window).rate * CHUNK_BLOCKS as f64;
        rate / self.chunk.sum.total().0.max(1) as f64
    }
}

impl Scan {
    /// Memory used, bytes, without the allocator's overhead.
    pub(super) fn state_bytes(&self) -> usize {
        self.seen.len() * size_of::<((Pid, u64), [Extremes; WINDOWS])>()
    }

    /// Forgets chunks that are no longer there.
    pub(super) fn restrict(&mut self, parts: &[Part<'_>]) {
        if self.seen.len() > parts.len() {
            let is_there = |key: &(Pid, u64)| parts.binary_search_by_key(key, Part::key).is_ok();
            self.seen.retain(|key, _| is_there(key));
        }
    }

    /// The parts (by process and address) at which an epoch looks.
    pub(super) fn choose<'a>(
        &self,
        parts: &[Part<'a>],
        window: usize,
        epoch: u32,
    ) -> Vec<Part<'a>> {
        if parts.len() <= CHUNKS_MAX {
            return parts.to_vec();
        }
        let mut slow = Vec::with_capacity(parts.len());
        let mut fast = Vec::with_capacity(parts.len());
        // Both are sorted.
        let mut all_seen = self.seen.iter().peekable();
        for (at, part) in parts.iter().enumerate() {
            let key = part.key();
            while all_seen.next_if(|(seen, _)| **seen < key).is_some() {}
            let seen = all_seen.next_if(|(seen, _)| **seen == key);
            let seen = seen.map_or_else(Extremes::default, |(_, all)| all[window]);
            let mean = part.mean_density(window);
            if part.chunk.sum.slow.0 > 0 {
                slow.push((-seen.hottest_slow * mean, at));
            }
            if part.chunk.sum.fast.0 > 0 {
                fast.push((seen.coldest_fast * mean, at));
            }
        }
        let mut is_chosen = vec![false; parts.len()];
        for (mut list, most) in [(slow, CHUNKS_MAX / 2), (fast, CHUNKS_MAX / 4)] {
            if list.len() > most {
                list.select_nth_unstable_by(most, |a, b| a.0.total_cmp(&b.0).then(a.1.cmp(&b.1)));
            }
            list.iter()
                .take(most)
                .for_each(|(_, at)| is_chosen[*at] = true);
        }
        for at in in_turn(window, epoch, parts.len(), CHUNKS_MAX / 4) {
            is_chosen[at] = true;
        }
        let chosen = parts
            .iter()
            .zip(is_chosen)
            .filter(|(_, is_chosen)| *is_chosen);
        chosen.map(|(part, _)| *part).collect()
    }

    /// Remembers the density of a chunk's hottest slow block and coldest fast one.
    pub(super) fn saw(
        &mut self,
        part: &Part<'_>,
        window: usize,
        hottest_slow: f64,
        coldest_fast: f64,
    ) {
        let mean = part.mean_density(window);
        let relative = |density: f64| match mean > 0.0 {
            true => (density / mean).min(f64::MAX),
            false => 1.0,
        };
        self.seen.entry(part.key()).or_default()[window] = Extremes {
            hottest_slow: relative(hottest_slow),
            coldest_fast: relative(coldest_fast),
        };
    }
}

#[cfg(test)]
mod tests {
    use std::collections::BTreeSet;

    use super::*;
    use crate::{BLOCK_SIZE, Block, ByteCount, Heat, Level, ResidencyMap, TierBytes, VirtRange};

    const CHUNKS: u64 = 1000;

    /// Memory of 1000 GiB, of which one block a chunk is known; the first quarter is fast.
    fn world() -> (ResidencyMap, Heat) {
        let mut residency = ResidencyMap::default();
        for chunk in 0..CHUNKS {
            let bytes = |there: bool| ByteCount(if there { BLOCK_SIZE } else { 0 });
            let place = TierBytes {
                fast: bytes(chunk < CHUNKS / 4),
                slow: bytes(chunk >= CHUNKS / 4),
            };
            residency.set(Pid(1), Block(chunk * CHUNK_BLOCKS as u64), place);
        }
        let mut heat = Heat::default();
        let end = Block(CHUNKS * CHUNK_BLOCKS as u64).start();
        heat.set_space(&[VirtRange::new(Block(0).start(), end).unwrap()]);
        (residency, heat)
    }

    fn parts<'a>(residency: &'a ResidencyMap, heat: &'a Heat) -> Vec<Part<'a>> {
        let pid = Pid(1);
        let part = |chunk: KnownChunk<'a>| Part {
            pid,
            heat: heat.of_chunk(chunk.first),
            chunk,
        };
        residency
            .known_by_chunk(pid, Level::First)
            .map(part)
            .collect()
    }

    fn numbers(parts: &[Part<'_>]) -> BTreeSet<u64> {
        parts.iter().map(|part| part.key().1).collect()
    }

    #[test]
    fn each_chunk_has_its_turn_in_each_window() {
        let (residency, heat) = world();
        let parts = parts(&residency, &heat);
        let scan = Scan::default();
        for window in [0, 1, WINDOWS - 1] {
            let looks = CHUNKS as usize / (CHUNKS_MAX / 4) + 1;
            let epochs =
                (0..).filter(|epoch| crate::heat::windows_due(*epoch).any(|w| w == window));
            let mut seen = BTreeSet::new();
            for epoch in epochs.take(looks) {
                let chosen = scan.choose(&parts, window, epoch);
                assert!(chosen.len() <= CHUNKS_MAX);
                seen.extend(numbers(&chosen));
            }
            assert_eq!(seen.len() as u64, CHUNKS, "window {window}");
        }
    }

    #[test]
    fn hot_slow_chunks_and_cold_fast_ones_come_first() {
        let (residency, mut heat) = world();
        for epoch in 0..4 {
            for chunk in 0..CHUNKS {
                let hot = chunk >= 990 || (5..CHUNKS / 4).contains(&chunk);
                let block = Block(chunk * CHUNK_BLOCKS as u64);
                heat.add(block, if hot { 100 } else { 1 });
            }
            heat.end_epoch(epoch, 0.5, usize::MAX);
        }
        let parts = parts(&residency, &heat);
        let mut scan = Scan::default();
        let chosen = numbers(&scan.choose(&parts, 0, 7));
        assert!(
            (990..CHUNKS)
                .chain(0..5)
                .all(|chunk| chosen.contains(&chunk))
        );
        // Nothing slow is hot in one of them any more.
        scan.saw(&parts[995], 0, 0.0, f64::INFINITY);
        assert!(!numbers(&scan.choose(&parts, 0, 7)).contains(&995));
    }
}
