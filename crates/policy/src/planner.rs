//! Decides which blocks change place.
//!
//! # Problem
//! Given ranges by hotness, where their blocks lie and how much room the tiers have, choose the
//! promotions and demotions of one epoch: the hottest bytes shall end up in fast memory, with as
//! little traffic as that takes, and none once it is reached.
//!
//! # Terms
//! - *target*: the bytes of a range that belong into fast memory if the ranking is right: fast
//!   capacity is dealt out from the hottest range on; the range on the border gets a part.
//! - *reserve*: fast memory that stays free, so that the kernel's reclaim (kswapd) never wakes;
//!   filling stops there. Only below *low*, a little less, do blocks leave to restore it: what
//!   the kernel allocates and frees by itself moves nothing.
//!
//! # Approach
//! Fill, then exchange. Walk the promotion candidates (slow blocks of ranges below their target,
//! hottest first). While fast memory is free above the reserve, fill it. Then each promotion is
//! paid for by demotions of the coldest fast blocks of ranges above their target. An exchange
//! must be *worth* it: the promoted range is at least half again as dense as the demoted one and the
//! difference is no accident (four standard deviations). When free fast memory falls
//! below low, the coldest blocks leave without an exchange until the reserve is restored.
//!
//! # Properties
//! - Fast memory is never promised beyond its free part plus what is demoted, nor slow memory.
//! - Neither direction exceeds the batch limit.
//! - Once free fast memory is used up, promotions and demotions are equal to within one block.
//! - A stable ranking yields an empty plan after finitely many epochs.
//! - The same input gives the same plan.

use crate::significance::z_squared;
use crate::{BLOCK_SIZE, Block, ByteCount, Pid, RankedRange, ResidencyMap};

/// An exchange needs a density this many times the other's.
const EXCHANGE_RATIO: f64 = 1.5;

/// An exchange needs this many squared standard deviations.
const EXCHANGE_Z2: f64 = 16.0;

/// Victim ranges that are tried for one promotion range before it is passed over.
const VICTIMS_TRIED: usize = 16;

/// What the tiers have to give, and how much may move in one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Free fast memory.
    pub fast_free: ByteCount,
    /// Fast memory that filling leaves free.
    pub fast_reserve: ByteCount,
    /// Below this much free fast memory blocks leave until the reserve is restored; at most the
    /// reserve.
    pub fast_low: ByteCount,
    /// Slow memory that can take demotions.
    pub slow_free: ByteCount,
    /// The most that may be promoted, and the most that may be demoted.
    pub batch: ByteCount,
}

/// Samples in a range below which it is not worth filling free memory with it.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct FillThreshold(pub f64);

impl Room {
    /// Free fast memory that relocations leave free.
    pub fn level(&self) -> ByteCount {
        if self.fast_free < self.fast_low {
            self.fast_reserve
        } else {
            self.fast_free.min(self.fast_reserve)
        }
    }
}

/// What a plan is made from.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// The ranges of all processes, hottest first.
    pub ranking: &'a [RankedRange],
    /// Where their blocks lie.
    pub residency: &'a ResidencyMap,
    /// What the tiers have to give.
    pub room: Room,
    /// From how many samples on a range is worth filling free memory with.
    pub fill: FillThreshold,
    /// Now.
    pub epoch: u32,
}

/// A block that is to change its tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relocation {
    /// Whose block.
    pub pid: Pid,
    /// Which block.
    pub block: Block,
    /// Bytes of it that lie in the tier it leaves.
    pub bytes: ByteCount,
}

/// The relocations of one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Into fast memory, hottest first.
    pub promotions: Vec<Relocation>,
    /// Out of fast memory, coldest first.
    pub demotions: Vec<Relocation>,
    /// Free fast memory that promotions leave.
    pub level: ByteCount,
}

impl Plan {
    /// Nothing to do.
    pub fn is_empty(&self) -> bool {
        self.promotions.is_empty() && self.demotions.is_empty()
    }
}

/// A range on its way to its target.
struct Dealt<'a> {
    range: &'a RankedRange,
    /// Bytes of it to promote, or to demote, to reach the target.
    excess: u64,
}

/// Plans the relocations of one epoch.
pub fn plan(situation: &Situation<'_>) -> Plan {
    let Situation {
        ranking,
        residency,
        room,
        fill,
        epoch,
    } = *situation;
    let (short, spare) = deal(ranking, residency, &room);
    let mut victims = Victims::new(&spare, residency, epoch);
    let mut ledger = Ledger::new(&room);
    let mut plan = Plan {
        level: room.level(),
        ..Plan::default()
    };

    while ledger.below_level() {
        let Some(victim) = victims.coldest().filter(|v| ledger.can_demote(v)) else {
            break;
        };
        ledger.demote(&victim);
        plan.demotions.push(victim);
        victims.take();
    }

    'ranges: for Dealt { range, excess } in short {
        let mut wanted = excess;
        for (block, placement) in residency.movable(range.pid, &range.range, epoch) {
            let bytes = placement.slow;
            if bytes.0 == 0 || bytes.0 > wanted {
                continue;
            }
            let promotion = Relocation {
                pid: range.pid,
                block,
                bytes,
            };
            if !ledger.batch_allows(&promotion) {
                break 'ranges;
            }
            if ledger.has_room_for(&promotion) && range.count < fill.0 {
                continue 'ranges;
            }
            while !ledger.has_room_for(&promotion) {
                let Some(victim) = victims.worth(range).filter(|v| ledger.can_demote(v)) else {
                    continue 'ranges;
                };
                ledger.demote(&victim);
                plan.demotions.push(victim);
                victims.take();
            }
            ledger.promote(&promotion);
            wanted -= bytes.0;
            plan.promotions.push(promotion);
        }
    }
    plan
}

/// Deals fast memory out from the hottest range on. Returns the ranges that have less than their
/// target, hottest first, and those that have more, coldest first.
fn deal<'a>(
    ranking: &'a [RankedRange],
    residency: &ResidencyMap,
    room: &Room,
) -> (Vec<Dealt<'a>>, Vec<Dealt<'a>>) {
    let placements: Vec<_> = ranking
        .iter()
        .map(|r| residency.placement(r.pid, &r.range))
        .collect();
    let in_fast: u64 = placements.iter().map(|p| p.fast.0).sum();
    let mut capacity = (in_fast + room.fast_free.0).saturating_sub(room.level().0);
    let (mut short, mut spare) = (vec![], vec![]);
    for (range, placement) in ranking.iter().zip(&placements) {
        let target = placement.resident().0.min(capacity);
        capacity -= target;
        if placement.fast.0 < target {
            short.push(Dealt {
                range,
                excess: target - placement.fast.0,
            });
        } else if placement.fast.0 > target {
            spare.push(Dealt {
                range,
                excess: placement.fast.0 - target,
            });
        }
    }
    spare.reverse();
    (short, spare)
}

/// The blocks that may be demoted, coldest range first.
struct Victims<'a> {
    /// What is left of each range: its blocks, next one last.
    ranges: Vec<(&'a RankedRange, Vec<Relocation>)>,
    /// Ranges before this one are used up.
    first: usize,
    /// The range whose block was offered last.
    offered: usize,
}

impl<'a> Victims<'a> {
    fn new(spare: &[Dealt<'a>], residency: &ResidencyMap, epoch: u32) -> Self {
        let ranges = spare
            .iter()
            .map(|Dealt { range, excess }| {
                let mut left = *excess;
                let mut blocks: Vec<_> = residency
                    .movable(range.pid, &range.range, epoch)
                    .filter_map(|(block, placement)| {
                        let bytes = placement.fast;
                        // The last one may be more than is left: blocks leave whole.
                        let fits = bytes.0 > 0 && left > 0;
                        fits.then(|| {
                            left = left.saturating_sub(bytes.0);
                            Relocation {
                                pid: range.pid,
                                block,
                                bytes,
                            }
                        })
                    })
                    .collect();
                blocks.reverse();
                (*range, blocks)
            })
            .filter(|(_, blocks)| !blocks.is_empty())
            .collect();
        Self {
            ranges,
            first: 0,
            offered: 0,
        }
    }

    /// The coldest block that is left.
    fn coldest(&mut self) -> Option<Relocation> {
        self.offered = self.first;
        self.ranges.get(self.first)?.1.last().copied()
    }

    /// The coldest block that `hot` is worth an exchange with.
    fn worth(&mut self, hot: &RankedRange) -> Option<Relocation> {
        let tried = self.ranges.len().min(self.first + VICTIMS_TRIED);
        self.offered = (self.first..tried)
            .find(|&i| !self.ranges[i].1.is_empty() && worth(hot, self.ranges[i].0))?;
        self.ranges[self.offered].1.last().copied()
    }

    /// Takes the block that was offered last.
    fn take(&mut self) {
        self.ranges[self.offered].1.pop();
        while self
            .ranges
            .get(self.first)
            .is_some_and(|(_, blocks)| blocks.is_empty())
        {
            self.first += 1;
        }
    }
}

/// Whether promoting a block of `hot` is worth demoting one of `cold`.
fn worth(hot: &RankedRange, cold: &RankedRange) -> bool {
    let blocks = |r: &RankedRange| r.range.len().0 as f64 / BLOCK_SIZE as f64;
    hot.density() >= EXCHANGE_RATIO * cold.density()
        && z_squared(hot.count, blocks(hot), cold.count, blocks(cold)) >= EXCHANGE_Z2
}

/// Keeps the books of both tiers, so that neither is promised twice.
struct Ledger {
    fast_free: u64,
    /// What of it stays free.
    level: u64,
    slow_free: u64,
    may_promote: u64,
    may_demote: u64,
}

impl Ledger {
    fn new(room: &Room) -> Self {
        Self {
            fast_free: room.fast_free.0,
            level: room.level().0,
            slow_free: room.slow_free.0,
            may_promote: room.batch.0,
            may_demote: room.batch.0,
        }
    }

    fn below_level(&self) -> bool {
        self.fast_free < self.level
    }

    fn batch_allows(&self, promotion: &Relocation) -> bool {
        promotion.bytes.0 <= self.may_promote
    }

    fn has_room_for(&self, promotion: &Relocation) -> bool {
        self.fast_free >= self.level + promotion.bytes.0
    }

    fn can_demote(&self, victim: &Relocation) -> bool {
        victim.bytes.0 <= self.may_demote.min(self.slow_free)
    }

    fn promote(&mut self, r: &Relocation) {
        self.fast_free -= r.bytes.0;
        self.slow_free += r.bytes.0;
        self.may_promote -= r.bytes.0;
    }

    fn demote(&mut self, r: &Relocation) {
        self.fast_free += r.bytes.0;
        self.slow_free -= r.bytes.0;
        self.may_demote -= r.bytes.0;
    }
}

#[cfg(test)]
mod tests;
