//! Decides which memory to look at without a sampling unit: the observer behind the tracker on DAMON.
//!
//! # Problem
//! A kernel can tell whether a page was accessed since its accessed bit was cleared. A look costs CPU time, and so does
//! telling the kernel where to look. Memory has up to half a million blocks of 2 MiB. One waiting time does not fit
//! all of them: a cold huge page is always found accessed after 80 ms, a hot small page seldom after 1 ms.
//!
//! # Approach
//! Looks are a resource with a measured price and a budget. The observer chooses *rounds* of blocks: one half as the
//! policy wishes, one quarter neighbours of newly hot blocks, and the rest in turn. The order of turns is scattered,
//! so that a hot set which has moved is met soon, and its neighbours show how far it reaches.
//!
//! Each block has a *rung*, the waiting time of its looks. A block that is always found accessed goes one rung down, to
//! a shorter time, and is looked at again in the same round. A block that is never found goes one rung up. A *pass* takes
//! blocks of one rung. The kernel clears the bits of all of them before it reads the first. So a pass has no more
//! blocks than the kernel visits in half of the waiting time. A pass of the same blocks needs no new regions.
//!
//! `estimate` makes a rate of what looks found. A lower bound is reported only where no shorter look corrects it:
//! its long exposure would outweigh the better estimate.
//!
//! Blocks that nobody has looked at come first, and are paid for out of savings. Otherwise each round is paid for by a
//! rest. The rest is longer while looks cost more than moves earn, and longest while the agent is calm. See `budget`.
//!
//! DAMON does not flush TLBs when it clears bits: a page that never leaves a TLB looks untouched. So the driver flushes
//! them once in each interval that is long enough. A huge page that is always found by a flushed look, and never
//! by the shorter one without, is such a page: its lower bound is reported.
//!
//! # Properties
//! - All known memory is looked at again in turn: as many rounds as it takes, each block once.
//! - Memory that nobody has looked at comes before memory that somebody has.
//! - A round looks at each of its blocks once at a rung, and reports it at most once.
//! - A pass never has more blocks than [`SET_MAX`], nor more than the kernel visits in half of its interval at the measured price.
//! - Nothing is spent on memory that is not mapped; knowledge stays when a mapping grows.
//! - CPU time stays within the share, the savings, and one round.

mod budget;
mod estimate;
mod memory;
mod observer;

use std::num::NonZero;
use std::time::Duration;

use crate::{Block, Pid};

pub use observer::Observer;

/// The most that looking may take of one CPU, %, for each `CPUS_PER_SHARE`: the lab's VM of 8 GiB is covered in a minute.
pub const CPU_PERCENT: f64 = 2.5;

/// Share of its time that a program is taken to wait for memory: accessed bits do not tell it, and most programs wait less.
pub const WAITS: f64 = 0.8;

/// CPUs that bring another share: a VM with 1 TiB has about 64, and sixteen times the blocks of one with 64 GiB.
const CPUS_PER_SHARE: u32 = 16;

/// The part of the share that a calm agent spends: 0.3 % of one CPU in a VM with 16.
const CALM_PART: f64 = 1.0 / 8.0;

/// Time after which looks become rarer unless moves earn their cost: the emulator exchanges a first few blocks in it.
const LEARNS: Duration = Duration::from_secs(6);

/// CPU time that can be saved for each CPU, and is there at the start: 1 TiB costs up to 26 s on hardware.
const SAVED_PER_CPU: Duration = Duration::from_secs(2);

/// Time from one round to the next while nothing is new: a move is verified soon, and a pass's fixed cost is small in it.
const PERIOD: Duration = Duration::from_secs(2);

/// The most blocks of a pass: the kernel keeps about 2 KiB for each of its regions.
pub const SET_MAX: usize = 4096;

/// Neighbours on each side of a newly hot block that are looked at next: a hot set's edge is found in steps of that.
const REACH: u64 = 2;

/// Prices of a look and of setting a region in the emulator, the highest known: they hold until some are measured.
const HIGHEST_PRICES: (Duration, Duration) =
    (Duration::from_micros(35), Duration::from_micros(400));

/// Address spaces that make a CPU forget another one's translations: twice the six that x86 kernels tell apart
/// (`TLB_NR_DYN_ASIDS`), since a number may be reused at once.
pub const SPACES_TO_FLUSH: usize = 12;

/// Waiting times, longest first. No round figures, so that they do not keep step with a program. Flushes need longer
/// times than user space can hardly keep.
pub const RUNGS: [Pass; 4] = [
    Pass::new(80_021, 4, true),
    Pass::new(10_007, 8, true),
    Pass::new(1499, 8, false),
    Pass::new(251, 8, false),
];

/// How a pass looks at each of its regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// From clearing an accessed bit to reading it.
    pub interval: Duration,
    /// Looks at each region.
    pub looks: u32,
    /// Whether CPUs have to forget their translations once in each interval.
    pub is_flushed: bool,
}

impl Pass {
    const fn new(interval_us: u64, looks: u32, is_flushed: bool) -> Self {
        Self {
            interval: Duration::from_micros(interval_us),
            looks,
            is_flushed,
        }
    }

    /// How long it takes, without the kernel's own time.
    pub fn length(&self) -> Duration {
        self.interval * self.looks
    }
}

/// What more evidence promises.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prospect {
    /// No move was worth its cost for several epochs, and moved memory earns as before.
    pub is_calm: bool,
    /// CPU time that moved memory has lately saved, seconds a second.
    pub earned: f64,
}

impl Prospect {
    /// Nothing is known yet.
    pub const OPEN: Self = Self {
        is_calm: false,
        earned: 0.0,
    };
}

/// A pass, and its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// How it looks.
    pub pass: Pass,
    /// At these blocks, in order of process and address; at least one.
    pub blocks: Vec<(Pid, Block)>,
    rung: usize,
}

/// The observer's next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// A pass, to be carried out now; [`Observer::found`] answers it.
    Look(Look),
    /// Nothing until then.
    Rest(Duration),
    /// Nothing before there is memory.
    Idle,
}

/// A pass's findings about one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The process.
    pub pid: Pid,
    /// Its block.
    pub block: Block,
    /// Looks that found an access.
    pub accesses: u32,
    /// Bytes that one page-table entry maps there; nothing where nobody has asked.
    pub page_bytes: Option<NonZero<u64>>,
}

/// CPU time that a pass has cost.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Visiting pages, flushes included.
    pub looking: Duration,
    /// Setting regions, and all else that the agent did for the pass.
    pub setting: Duration,
    /// Regions that were set: none where the kernel had them.
    pub set: u64,
}

#[cfg(test)]
mod machine;
#[cfg(test)]
mod tests;
