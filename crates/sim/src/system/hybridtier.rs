//! HybridTier: page frequency and momentum in two small filters, instead of a counter per page.
//!
//! Song et al., ASPLOS 2025; constants from the authors' artifact, which has separate programs for small and huge
//! pages. It tracks by sampled loads, classifies by two counting Bloom filters, and migrates pages in batches.
//!
//! # Problem
//! A counter per page uses memory and cache. A counter that decays slowly reacts late when the hot set changes.
//!
//! # Approach
//! Each CPU takes up to 100,001 samples a second. The reading thread counts them in batches of 100,000, in two filters.
//! The larger one ages slowly (frequency), the smaller one soon (momentum). A sampled page with enough of either is
//! promoted. If less than 1.25 % of fast memory is free, pages with too little of both are demoted in address order,
//! until 5 % is free. Pages with frequency but no momentum get a second chance: if they are rarely sampled within 60 s,
//! they are demoted, too. While more than 100 MiB/s is demoted, the thread pauses for a second after each demotion.
//!
//! Sampling stops if two sweeps through memory find too few cold pages, or if promotions are rare for a long time.
//! After two minutes, it checks the share of loads from fast memory each minute. When that share falls, both filters
//! age and sampling resumes. Before it stops, it lowers the frequency limit step by step, as long as the pages above
//! the limit fill less than four fifths of fast memory.
//!
//! The momentum filter is tiny, and its ageing interval is constant. With little fast memory (below about 16 GiB of
//! small pages), every page therefore has momentum, and no page is ever cold.
//!
//! If a page of the model stands for `2^k` small pages, one of these represents it. The model then takes one of `2^k`
//! samples, with filters and batches `2^k` times smaller. If all of them counted together, a page without samples would
//! never be found, although some of its real pages have none.
//!
//! Not modelled: a lower sampling rate for fast loads once four fifths of their samples meet a saturated counter.
//! Guests have no counters of tiers, so the model provides the host's.
//!
//! Every system is one file, and the artifact's program is long, so this file is long, too.
//!
//! # Properties
//! - Sampling resumes if the share of fast loads falls, but not if it is stable or rises.

use std::collections::{BTreeMap, VecDeque};
use std::ops::Range;

use demeter_policy::{BLOCK_SIZE, Block, ByteCount, GuestVirtAddr, MIB, Tier, VirtRange};

use super::counting_bloom::{CountingFilter, FilterConfig};
use super::{Context, Managed, Manager};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::ledger::Cause;
use crate::machine::radix::PageSize;
use crate::machine::sampler::{Record, Sampling};

/// Time between two samples of a CPU that only loads. With loads of 80 ns that is one in 125; the authors' log of their
/// own program has one in 113.
const SAMPLE_PS: u64 = 1_000_000_000_000 / 100_001;

/// Samples counted at a time.
const BATCH: u64 = 100_000;

/// Capacity of a thread's sample buffers, for loads of both tiers, while the reading thread pauses.
const BUFFER: u64 = 2 * 8192;

/// Samples between two ageings of momentum.
const MOMENTUM_SAMPLES: u64 = 1_100_000;

/// Shares of fast memory in 1/10,000. Demotion starts if less than the first is free, and ends at the second. The
/// frequency limit is lowered if hot pages fill less than the third.
const DEMOTE_BELOW: u64 = 125;
const DEMOTE_UNTIL: u64 = 500;
const HOT_ENOUGH: u64 = 8000;

/// Demotion rates in bytes per second, and the length of a pause. Above the first rate, the thread pauses after each
/// demotion; below the second, it stops pausing.
const REST_ABOVE: u64 = 100 * MIB;
const NO_REST_BELOW: u64 = 10 * MIB;
const REST_PS: u64 = 1_000_000_000_000;

/// Duration of a second chance.
const CHANCE_PS: u64 = 60_000_000_000_000;

/// Number of failed sweeps, after a complete one, until sampling stops.
const SWEEPS: u32 = 10;

/// Real pages moved by one call.
const PAGES_PER_CALL: usize = 1024;

/// Bytes of address space scanned between counts of cold pages: 1,024 small pages (assumed for huge pages).
const STRETCH_BYTES: u64 = 1024 * 4096;

/// Delay after the end of sampling, interval between checks of fast loads, and number of checks per trend.
const SETTLE_PS: u64 = 120_000_000_000_000;
const LOOK_PS: u64 = 60_000_000_000_000;
const LOOKS: usize = 5;

/// Parameters that differ between the programs for small and huge pages.
#[derive(Debug)]
struct Kind {
    is_huge: bool,
    /// Counters per word of a filter, and the saturation value.
    per_word: u64,
    count_max: u16,
    /// Divisor of the momentum filter's memory.
    momentum_part: u64,
    /// Samples per page of fast memory between two ageings of frequency.
    samples_per_page: u64,
    /// Frequency limit of promotion, its minimum and step; momentum limit of promotion.
    frequency: u16,
    frequency_least: u16,
    frequency_step: u16,
    momentum: u16,
    /// Below this momentum, a page has none: for frequencies below the limit, and above it.
    momentum_of_cold: u16,
    momentum_of_chance: u16,
    /// Maximum number of second chances at a time, and the samples that a page then needs.
    chances: usize,
    chance_samples: u16,
    /// After `plateau_from` batches, every `plateau_batches` batches: whether at most `plateau_pages` were promoted.
    plateau_from: u64,
    plateau_batches: u64,
    plateau_pages: u64,
    /// Sampling resumes if the share of fast loads falls by more than this per check.
    falls: f64,
}

static SMALL: Kind = Kind {
    is_huge: false,
    per_word: 16,
    count_max: 15,
    momentum_part: 100,
    samples_per_page: 160,
    frequency: 5,
    frequency_least: 3,
    frequency_step: 1,
    momentum: 3,
    momentum_of_cold: 1,
    momentum_of_chance: 1,
    chances: 10_000,
    chance_samples: 1,
    plateau_from: 500,
    plateau_batches: 20,
    plateau_pages: 25_000,
    falls: 0.01,
};

static HUGE: Kind = Kind {
    is_huge: true,
    per_word: 4,
    count_max: u16::MAX,
    momentum_part: 8,
    samples_per_page: 64_000,
    frequency: 1000,
    frequency_least: 600,
    frequency_step: 100,
    momentum: 200,
    momentum_of_cold: 400,
    momentum_of_chance: 20,
    chances: 1000,
    chance_samples: 100,
    plateau_from: 100,
    plateau_batches: 50,
    plateau_pages: 100,
    falls: 0.02,
};

/// Monitor of the share of fast loads, while sampling is off.
#[derive(Debug)]
struct FastShareMonitor {
    due_ps: u64,
    lines_before: [u64; 2],
    shares: VecDeque<f64>,
}

impl FastShareMonitor {
    /// Starts to monitor.
    fn since(now_ps: u64, lines: [u64; 2]) -> Self {
        Self {
            due_ps: now_ps + SETTLE_PS,
            lines_before: lines,
            shares: VecDeque::new(),
        }
    }

    /// Adds the traffic of the tiers so far. Once there are enough checks, returns the change of fast memory's share
    /// per check, by linear regression.
    fn look(&mut self, lines: [u64; 2]) -> Option<f64> {
        self.due_ps += LOOK_PS;
        let [fast, slow] = [0, 1].map(|i| lines[i].saturating_sub(self.lines_before[i]) as f64);
        self.lines_before = lines;
        self.shares.push_back(fast / (fast + slow).max(1.0));
        if self.shares.len() <= LOOKS {
            return None;
        }
        self.shares.pop_front();
        let middle = (LOOKS - 1) as f64 / 2.0;
        let shares = self.shares.iter().enumerate();
        let [xy, xx] = shares.fold([0.0; 2], |[xy, xx], (i, share)| {
            let x = i as f64 - middle;
            [xy + x * share, xx + x * x]
        });
        Some(xy / xx)
    }
}

/// The HybridTier library.
#[derive(Debug)]
pub(crate) struct HybridTier {
    load_ps: u64,
    threads: u64,
    kind: &'static Kind,
    k: u32,
    frequency: CountingFilter,
    momentum: CountingFilter,
    /// Frequency limit of a hot page.
    limit: u16,
    /// Waiting samples: one of `one_of` is kept, and counts for `counts_for`.
    waiting: Vec<GuestVirtAddr>,
    one_of: u64,
    counts_for: u64,
    samples_seen: u64,
    /// Whether the thread pauses, and until when.
    rests: bool,
    rests_until_ps: u64,
    rest_ps: u64,
    demoted_ps: u64,
    /// Position of the search for cold pages, whether the last search reached the end, and the number of failed
    /// searches since.
    next: GuestVirtAddr,
    has_swept: bool,
    sweeps: u32,
    /// Pages with a second chance, and their frequency at its start.
    chances: Vec<(GuestVirtAddr, u16)>,
    chances_since_ps: u64,
    batches: u64,
    promoted_bytes: u64,
    /// Set while sampling is off.
    watch: Option<FastShareMonitor>,
}

impl HybridTier {
    /// A library without samples.
    pub(crate) fn new(managed: &Managed) -> Self {
        Self {
            load_ps: managed.load_ps.max(1),
            threads: managed.threads,
            kind: &SMALL,
            k: 0,
            frequency: CountingFilter::default(),
            momentum: CountingFilter::default(),
            limit: SMALL.frequency,
            waiting: vec![],
            one_of: 1,
            counts_for: 1,
            samples_seen: 0,
            rests: false,
            rests_until_ps: 0,
            rest_ps: 0,
            demoted_ps: 0,
            next: GuestVirtAddr(0),
            has_swept: false,
            sweeps: 0,
            chances: vec![],
            chances_since_ps: 0,
            batches: 0,
            promoted_bytes: 0,
            watch: None,
        }
    }

    /// Loads per sample, for real loads and for the model. A simulated load stands for `2^k` and is sampled at most
    /// once.
    fn periods(&self, k: u32) -> [u64; 2] {
        let period = (SAMPLE_PS / self.load_ps).max(1);
        [period, period.max(1 << k)]
    }

    /// Start of the unit that is counted and moved as one.
    fn unit(&self, gva: GuestVirtAddr) -> GuestVirtAddr {
        GuestVirtAddr(gva.0 & !(self.unit_bytes() - 1))
    }
    fn unit_bytes(&self) -> u64 {
        match self.kind.is_huge {
            true => BLOCK_SIZE,
            false => 4096 << self.k,
        }
    }

    /// The scale: log2 of the real pages per page of the model.
    fn scale(&self) -> u32 {
        if self.kind.is_huge { 0 } else { self.k }
    }

    /// Number of simulated samples for a number of real ones.
    fn taken(&self, real: u64) -> usize {
        ((real >> self.scale()) / self.counts_for).max(1) as usize
    }

    /// Migrates pages, as far as memory is free; returns the bytes moved.
    fn move_units(
        &self,
        units: &[GuestVirtAddr],
        to: Tier,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> u64 {
        if self.kind.is_huge {
            let blocks = units.iter().map(|&at| Block::of(at));
            return blocks.map(|b| guest.migrate_block(b, to, actor)).sum();
        }
        let per_call = (PAGES_PER_CALL >> self.k).max(1);
        let calls = units.chunks(per_call);
        calls.map(|c| guest.migrate_pages(c, to, actor)).sum()
    }

    /// Counts a batch of samples; returns hot units of slow memory.
    fn count(
        &mut self,
        batch: &[GuestVirtAddr],
        guest: &Guest,
        actor: &mut Actor<'_>,
    ) -> Vec<GuestVirtAddr> {
        let mut units = BTreeMap::new();
        for &gva in batch {
            *units.entry(self.unit(gva)).or_insert(0) += self.counts_for;
        }
        let sample_ps = actor.costs.memtis_sample_ps << self.scale();
        actor.charge(Cause::Classify, units.len() as u64 * sample_ps);
        let mut hot = vec![];
        for (at, samples) in units {
            let frequency = self.frequency.add(at.0, samples);
            let momentum = self.momentum.add(at.0, samples);
            let is_hot = frequency >= self.limit || momentum >= self.kind.momentum;
            let entry = guest.tables.find(at);
            if is_hot && entry.is_some_and(|(e, _)| guest.tier_of(e.index()) == Tier::Slow) {
                hot.push(at);
            }
        }
        hot
    }

    /// Counts a batch of samples, promotes hot pages, and demotes if memory is short.
    fn batch(&mut self, batch: &[GuestVirtAddr], guest: &mut Guest, actor: &mut Actor<'_>) {
        let hot = self.count(batch, guest, actor);
        for units in hot.chunks((PAGES_PER_CALL >> self.scale()).max(1)) {
            if guest.usable(Tier::Fast).0 == 0 {
                break;
            }
            let moved = self.move_units(units, Tier::Fast, guest, actor);
            self.promoted_bytes += moved;
            if moved == 0 {
                break;
            }
        }
        let fast = u64::from(guest.frames_of(Tier::Fast)) * guest.bytes(PageSize::Base);
        if guest.usable(Tier::Fast).0 <= fast / 10_000 * DEMOTE_BELOW {
            self.end_chances(guest, actor);
            let until = fast / 10_000 * DEMOTE_UNTIL;
            self.demote(
                until.saturating_sub(guest.usable(Tier::Fast).0),
                guest,
                actor,
            );
        }
        self.batches += 1;
        if self.watch.is_none() {
            self.look_for_plateau(fast, guest, actor);
        }
    }

    /// Demotes `bytes` of cold pages.
    fn demote(&mut self, bytes: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        let mut cold = vec![];
        let enough = (bytes / self.unit_bytes()) as usize;
        let vmas = guest.vmas().to_vec();
        'search: for vma in &vmas {
            let Some(range) = VirtRange::new(vma.start().max(self.next), vma.end()) else {
                continue;
            };
            let mut at = range.start();
            while at < range.end() {
                let stretch = STRETCH_BYTES.max(self.unit_bytes());
                let end = GuestVirtAddr(range.end().0.min(at.0 + stretch));
                self.look_for_cold(at..end, &mut cold, guest, actor);
                at = end;
                self.next = end;
                if cold.len() >= enough {
                    break 'search;
                }
            }
        }
        let has_swept = cold.len() < enough;
        if has_swept {
            self.next = GuestVirtAddr(0);
        }
        let moved = self.move_units(&cold, Tier::Slow, guest, actor);
        self.rest_after(moved, actor.now_ps());
        match (self.has_swept, has_swept) {
            (true, true) => self.give_up(actor),
            (true, false) => {
                self.sweeps += 1;
                if self.sweeps == SWEEPS {
                    self.give_up(actor);
                }
            }
            (false, _) => {}
        }
        self.has_swept = has_swept && self.watch.is_none();
    }

    /// Finds cold pages of fast memory in a range; some others get a second chance.
    fn look_for_cold(
        &mut self,
        range: Range<GuestVirtAddr>,
        cold: &mut Vec<GuestVirtAddr>,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) {
        let (mut units, mut seen) = (vec![], 0);
        let middle = guest.first_slow_frame();
        guest.tables.for_each(range, |at, entry, size| {
            seen += match size {
                PageSize::Base => 1 << actor.k,
                _ => 1,
            };
            if entry.index() < middle {
                units.push(self.unit(at));
            }
        });
        actor.charge(Cause::Classify, seen * actor.costs.scan_entry_ps);
        units.dedup();
        for at in units {
            let momentum = self.momentum.of(at.0);
            let is_rare = self.frequency.of(at.0) < self.limit;
            if is_rare && momentum < self.kind.momentum_of_cold {
                cold.push(at);
            } else if !is_rare
                && momentum < self.kind.momentum_of_chance
                && self.chances.len() < (self.kind.chances >> self.scale()).max(1)
            {
                self.chances.push((at, self.frequency.make_room(at.0)));
            }
        }
    }

    /// Ends expired second chances: demotes pages that were rarely sampled.
    fn end_chances(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if self.chances.is_empty() || actor.now_ps() < self.chances_since_ps + CHANCE_PS {
            return;
        }
        self.chances_since_ps = actor.now_ps();
        let chances = std::mem::take(&mut self.chances).into_iter();
        let needed = self.kind.chance_samples;
        let unused = chances.filter(|&(at, then)| {
            let now = self.frequency.of(at.0);
            now < then.saturating_add(needed)
        });
        let unused: Vec<_> = unused.map(|(at, _)| at).collect();
        self.move_units(&unused, Tier::Slow, guest, actor);
    }

    /// Pauses if it demotes too quickly.
    fn rest_after(&mut self, demoted: u64, now_ps: u64) {
        let since_s = (now_ps - self.demoted_ps) as f64 / 1e12;
        let per_s = demoted as f64 / since_s.max(1e-3);
        if per_s > REST_ABOVE as f64 {
            self.rest_ps = REST_PS;
        } else if per_s < NO_REST_BELOW as f64 {
            self.rest_ps = 0;
        }
        self.demoted_ps = now_ps;
        self.rests = self.rest_ps > 0;
        self.rests_until_ps = now_ps + self.rest_ps;
    }

    /// After a long time with few promotions, lowers the limit or stops sampling.
    fn look_for_plateau(&mut self, fast: u64, guest: &mut Guest, actor: &mut Actor<'_>) {
        if self.batches % self.kind.plateau_batches != self.kind.plateau_batches - 1 {
            return;
        }
        let page_bytes = if self.kind.is_huge { BLOCK_SIZE } else { 4096 };
        let promoted = std::mem::take(&mut self.promoted_bytes) / page_bytes;
        if self.batches <= self.kind.plateau_from || promoted > self.kind.plateau_pages {
            return;
        }
        let (base, mut hot) = (guest.bytes(PageSize::Base), 0);
        for vma in guest.vmas().to_vec() {
            let range = vma.start()..vma.end();
            guest.tables.for_each(range, |at, _, size| {
                if self.frequency.of(self.unit(at).0) >= self.limit {
                    hot += if size == PageSize::Base {
                        base
                    } else {
                        BLOCK_SIZE
                    };
                }
            });
        }
        if hot >= fast / 10_000 * HOT_ENOUGH {
            self.give_up(actor);
            return;
        }
        if self.limit > self.kind.frequency_least {
            self.limit -= self.kind.frequency_step;
        } else {
            self.give_up(actor);
        }
    }

    /// Stops sampling, and starts to monitor.
    fn give_up(&mut self, actor: &Actor<'_>) {
        self.watch = Some(FastShareMonitor::since(actor.now_ps(), lines(actor)));
        self.waiting.clear();
    }

    /// Resumes sampling.
    fn resume(&mut self) {
        self.watch = None;
        self.frequency.age();
        self.momentum.age();
        self.limit = self.kind.frequency;
        self.chances.clear();
        self.sweeps = 0;
        self.has_swept = false;
    }
}

/// Lines transferred by both tiers.
fn lines(actor: &Actor<'_>) -> [u64; 2] {
    let [fast, slow] = actor.memory.tiers();
    [fast.lines_ever(), slow.lines_ever()]
}

impl Manager for HybridTier {
    fn sampling(&self, k: u32) -> Option<Sampling> {
        let [_, period] = self.periods(k);
        let threshold_ps = self.load_ps;
        self.watch.is_none().then_some(Sampling {
            period,
            threshold_ps,
        })
    }

    fn has_worker(&self) -> bool {
        true
    }

    fn start(&mut self, guest: &Guest, now_ps: u64, _filling: bool) -> u64 {
        self.k = guest.page_bits() - 12;
        self.kind = if guest.wants_huge() { &HUGE } else { &SMALL };
        self.limit = self.kind.frequency;
        let [real, simulated] = self.periods(self.k);
        if self.kind.is_huge {
            self.counts_for = (simulated / real).max(1);
        } else {
            self.one_of = ((real << self.k) / simulated).max(1);
        }
        let fast = u64::from(guest.frames_of(Tier::Fast)) * guest.bytes(PageSize::Base);
        let page_bytes = if self.kind.is_huge { BLOCK_SIZE } else { 4096 };
        let frequency = FilterConfig {
            pages: fast / page_bytes,
            part: 1,
            per_word: self.kind.per_word,
            count_max: self.kind.count_max,
            ages_after: fast / page_bytes * self.kind.samples_per_page,
            k: self.scale(),
        };
        self.frequency = CountingFilter::new(frequency);
        self.momentum = CountingFilter::new(FilterConfig {
            part: self.kind.momentum_part,
            ages_after: MOMENTUM_SAMPLES,
            ..frequency
        });
        self.chances_since_ps = now_ps;
        self.demoted_ps = now_ps;
        super::NEVER_PS
    }

    fn take_samples(&mut self, records: &[Record]) {
        let before = self.samples_seen;
        self.samples_seen += records.len() as u64;
        let numbered = records.iter().zip(before..);
        let taken = numbered.filter(|(_, number)| number.is_multiple_of(self.one_of));
        self.waiting.extend(taken.map(|(record, _)| record.gva));
        if self.rests {
            let most = self.taken(BUFFER * self.threads);
            self.waiting.truncate(most);
        }
    }

    /// One thread does all the work.
    fn worker_turn(&mut self, _began_ps: u64, ctx: &mut Context<'_>) -> bool {
        let Context { guest, actor, .. } = ctx;
        if let Some(watch) = &mut self.watch {
            if actor.now_ps() < watch.due_ps {
                return false;
            }
            let rise = watch.look(lines(actor));
            let falls = rise.is_some_and(|rise| rise < -self.kind.falls);
            if falls {
                self.resume();
            }
            return falls;
        }
        self.rests = actor.now_ps() < self.rests_until_ps;
        let most = self.taken(BATCH);
        while self.waiting.len() >= most && actor.now_ps() >= self.rests_until_ps {
            let batch: Vec<_> = self.waiting.drain(..most).collect();
            self.batch(&batch, guest, actor);
        }
        self.watch.is_some()
    }

    /// Filters at full size.
    fn memory_overhead(&self, _guest: &Guest) -> ByteCount {
        let filters = self.frequency.real_bytes() + self.momentum.real_bytes();
        let chances = size_of_val(&self.chances[..]) as u64;
        ByteCount((filters + chances) << self.scale())
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
        fn sampling_goes_on_only_where_the_share_of_fast_loads_falls(
            start in 0.3f64..0.7, change in -0.05f64..0.05,
        ) {
            let mut watch = FastShareMonitor::since(0, [0; 2]);
            let (mut lines, mut rise) = ([0u64; 2], None);
            for i in 0..=LOOKS {
                prop_assert_eq!(rise, None);
                let fast = ((start + change * i as f64) * 1e9) as u64;
                lines = [lines[0] + fast, lines[1] + 1_000_000_000 - fast];
                rise = watch.look(lines);
            }
            prop_assert!((rise.unwrap() - change).abs() < 1e-6);
        }
    }
}
