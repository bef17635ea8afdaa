//! A machine that is a formula, for tests: blocks are accessed at known rates, samples fall by chance, moves take a known
//! time and nothing else happens.

use std::collections::BTreeMap;

use super::{EpochEnd, Gain, Rule, plan};
use crate::chance::Chance;
use crate::tier::Direction;
use crate::{
    BLOCK_SIZE, Block, ByLevel, ByteCount, FillThreshold, Heat, Level, MoveBudget, Pid,
    ResidencyMap, Room, Situation, Sockets, TierBytes, VirtRange,
};

pub(super) const PID: Pid = Pid(1);
const BASE: u64 = 1 << 18;
const EPOCH_S: f64 = 0.5;

/// Costs of a machine, and how its memory is divided.
#[derive(Debug, Clone, Copy)]
pub(super) struct Machine {
    pub blocks: usize,
    pub fast_blocks: usize,
    pub cpus: u32,
    pub fast_ns: f64,
    pub slow_ns: f64,
    /// Promotion and demotion of one block each.
    pub exchange_s: f64,
    pub period: u32,
    /// Accesses a second that fast memory can serve.
    pub peak: f64,
}

impl Machine {
    /// Latency of fast memory that serves this share of accesses: its queue grows with its traffic, and each CPU waits for
    /// its own access.
    pub fn fast_ns(&self, hits: f64) -> f64 {
        let (mut least, mut most) = (self.fast_ns, 1e3 * self.fast_ns);
        for _ in 0..60 {
            let ns = (least + most) / 2.0;
            let used = hits * self.accesses(hits, ns) / self.peak;
            match used < 1.0 && self.fast_ns / (1.0 - used) < ns {
                true => most = ns,
                false => least = ns,
            }
        }
        most
    }

    /// Accesses a second, at this latency of fast memory.
    pub fn accesses(&self, hits: f64, fast_ns: f64) -> f64 {
        f64::from(self.cpus) * 1e9 / (hits * fast_ns + (1.0 - hits) * self.slow_ns)
    }
}

/// The costs of hardware.
pub(super) fn hardware(blocks: usize, cpus: u32) -> Machine {
    Machine {
        blocks,
        fast_blocks: blocks / 4,
        cpus,
        fast_ns: 80.0,
        slow_ns: 200.0,
        exchange_s: 1.4e-3,
        period: 4093,
        peak: f64::INFINITY,
    }
}

/// The costs of the lab's emulator.
pub(super) fn lab(blocks: usize) -> Machine {
    Machine {
        fast_ns: 760.0,
        slow_ns: 2120.0,
        exchange_s: 23e-3,
        period: 2048,
        ..hardware(blocks, 1)
    }
}

/// The result of a run.
#[derive(Debug, Clone, Copy)]
pub(super) struct Outcome {
    /// Speed relative to no management, over the whole run and over its last third.
    pub mean: f64,
    pub end: f64,
    /// Blocks moved.
    pub moved: u64,
    /// Seconds until nine tenths of what is served by fast memory in the end are.
    pub t90_s: f64,
}

/// How many of what is expected so often, by chance.
fn poisson(mean: f64, chance: &mut Chance) -> u32 {
    if mean > 50.0 {
        let normal = (0..12).map(|_| chance.draw()).sum::<f64>() - 6.0;
        return (mean + normal * mean.sqrt()).round().max(0.0) as u32;
    }
    let (least, mut product, mut n) = ((-mean).exp(), chance.draw(), 0);
    while product > least {
        product *= chance.draw();
        n += 1;
    }
    n
}

fn gain(m: &Machine) -> Gain {
    Gain {
        loads_per_sample: Some(m.period),
        waits: 1.0,
        latency_ns: ByLevel([m.fast_ns as u32, m.slow_ns as u32, 0, 0]),
        cpus: m.cpus,
    }
}

/// Fast memory is full, and slow memory never is.
const ROOM: Room = Room {
    fast_free: ByteCount(0),
    fast_reserve: ByteCount(0),
    fast_missing: ByteCount(0),
    fast_low: ByteCount(0),
    slow_free: ByteCount(u64::MAX / 2),
    batch: ByteCount(u64::MAX / 2),
};

/// Runs the rule for `seconds` beside a program whose accesses fall into blocks by these shares.
pub(super) fn run(
    machine: &Machine,
    seconds: f64,
    seed: u64,
    mut shares: impl FnMut(f64, &mut Vec<f64>),
) -> Outcome {
    let m = *machine;
    let (mut rule, mut heat) = (Rule::new(gain(&m)), Heat::default());
    let mut residency = ResidencyMap::default();
    let (first, end) = (Block(BASE), Block(BASE + m.blocks as u64));
    heat.set_space(&[VirtRange::new(first.start(), end.start()).unwrap()]);
    let block = |b: usize| Block(BASE + b as u64);
    let mut in_fast: Vec<bool> = (0..m.blocks).map(|b| b < m.fast_blocks).collect();
    let unmanaged = in_fast.clone();
    for (b, &fast) in in_fast.iter().enumerate() {
        residency.set(PID, block(b), place(fast));
    }
    let mut chance = Chance::new(seed);
    let (no_shares, no_sockets) = (BTreeMap::new(), Sockets::default());
    let mut share = vec![0.0; m.blocks];
    let (mut done, mut done_unmanaged, mut hits) = (vec![], vec![], vec![]);
    let (mut moved, mut spent_s) = (0, 0.0f64);
    let epochs = (seconds / EPOCH_S) as u32;
    for epoch in 1..=epochs {
        shares(f64::from(epoch) * EPOCH_S, &mut share);
        let hit = |fast: &[bool]| hit_share(&share, fast);
        let rate = |fast: &[bool]| m.accesses(hit(fast), m.fast_ns(hit(fast)));
        let left = 1.0 - (spent_s / (EPOCH_S * f64::from(m.cpus))).min(0.9);
        let accesses = EPOCH_S * left * rate(&in_fast);
        done.push(accesses);
        done_unmanaged.push(EPOCH_S * rate(&unmanaged));
        hits.push(hit(&in_fast));
        for (b, share) in share.iter().enumerate() {
            let events = poisson(share * accesses / f64::from(m.period), &mut chance);
            if events > 0 {
                heat.add(block(b), events);
                rule.saw(residency.away_of(PID, block(b)), events, None);
            }
        }
        heat.end_epoch(epoch, EPOCH_S, usize::MAX);
        rule.end_epoch(&EpochEnd {
            epoch,
            elapsed_s: EPOCH_S,
            is_repeat: false,
            away: residency.away(),
            rate: heat.rate(0),
        });
        let latency_ns = [m.fast_ns(hit(&in_fast)), m.slow_ns].map(|ns| Some(ns as u32));
        rule.loaded(&ByLevel([latency_ns[0], latency_ns[1], None, None]));
        let situation = Situation {
            ranking: &[],
            residency: &residency,
            shares: &no_shares,
            sockets: &no_sockets,
            level: Level::First,
            planned: &[],
            room: ROOM,
            fill: FillThreshold(0.0),
            budget: MoveBudget::NONE,
            balloon_waits: false,
            epoch,
            epoch_ms: (EPOCH_S * 1e3) as u64,
            collapses: false,
        };
        let plan = plan(&mut rule, &situation, &[(PID, &heat)]);
        spent_s = 0.0;
        let both = [
            (&plan.demotions, Direction::Demotion),
            (&plan.promotions, Direction::Promotion),
        ];
        for (relocations, direction) in both {
            for r in relocations {
                let to_fast = direction == Direction::Promotion;
                in_fast[(r.block.0 - BASE) as usize] = to_fast;
                let way = (Level::First, direction);
                residency.moved(PID, r.block, way, place(to_fast).into());
                let took_s = m.exchange_s / 2.0;
                rule.moved(direction, r.bytes, (took_s * 1e9) as u64, false);
                spent_s += took_s;
                moved += 1;
            }
        }
    }
    outcome(&done, &done_unmanaged, &hits, moved)
}

/// Where a whole block lies.
fn place(fast: bool) -> TierBytes {
    let bytes = |there: bool| ByteCount(if there { BLOCK_SIZE } else { 0 });
    TierBytes {
        fast: bytes(fast),
        slow: bytes(!fast),
    }
}

/// Share of accesses that blocks in fast memory serve.
fn hit_share(shares: &[f64], fast: &[bool]) -> f64 {
    let both = shares.iter().zip(fast).filter(|(_, fast)| **fast);
    both.map(|(share, _)| share).sum()
}

/// The figures of a run, from its accesses with and without the rule and its hits, by epoch.
fn outcome(done: &[f64], done_unmanaged: &[f64], hits: &[f64], moved: u64) -> Outcome {
    let sum = |part: &[f64]| part.iter().sum::<f64>();
    let third = done.len() * 2 / 3;
    let last =
        hits[hits.len() * 5 / 6..].iter().sum::<f64>() / (hits.len() - hits.len() * 5 / 6) as f64;
    let t90 = hits
        .iter()
        .position(|hit| *hit >= 0.9 * last)
        .unwrap_or(hits.len());
    Outcome {
        mean: sum(done) / sum(done_unmanaged),
        end: sum(&done[third..]) / sum(&done_unmanaged[third..]),
        moved,
        t90_s: t90 as f64 * EPOCH_S,
    }
}

/// Nine tenths of all accesses to a part of memory.
pub(super) fn hot_set(first: usize, size: usize) -> impl Fn(f64, &mut Vec<f64>) {
    move |_, share| {
        let n = share.len();
        share.fill(0.1 / n as f64);
        share[first..first + size]
            .iter_mut()
            .for_each(|s| *s += 0.9 / size as f64);
    }
}

/// Nine tenths of all accesses to single blocks.
pub(super) fn scattered(size: usize) -> impl Fn(f64, &mut Vec<f64>) {
    move |_, share| {
        let n = share.len();
        share.fill(0.1 / n as f64);
        let mut chance = Chance::new(3);
        let mut left = size;
        while left > 0 {
            let b = (chance.draw() * n as f64) as usize;
            if share[b] < 0.5 / size as f64 {
                share[b] += 0.9 / size as f64;
                left -= 1;
            }
        }
    }
}

/// A hot set that moves on by its size each so often.
pub(super) fn window(size: usize, every_s: f64) -> impl Fn(f64, &mut Vec<f64>) {
    move |now_s, share| {
        let first = (now_s / every_s) as usize * size % (share.len() - size);
        hot_set(first, size)(now_s, share);
    }
}

/// One pass over all of memory in `period_s` seconds, again and again.
pub(super) fn sweep(period_s: f64) -> impl Fn(f64, &mut Vec<f64>) {
    move |now_s, share| {
        let n = share.len();
        let size = ((n as f64 * EPOCH_S / period_s) as usize).clamp(1, n);
        let at = (now_s % period_s / period_s * n as f64) as usize;
        share.fill(0.0);
        for b in 0..size {
            share[(at + b) % n] = 1.0 / size as f64;
        }
    }
}
