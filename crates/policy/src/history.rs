//! Finds hot memory from accessed bits alone, for a hypervisor without an agent in the VM.
//!
//! # Problem
//! An accessed bit says that a block was accessed since the bit was cleared, but not how often. One look at a busy VM
//! finds nearly every block of 2 MiB accessed, one at an idle VM finds none. Which blocks are hot, and how large is the
//! VM's working set?
//!
//! # Approach
//! As in Lee, Gupta and Schwan (MSPC 2013), each block has a [`History`] of 32 looks, one per interval of the VM's own
//! run time. So a VM that does not run loses no history. A block is hot if its history has [`ByHistory::hot_ones`] set
//! bits. The [planner](crate::plan()) uses the number of set bits to rank, fill and exchange. The working set consists
//! of the hot blocks.
//!
//! The time of a look, from clearing a bit to reading it, decides what it can show. The authors look at pages of 4 KiB
//! for a whole interval; in a block of 2 MiB, almost always something is accessed by then. Hence the [`Window`] is
//! shortened while looks find more accessed memory than fast memory can hold, and lengthened while they find less. Hot
//! memory is then memory that is accessed in most looks.
//!
//! # Properties
//! - The number of set bits in a history is the number of accesses found in the last 32 looks.
//! - The ranges partition the blocks of the space, and each range has one number of set bits.
//! - An interval without any accessed block leaves all histories unchanged.
//! - Blocks that stay mapped keep their histories.
//! - No block with fewer set bits than `hot_ones` is promoted, and no block is exchanged for one with nearly as many.
//! - A window stays within its bounds, and reaches them if looks always, or never, find too much.

mod contradiction;
mod pace;

use std::time::Duration;

use contradiction::Found;
pub use pace::Pace;

use crate::engine::{Classify, Strategy};
use crate::{
    BLOCK_SIZE, Block, ByteCount, ClassifiedRange, GuestVirtAddr, MoveBudget, Pid, Plan,
    RankedRange, ResidencyMap, Situation, TierBytes, VirtRange, plan,
};

/// Number of set bits in a hot block's history, of 32: as in the authors' hypervisor.
pub const HOT_ONES: u32 = 22;

/// Number of looks in a history.
const LOOKS: u32 = u32::BITS;

/// Number of latest looks, which may contradict those before.
const LATEST: u32 = 4;

/// The last 32 looks at a block, the latest in the highest bit.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct History(u32);

impl History {
    /// Adds a look.
    pub fn push(&mut self, accessed: bool) {
        self.0 = self.0 >> 1 | u32::from(accessed) << 31;
    }

    /// Number of looks that found it accessed, up to 32.
    pub fn ones(self) -> u32 {
        self.0.count_ones()
    }
}

/// A block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Cell {
    block: Block,
    history: History,
    /// Whether this interval's look found it accessed.
    is_accessed: bool,
}

/// The histories of a VM's blocks.
#[derive(Debug, Clone, Default, PartialEq, Eq)]
pub struct Histories {
    /// Sorted by block.
    cells: Vec<Cell>,
    /// Whether this interval's look found anything accessed.
    has_news: bool,
    /// Number of looks that did, up to the length of a history.
    looks: u32,
}

impl Histories {
    /// Number of looks that found something accessed, up to the 32 of a history.
    pub fn looks(&self) -> u32 {
        self.looks
    }

    /// Whether the latest looks contradict those before: the VM uses other memory now. Only full histories show it.
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
    /// Number of set bits in a hot block's history; 1 to 32.
    pub hot_ones: u32,
}

impl Default for ByHistory {
    fn default() -> Self {
        Self { hot_ones: HOT_ONES }
    }
}

impl ByHistory {
    /// The working set by tier: the hot blocks. Comparing with the mean, as [`working_set`](crate::working_set()) does,
    /// would include all memory, because looks are lengthened until they find as much as fast memory holds.
    pub fn working_set(&self, ranking: &[RankedRange], residency: &ResidencyMap) -> TierBytes {
        let least = (f64::from(self.hot_ones) - 0.5) / BLOCK_SIZE as f64;
        let hot = ranking.iter().filter(|range| range.density() >= least);
        let mut set = TierBytes::default();
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

    /// The planner's plan, with set bits as the price: `hot_ones` pay for a promotion, and as large a difference pays
    /// for an exchange.
    fn plan(&mut self, situation: &Situation<'_>, _heats: &[(Pid, &Histories)]) -> Plan {
        let least = f64::from(self.hot_ones) - 0.5;
        plan(&Situation {
            budget: MoveBudget {
                left_ps: u64::MAX,
                promotion_ps: 1,
                demotion_ps: 0,
                sample_ps: BLOCK_SIZE as f64 / least,
            },
            ..*situation
        })
    }
}

/// The length of a look. See the module's text.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Window {
    now: Duration,
    most: Duration,
    /// Looks since its last change, and the blocks that they found accessed.
    looks: u32,
    accessed: u64,
}

impl Window {
    /// The shortest length: kdamond's limit.
    pub const LEAST: Duration = Duration::from_millis(1);

    /// Number of looks between two changes.
    const LOOKS: u32 = 4;

    /// Starts with the longest: an interval, but at least [`Self::LEAST`].
    pub fn new(interval: Duration) -> Self {
        let most = interval.max(Self::LEAST);
        Self {
            now: most,
            most,
            looks: 0,
            accessed: 0,
        }
    }

    /// Length of the next look.
    pub fn now(&self) -> Duration {
        self.now
    }

    /// Adds the number of blocks that a look found accessed, and the usable fast memory. A look without any is ignored.
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
