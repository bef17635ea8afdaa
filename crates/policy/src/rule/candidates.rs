//! The blocks that may change place in an epoch: the hottest slow ones and the coldest fast ones.

use std::collections::BTreeSet;

use super::Rule;
use super::scan::{Part, Scan};
use super::unit::Unit;
use crate::heat::Estimate;
use crate::residency::CHUNK_BLOCKS;
use crate::{BLOCK_SIZE, Block, Pid, Plan, Situation, Tier};

/// Fast blocks that are compared with a slow one before it is passed over, and pairs that are named as undecided.
pub(super) const TRIED: usize = 16;

/// Units that may move now.
pub(super) struct Candidates<'a> {
    /// Hottest first.
    pub(super) slow: Vec<Unit<'a>>,
    /// Coldest first.
    pub(super) fast: Vec<Unit<'a>>,
    /// Units of a tier that load has made slower than the one below, hottest first.
    pub(super) overloaded: Vec<Unit<'a>>,
}

impl Candidates<'_> {
    pub(super) fn drop_planned<'p>(&mut self, plans: impl Iterator<Item = &'p Plan>) {
        let planned: BTreeSet<(Pid, Block)> = plans.flat_map(Plan::planned).collect();
        if planned.is_empty() {
            return;
        }
        let is_new = |unit: &Unit<'_>| !planned.contains(&(unit.pid, unit.block));
        self.slow.retain(is_new);
        self.fast.retain(is_new);
        self.overloaded.retain(is_new);
    }
}

/// The units of a plan for this window: slow ones whose loss may reach the cost of a promotion, and the coldest fast ones.
/// No more of either are kept than can be tried in one epoch.
pub(super) fn candidates<'a>(
    rule: &Rule,
    situation: &Situation<'_>,
    parts: &[Part<'a>],
    window: usize,
    scan: &mut Scan,
) -> Candidates<'a> {
    let block_s = rule.promotion_s(BLOCK_SIZE) + rule.demotion_s(BLOCK_SIZE);
    let by_time = (rule.movers_s(situation) / block_s.max(1e-6)) as usize;
    let by_rate = (situation.room.batch.0 / BLOCK_SIZE) as usize;
    // Small blocks are cheaper to move than whole ones.
    let most = by_time.min(by_rate).saturating_mul(TRIED).max(TRIED);
    let level = situation.level;
    let excess_s = rule.load.excess_s(level);
    let is_relieved = excess_s > 0.0 && situation.shares.is_empty();
    let mut all = Vec::with_capacity(parts.len());
    let (mut slow, mut overloaded) = (vec![], vec![]);
    // By the socket that they lie near, so that each has partners.
    let mut fast: Vec<Vec<u128>> = vec![vec![]];
    let mut longer = [0.0; CHUNK_BLOCKS];
    for (part, first) in parts.iter().zip((0..).step_by(CHUNK_BLOCKS)) {
        let mut estimates = [Estimate::default(); CHUNK_BLOCKS];
        part.heat.estimates(window, &mut estimates);
        if part.chunk.sum.fast.0 > 0 {
            part.heat.longer_rates(window, &mut longer);
        }
        let (mut hottest_slow, mut coldest_fast) = (0.0f64, f64::INFINITY);
        for (at, known) in part.chunk.blocks().enumerate() {
            let Some(known) = known.filter(|k| k.aside_until <= situation.epoch) else {
                continue;
            };
            let spread = known.spread();
            let (placement, resident) = (spread.at(level), spread.resident().0 as f64);
            let at_block = first + at as u64;
            let density = estimates[at].rate / resident.max(1.0);
            if placement.slow.0 > 0 {
                hottest_slow = hottest_slow.max(density);
                slow.push(!key(density, at_block));
            }
            if placement.fast.0 > 0 {
                if is_relieved {
                    overloaded.push(!key(density, at_block));
                }
                // Of blocks that are all idle now, those that were so for long go first.
                let bytes = placement.fast.0 as f64;
                let density = density + longer[at] * (bytes / resident.max(1.0)) / bytes;
                coldest_fast = coldest_fast.min(density);
                let socket = usize::from(spread.socket.number());
                if fast.len() <= socket {
                    fast.resize_with(socket + 1, Vec::new);
                }
                fast[socket].push(key(density, at_block));
            }
        }
        scan.saw(part, window, hottest_slow, coldest_fast);
        all.push(estimates);
    }
    let unit = |tier: Tier, key: u128| {
        let (density, at_block) = of_key(key);
        let (part, at) = (at_block / CHUNK_BLOCKS, at_block % CHUNK_BLOCKS);
        let estimate = all[part][at];
        Unit::new(
            rule,
            situation,
            &parts[part],
            (tier, at),
            (estimate, density),
        )
    };
    let slow = least(slow, most).into_iter();
    let of_socket = |keys| least(keys, most);
    let mut fast: Vec<u128> = fast.into_iter().flat_map(of_socket).collect();
    fast.sort_unstable();
    let fast = fast.into_iter();
    let overloaded = least(overloaded, most).into_iter();
    Candidates {
        slow: slow.filter_map(|key| unit(Tier::Slow, !key)).collect(),
        fast: fast.filter_map(|key| unit(Tier::Fast, key)).collect(),
        overloaded: overloaded
            .filter_map(|key| {
                let event_s = excess_s;
                unit(Tier::Fast, !key).map(|unit| Unit { event_s, ..unit })
            })
            .collect(),
    }
}

/// A number that orders blocks by density, then by place. Numbers are sorted several times as fast as pairs.
fn key(density: f64, at_block: u64) -> u128 {
    let bits = density.to_bits();
    // As in `f64::total_cmp`, but unsigned: among negative numbers the larger bits are less.
    let order = match bits >> 63 {
        0 => bits | 1 << 63,
        _ => !bits,
    };
    u128::from(order) << 64 | u128::from(at_block)
}

/// The density and place behind a key.
fn of_key(key: u128) -> (f64, usize) {
    let order = (key >> 64) as u64;
    let bits = match order >> 63 {
        1 => order ^ 1 << 63,
        _ => !order,
    };
    (f64::from_bits(bits), key as u64 as usize)
}

/// The `most` least keys, sorted.
fn least(mut keys: Vec<u128>, most: usize) -> Vec<u128> {
    if keys.len() > most {
        keys.select_nth_unstable(most);
        keys.truncate(most);
    }
    keys.sort_unstable();
    keys
}
