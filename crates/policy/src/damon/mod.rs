//! Chooses the memory to scan without a PMU: the observer behind the DAMON tracker.
//!
//! # Problem
//! A kernel can tell whether a page was accessed since its accessed bit was cleared. A look costs CPU time, and so does
//! setting the kernel's regions. Memory has up to half a million blocks of 2 MiB. No single waiting time fits all of
//! them: a cold huge page is always found accessed after 80 ms, a hot small page rarely after 1 ms.
//!
//! # Approach
//! Looks are a resource with a measured price and a budget. The observer chooses *rounds* of blocks: one half as the
//! policy requests, one quarter neighbours of newly hot blocks, and the rest in turn. Turns are scattered over memory,
//! so that they soon find a hot set that has moved; its neighbours then show its extent.
//!
//! Each block has a *rung*, the waiting time of its looks. A block that is always found accessed moves one rung down,
//! to a shorter time, and is looked at again in the same round. A block that is never found accessed moves one rung up.
//! A *pass* has blocks of one rung. The kernel clears the bits of all of them before it reads the first. Hence a pass
//! has no more blocks than the kernel visits in half of the waiting time. A pass of the same blocks needs no new
//! regions.
//!
//! `estimate` turns the results of looks into a rate. A lower bound is reported only if no shorter look corrects it:
//! its long exposure would outweigh the better estimate.
//!
//! Unknown blocks come first, except for what the policy requests, and are paid for from savings. Any other round is
//! followed by a rest that pays for it. The rest is longer while looks cost more than moves earn or promise, and longest
//! while the agent is calm. Rests are irregular: regular ones would always find a program that sweeps its memory in the same
//! time at the same blocks. See `budget`.
//!
//! DAMON does not flush TLBs when it clears bits, so a page that stays in a TLB looks unaccessed. Hence the driver
//! flushes TLBs once in each interval that is long enough. Such a huge page is always found accessed with a flush, and
//! never by the shorter look without one. Its lower bound is reported.
//!
//! # Properties
//! - All known memory is looked at repeatedly, each block once per turn, over as many rounds as that needs.
//! - Unknown memory comes before known memory that the policy did not request.
//! - A round looks at each of its blocks once per rung, and reports it at most once.
//! - A pass has at most [`SET_MAX`] blocks. At the measured price, the kernel visits all of them in half of the
//!   interval.
//! - Unmapped memory costs nothing; knowledge stays when a mapping grows.
//! - CPU time stays within the share, the savings, and one round.

mod budget;
mod estimate;
mod memory;
mod observer;

use std::num::NonZero;
use std::time::Duration;

use crate::{Block, Pid};

pub use observer::Observer;

/// CPU limit of looks, % of one CPU per `CPUS_PER_SHARE`. It covers the lab's VM of 8 GiB in a minute.
pub const CPU_PERCENT: f64 = 2.5;

/// Assumed share of time that a program waits for memory. Accessed bits do not show it, and most programs wait less.
pub const WAITS: f64 = 0.8;

/// CPUs per share. A VM with 1 TiB has about 64 CPUs, and sixteen times the blocks of a VM with 64 GiB.
const CPUS_PER_SHARE: u32 = 16;

/// The part of the share that a calm agent spends: 0.3 % of one CPU in a VM with 16.
const CALM_SHARE: f64 = 1.0 / 8.0;

/// Time after which looks become rarer unless moves earn their cost: the emulator exchanges a first few blocks in it.
const LEARNS: Duration = Duration::from_secs(6);

/// CPU time that can be saved per CPU; full at the start. 1 TiB costs up to 26 s on hardware.
const SAVED_PER_CPU: Duration = Duration::from_secs(2);

/// Time between rounds while nothing is new. It verifies a move soon, and keeps the fixed cost of passes small.
const PERIOD: Duration = Duration::from_secs(2);

/// Maximum number of blocks in a pass: the kernel uses about 2 KiB per region.
pub const SET_MAX: usize = 4096;

/// Number of neighbours on each side of a newly hot block that are looked at next: the step in finding a hot set's
/// edge.
const REACH: u64 = 2;

/// Prices of a look and of making a region in the emulator, the highest known. They are used until prices are measured.
const HIGHEST_PRICES: (Duration, Duration) =
    (Duration::from_micros(35), Duration::from_micros(400));

/// Number of address spaces that flush another one's translations from a CPU. It is twice the six that x86 kernels keep
/// apart (`TLB_NR_DYN_ASIDS`), since a number may be reused at once.
pub const SPACES_TO_FLUSH: usize = 12;

/// Waiting times, the longest first. They are not round numbers, so that they do not synchronize with a program. User
/// space cannot time flushes precisely enough for the short ones.
pub const RUNGS: [Pass; 4] = [
    Pass::new(80_021, 4, true),
    Pass::new(10_007, 8, true),
    Pass::new(1499, 8, false),
    Pass::new(251, 8, false),
];

/// The looks of a pass at each of its regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// Time from clearing an accessed bit to reading it.
    pub interval: Duration,
    /// Number of looks at each region.
    pub looks: u32,
    /// Whether TLBs must be flushed once in each interval.
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

    /// Its duration, without the kernel's own time.
    pub fn length(&self) -> Duration {
        self.interval * self.looks
    }
}

/// The expected value of more evidence.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct Prospect {
    /// No move was worth its cost for several epochs, and moved memory earns as before.
    pub is_calm: bool,
    /// CPU time that moved memory has saved lately, seconds per second.
    pub earned: f64,
    /// CPU time that exchanges would certainly save that were not made as yet, seconds per second.
    pub promised: f64,
}

impl Prospect {
    /// The prospect before anything has moved.
    pub const OPEN: Self = Self {
        is_calm: false,
        earned: 0.0,
        promised: 0.0,
    };
}

/// A pass with its blocks.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// The kind of pass.
    pub pass: Pass,
    /// Its blocks, sorted by process and address; at least one.
    pub blocks: Vec<(Pid, Block)>,
    rung: usize,
}

/// The observer's next step.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum Next {
    /// Carry this pass out now; [`Observer::found`] takes its results.
    Look(Look),
    /// Do nothing until this time.
    Rest(Duration),
    /// Do nothing until there is memory.
    Idle,
}

/// The result of a pass for one block.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Found {
    /// The process.
    pub pid: Pid,
    /// Its block.
    pub block: Block,
    /// Number of looks that found an access.
    pub accesses: u32,
    /// Bytes mapped by one page-table entry there; `None` if unknown.
    pub page_bytes: Option<NonZero<u64>>,
}

/// CPU time of a pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default)]
pub struct Cost {
    /// Time to visit pages, including flushes.
    pub looking: Duration,
    /// Time to set regions, and all other work of the agent for the pass.
    pub setting: Duration,
    /// Number of regions that were set; 0 if the kernel had them already.
    pub set: u64,
}

#[cfg(test)]
mod machine;
#[cfg(test)]
mod tests;
