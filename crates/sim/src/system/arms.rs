//! ARMS: tiering without thresholds to tune.
//!
//! Yadalam et al., arXiv 2508.04417 (2025); numbers as in the authors' code (`arms_kernel.h`, `arms_kernel.cpp`, built for
//! their machine without Optane memory).
//!
//! # Problem
//! A threshold of heat, a rate at which counts fade and a limit of moves suit one program on one machine. They are wrong for
//! others.
//!
//! # Approach
//! Loads from both tiers are sampled. Each 500 ms a page's samples go into two moving averages, over 1 s and over 10 s,
//! and 0.4 and 0.6 of these are its score. Pages are ranked by score; the first that fit fast memory are hot, and each turn in which one
//! is adds to its age. A hot page of slow memory goes up, for free memory or for the coldest page
//! of fast memory, under three conditions:
//! - it was hot twice in a row without getting colder;
//! - both its averages are above those of the page that goes down;
//! - the time that the move saves, by score, age and the tiers' latencies, is 1.5 times its cost. The cost is measured.
//!
//! Where traffic to slow memory jumps (Page-Hinkley's test, each second), the short average counts for more and the
//! sampling period is halved, for 20 s at least.
//!
//! A thread with a core of its own reads the samples. Memory is in pages of 2 MiB in both tiers, as HeMem has it. The
//! first version of the library maps devices as HeMem does, and its costs are those of such pages. A later version also
//! moves small pages, for which these costs are too high. Latencies are the host's, as a guest has no such counters; the
//! authors derive them from bandwidth. Left out: stores, which the simulator's unit does not sample. Assumed: looking
//! at a page in a turn, and in the search for new pages each 5 s, costs what Memtis takes for it.
//!
//! # Properties
//! - The hot pages fit fast memory, and no page outside has a higher score than one of them.
//! - A page that goes up has a higher score than the page that comes down for it.

use std::collections::BTreeMap;

use demeter_policy::{BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, Tier};

use super::hemem::{Spinner, tier_of};
use super::{Context, Managed, Manager, Needs};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::sampler::{Record, Sampling};
use crate::machine::tier::LINE_BYTES;

/// Loads for each sample, and after a jump.
const PERIOD: u64 = 10_007;
const PERIOD_ALERT: u64 = 5_003;

/// Time between two turns of the policy thread; turns between two tests for a jump, and between two searches for pages.
const TURN_PS: u64 = 500 * PS_PER_MS;
const TURNS_PER_TEST: u64 = 2;
const TURNS_PER_SEARCH: u64 = 10;

/// Weights of the newest turn in the averages over 1 s and 10 s, and of these in a score, without and after a jump.
const NEWEST: [f64; 2] = [0.6667, 0.0952];
const CALM: [f64; 2] = [0.4, 0.6];
const ALERT: [f64; 2] = [0.731, 0.269];

/// How many times its cost a move has to save.
const MARGIN: f64 = 1.5;

/// Weight of the newest measurement in a move's cost, and by how much the cost falls in a turn without moves.
const COST_NEWEST: f64 = 0.0952;
const COST_FALL: f64 = 1.5;

/// The least cost, in microseconds: copying 2 MiB at 15 GB/s, and 500 for the rest.
const COST_MIN_US: f64 = 636.5;

/// The test for a jump: weights of the newest bandwidth in mean and deviation. Deviations that are forgiven, and
/// deviations that add up to a jump. The least bandwidth of a jump, GB/s, and tests for which it lasts.
const MEAN_NEWEST: f64 = 0.1;
const DEVIATION_NEWEST: f64 = 0.2;
const FORGIVEN: f64 = 0.5;
const JUMP: f64 = 6.0;
const JUMP_MIN_GBPS: f64 = 0.3;
const ALERT_TESTS: u32 = 20;

/// Bytes of what the authors keep for each page (`struct arms_page_info` and its place in their table, rounded).
const ENTRY_BYTES: u64 = 128;

/// Samples and score of a page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    /// Samples since the last turn.
    samples: u32,
    averages: [f64; 2],
    score: f64,
    /// Turns for which it has been hot, and whether it may go up.
    age: u32,
    is_ripe: bool,
    /// Where it lay at the last turn.
    in_fast: bool,
}

impl Page {
    /// Takes the samples of a turn in. `weight`: what a sample stands for. True if the page has become colder.
    fn end_turn(&mut self, weight: f64, bias: [f64; 2]) -> bool {
        let samples = f64::from(std::mem::take(&mut self.samples)) * weight;
        let before = self.score;
        for (average, newest) in self.averages.iter_mut().zip(NEWEST) {
            *average += (samples - *average) * newest;
        }
        self.score = self.averages[0] * bias[0] + self.averages[1] * bias[1];
        self.score < before
    }

    /// It is among the hot pages, or not.
    fn grow_older(&mut self, is_hot: bool, is_falling: bool) {
        if !is_hot {
            (self.age, self.is_ripe) = (0, false);
        } else if self.score != 0.0 {
            self.age = self.age.saturating_add(1);
            self.is_ripe |= self.age > 1 && !is_falling;
        }
    }
}

/// The test for a jump in slow memory's traffic.
#[derive(Debug, Default)]
struct Jump {
    mean: f64,
    deviation: f64,
    sum: f64,
    /// Tests since the last jump, while it lasts.
    since: Option<u32>,
}

impl Jump {
    fn test(&mut self, gbps: f64) {
        self.mean += (gbps - self.mean) * MEAN_NEWEST;
        let square = (gbps - self.mean).powi(2);
        // The authors' formula, which mixes a deviation with a square.
        let mixed = self.deviation + (square - self.deviation) * DEVIATION_NEWEST;
        self.deviation = mixed.max(1e-12).sqrt();
        self.sum = (self.sum + gbps - self.mean - FORGIVEN * self.deviation).max(0.0);
        if self.sum > JUMP * self.deviation {
            self.sum = 0.0;
            if self.since.is_none() && gbps > JUMP_MIN_GBPS {
                self.since = Some(0);
            }
        } else if let Some(since) = &mut self.since {
            *since += 1;
            if *since >= ALERT_TESTS && self.sum <= 0.0 {
                self.since = None;
            }
        }
    }
}

/// A move, in microseconds of each page.
#[derive(Debug, Clone, Copy)]
struct Cost(f64);

impl Cost {
    fn measured(&mut self, took_ps: u64, pages: u64) {
        if pages > 0 {
            let us = took_ps as f64 / 1e6 / pages as f64;
            self.0 += (us - self.0) * COST_NEWEST;
        }
    }

    fn fall(&mut self) {
        self.0 = (self.0 / COST_FALL).max(COST_MIN_US);
    }
}

/// Pages that go up and down.
#[derive(Debug, Default, PartialEq)]
struct Moves {
    up: Vec<Block>,
    down: Vec<Block>,
}

/// Costs and bounds of moves.
#[derive(Debug, Clone, Copy)]
struct Terms {
    /// Microseconds that fast memory is quicker for a load.
    gap_us: f64,
    promotion: Cost,
    demotion: Cost,
    /// Pages for which fast memory is free.
    free: u64,
    /// Pages that may go up.
    pages_max: usize,
}

/// Plans a turn's moves. `ranked`: all pages, the hottest first, of which the first `hot` fit fast memory.
fn plan(ranked: &[(Block, Page)], hot: usize, terms: Terms) -> Moves {
    let mut moves = Moves::default();
    let mut coldest = ranked[hot..].iter().rev().filter(|(_, page)| page.in_fast);
    let mut free = terms.free;
    let saved_us =
        |score: f64, age: u32| score * f64::from(age) * PERIOD_ALERT as f64 * terms.gap_us;
    for (block, page) in ranked[..hot]
        .iter()
        .filter(|(_, page)| !page.in_fast && page.is_ripe)
    {
        let cost_us = MARGIN * terms.promotion.0;
        let is_worth_it = page.score > 0.0 && saved_us(page.score, page.age) >= cost_us;
        if moves.up.len() >= terms.pages_max || !is_worth_it {
            break;
        }
        if free > 0 {
            free -= 1;
        } else {
            let Some((cold_block, cold)) = coldest.next() else {
                break;
            };
            let least = page.averages[0].min(page.averages[1]);
            let most = cold.averages[0].max(cold.averages[1]);
            let cost_us = MARGIN * (terms.promotion.0 + terms.demotion.0);
            if least < most || saved_us(page.score - cold.score, page.age) < cost_us {
                break;
            }
            moves.down.push(*cold_block);
        }
        moves.up.push(*block);
    }
    moves
}

/// The library.
#[derive(Debug)]
pub(crate) struct Arms {
    threshold_ps: u64,
    pages: BTreeMap<Block, Page>,
    waiting: Vec<GuestVirtAddr>,
    samples_seen: u64,
    spinner: Spinner,
    turns: u64,
    jump: Jump,
    /// Whether the units sample as after a jump.
    is_alert: bool,
    /// Lines of slow memory by the last test.
    lines_before: u64,
    promotion: Cost,
    demotion: Cost,
    gap_us: f64,
}

impl Arms {
    /// Nothing seen yet.
    pub(crate) fn new(managed: &Managed<'_>) -> Self {
        Self {
            threshold_ps: managed.load_ps,
            pages: BTreeMap::new(),
            waiting: vec![],
            samples_seen: 0,
            spinner: Spinner::default(),
            turns: 0,
            jump: Jump::default(),
            is_alert: false,
            lines_before: 0,
            promotion: Cost(COST_MIN_US),
            demotion: Cost(COST_MIN_US),
            gap_us: 0.0,
        }
    }

    /// Looks for pages that it does not know yet.
    fn search(&mut self, guest: &Guest, actor: &mut Actor<'_>) {
        for vma in guest.vmas() {
            let (first, end) = (Block::of(vma.start()).0, vma.end().0.div_ceil(BLOCK_SIZE));
            for block in (first..end).map(Block) {
                if tier_of(guest, block).is_some() {
                    self.pages.entry(block).or_default();
                }
            }
        }
        self.charge_looks(actor);
    }

    fn charge_looks(&self, actor: &mut Actor<'_>) {
        let looks_ps = self.pages.len() as u64 * actor.costs.memtis_page_ps;
        actor.charge(Cause::Classify, looks_ps);
    }

    /// Measures slow memory's traffic and the tiers' latencies.
    fn test(&mut self, actor: &Actor<'_>) {
        let [fast, slow] = actor.memory.tiers();
        let lines = (slow.lines_ever() - self.lines_before) << actor.k;
        self.lines_before = slow.lines_ever();
        let ns = TURNS_PER_TEST * TURN_PS / 1000;
        self.jump.test((lines * LINE_BYTES) as f64 / ns as f64);
        self.gap_us = (slow.latency_ps as f64 - fast.latency_ps as f64) / 1e6;
    }

    /// Ends a turn for all pages; returns them, the hottest first, and how many fit fast memory.
    fn rank(&mut self, guest: &Guest) -> (Vec<(Block, Page)>, usize) {
        let bias = match self.jump.since {
            Some(_) => ALERT,
            None => CALM,
        };
        let weight = match self.is_alert {
            true => 1.0,
            // Counts are kept as if all were sampled as after a jump.
            false => (PERIOD / PERIOD_ALERT) as f64,
        };
        let mut ranked = Vec::with_capacity(self.pages.len());
        let mut fits = (guest.usable(Tier::Fast).0 / BLOCK_SIZE) as usize;
        self.pages.retain(|&block, page| {
            let Some(tier) = tier_of(guest, block) else {
                return false;
            };
            page.in_fast = tier == Tier::Fast;
            fits += usize::from(page.in_fast);
            let is_falling = page.end_turn(weight, bias);
            ranked.push((block, *page, is_falling));
            true
        });
        ranked.sort_by(|a, b| b.1.score.total_cmp(&a.1.score));
        let hot = fits.min(ranked.len());
        for (i, (block, page, is_falling)) in ranked.iter_mut().enumerate() {
            page.grow_older(i < hot, *is_falling);
            self.pages.insert(*block, *page);
        }
        let ranked = ranked.into_iter().map(|(block, page, _)| (block, page));
        (ranked.collect(), hot)
    }

    /// Moves pages, and measures what that takes.
    fn carry_out(&mut self, moves: &Moves, guest: &mut Guest, actor: &mut Actor<'_>) {
        if moves.up.is_empty() {
            self.promotion.fall();
            self.demotion.fall();
            return;
        }
        for (blocks, to) in [(&moves.down, Tier::Slow), (&moves.up, Tier::Fast)] {
            let began_ps = actor.now_ps();
            let mut moved = 0;
            for &block in blocks {
                moved += u64::from(guest.migrate_block(block, to, actor) > 0);
            }
            let cost = match to {
                Tier::Slow => &mut self.demotion,
                Tier::Fast => &mut self.promotion,
            };
            cost.measured(actor.now_ps() - began_ps, moved);
        }
    }
}

impl Manager for Arms {
    fn needs(&self) -> Needs {
        Needs {
            huge_in_slow: true,
            ..Needs::default()
        }
    }

    fn sampling(&self, k: u32) -> Option<Sampling> {
        let period = match self.is_alert {
            true => PERIOD_ALERT,
            false => PERIOD,
        };
        Some(Sampling {
            period: period.max(1 << k),
            threshold_ps: self.threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.spinner = Spinner::since(now_ps);
        now_ps
    }

    /// The policy thread's turn.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let due_ps = actor.now_ps() + TURN_PS;
        if self.turns.is_multiple_of(TURNS_PER_SEARCH) {
            self.search(guest, actor);
        }
        self.turns += 1;
        if self.turns.is_multiple_of(TURNS_PER_TEST) {
            self.test(actor);
        }
        self.charge_looks(actor);
        let (ranked, hot) = self.rank(guest);
        let turn_us = (TURN_PS / 1_000_000) as f64;
        let terms = Terms {
            gap_us: self.gap_us,
            promotion: self.promotion,
            demotion: self.demotion,
            free: guest.usable(Tier::Fast).0 / BLOCK_SIZE,
            pages_max: (turn_us / (self.promotion.0 + self.demotion.0)) as usize,
        };
        let moves = plan(&ranked, hot, terms);
        self.carry_out(&moves, guest, actor);
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
            if let Some(page) = self.pages.get_mut(&Block::of(gva)) {
                page.samples += 1;
            }
        }
        self.spinner.spin(actor);
        let is_alert = self.jump.since.is_some();
        std::mem::replace(&mut self.is_alert, is_alert) != is_alert
    }

    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        ByteCount(self.pages.len() as u64 * ENTRY_BYTES)
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn terms(free: u64, pages_max: usize) -> Terms {
        Terms {
            gap_us: 0.1,
            promotion: Cost(5.0),
            demotion: Cost(5.0),
            free,
            pages_max,
        }
    }

    prop_compose! {
        fn ranked()(
            pages in prop::collection::vec((0.0..50.0f64, 0.0..50.0f64, 0u32..9, any::<bool>(), any::<bool>()), 1..60),
        ) -> Vec<(Block, Page)> {
            let page = |(i, (a, b, age, is_ripe, in_fast)): (usize, (f64, f64, u32, bool, bool))| {
                let mut page = Page { age, is_ripe, in_fast, ..Page::default() };
                page.averages = [a, b];
                page.score = 0.4 * a + 0.6 * b;
                (Block(i as u64), page)
            };
            let mut ranked: Vec<_> = pages.into_iter().enumerate().map(page).collect();
            ranked.sort_by(|a, b| b.1.score.total_cmp(&a.1.score));
            ranked
        }
    }

    proptest! {
        #[test]
        fn hotter_pages_replace_colder_ones(
            ranked in ranked(), hot in 0usize..60, free in 0u64..10, pages_max in 0usize..40,
        ) {
            let hot = hot.min(ranked.len());
            let moves = plan(&ranked, hot, terms(free, pages_max));
            prop_assert!(moves.up.len() <= pages_max);
            prop_assert!(moves.up.len() as u64 <= free + moves.down.len() as u64);
            let of = |block: &Block| ranked.iter().find(|(b, _)| b == block).unwrap().1;
            for block in &moves.up {
                let page = of(block);
                prop_assert!(!page.in_fast && page.is_ripe && page.score > 0.0);
                prop_assert!(moves.down.iter().all(|d| of(d).in_fast && of(d).score <= page.score));
            }
        }

        /// A steady load is no jump; one that is many times as high is.
        #[test]
        fn a_jump_is_noticed(before in 1.0..5.0f64, times in 5.0..20.0f64) {
            let mut jump = Jump::default();
            (0..100).for_each(|_| jump.test(before));
            prop_assert_eq!(jump.since, None);
            (0..8).for_each(|_| jump.test(before * times));
            prop_assert!(jump.since.is_some());
            (0..200).for_each(|_| jump.test(before * times));
            prop_assert_eq!(jump.since, None);
        }
    }
}
