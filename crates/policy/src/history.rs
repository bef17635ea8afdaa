//! Tells hot memory from cold by access bits alone: what a hypervisor has for a VM that tells it nothing.
//!
//! # Problem
//! An access bit says that a block was accessed since it was last cleared, not how often. One look at
//! a busy VM finds nearly every block of 2 MiB accessed, one at an idle VM finds none. Which blocks
//! are hot, and how much memory does the VM use again and again?
//!
//! # Approach
//! As Lee, Gupta and Schwan (MSPC 2013) have it: each block has a [`History`] of 32 looks, one in each interval of
//! the VM's own run time, so that a VM that does not run forgets nothing. A block is hot from so many
//! ones on ([`ByHistory::hot_ones`]). The ones are the counts by which the [planner](crate::plan()) ranks, fills,
//! and exchanges; the working set is what is hot.
//!
//! How long a look takes, from clearing a bit to reading it, decides what it can tell. The authors
//! look at pages of 4 KiB for a whole interval; in a block of 2 MiB something is nearly always
//! accessed by then. So the [`Window`] is shortened while looks find more accessed than fast memory
//! holds, and lengthened while they find less: hot memory is then what is accessed in most looks, and the rest is
//! not.
//!
//! # Properties
//! - A history has as many ones as looks among the last 32 found the block accessed.
//! - The ranges partition the blocks of the space, and each has one number of ones.
//! - An interval in which nothing at all was found accessed leaves all histories as they are.
//! - Blocks that stay mapped keep their histories.
//! - Nothing with fewer ones than `hot_ones` is promoted, and nothing is exchanged for what has
//!   nearly as many.
//! - A window stays within its bounds, and reaches them where looks always, or never, find too much.

mod contradiction;
mod pace;

use std::time::Duration;

use contradiction::Found;
pub use pace::Pace;

use crate::engine::{Classify, Strategy};
use crate::{
    BLOCK_SIZE, Block, Budget, ByteCount, ClassifiedRange, GuestVirtAddr, Pid, Placement, Plan,
    RankedRange, ResidencyMap, Situation, VirtRange, plan,
};

/// Ones of a hot block's history, of 32: as in the authors' hypervisor.
pub const HOT_ONES: u32 = 22;

/// Looks that a history holds.
const LOOKS: u32 = u32::BITS;

/// The latest looks, which may contradict the ones before.
const LATEST: u32 = 4;

/// The last 32 looks at a block, the latest in the highest bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct History(u32);

impl History {
    /// Takes a look in.
    pub fn push(&mut self, accessed: bool) {
        self.0 = self.0 >> 1 | u32::from(accessed) << 31;
    }

    /// Looks that found it accessed, up to 32.
    pub fn ones(self) -> u32 {
        self.0.count_ones()
    }
}

/// One block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    block: Block,
    history: History,
    /// In this interval's look.
    is_accessed: bool,
}

/// The histories of one VM's memory.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histories {
    /// By block.
    cells: Vec<Cell>,
    /// Whether this interval's look found anything accessed.
    has_news: bool,
    /// Looks that did, up to as many as a history holds.
    looks: u32,
}

impl Histories {
    /// Looks that found something accessed, up to the 32 of a history.
    pub fn looks(&self) -> u32 {
        self.looks
    }

    /// Whether the latest looks contradict the ones before: the VM has turned to other memory. Known when the
    /// histories are full.
    pub fn are_contradicted(&self) -> bool {
        let histories = self.cells.iter().map(|cell| cell.history);
        self.looks == LOOKS && Found::of(histories).is_contradiction()
    }
}

impl Classify for Histories {
    fn set_space(&mut self, vmas: &[VirtRange]) {
        let mut blocks: Vec<Block> = vmas.iter().flat_map(Block::all_of).collect();
        // Two mappings may share a block.
        blocks.dedup();
        let cell = |block| {
            let known = self.cells.binary_search_by_key(&block, |cell| cell.block);
            known.map_or(
                Cell {
                    block,
                    history: History::default(),
                    is_accessed: false,
                },
                |at| self.cells[at],
            )
        };
        self.cells = blocks.into_iter().map(cell).collect();
    }

    fn add(&mut self, addr: GuestVirtAddr, _samples: u32) {
        let block = Block::of(addr);
        if let Ok(at) = self.cells.binary_search_by_key(&block, |cell| cell.block) {
            self.cells[at].is_accessed = true;
            self.has_news = true;
        }
    }

    fn end_epoch(&mut self, _epoch: u32, _elapsed_s: f64, _chunks_max: usize) -> bool {
        let has_news = std::mem::take(&mut self.has_news);
        if has_news {
            self.looks = (self.looks + 1).min(LOOKS);
            for cell in &mut self.cells {
                cell.history.push(std::mem::take(&mut cell.is_accessed));
            }
        }
        has_news
    }

    fn ranges(&self) -> impl Iterator<Item = ClassifiedRange> {
        let alike =
            |a: &Cell, b: &Cell| a.history.ones() == b.history.ones() && a.block.0 + 1 == b.block.0;
        self.cells.chunk_by(alike).filter_map(|cells| {
            let (first, last) = (cells.first()?, cells.last()?);
            let end = GuestVirtAddr(last.block.start().0 + BLOCK_SIZE);
            Some(ClassifiedRange {
                range: VirtRange::new(first.block.start(), end)?,
                count: f64::from(first.history.ones()) * cells.len() as f64,
                born_epoch: 0,
            })
        })
    }

    fn state_bytes(&self) -> usize {
        size_of_val(&self.cells[..])
    }
}

/// The strategy of an engine that decides by [`Histories`].
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct ByHistory {
    /// Ones of a hot block's history; 1 to 32.
    pub hot_ones: u32,
}

impl Default for ByHistory {
    fn default() -> Self {
        Self { hot_ones: HOT_ONES }
    }
}

impl ByHistory {
    /// The working set, by the tier in which it lies: the blocks that are hot. Compared with the mean, as
    /// for [`working_set`](crate::working_set()), all would be in it: looks are as long as lets them find as much
    /// as fast memory holds.
    pub fn working_set(&self, ranking: &[RankedRange], residency: &ResidencyMap) -> Placement {
        let least = (f64::from(self.hot_ones) - 0.5) / BLOCK_SIZE as f64;
        let hot = ranking.iter().filter(|range| range.density() >= least);
        let mut set = Placement::default();
        for range in hot {
            let placement = residency.placement(range.pid, &range.range);
            set.fast.0 += placement.fast.0;
            set.slow.0 += placement.slow.0;
        }
        set
    }
}

impl Strategy for ByHistory {
    type Classifier = Histories;

    fn classifier(&self) -> Histories {
        Histories::default()
    }

    /// The planner's plan, with a price of so many ones: a block pays for its promotion if it has as
    /// many, and for the demotion of another if it has so many more.
    fn plan(&mut self, situation: &Situation<'_>, _heats: &[(Pid, &Histories)]) -> Plan {
        let least = f64::from(self.hot_ones) - 0.5;
        plan(&Situation {
            budget: Budget {
                left_ps: u64::MAX,
                promotion_ps: 1,
                demotion_ps: 0,
                sample_ps: BLOCK_SIZE as f64 / least,
            },
            ..*situation
        })
    }
}

/// How long a look takes. See the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    now: Duration,
    most: Duration,
    /// Looks since it was last changed, and blocks that they found accessed.
    looks: u32,
    accessed: u64,
}

impl Window {
    /// The shortest: what a kdamond can keep to.
    pub const LEAST: Duration = Duration::from_millis(1);

    /// Looks between two changes.
    const LOOKS: u32 = 4;

    /// Begins with the longest: an interval, but no less than [`Self::LEAST`].
    pub fn new(interval: Duration) -> Self {
        let most = interval.max(Self::LEAST);
        Self {
            now: most,
            most,
            looks: 0,
            accessed: 0,
        }
    }

    /// How long the next look takes.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Takes in how many blocks a look found accessed, where so much fast memory may be used. A look
    /// that found none says nothing.
    pub fn looked(&mut self, accessed_blocks: u64, fast: ByteCount) {
        if accessed_blocks == 0 {
            return;
        }
        self.looks += 1;
        self.accessed = self.accessed.saturating_add(accessed_blocks);
        if self.looks < Self::LOOKS {
            return;
        }
        let found = self.accessed / u64::from(self.looks);
        (self.looks, self.accessed) = (0, 0);
        let fits = fast.0 / BLOCK_SIZE;
        if found > fits {
            self.now = (self.now / 2).max(Self::LEAST);
        } else if found < fits / 4 * 3 {
            self.now = (self.now / 4 * 5).min(self.most);
        }
    }
}

#[cfg(test)]
mod tests;
