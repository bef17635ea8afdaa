//! Chooses the blocks to promote and demote in an epoch.
//!
//! # Problem
//! Given ranges by heat, the places of their blocks and the tiers' free memory, choose the promotions and demotions of
//! one epoch. The hottest bytes must end up in fast memory, with as little traffic as possible, and with none once they
//! are there.
//!
//! # Terms
//! - *target*: the bytes of a range that belong in fast memory if the ranking is right. Fast capacity is assigned from
//!   the hottest range on; the range at the border gets a part.
//! - *reserve*: fast memory that stays free, so that kswapd never wakes; filling stops there. Only below *low*, a
//!   little less, are blocks demoted to restore it. So the kernel's own allocations cause no moves.
//!
//! # Approach
//! Fill, then exchange. Visit the promotion candidates (slow blocks of ranges below their target, the hottest first).
//! While fast memory is free above the reserve, fill it. After that, each promotion needs demotions of the coldest fast
//! blocks of ranges above their target. An exchange must be *worth* it. The promoted range is at least 1.5 times as
//! dense as the demoted one, the difference is significant (four standard deviations), and it pays for the two moves
//! within the horizon. Densities are those of resident memory.
//!
//! If free fast memory is below low, the coldest blocks are demoted without an exchange until the reserve is restored.
//! They must be certainly colder than the rest. Moves cost no more than the budget, and no range moves more blocks than
//! it has samples.
//!
//! # Properties
//! - Commitments of a tier never exceed its free memory plus the memory that leaves it.
//! - Neither direction exceeds the batch limit, and both together stay within the budget.
//! - Once free fast memory is used up, promotions and demotions are equal to within one block.
//! - A stable ranking yields an empty plan after finitely many epochs.
//! - The same input gives the same plan.

use std::collections::BTreeMap;

use crate::significance::z_squared;
use crate::{BLOCK_SIZE, Block, ByteCount, Level, Pid, RankedRange, ResidencyMap, Share, Sockets};

/// Minimum ratio of densities in an exchange.
const EXCHANGE_RATIO: f64 = 1.5;

/// Minimum significance of an exchange, in squared standard deviations.
const EXCHANGE_Z2: f64 = 16.0;

/// Minimum significance of a range's coldness for demotion without an exchange, in squared standard deviations.
const COLD_Z2: f64 = 9.0;

/// Bytes of a block.
const BLOCK: f64 = BLOCK_SIZE as f64;

/// Number of victim ranges tried for one promotion range.
const VICTIMS_TRIED: usize = 16;

/// The tiers' free memory, and limits of moves in one epoch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Room {
    /// Free fast memory.
    pub fast_free: ByteCount,
    /// Memory that the fast tier lacks until any is free: below a watermark the kernel keeps what is demoted.
    pub fast_missing: ByteCount,
    /// Fast memory that filling leaves free.
    pub fast_reserve: ByteCount,
    /// Free fast memory below which blocks are demoted until the reserve is restored; at most the reserve, and zero if
    /// only moves that pay are made.
    pub fast_low: ByteCount,
    /// Slow memory available for demotions.
    pub slow_free: ByteCount,
    /// Limit of promotions, and of demotions.
    pub batch: ByteCount,
}

/// Number of samples in a range below which it is not promoted into free memory.
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

/// The cost limit of a plan, and the prices of moves.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct MoveBudget {
    /// The remaining budget, picoseconds.
    pub left_ps: u64,
    /// Cost of promoting a byte, picoseconds.
    pub promotion_ps: u64,
    /// Cost of demoting a byte, picoseconds.
    pub demotion_ps: u64,
    /// Expected benefit of a counted sample within the horizon, picoseconds.
    pub sample_ps: f64,
}

impl MoveBudget {
    /// No limit: everything pays.
    pub const NONE: Self = Self {
        left_ps: u64::MAX,
        promotion_ps: 0,
        demotion_ps: 0,
        sample_ps: f64::MAX,
    };

    fn spend(&mut self, bytes: u64, price_ps: u64) {
        self.left_ps = self.left_ps.saturating_sub(bytes.saturating_mul(price_ps));
    }

    /// Whether `more_samples` per byte, compared with the other memory, pay for a byte's promotion, and for a demotion
    /// in an exchange.
    pub fn pays(&self, more_samples: f64, is_exchange: bool) -> bool {
        let demotion_ps = if is_exchange { self.demotion_ps } else { 0 };
        more_samples * self.sample_ps >= (self.promotion_ps + demotion_ps) as f64
    }
}

/// The input of a plan.
#[derive(Debug, Clone, Copy)]
pub struct Situation<'a> {
    /// Ranges of all processes, the hottest first.
    pub ranking: &'a [RankedRange],
    /// Places of their blocks.
    pub residency: &'a ResidencyMap,
    /// Shares of fast memory by process; if empty, the hottest memory gets it.
    pub shares: &'a BTreeMap<Pid, Share>,
    /// The sockets that processes run on, and free memory near each.
    pub sockets: &'a Sockets,
    /// The boundary to plan for: the one below this tier, which is "fast memory" here.
    pub level: Level,
    /// Plans for faster boundaries. Their blocks are moving already, and their costs are spent.
    pub planned: &'a [(Level, Plan)],
    /// The tiers' free memory and limits.
    pub room: Room,
    /// Number of samples from which a range is promoted into free memory.
    pub fill: FillThreshold,
    /// Cost limit and prices of moves.
    pub budget: MoveBudget,
    /// Whether the balloon waits for fast memory: then the coldest blocks leave even without certainty.
    pub balloon_waits: bool,
    /// The present epoch.
    pub epoch: u32,
    /// Time between two epochs, milliseconds; limits a plan if the cost of moves is known.
    pub epoch_ms: u64,
    /// Whether small pages may become huge ones in place.
    pub collapses: bool,
}

/// A block that moves to another tier.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Relocation {
    /// The process.
    pub pid: Pid,
    /// Its block.
    pub block: Block,
    /// Its bytes in the tier that it leaves, or in which it collapses.
    pub bytes: ByteCount,
}

/// The relocations of one epoch.
#[derive(Debug, Clone, PartialEq, Eq, Default)]
pub struct Plan {
    /// Moves into fast memory, the hottest first.
    pub promotions: Vec<Relocation>,
    /// Moves out of fast memory, the coldest first.
    pub demotions: Vec<Relocation>,
    /// Blocks whose small pages become a huge one where they lie, the hottest first.
    pub collapses: Vec<Relocation>,
    /// Free fast memory that promotions leave.
    pub level: ByteCount,
    /// Blocks that were compared and stay for now, for which more evidence matters most.
    pub undecided: Vec<(Pid, Block)>,
}

impl Plan {
    /// Whether nothing moves.
    pub fn is_empty(&self) -> bool {
        self.promotions.is_empty() && self.demotions.is_empty()
    }

    /// The blocks to move or to collapse.
    pub(crate) fn planned(&self) -> impl Iterator<Item = (Pid, Block)> + '_ {
        self.blocks()
            .chain(self.collapses.iter().map(|r| (r.pid, r.block)))
    }

    /// The blocks to move.
    pub(crate) fn blocks(&self) -> impl Iterator<Item = (Pid, Block)> + '_ {
        let all = self.promotions.iter().chain(&self.demotions);
        all.map(|r| (r.pid, r.block))
    }
}

/// A range with its distance from its target.
struct Dealt<'a> {
    range: &'a RankedRange,
    /// Its resident memory.
    resident: u64,
    /// Samples per resident byte.
    density: f64,
    /// Bytes to promote, or to demote, to reach the target.
    excess: u64,
}

/// Plans the relocations of one epoch.
pub fn plan(situation: &Situation<'_>) -> Plan {
    let Situation {
        residency,
        room,
        fill,
        budget,
        epoch,
        ..
    } = *situation;
    let (short, spare, whole) = deal(situation);
    let mut victims = Victims::new(&spare, residency, epoch);
    let mut ledger = Ledger::new(&room, &budget);
    let mut plan = Plan {
        level: room.level(),
        ..Plan::default()
    };

    while ledger.below_level() {
        let is_known = |range: &Dealt<'_>| situation.balloon_waits || whole.knows_cold(range);
        let Some(victim) = victims.coldest(is_known).filter(|v| ledger.can_demote(v)) else {
            break;
        };
        ledger.demote(&victim);
        plan.demotions.push(victim);
        victims.take();
    }

    'ranges: for hot in &short {
        // Limited by the evidence: a sample for each block.
        let mut wanted = hot.excess.min(hot.range.count as u64 * BLOCK_SIZE);
        for (block, placement) in residency.movable(hot.range.pid, &hot.range.range, epoch) {
            let bytes = placement.slow;
            if bytes.0 == 0 || bytes.0 > wanted {
                continue;
            }
            let promotion = Relocation {
                pid: hot.range.pid,
                block,
                bytes,
            };
            if !ledger.batch_allows(&promotion) {
                break 'ranges;
            }
            let fills = ledger.has_room_for(&promotion);
            let pays = budget.pays(hot.density, false);
            if fills && (hot.range.count < fill.0 || !pays) {
                continue 'ranges;
            }
            if !fills && victims.worth(hot, &budget).is_none() {
                continue 'ranges;
            }
            if !ledger.affords(&promotion, fills) {
                break 'ranges;
            }
            while !ledger.has_room_for(&promotion) {
                let victim = victims.worth(hot, &budget);
                let Some(victim) = victim.filter(|v| ledger.can_demote(v)) else {
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

/// Assigns fast memory from the hottest range on. Returns the ranges below their target, hottest first; those above it,
/// coldest first; and the sum of all.
///
/// Among equal ranges the largest is the coldest, because its lack of samples is the most significant.
fn deal<'a>(situation: &Situation<'a>) -> (Vec<Dealt<'a>>, Vec<Dealt<'a>>, Whole) {
    let Situation {
        residency, room, ..
    } = situation;
    let dealt = |range: &'a RankedRange| {
        let placement = residency.placement(range.pid, &range.range);
        let known = residency.known_blocks(range.pid, &range.range) as u64;
        let blocks = Block::numbers_of(&range.range);
        let blocks = blocks.end - blocks.start;
        // Unknown blocks are assumed to be like the rest of the range.
        let resident = u128::from(placement.total().0) * u128::from(blocks);
        let resident = (resident / u128::from(known.max(1))) as u64;
        let dealt = Dealt {
            range,
            resident,
            density: range.count / resident.max(1) as f64,
            excess: 0,
        };
        (dealt, placement)
    };
    let mut all: Vec<_> = situation.ranking.iter().map(dealt).collect();
    all.retain(|(_, placement)| placement.total().0 > 0);
    all.sort_by(|(a, _), (b, _)| {
        let by_density = b.density.total_cmp(&a.density);
        by_density.then(a.resident.cmp(&b.resident))
    });
    let whole = Whole {
        count: all.iter().map(|(r, _)| r.range.count).sum(),
        resident: all.iter().map(|(r, _)| r.resident as f64).sum(),
    };
    let in_fast: u64 = all.iter().map(|(_, p)| p.fast.0).sum();
    let mut capacity = (in_fast + room.fast_free.0).saturating_sub(room.level().0);
    let (mut short, mut spare) = (vec![], vec![]);
    for (dealt, placement) in all {
        let target = placement.total().0.min(capacity);
        capacity -= target;
        let excess = target.abs_diff(placement.fast.0);
        if placement.fast.0 < target {
            short.push(Dealt { excess, ..dealt });
        } else if placement.fast.0 > target {
            spare.push(Dealt { excess, ..dealt });
        }
    }
    spare.reverse();
    (short, spare, whole)
}

/// All ranges together.
struct Whole {
    count: f64,
    resident: f64,
}

impl Whole {
    /// Whether a range is certainly colder than the others: its lack of samples is significant.
    fn knows_cold(&self, range: &Dealt<'_>) -> bool {
        let (rest, size) = (self.count - range.range.count, range.resident as f64);
        let rest_size = self.resident - size;
        rest_size > 0.0
            && rest / rest_size > range.density
            && z_squared(rest, rest_size / BLOCK, range.range.count, size / BLOCK) >= COLD_Z2
    }
}

/// Blocks that may be demoted, the coldest range first.
struct Victims<'a> {
    /// The remaining blocks of each range; the next one is last.
    ranges: Vec<(&'a Dealt<'a>, Vec<Relocation>)>,
    /// Ranges before this one are used up.
    first: usize,
    /// The range of the last offered block.
    offered: usize,
}

impl<'a> Victims<'a> {
    fn new(spare: &'a [Dealt<'a>], residency: &ResidencyMap, epoch: u32) -> Self {
        let ranges = spare
            .iter()
            .map(|dealt| {
                let (range, mut left) = (dealt.range, dealt.excess);
                let mut blocks: Vec<_> = residency
                    .movable(range.pid, &range.range, epoch)
                    .filter_map(|(block, placement)| {
                        let bytes = placement.fast;
                        // The last block may exceed the rest, since blocks move as a whole.
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
                (dealt, blocks)
            })
            .filter(|(_, blocks)| !blocks.is_empty())
            .collect();
        Self {
            ranges,
            first: 0,
            offered: 0,
        }
    }

    /// The coldest remaining block of a range for which `is_known` holds.
    fn coldest(&mut self, is_known: impl Fn(&Dealt<'_>) -> bool) -> Option<Relocation> {
        let tried = self.ranges.len().min(self.first + VICTIMS_TRIED);
        self.offer(tried, is_known)
    }

    /// The coldest remaining block that is worth an exchange with `hot`.
    fn worth(&mut self, hot: &Dealt<'_>, budget: &MoveBudget) -> Option<Relocation> {
        let tried = self.ranges.len().min(self.first + VICTIMS_TRIED);
        self.offer(tried, |cold| worth(hot, cold, budget))
    }

    /// The first block of the ranges before `tried` for which `will_do` holds.
    fn offer(&mut self, tried: usize, will_do: impl Fn(&Dealt<'_>) -> bool) -> Option<Relocation> {
        self.offered = (self.first..tried)
            .find(|&i| !self.ranges[i].1.is_empty() && will_do(self.ranges[i].0))?;
        self.ranges[self.offered].1.last().copied()
    }

    /// Takes the last offered block.
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

/// Whether exchanging a block of `cold` for one of `hot` is worth it: it pays, and it is significant.
fn worth(hot: &Dealt<'_>, cold: &Dealt<'_>, budget: &MoveBudget) -> bool {
    let blocks = |r: &Dealt<'_>| r.resident as f64 / BLOCK;
    let certainty = z_squared(hot.range.count, blocks(hot), cold.range.count, blocks(cold));
    hot.density >= EXCHANGE_RATIO * cold.density
        && certainty >= EXCHANGE_Z2
        && budget.pays(hot.density - cold.density, true)
}

/// Tracks both tiers' free memory, so that none is assigned twice.
struct Ledger {
    fast_free: u64,
    /// Fast memory that stays free.
    level: u64,
    slow_free: u64,
    may_promote: u64,
    may_demote: u64,
    budget: MoveBudget,
}

impl Ledger {
    fn new(room: &Room, budget: &MoveBudget) -> Self {
        Self {
            fast_free: room.fast_free.0,
            level: room.level().0,
            slow_free: room.slow_free.0,
            may_promote: room.batch.0,
            may_demote: room.batch.0,
            budget: *budget,
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

    /// Whether the budget suffices for a promotion and, unless it `fills`, for an equal demotion.
    fn affords(&self, promotion: &Relocation, fills: bool) -> bool {
        let MoveBudget {
            promotion_ps,
            demotion_ps,
            left_ps,
            ..
        } = self.budget;
        let price_ps = promotion_ps + if fills { 0 } else { demotion_ps };
        promotion.bytes.0.saturating_mul(price_ps) <= left_ps
    }

    fn promote(&mut self, r: &Relocation) {
        self.budget.spend(r.bytes.0, self.budget.promotion_ps);
        self.fast_free -= r.bytes.0;
        self.slow_free += r.bytes.0;
        self.may_promote -= r.bytes.0;
    }

    fn demote(&mut self, r: &Relocation) {
        self.budget.spend(r.bytes.0, self.budget.demotion_ps);
        self.fast_free += r.bytes.0;
        self.slow_free -= r.bytes.0;
        self.may_demote -= r.bytes.0;
    }
}

#[cfg(test)]
mod tests;
