//! Decides which blocks change place, and when.
//!
//! # Problem
//! Memory is a few tiers, each faster and smaller than the next. A block in a slower tier that is hotter than one in the
//! faster tier costs time as long as it stays there; an exchange costs time once. How long the difference will last is unknown.
//!
//! # Approach
//! Rent or buy (the ski rental of Karlin et al. 1988, for two blocks the page migration of Black and Sleator 1989).
//! 1. The *loss* of a pair over a window is the difference of its events, less chance, times the extra cost of an event in
//!    the slower tier. Counts are compared by their square roots, whose chance is the same however few there are.
//! 2. A pair is exchanged once its loss over some window has reached the measured cost of the exchange. Each shorter
//!    window has to show the same difference, within chance. The hottest slow block is paired with the coldest
//!    fast one, and so on; while fast memory is free a promotion needs no partner. Where it is full below a watermark, the
//!    coldest make up for that first.
//! 3. A token bucket pays for exchanges. It begins with half a second for each CPU and gains 0.3 % of the machine's
//!    time. It gains what memory earns that was moved, and loses what that memory loses, compared with where it lay first. A
//!    program does less in memory that has become slower: its loss counts as if it did as much as before.
//!    Income that was steady for up to sixteen seconds is lent for as long again. So is the income that exchanges promise, as
//!    far as moved memory earns what was expected of it: a move's expected income is what its block lost before. When the
//!    bucket is empty, blocks may only go back to where they lay first. Moves that have lost as much as it held at first,
//!    and still lose, are undone.
//! 4. Latencies are those of tiers under their load now. A tier that load has made slower than the one below is relieved of
//!    its hottest blocks (`load`).
//! 5. A slow block that is not hot enough to move keeps its small pages, whose translation takes longer. They become a
//!    huge page once that has cost as much (`collapse`).
//!
//! So a hot set that is ten times thinner is moved ten times later, and no horizon has to be known. The rule is that of one
//! boundary between two tiers; with more tiers it is applied to each boundary, the fastest first. Blocks may have any size:
//! what is compared is events per byte.
//!
//! # Properties
//! - Memory that is used evenly accrues no loss, so nothing moves.
//! - One pair, prices known, costs at most three times what an offline optimum costs, and an exchange more.
//! - Moves cost at most twice (for the way back) the sum of the first tokens, the share of the time and what moves earn.
//! - Neither tier is promised more than it has. Once fast memory is full, promotions and demotions are equal to within a
//!   block, but for demotions that make up for missing memory.
//! - A plan is bounded by the budget of one epoch.
//! - The same evidence gives the same plan.

mod candidates;
mod collapse;
mod gain;
mod load;
mod loss;
mod pairs;
mod price;
mod remaining;
mod scan;
mod shares;
mod unit;

use std::cmp::Ordering;

use serde::{Deserialize, Serialize};

use crate::heat::{Heat, WINDOWS, window_s};
use crate::saved::{NotAState, check, finite};
use crate::tier::Direction;
use crate::{Away, BLOCK_SIZE, Block, ByLevel, ByteCount, Level, Situation, Spread};
pub use gain::Gain;
use load::Load;
pub(crate) use pairs::plan;
use price::Price;
use scan::Scan;

/// Share of the machine's time that moves may cost without earning: with the loss until they are undone and the way back a
/// hundredth.
const TRICKLE: f64 = 0.003;

/// Tokens at first, seconds for each CPU: a few exchanges on the slowest machine known, whose demotions fill CPUs' lists of free
/// pages before they make room. At most a second is kept.
const TOKENS_S: f64 = 0.5;

/// Income counts as steady that was there lately, and in each of the windows of four and sixteen seconds.
const STEADY_WINDOWS: usize = 3;

/// Blocks that a plan moves each way, one by one, while nobody knows what that costs. The second one makes a price: the first
/// call is slow.
const FIRST_BLOCKS: usize = 2;

/// One call that moves pages holds a program no longer than this, seconds.
const BATCH_S: f64 = 0.02;

/// Evidence of memory that was moved to one tier.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
struct Fresh {
    /// Samples since somebody last looked.
    #[serde(deserialize_with = "finite")]
    events: f64,
    /// Rates of blocks that were watched lately, together, and how many these were. One round's looks end at different times:
    /// those at the hottest blocks last. So a mean of the last few alone would say nothing about the others.
    #[serde(deserialize_with = "finite")]
    rates: f64,
    #[serde(deserialize_with = "finite")]
    watched: f64,
}

impl Fresh {
    /// Events in all of `blocks` in the last `elapsed_s` seconds; none before the first look.
    fn take(&mut self, blocks: u64, elapsed_s: f64) -> f64 {
        let rate = match self.watched > 0.0 {
            true => self.rates / self.watched * blocks as f64,
            false => 0.0,
        };
        let kept = window_s(1) / (window_s(1) + elapsed_s);
        self.rates *= kept;
        self.watched *= kept;
        std::mem::take(&mut self.events) + rate * elapsed_s
    }
}

/// Cost and benefit of moves so far.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Default, Serialize, Deserialize)]
pub struct Balance {
    /// Time that moves took, but for what the host has ordered, nanoseconds.
    pub cost_ns: u64,
    /// Time that they are estimated to have saved, less what they lost, nanoseconds.
    pub benefit_ns: i64,
    /// Whether the budget is empty: earlier moves earned less than they cost.
    pub is_resting: bool,
    /// Time that moved memory has saved lately, nanoseconds per second.
    pub income_ns: u64,
    /// Whether it has saved less than half of that in the last few seconds.
    pub is_falling: bool,
    /// Time that exchanges would certainly save, nanoseconds per second.
    pub promise_ns: u64,
}

/// The rule's state. See the module's text.
#[derive(Debug, Clone, Serialize, Deserialize)]
pub struct Rule {
    #[serde(skip)]
    gain: Gain,
    /// Time that moves may cost now, seconds; below zero earlier ones have lost more than was allowed.
    #[serde(deserialize_with = "finite")]
    tokens_s: f64,
    promotion: Price,
    demotion: Price,
    collapse: Price,
    /// Events in memory that was moved, by where it was found first and where it is now.
    fresh: ByLevel<ByLevel<Fresh>>,
    /// Seconds since somebody has looked.
    #[serde(deserialize_with = "finite")]
    unseen_s: f64,
    /// Income from moved memory, seconds a second: lately, and over the windows of four and sixteen seconds.
    #[serde(deserialize_with = "finite")]
    income: [f64; STEADY_WINDOWS],
    /// Time that exchanges would certainly save, by the last plan for each boundary and window, seconds a second.
    #[serde(deserialize_with = "finite")]
    promises: ByLevel<[f64; WINDOWS]>,
    /// The window whose exchanges did not fit the last epoch, for each boundary.
    unfinished: ByLevel<Option<usize>>,
    /// The cost of an event in each tier now.
    load: Load,
    balance: Balance,
    scans: ByLevel<Scan>,
}

/// The facts of an epoch that has ended.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct EpochEnd {
    /// Which one.
    pub epoch: u32,
    /// How long it took, seconds.
    pub elapsed_s: f64,
    /// Its events repeat those of the last one: no look has ended since.
    pub is_repeat: bool,
    /// Blocks that were moved and are not back, by where they were found first and where they are now.
    pub away: ByLevel<ByLevel<u64>>,
    /// Events a second in the memory of all processes.
    pub rate: f64,
}

impl EpochEnd {
    /// The part of demoted blocks for which others were promoted.
    fn part_exchanged(&self) -> f64 {
        let (mut promoted, mut demoted) = (0, 0);
        for home in Level::ALL {
            for now in Level::ALL {
                let blocks = *self.away.get(home).get(now);
                match now.cmp(&home) {
                    Ordering::Less => promoted += blocks,
                    Ordering::Greater => demoted += blocks,
                    Ordering::Equal => {}
                }
            }
        }
        (promoted as f64 / demoted.max(1) as f64).min(1.0)
    }
}

impl Rule {
    /// One that knows nothing yet.
    pub fn new(gain: Gain) -> Self {
        Self {
            gain,
            tokens_s: TOKENS_S * f64::from(gain.cpus),
            promotion: Price::default(),
            demotion: Price::default(),
            collapse: Price::default(),
            fresh: ByLevel::default(),
            unseen_s: 0.0,
            income: [0.0; STEADY_WINDOWS],
            promises: ByLevel::default(),
            unfinished: ByLevel::default(),
            load: Load::new(&gain),
            balance: Balance::default(),
            scans: ByLevel::default(),
        }
    }

    /// CPUs of the machine.
    pub(crate) fn cpus(&self) -> u32 {
        self.gain.cpus
    }

    /// A saved state on this rule's machine, which had this number of CPUs.
    ///
    /// # Errors
    /// A part of the state is impossible.
    pub(crate) fn restored(&self, saved: Self, cpus: u32) -> Result<Self, NotAState> {
        let mut windows = saved.unfinished.0.iter().flatten();
        check(
            "an unfinished window",
            windows.all(|window| *window < WINDOWS),
        )?;
        let gain = Gain { cpus, ..self.gain };
        let mut rule = Self { gain, ..saved };
        rule.load.set_rate(&gain, rule.load.rate);
        Ok(rule)
    }

    /// Takes note of events in memory that was moved to a tier: samples, or accesses found while a block was watched for
    /// `exposure_s` seconds.
    #[inline]
    pub fn saw(&mut self, away: Option<Away>, events: u32, exposure_s: Option<f64>) {
        let Some(Away { home, now }) = away else {
            return;
        };
        let fresh = self.fresh.get_mut(home).get_mut(now);
        match exposure_s {
            None => fresh.events += f64::from(events),
            Some(exposure_s) if exposure_s > 0.0 => {
                fresh.rates += f64::from(events) / exposure_s;
                fresh.watched += 1.0;
            }
            Some(_) => {}
        }
    }

    /// Takes in what moves have earned, and what time alone allows.
    pub fn end_epoch(&mut self, end: &EpochEnd) {
        let cpus = f64::from(self.gain.cpus);
        self.tokens_s += TRICKLE * cpus * end.elapsed_s;
        self.unseen_s += end.elapsed_s;
        if end.is_repeat {
            // Income that nobody has seen for a second counts half.
            self.income[0] *= window_s(0) / (window_s(0) + end.elapsed_s);
        } else if self.unseen_s > 0.0 {
            self.load.set_rate(&self.gain, end.rate);
            let earned_s = self.earned_s(end);
            self.tokens_s += earned_s;
            for (window, income) in self.income.iter_mut().enumerate() {
                let memory_s = self.unseen_s
                    + match window {
                        0 => 0.0,
                        _ => window_s(window),
                    };
                *income += (earned_s - *income * self.unseen_s) / memory_s;
            }
            self.balance.benefit_ns = self
                .balance
                .benefit_ns
                .saturating_add((earned_s * 1e9) as i64);
            self.unseen_s = 0.0;
        }
        self.tokens_s = self.tokens_s.clamp(-cpus, cpus);
        let epochs = window_s(WINDOWS - 1) / end.elapsed_s.max(f64::MIN_POSITIVE);
        if end.epoch.is_multiple_of((epochs as u32).max(1)) {
            // A price at which nothing is worth moving would never be measured again.
            self.promotion.age();
            self.demotion.age();
            self.collapse.age();
        }
    }

    /// Seconds that moved memory has saved, compared with where it lay first, as far as somebody has looked.
    ///
    /// A program that uses its memory in turns does less while it uses what has become slower. So a loss counts as if it did
    /// as much as before, for as many blocks as were promoted in exchange: a turn of theirs may come. A program that uses all
    /// of it at the same time does both parts equally often: a gain counts as it is.
    fn earned_s(&mut self, end: &EpochEnd) -> f64 {
        let most_s = f64::from(self.gain.cpus) * self.unseen_s;
        let part_exchanged = end.part_exchanged();
        let (mut earned_s, mut as_before_s) = (0.0, 0.0);
        for home in Level::ALL {
            for now in Level::ALL {
                let fresh = self.fresh.get_mut(home).get_mut(now);
                let blocks = *end.away.get(home).get(now);
                let events = fresh.take(blocks, self.unseen_s);
                let saved_s = events * (self.load.event_s.get(home) - self.load.event_s.get(now));
                let saved_s = saved_s.clamp(-most_s, most_s);
                let slowdown = self.load.slowdown(&self.gain, home, now);
                earned_s += saved_s;
                as_before_s += saved_s * (1.0 + part_exchanged * (slowdown - 1.0));
            }
        }
        match earned_s < 0.0 {
            true => as_before_s.max(-most_s),
            false => earned_s,
        }
    }

    /// Takes note of each tier's latency under its load now, where it was measured.
    pub fn loaded(&mut self, latency_ns: &ByLevel<Option<u32>>) {
        self.load.measured(&self.gain, latency_ns);
    }

    /// Takes note that the number of CPUs has changed.
    pub fn set_cpus(&mut self, cpus: u32) {
        self.gain.cpus = cpus;
    }

    /// Takes note of what a batch cost. The budget does not pay for what the host has ordered.
    pub fn moved(
        &mut self,
        direction: Direction,
        tried: ByteCount,
        took_ns: u64,
        is_ordered: bool,
    ) {
        let price = match direction {
            Direction::Promotion => &mut self.promotion,
            Direction::Demotion => &mut self.demotion,
        };
        price.pay(tried.0, took_ns);
        if !is_ordered {
            self.spent(took_ns);
        }
    }

    /// Takes note of what a batch of collapses cost.
    pub fn collapsed(&mut self, tried: ByteCount, took_ns: u64) {
        self.collapse.pay(tried.0, took_ns);
        self.spent(took_ns);
    }

    fn spent(&mut self, took_ns: u64) {
        let cpus = f64::from(self.gain.cpus);
        self.tokens_s = (self.tokens_s - took_ns as f64 * 1e-9).max(-cpus);
        self.balance.cost_ns = self.balance.cost_ns.saturating_add(took_ns);
    }

    /// Takes note that a block has crossed the boundary below a tier; `below` is its place on the slower side.
    /// Income of the longer windows gets the amount that the block would have earned in them.
    pub(crate) fn crossed(
        &mut self,
        heat: &Heat,
        block: Block,
        (level, direction): (Level, Direction),
        below: &Spread,
    ) {
        let extra_s = self.extra_s(level, below, below.resident().0);
        let gain_s = match direction {
            Direction::Promotion => extra_s,
            Direction::Demotion => -extra_s,
        };
        for (window, income) in self.income.iter_mut().enumerate().skip(1) {
            let events = heat.estimate(window, block).rate * heat.span_s(window);
            *income += events * gain_s / window_s(window);
        }
    }

    /// Time that moves may cost now, seconds: the tokens, and a loan. It is the income of sixteen seconds, that of promised
    /// exchanges included. Where moved memory earns only a part of its expected income, only that part is lent.
    pub(crate) fn spendable_s(&self) -> f64 {
        let [.., expected] = self.income;
        let steady = self.income.iter().copied().fold(f64::INFINITY, f64::min);
        let kept = (steady / expected.max(f64::MIN_POSITIVE)).clamp(0.0, 1.0);
        let lasting_s = expected.max(0.0) + self.promised_s(STEADY_WINDOWS - 1);
        self.tokens_s + kept * lasting_s * window_s(STEADY_WINDOWS - 1)
    }

    /// Tokens beyond the first ones, seconds. Loans are for moves, which earn.
    fn spare_s(&self) -> f64 {
        self.tokens_s - TOKENS_S * f64::from(self.gain.cpus)
    }

    /// Time that exchanges would certainly save, by windows from this one on, seconds a second.
    fn promised_s(&self, first: usize) -> f64 {
        let by_boundary = self.promises.0.iter();
        let most = by_boundary.map(|windows| windows[first..].iter().copied().fold(0.0, f64::max));
        most.sum()
    }

    /// Loads that an event stands for, by what events in the slowest tier cost now.
    fn loads_per_event(&self) -> f64 {
        let mut loads = 0.0f64;
        for (event_s, ns) in self.load.event_s.0.iter().zip(self.gain.latency_ns.0) {
            let extra_ns = f64::from(ns) - f64::from(self.gain.latency_ns.0[0]);
            if extra_ns > 0.0 {
                loads = loads.max(event_s * 1e9 / extra_ns);
            }
        }
        loads
    }

    /// Whether it has been measured what moves cost.
    pub(crate) fn knows_prices(&self) -> bool {
        self.promotion.is_known() || self.demotion.is_known()
    }

    /// The cost of promoting `bytes`, seconds.
    fn promotion_s(&self, bytes: u64) -> f64 {
        self.promotion.or(&self.demotion).seconds(bytes)
    }

    /// The cost of demoting `bytes`, seconds.
    fn demotion_s(&self, bytes: u64) -> f64 {
        self.demotion.or(&self.promotion).seconds(bytes)
    }

    /// Whether moves have lost as much as they were allowed to cost at first, and still lose: then they are undone.
    pub(crate) fn has_lost(&self) -> bool {
        let loses = self.income[0] < 0.0 && self.income[1] < 0.0;
        loses && self.tokens_s <= -TOKENS_S * f64::from(self.gain.cpus)
    }

    /// The most blocks that one batch shall move, of which each thread moves no more than `most`.
    pub fn batch_blocks(&self, most: usize) -> usize {
        if !self.knows_prices() {
            return 1;
        }
        let dearer_s = self
            .promotion_s(BLOCK_SIZE)
            .max(self.demotion_s(BLOCK_SIZE));
        let blocks = (BATCH_S / dearer_s) as u64;
        blocks.clamp(1, most as u64) as usize * self.movers()
    }

    /// The number of threads that move blocks at the same time.
    pub fn movers(&self) -> usize {
        self.gain.movers()
    }

    /// The time that all threads together can move in one epoch, seconds.
    fn movers_s(&self, situation: &Situation<'_>) -> f64 {
        situation.epoch_ms as f64 / 1e3 * self.movers() as f64
    }

    /// Memory used for blocks, bytes, without the allocator's overhead.
    pub(crate) fn state_bytes(&self) -> usize {
        self.scans.0.iter().map(Scan::state_bytes).sum()
    }

    /// Cost and benefit of moves so far.
    pub fn balance(&self) -> Balance {
        let [_, now, lately] = self.income;
        Balance {
            is_resting: self.spendable_s() <= 0.0,
            income_ns: (lately.max(0.0) * 1e9) as u64,
            is_falling: now * 2.0 < lately.max(0.0),
            promise_ns: (self.promised_s(0) * 1e9) as u64,
            ..self.balance
        }
    }
}

#[cfg(test)]
mod tests;
