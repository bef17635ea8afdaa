//! PACT: pages weigh the stalls that they cause, instead of their accesses.
//!
//! ASPLOS 2026; numbers as in the authors' code (`MoatLab/PACT`).
//!
//! # Problem
//! A miss that overlaps with others costs little. Pages that are accessed often are not always those that the program
//! waits for.
//!
//! # Approach
//! Each 20 ms the counters tell how long the program stalled on slow memory: its misses times their latency, over the
//! misses in flight. Sampled loads (one of 400) divide that among the pages they went to. A page's score is the sum of its parts,
//! and never fades. Scores fall into 20 bins. A bin's width follows from 100 scores taken at random. It is twice
//! the spread of their inner half, over the cube root of the number of known pages. It is doubled if known pages are more
//! than 0.7 times those that wait for promotion, else halved. A page of slow memory that reaches the top bin is queued at once. A thread moves up to 4,096 pages
//! a call. Reclaim demotes. Each second it is switched on if less was demoted than promoted, else off. So promotions come first: `move_pages`
//! goes down to the lowest watermark.
//!
//! The model takes the program's wait for slow memory, walks aside, for the stall that the authors compute. Cycles are those
//! of their processor (assumed: 2.2 GHz). Of pages that a base page stands for each has its part of the score. Samples are taken up each
//! 20 ms; a sample of fast memory is dropped, as the authors' event counts slow memory's only. Left out: the
//! ring of 131,072 updates, which never fills.
//!
//! # Properties
//! - The stalls of a window are divided among its samples, and nothing is lost.
//! - Only a page of slow memory in the top bin is queued, and once.

use std::collections::{BTreeMap, VecDeque};

use demeter_policy::{ByteCount, GuestVirtAddr, Tier};
use demeter_scenario::rng::Rng;

use super::reclaimer::Reclaimer;
use super::{Context, Managed, Manager};
use crate::guest::Guest;
use crate::machine::actor::{Actor, Vcpu};
use crate::machine::cost::PS_PER_MS;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;
use crate::machine::sampler::{Record, Sampling};

/// Loads of slow memory for each sample.
const PERIOD: u64 = 400;

/// Time between two looks at the counters, and between two decisions about reclaim.
const WINDOW_PS: u64 = 20 * PS_PER_MS;
const WINDOWS_PER_DECISION: u64 = 50;

/// Pages of one call.
const BATCH: usize = 4096;

/// Pages that are known at the most, and bytes for each.
const PAGES_MAX: usize = 2 << 20;
const ENTRY_BYTES: u64 = 25;

/// Bins, and their width in cycles at first.
const BINS: f64 = 20.0;
const WIDTH: f64 = 1000.0;

/// Scores that tell the spread, and pages known for each that waits above which bins are made wider.
const RESERVOIR: usize = 100;
const CROWDED: f64 = 0.7;

/// A cycle of the authors' processor.
const CYCLE_PS: f64 = 455.0;

/// Scores taken at random of all that there were.
#[derive(Debug)]
struct Reservoir {
    scores: Vec<f64>,
    seen: u64,
    rng: Rng,
}

impl Reservoir {
    fn new() -> Self {
        Self {
            scores: vec![],
            seen: 0,
            rng: Rng::new(1, 0),
        }
    }

    fn add(&mut self, score: f64) {
        self.seen += 1;
        if self.scores.len() < RESERVOIR {
            self.scores.push(score);
            return;
        }
        let at = self.rng.below(self.seen) as usize;
        if let Some(old) = self.scores.get_mut(at) {
            *old = score;
        }
    }

    /// How far the inner half of the scores reaches, if that is known.
    fn spread(&self) -> Option<f64> {
        let mut scores = self.scores.clone();
        scores.sort_by(f64::total_cmp);
        let at = |quarters: usize| scores.get(quarters * scores.len() / 4).copied();
        let spread = at(3)? - at(1)?;
        (scores.len() >= 4 && spread > 0.0).then_some(spread)
    }
}

/// The width of a bin, by the spread of scores and the numbers of pages that are known and that wait.
fn width(spread: f64, known: usize, waiting: usize) -> f64 {
    let width = 2.0 * spread / (known as f64).cbrt();
    match (known as f64) / (waiting as f64) {
        _ if waiting == 0 => width,
        crowded if crowded > CROWDED => 2.0 * width,
        _ => width / 2.0,
    }
}

/// Score and state of a page.
#[derive(Debug, Clone, Copy, Default)]
struct Page {
    /// Cycles.
    score: f64,
    is_queued: bool,
}

/// The daemon.
#[derive(Debug)]
pub(crate) struct Pact {
    threshold_ps: u64,
    pages: BTreeMap<GuestVirtAddr, Page>,
    /// Base pages that may be known.
    pages_max: usize,
    waiting: Vec<GuestVirtAddr>,
    samples_seen: u64,
    reservoir: Reservoir,
    width: f64,
    queue: VecDeque<GuestVirtAddr>,
    /// Stalls on slow memory by the last look.
    stalled_ps: u64,
    windows: u64,
    reclaimer: Reclaimer,
    may_demote: bool,
}

impl Pact {
    /// Nothing seen yet.
    pub(crate) fn new(managed: &Managed<'_>) -> Self {
        Self {
            threshold_ps: managed.tiers[1].latency_ps,
            pages: BTreeMap::new(),
            pages_max: PAGES_MAX,
            waiting: vec![],
            samples_seen: 0,
            reservoir: Reservoir::new(),
            width: WIDTH,
            queue: VecDeque::new(),
            stalled_ps: 0,
            windows: 0,
            reclaimer: Reclaimer::default(),
            may_demote: true,
        }
    }

    /// Divides what was stalled since the last look among the pages that were sampled.
    fn score(&mut self, guest: &Guest, actor: &mut Actor<'_>) {
        let stalled = |vcpu: &Vcpu| vcpu.bill.of(Cause::Slow);
        let stalled_ps: u64 = actor.vcpus.iter().map(stalled).sum();
        let since_ps = stalled_ps - std::mem::replace(&mut self.stalled_ps, stalled_ps);
        let samples = std::mem::take(&mut self.waiting);
        let slow: Vec<_> = samples
            .into_iter()
            .filter(|&gva| {
                let found = guest.tables.find(gva);
                found.is_some_and(|(entry, _)| guest.tier_of(entry.index()) == Tier::Slow)
            })
            .collect();
        self.samples_seen += slow.len() as u64;
        actor.charge(
            Cause::Classify,
            slow.len() as u64 * actor.costs.memtis_sample_ps,
        );
        let all = since_ps as f64 / CYCLE_PS;
        let each = all / slow.len().max(1) as f64 / f64::from(1u32 << actor.k);
        for gva in slow {
            self.add(guest.page_start(gva, PageSize::Base), each);
        }
    }

    /// Adds stalls to a page's score, and queues it if it reaches the top bin.
    fn add(&mut self, at: GuestVirtAddr, stalls: f64) {
        if self.pages.len() >= self.pages_max && !self.pages.contains_key(&at) {
            return;
        }
        let page = self.pages.entry(at).or_default();
        page.score += stalls;
        self.reservoir.add(page.score);
        if page.score >= (BINS - 1.0) * self.width && !page.is_queued {
            page.is_queued = true;
            self.queue.push_back(at);
        }
    }

    /// Promotes what waits, a call at a time, as far as there is room.
    fn promote(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        let until_ps = actor.now_ps() + WINDOW_PS;
        while actor.now_ps() < until_ps && !self.queue.is_empty() {
            let (mut room, mut real) = (guest.allocatable().0, 0);
            let mut batch = vec![];
            while real < BATCH
                && let Some(&at) = self.queue.front()
            {
                let found = guest.tables.find(at);
                let slow = found.filter(|(entry, _)| guest.tier_of(entry.index()) == Tier::Slow);
                let size = slow.map(|(_, size)| size);
                let start = size.map(|size| guest.page_start(at, size));
                // A huge page goes up once, whatever part of it waits.
                let is_new = start.is_some() && batch.last() != start.as_ref();
                let bytes = size.filter(|_| is_new).map_or(0, |size| guest.bytes(size));
                let Some(left) = room.checked_sub(bytes) else {
                    break;
                };
                room = left;
                real += match size {
                    Some(PageSize::Base) => 1 << actor.k,
                    _ => 1,
                };
                self.queue.pop_front();
                if let Some(page) = self.pages.get_mut(&at) {
                    page.is_queued = false;
                }
                batch.extend(start.filter(|_| is_new));
            }
            if batch.is_empty() && !self.queue.is_empty() {
                // A call without room fails, page by page, and each may be queued by its next sample.
                self.reclaimer.wake(actor.now_ps());
                for at in self.queue.drain(..) {
                    if let Some(page) = self.pages.get_mut(&at) {
                        page.is_queued = false;
                    }
                }
                return;
            }
            guest.migrate_pages(&batch, Tier::Fast, actor);
        }
    }
}

impl Manager for Pact {
    /// A period is at least the `2^k` loads that a simulated one stands for.
    fn sampling(&self, k: u32) -> Option<Sampling> {
        Some(Sampling {
            period: PERIOD.max(1 << k),
            threshold_ps: self.threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, _guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        now_ps + WINDOW_PS
    }

    /// The end of a window, and the moving thread's turn.
    fn turn(&mut self, ctx: &mut Context<'_>) -> u64 {
        let Context { guest, actor, .. } = ctx;
        let due_ps = actor.now_ps() + WINDOW_PS;
        self.pages_max = PAGES_MAX >> actor.k;
        self.score(guest, actor);
        if let Some(spread) = self.reservoir.spread() {
            let [known, waiting] = [self.pages.len(), self.queue.len()].map(|n| n << actor.k);
            self.width = width(spread, known, waiting);
        }
        self.windows += 1;
        if self.windows.is_multiple_of(WINDOWS_PER_DECISION) {
            self.may_demote = guest.counts.demoted_bytes < guest.counts.promoted_bytes;
        }
        self.promote(guest, actor);
        due_ps.max(actor.now_ps())
    }

    fn take_samples(&mut self, records: &[Record]) {
        self.waiting.extend(records.iter().map(|r| r.gva));
    }

    fn reclaim_since_ps(&self, now_ps: u64) -> Option<u64> {
        self.reclaimer
            .wants_turn(now_ps)
            .filter(|_| self.may_demote)
    }

    fn reclaim(&mut self, now_ps: u64, ctx: &mut Context<'_>) {
        let guest = &mut *ctx.guest;
        self.reclaimer
            .turn(now_ps, &mut ctx.actor, |actor, until_ps| {
                guest.reclaim(actor, until_ps)
            });
    }

    fn memory_overhead(&self, guest: &Guest) -> ByteCount {
        ByteCount((self.pages.len() as u64 * ENTRY_BYTES) << guest.k())
    }

    fn samples_seen(&self) -> u64 {
        self.samples_seen
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    fn pact(width: f64) -> Pact {
        Pact {
            threshold_ps: 0,
            pages: BTreeMap::new(),
            pages_max: PAGES_MAX,
            waiting: vec![],
            samples_seen: 0,
            reservoir: Reservoir::new(),
            width,
            queue: VecDeque::new(),
            stalled_ps: 0,
            windows: 0,
            reclaimer: Reclaimer::default(),
            may_demote: true,
        }
    }

    proptest! {
        #[test]
        fn stalls_add_up_and_the_top_bin_is_queued_once(
            stalls in prop::collection::vec((0u64..20, 0.0..5000.0f64), 1..500),
        ) {
            let mut pact = pact(WIDTH);
            for &(page, stalls) in &stalls {
                pact.add(GuestVirtAddr(page << 12), stalls);
            }
            let sum: f64 = stalls.iter().map(|(_, stalls)| stalls).sum();
            let scores: f64 = pact.pages.values().map(|page| page.score).sum();
            prop_assert!((sum - scores).abs() < 1e-6 * sum.max(1.0));
            for (at, page) in &pact.pages {
                let queued = pact.queue.iter().filter(|q| *q == at).count();
                prop_assert_eq!(queued, usize::from(page.score >= 19.0 * WIDTH));
            }
        }

        #[test]
        fn a_reservoir_knows_the_spread(spread in 1.0..1e6f64) {
            let mut reservoir = Reservoir::new();
            (0..10_000).for_each(|i| reservoir.add(f64::from(i % 1000) / 1000.0 * spread));
            prop_assert_eq!(reservoir.scores.len(), RESERVOIR);
            let found = reservoir.spread().unwrap();
            prop_assert!((0.3 * spread..0.7 * spread).contains(&found), "{} of {}", found, spread);
        }
    }

    #[test]
    fn bins_are_wider_where_few_pages_wait() {
        assert_eq!(width(1000.0, 1000, 0), 200.0);
        assert_eq!(width(1000.0, 1000, 10), 400.0);
        assert_eq!(width(1000.0, 1000, 2000), 100.0);
        assert_eq!(Reservoir::new().spread(), None);
    }
}
