//! Colloid: fills fast memory only until both tiers have equal latency.
//!
//! Vuppalapati and Agarwal, SOSP 2024; constants from the authors' code on top of HeMem. It tracks and classifies like
//! HeMem, and moves pages to shift traffic by a desired amount.
//!
//! # Problem
//! A loaded fast tier may be slower than the slow tier. Packing all hot pages into it then slows everything down.
//!
//! # Approach
//! The memory controllers measure each tier's latency: requests in flight divided by arrivals. `p` is the share of
//! requests to the fast tier. If the fast tier is quicker, the desired share is above `p`, otherwise below. The target
//! is the middle of the remaining interval. Pages are moved, hottest first, until their samples make up the shifted
//! share. In 500 ms no more bytes move than the shifted traffic.
//!
//! Guests have no such counters, so the model provides the host's. As in HeMem, memory consists of 2 MiB pages in both
//! tiers.
//!
//! # Properties
//! - The interval is part of 0 to 1, and contains the target.
//! - If latency rises with traffic, both tiers become equal, or all traffic goes to the quicker tier.

use demeter_policy::{BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, Tier};

use super::hemem::{Heat, Spinner, TURN_PS, tier_of};
use super::{Context, Managed, Manager, Needs};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::sampler::{Record, Sampling};

/// Loads per sample.
const PERIOD: u64 = 5003;

/// Weight of the newest measurement in the average.
const NEWEST: f64 = 1.0 / 16.0;

/// Latencies that differ by less, relative to the fast tier's, count as equal.
pub(super) const EQUAL: f64 = 0.05;

/// An interval smaller than this is reset.
const NARROW: f64 = 0.01;

/// Number of turns in the period of the migration limit.
const TURNS_PER_LIMIT: f64 = 50.0;

/// Highest distinguishable sample count; beyond it a page's count is halved.
const COUNTS: usize = 32;

/// The interval that contains the desired share.
#[derive(Debug, Clone, Copy, PartialEq)]
struct Balance {
    low: f64,
    high: f64,
}

impl Balance {
    /// The full interval.
    const OPEN: Self = Self {
        low: 0.0,
        high: 1.0,
    };

    /// Updates the interval with the latencies at a share of `p`. Returns the change of the share; negative to shrink
    /// it.
    fn step(&mut self, p: f64, [fast, slow]: [f64; 2]) -> f64 {
        if (fast - slow).abs() < EQUAL * fast {
            return 0.0;
        }
        if fast < slow {
            self.low = p;
            if self.high <= self.low || self.high - self.low < NARROW {
                self.high = 1.0;
            }
        } else {
            self.high = p;
            if self.low >= self.high || self.high - self.low < NARROW {
                self.low = 0.0;
            }
        }
        (self.low + self.high) / 2.0 - p
    }
}

/// Measurements of the memory controllers, by tier.
#[derive(Debug)]
pub(super) struct Load {
    /// Weight of the newest measurement.
    newest: f64,
    /// Line counts at the last measurement; lines per interval and latency, both smoothed.
    lines_before: [u64; 2],
    lines: [f64; 2],
    latency_ps: [f64; 2],
}

impl Load {
    /// A state without measurements.
    pub(super) fn new(newest: f64) -> Self {
        Self {
            newest,
            lines_before: [0; 2],
            lines: [0.0; 2],
            latency_ps: [0.0; 2],
        }
    }

    /// Reads the counters.
    pub(super) fn measure(&mut self, actor: &Actor<'_>) {
        for (i, tier) in actor.memory.tiers().into_iter().enumerate() {
            let lines = tier.lines_ever();
            let new = (lines - self.lines_before[i]) as f64 * f64::from(1u32 << actor.k);
            self.lines_before[i] = lines;
            self.lines[i] += (new - self.lines[i]) * self.newest;
            let latency_ps = tier.latency_ps as f64;
            self.latency_ps[i] += (latency_ps - self.latency_ps[i]) * self.newest;
        }
    }

    /// The tiers' latencies.
    pub(super) fn latency_ps(&self) -> [f64; 2] {
        self.latency_ps
    }
}

/// The Colloid library.
#[derive(Debug)]
pub(crate) struct Colloid {
    threshold_ps: u64,
    heat: Heat,
    waiting: Vec<GuestVirtAddr>,
    samples_seen: u64,
    spinner: Spinner,
    balance: Balance,
    load: Load,
    /// Bytes that may be moved in this period.
    allowed: f64,
}

impl Colloid {
    /// A library without samples.
    pub(crate) fn new(managed: &Managed) -> Self {
        Self {
            threshold_ps: managed.load_ps,
            heat: Heat::default(),
            waiting: vec![],
            samples_seen: 0,
            spinner: Spinner::default(),
            balance: Balance::OPEN,
            load: Load::new(NEWEST),
            allowed: 0.0,
        }
    }

    /// Promotes pages that have `part` of all samples; demotes if it is negative.
    fn shift(&mut self, part: f64, guest: &mut Guest, actor: &mut Actor<'_>) {
        // Lists by count, as the library keeps them.
        let mut by_count: [Vec<Vec<Block>>; 2] = [vec![vec![]; COUNTS], vec![vec![]; COUNTS]];
        let mut all = 0;
        for block in self.heat.blocks() {
            let Some(tier) = tier_of(guest, block) else {
                continue;
            };
            let count = self.heat.of(block);
            all += count;
            by_count[tier as usize][(count as usize).min(COUNTS - 1)].push(block);
        }
        let mut left = part.abs() * f64::from(all);
        let (from, to) = match part > 0.0 {
            true => (Tier::Slow, Tier::Fast),
            false => (Tier::Fast, Tier::Slow),
        };
        let [fast, slow] = by_count;
        let (sources, mut coldest) = match from {
            Tier::Slow => (slow, fast.into_iter().flatten()),
            Tier::Fast => (fast, vec![].into_iter().flatten()),
        };
        for (count, blocks) in sources.into_iter().enumerate().skip(1).rev() {
            for block in blocks {
                if count as f64 > left {
                    break;
                }
                if self.allowed < BLOCK_SIZE as f64 {
                    return;
                }
                if to == Tier::Fast && guest.usable(to).0 < BLOCK_SIZE {
                    // A page to demote must be colder than the promoted page, or there is no gain.
                    let cold = coldest.next().filter(|&c| self.heat.of(c) < count as u32);
                    let Some(cold) = cold else {
                        return;
                    };
                    guest.migrate_block(cold, Tier::Slow, actor);
                }
                if guest.migrate_block(block, to, actor) == 0 {
                    return;
                }
                left -= count as f64;
                self.allowed -= BLOCK_SIZE as f64;
            }
        }
    }
}

impl Manager for Colloid {
    fn needs(&self) -> Needs {
        Needs {
            huge_in_slow: true,
            ..Needs::default()
        }
    }

    fn sampling(&self, k: u32) -> Option<Sampling> {
        Some(Sampling {
            period: PERIOD.max(1 << k),
            threshold_ps: self.threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.heat = Heat::new(guest.limits());
        self.spinner = Spinner::since(now_ps);
        now_ps + TURN_PS
    }

    /// The policy thread's turn.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let due_ps = actor.now_ps() + TURN_PS;
        self.load.measure(actor);
        let all: f64 = self.load.lines.iter().sum();
        if all > 0.0 {
            let p = self.load.lines[0] / all;
            let part = self.balance.step(p, self.load.latency_ps);
            let bytes = part.abs() * all * 64.0;
            self.allowed = (self.allowed + bytes).min(bytes * TURNS_PER_LIMIT);
            let pages = self.heat.blocks().count() as u64;
            actor.charge(Cause::Classify, pages * actor.costs.scan_entry_ps);
            if self.allowed >= BLOCK_SIZE as f64 {
                self.shift(part, guest, actor);
            }
        }
        due_ps.max(actor.now_ps())
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.waiting.extend(records.iter().map(|r| r.gva));
    }

    fn worker_turn(&mut self, _began_ps: u64, ctx: &mut Context<'_>) -> bool {
        let actor = &mut ctx.actor;
        for gva in std::mem::take(&mut self.waiting) {
            self.samples_seen += 1;
            actor.charge(Cause::Classify, actor.costs.memtis_sample_ps);
            self.heat.add(gva);
        }
        self.spinner.spin(actor);
        false
    }

    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        ByteCount(self.heat.state_bytes() as u64)
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    proptest! {
        #[test]
        fn what_is_aimed_for_is_a_share(
            steps in prop::collection::vec((0.0..=1.0f64, 1.0..1000.0f64, 1.0..1000.0f64), 1..100),
        ) {
            let mut balance = Balance::OPEN;
            for (p, fast, slow) in steps {
                let aim = p + balance.step(p, [fast, slow]);
                prop_assert!((-1e-9..=1.0 + 1e-9).contains(&aim), "{}", aim);
                prop_assert!(0.0 <= balance.low && balance.low <= balance.high && balance.high <= 1.0);
            }
        }

        /// The fast tier has an advantage of `idle` when idle, and slows down with its share.
        #[test]
        fn latencies_become_equal(start in 0.0..=1.0f64, idle in 10.0..100.0f64, slope in 1.0..500.0f64) {
            let (mut balance, mut p) = (Balance::OPEN, start);
            let latencies = |p: f64| [100.0 - idle / 2.0 + slope * p, 100.0];
            for _ in 0..200 {
                p += balance.step(p, latencies(p));
            }
            let [fast, slow] = latencies(p);
            let is_equal = (fast - slow).abs() <= 0.06 * fast;
            prop_assert!(is_equal || fast < slow && p > 0.97, "{} {} {}", p, fast, slow);
        }
    }
}
