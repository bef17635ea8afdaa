//! Numbers of all blocks and groups of a chunk, in one array.

use std::ops::{Deref, DerefMut};

use serde::{Deserialize, Serialize};

use super::WINDOWS;
use super::pool::LEVELS;
use crate::residency::CHUNK_BLOCKS;

/// Number of blocks and groups of 8, 64 and 512 blocks.
pub(super) const CELLS: usize = CHUNK_BLOCKS + CHUNK_BLOCKS / 8 + CHUNK_BLOCKS / 64 + 1;

/// The first cell of each level: blocks, then ever larger groups.
pub(super) const FIRST: [usize; LEVELS] =
    [0, CHUNK_BLOCKS, CHUNK_BLOCKS + CHUNK_BLOCKS / 8, CELLS - 1];

/// A number for each window. They lie together, since new evidence adds to all of them.
type Cell = [f32; WINDOWS];

/// A cell for each block and group of a chunk.
#[derive(Debug, Clone, Serialize, Deserialize)]
#[serde(try_from = "Vec<(u16, Cell)>", into = "Vec<(u16, Cell)>")]
pub(super) struct Cells(Box<[Cell; CELLS]>);

impl Default for Cells {
    fn default() -> Self {
        // The array is too large to build on the stack.
        let boxed: Box<[Cell]> = vec![[0.0; WINDOWS]; CELLS].into_boxed_slice();
        let boxed = boxed.try_into();
        Self(boxed.unwrap_or_else(|_| unreachable!("it has just so many")))
    }
}

impl Deref for Cells {
    type Target = [Cell; CELLS];

    fn deref(&self) -> &Self::Target {
        &self.0
    }
}

impl DerefMut for Cells {
    fn deref_mut(&mut self) -> &mut Self::Target {
        &mut self.0
    }
}

impl Cells {
    /// Memory used, bytes, without the allocator's overhead.
    pub(super) const BYTES: usize = size_of::<[Cell; CELLS]>();

    /// Whether all that lies in unmapped memory is zero.
    pub(super) fn fit(&self, mapped: &Mapped) -> bool {
        let is_mapped = |at: usize| {
            let level = FIRST.partition_point(|first| *first <= at) - 1;
            mapped.count(level, at - FIRST[level]) > 0
        };
        let mut cells = self.iter().enumerate();
        cells.all(|(at, cell)| *cell == [0.0; WINDOWS] || is_mapped(at))
    }
}

/// Most cells are zero. The others are saved with their places.
impl From<Cells> for Vec<(u16, Cell)> {
    fn from(cells: Cells) -> Self {
        let numbered = (0..).zip(cells.iter().copied());
        numbered
            .filter(|(_, cell)| *cell != [0.0; WINDOWS])
            .collect()
    }
}

/// A cell that does not exist, or whose numbers are impossible.
#[derive(Debug, Clone, Copy, thiserror::Error)]
#[error("cell {0} is none")]
pub(super) struct NotACell(u16);

impl TryFrom<Vec<(u16, Cell)>> for Cells {
    type Error = NotACell;

    fn try_from(saved: Vec<(u16, Cell)>) -> Result<Self, NotACell> {
        let mut cells = Self::default();
        for (at, numbers) in saved {
            let are_possible = numbers.iter().all(|n| n.is_finite() && *n >= 0.0);
            let cell = cells.get_mut(usize::from(at));
            *cell.filter(|_| are_possible).ok_or(NotACell(at))? = numbers;
        }
        Ok(cells)
    }
}

/// The cells of a block and of its groups.
pub(super) fn path(at: usize) -> [usize; LEVELS] {
    [at, FIRST[1] + at / 8, FIRST[2] + at / 64, FIRST[3]]
}

/// The mapped blocks of a chunk, a bit each.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub(super) struct Mapped([u64; CHUNK_BLOCKS / 64]);

impl Mapped {
    pub(super) fn insert(&mut self, block: usize) {
        self.0[block / 64] |= 1 << (block % 64);
    }

    pub(super) fn contains(&self, block: usize) -> bool {
        self.0[block / 64] >> (block % 64) & 1 == 1
    }

    /// Number of mapped blocks in a group at a level.
    #[inline]
    pub(super) fn count(&self, level: usize, group: usize) -> u32 {
        match level {
            0 => u32::from(self.contains(group)),
            1 => (self.0[group / 8] >> (group % 8 * 8) & 0xff).count_ones(),
            2 => self.0[group].count_ones(),
            _ => self.0.iter().map(|blocks| blocks.count_ones()).sum(),
        }
    }
}
