//! What a tracker on DAMON, the kernel's monitor of data accesses, decides: when accessed bits are looked
//! at, for how long, and what is made of it. A driver carries it out: the guest's tracker on a live
//! kernel, the simulated agent on the simulated one.
//!
//! The kernel clears the accessed bit of one page of each region and looks again one sampling
//! interval later. Each look costs microseconds, so looks are few and long: a long pass tells hot
//! small pages from cold ones; while many regions are always found accessed, as huge pages are,
//! shorter passes over just those follow at once. Then there is a rest for as long as the CPU bound wants, and
//! several times as long while the agent is calm. In between a calm agent *watches* a few of the hottest regions,
//! which costs little: it cannot tell what is hot, but when two watches, one right after the other, find that they no longer are all
//! memory is looked at again at once. The hottest regions have been picked for what is chance in part, so that one watch finds less now and then.
//! exposure.rs says what can be made of the looks.
//!
//! The kernel clears accessed bits without flushing the TLB: a page that never leaves it looks untouched. So the driver has CPUs
//! flushed in the middle of each interval that is long enough for that. In the shortest passes such a page stays hidden.

mod budget;
mod exposure;

use std::num::NonZero;
use std::time::Duration;

use crate::addr::{BLOCK_SIZE, Pid, VirtRange};
use crate::sample::Sample;
use budget::Budget;
pub use exposure::Exposures;

/// The most that looking may take of one CPU, %, if nobody says otherwise.
pub const CPU_PERCENT: f64 = 2.5;

/// How a pass looks at regions.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Pass {
    /// From clearing an accessed bit to looking at it.
    pub interval: Duration,
    /// Looks at each region.
    pub looks: u32,
}

impl Pass {
    /// How long it takes, but for what kdamond itself needs.
    pub fn length(&self) -> Duration {
        self.interval * self.looks
    }
}

/// Regions of processes, in order of process and address, and disjoint.
pub type Regions = Vec<(Pid, VirtRange)>;

/// A pass, and what it looks at.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Look {
    /// Its exposure's number, longest first.
    pub rung: usize,
    /// How it looks.
    pub pass: Pass,
    /// At these regions only; nothing: at all memory, in regions of DAMON's choice.
    pub at: Option<Regions>,
}

impl Look {
    /// Whether CPUs have to forget which translations they hold, once in each interval.
    pub fn is_flushed(&self) -> bool {
        self.pass.interval >= FLUSHED_MIN
    }

    /// Whether it can tell that what was hot no longer is, but not what is hot instead.
    pub fn is_watch(&self) -> bool {
        self.rung == 0 && self.at.is_some()
    }
}

/// A region of one aggregation.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Region {
    /// The process.
    pub pid: Pid,
    /// Its addresses.
    pub range: VirtRange,
    /// Looks that found it accessed.
    pub accesses: u32,
    /// Bytes that each of its page-table entries maps; nothing where nobody has asked.
    pub page_bytes: Option<NonZero<u64>>,
}

/// Longest first; a pass's place in this list is its *rung*. The first one ends within an epoch, kdamond's
/// own work included; the others are waited for. Intervals are no round figures, so that they do not keep
/// step with a program.
pub const PASSES: [Pass; 4] = [
    Pass {
        interval: Duration::from_micros(80_021),
        looks: 4,
    },
    Pass {
        interval: Duration::from_micros(10_007),
        looks: 5,
    },
    Pass {
        interval: Duration::from_micros(1499),
        looks: 5,
    },
    Pass {
        interval: Duration::from_micros(251),
        looks: 8,
    },
];

/// Intervals from here on have a flush each. Shorter times are hard to keep from user space.
const FLUSHED_MIN: Duration = Duration::from_millis(5);

/// Address spaces that have to run on a CPU until it holds no translation of another one, where it has PCIDs. Linux on x86 tells six
/// apart on each CPU (`TLB_NR_DYN_ASIDS` in `arch/x86/mm/tlb.c`). Twice as many: the number that the next one takes may be that
/// of one which has just run.
pub const SPACES_TO_FLUSH: usize = 12;

/// The first one of a calm agent: enough to see that memory which was hot no longer is. At half of the cost
/// it comes twice as often.
const CALM_PASS: Pass = Pass {
    looks: 2,
    ..PASSES[0]
};

/// Regions that a calm agent watches: the hottest.
const WATCHED_MAX: usize = 16;

/// Watches in a row that find what was hot no longer so until it is believed.
const SURPRISES_NEEDED: u32 = 2;

/// A shorter exposure is expected to take less than this part of the one before.
const SHORTER: f64 = 0.7;

/// An interval is taken to be no longer than so many times what was asked for, whatever a clock says.
const STRETCH_MAX: u32 = 100;

/// Regions, over all targets: one for each block where memory is small enough, so that none is split or merged;
/// else DAMON adapts their sizes.
const REGIONS_MAX: u64 = 400;
const REGIONS_MIN_PER_TARGET: u64 = 10;

/// What was seen of processes' memory, and when to look again. Times are since any fixed moment.
#[derive(Debug, Clone)]
pub struct Observer {
    exposures: Exposures,
    budget: Budget,
    calm: bool,
    /// What was found last.
    last: Last,
    taken: Taken,
}

/// How long the last look at what is hot took.
#[derive(Debug, Clone, Copy)]
struct Taken {
    /// What an interval was, and what was asked for.
    interval: Duration,
    asked: Duration,
    /// Regions that were looked at.
    regions: usize,
}

impl Taken {
    /// Whether an interval of a look at so many regions can be expected to be a good deal shorter. Kdamond's own part in it
    /// grows with their number, and does not depend on what is asked for.
    fn can_be_shortened_to(&self, asked: Duration, regions: usize) -> bool {
        let own = self.interval.saturating_sub(self.asked);
        let part = regions as f64 / self.regions.max(1) as f64;
        asked + own.mul_f64(part) < self.interval.mul_f64(SHORTER)
    }
}

/// What a pass was for, and what came of it.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Last {
    /// To see what is hot.
    Look,
    /// To see whether what was hot still is. So many watches in a row have found that it is not.
    Watch { surprises: u32 },
}

impl Last {
    /// Watches in a row that have found what was hot no longer so.
    fn surprises(self) -> u32 {
        match self {
            Self::Look => 0,
            Self::Watch { surprises } => surprises,
        }
    }
}

impl Observer {
    /// One that has seen nothing yet, and may spend so much of one CPU, %.
    pub fn new(cpu_percent: f64, now: Duration) -> Self {
        Self {
            exposures: Exposures::default(),
            budget: Budget::new(cpu_percent, now),
            calm: false,
            last: Last::Look,
            taken: Taken {
                interval: PASSES[0].interval,
                asked: PASSES[0].interval,
                regions: 0,
            },
        }
    }

    /// Whether a long pass may begin, or the CPU bound wants a rest.
    pub fn may_look(&mut self, now: Duration) -> bool {
        self.budget.allows(now) || self.may_watch(now)
    }

    /// Whether a look now would be at the hottest regions only.
    fn may_watch(&mut self, now: Duration) -> bool {
        self.is_at_rest() && self.exposures.has_samples() && self.budget.allows_watch(now)
    }

    /// How to look at this rung, and at what: the long pass at all memory, or what a calm agent watches; a shorter one
    /// at what the one before it could not tell.
    pub fn look(&mut self, rung: usize, now: Duration) -> Look {
        let pass = match rung {
            0 if self.is_at_rest() => CALM_PASS,
            _ => PASSES[rung.min(PASSES.len() - 1)],
        };
        let at = match rung.checked_sub(1) {
            None if !self.budget.allows(now) && self.may_watch(now) => {
                Some(self.exposures.hottest(WATCHED_MAX))
            }
            None => None,
            Some(longer) => self.untold(longer),
        };
        Look { rung, pass, at }
    }

    /// What this rung could not tell, to be looked at for a shorter time; nothing where that is most of memory: to name
    /// it costs more than it saves.
    fn untold(&self, rung: usize) -> Option<Regions> {
        let saturated = self.exposures.saturated(rung);
        (saturated.len() * 2 < self.exposures.accessed()).then_some(saturated)
    }

    /// Takes what a look has found, whose first aggregation was reported so long after its start.
    /// Returns how long an interval really was: from one look at a region to the next, kdamond goes through
    /// all others, too, and may have to wait for a CPU.
    pub fn found(&mut self, look: &Look, elapsed: Duration, regions: &[Region]) -> Duration {
        let pass = &look.pass;
        let most = pass.interval * STRETCH_MAX;
        let interval = (elapsed / pass.looks.max(1)).clamp(pass.interval, most);
        let exposures = &mut self.exposures;
        self.last = match look.is_watch() {
            true => Last::Watch {
                surprises: match exposures.are_contradicted_by(pass.looks, regions) {
                    true => self.last.surprises().saturating_add(1),
                    false => 0,
                },
            },
            false => {
                exposures.add(look.rung, interval, pass.looks, regions);
                self.taken = Taken {
                    interval,
                    asked: pass.interval,
                    regions: regions.len(),
                };
                Last::Look
            }
        };
        interval
    }

    /// The rung to look at as soon as this one, the last, has found something, if any. None where kdamond is too slow to make
    /// it much shorter.
    pub fn follow_up(&self, rung: usize) -> Option<usize> {
        let next = rung + 1;
        let pass = PASSES.get(next)?;
        let is_due = !self.is_at_rest() || !self.exposures.knows(next);
        let is_due = is_due && self.has_news() && self.exposures.is_saturated(rung);
        let regions = || self.untold(rung).map_or(self.taken.regions, |at| at.len());
        let follows = is_due && self.taken.can_be_shortened_to(pass.interval, regions());
        follows.then_some(next)
    }

    /// Whether what was found last can tell what is hot.
    pub fn has_news(&self) -> bool {
        self.last == Last::Look
    }

    /// Whether what was hot seems to be so no longer: the next look is not to wait until the agent wakes again.
    pub fn is_surprised(&self) -> bool {
        self.last.surprises() > 0
    }

    /// Pays for what was looked at since `began`. Returns whether a calm agent's rest follows.
    pub fn pay(&mut self, began: Duration, spent: Duration) -> bool {
        let is_at_rest = self.is_at_rest();
        match self.last {
            Last::Look => self.budget.spend(began, spent, is_at_rest),
            Last::Watch { surprises } => {
                self.budget.spend_on_watch(began, spent);
                match surprises {
                    0 => {}
                    1..SURPRISES_NEEDED => self.budget.watch_again(),
                    SURPRISES_NEEDED.. => self.budget.wake(),
                }
            }
        }
        is_at_rest
    }

    /// The agent has decided and moved what it wanted. If it is calm it found nothing to do: news can wait.
    pub fn epoch_ended(&mut self, is_calm: bool) {
        if self.calm && !is_calm {
            self.budget.wake();
        }
        self.calm = is_calm;
    }

    /// Whether the agent is calm: it sleeps for longer than a pass takes, and has the time to wait for one
    /// when it wakes.
    pub fn is_calm(&self) -> bool {
        self.calm
    }

    /// Calm, and nothing was seen lately that the next pass has to confirm.
    fn is_at_rest(&self) -> bool {
        let is_surprised = self.last.surprises() >= SURPRISES_NEEDED;
        self.calm && !is_surprised && !self.exposures.is_urgent()
    }

    /// Appends at most `max` samples to `out`: what the policy lacks after it has forgotten half of
    /// what it held.
    pub fn samples(&mut self, max: usize, out: &mut Vec<Sample>) {
        self.exposures.samples(max, out);
    }

    /// Appends at most `max` sightings to `out`: what the last looks found, and how hot it is known to be.
    pub fn sightings(&self, max: usize, out: &mut Vec<Sample>) {
        self.exposures.sightings(max, out);
    }

    /// Forgets all other processes.
    pub fn retain(&mut self, pids: &[Pid]) {
        self.exposures.retain(pids);
    }

    /// Forgets what it has seen.
    pub fn clear(&mut self) {
        self.exposures.clear();
    }
}

/// How many regions a kdamond keeps of so many targets with so many mapped bytes: at least so many
/// for each target, at most so many for all. DAMON splits regions while there are fewer than half
/// of the most.
pub fn region_bounds(targets: u64, mapped_bytes: u64) -> (u64, u64) {
    let targets = targets.max(1);
    let blocks = mapped_bytes.div_ceil(BLOCK_SIZE).min(REGIONS_MAX);
    let min = (blocks / targets).max(REGIONS_MIN_PER_TARGET);
    (min, (min * targets).max(REGIONS_MAX))
}

#[cfg(any())]
mod harm;

#[cfg(test)]
mod tests {
    use super::*;
    use crate::addr::GuestVirtAddr;

    const PID: Pid = Pid(7);

    fn block(number: u64, accesses: u32) -> Region {
        let start = number * BLOCK_SIZE;
        let range = VirtRange::new(GuestVirtAddr(start), GuestVirtAddr(start + BLOCK_SIZE));
        Region {
            pid: PID,
            range: range.unwrap(),
            accesses,
            page_bytes: None,
        }
    }

    /// Looks at a hundred blocks, or at those of them that are to be watched: each is found accessed by so many looks.
    /// That takes 70 ms of a CPU, or 10.
    fn look(observer: &mut Observer, now: Duration, found: impl Fn(u64) -> u32) -> Look {
        let look = observer.look(0, now);
        let all = (0..100).map(|number| block(number, found(number)));
        let watched = |region: &Region| {
            let at = (region.pid, region.range);
            look.at.as_ref().is_none_or(|regions| regions.contains(&at))
        };
        let regions: Vec<_> = all.filter(watched).collect();
        observer.found(&look, look.pass.length(), &regions);
        let cost_ms = if look.is_watch() { 10 } else { 70 };
        observer.pay(now, Duration::from_millis(cost_ms));
        look
    }

    #[test]
    fn a_calm_agent_watches_what_is_hot_and_looks_at_all_when_it_no_longer_is() {
        let hot = |number| if number < 20 { 3 } else { 0 };
        let mut observer = Observer::new(CPU_PERCENT, Duration::ZERO);
        let mut now = Duration::ZERO;
        for _ in 0..4 {
            assert_eq!(look(&mut observer, now, hot).at, None);
            observer.samples(10_000, &mut vec![]);
            now += Duration::from_secs(1);
        }
        observer.epoch_ended(true);
        look(&mut observer, now, hot);
        observer.samples(10_000, &mut vec![]);
        // A whole look is not due, a watch is.
        now += Duration::from_millis(500);
        assert!(observer.may_look(now));
        let watch = look(&mut observer, now, hot);
        assert!(watch.is_watch() && !observer.has_news() && observer.follow_up(0).is_none());
        let at = watch.at.unwrap();
        assert!(at.len() == WATCHED_MAX);
        assert!(
            at.iter()
                .all(|(_, range)| range.start().0 < 20 * BLOCK_SIZE)
        );
        assert!(!observer.may_look(now));

        // One watch may find nothing by chance; the next one comes at once, and has to agree.
        now += Duration::from_secs(4);
        assert!(look(&mut observer, now, |_| 0).is_watch());
        assert!(observer.may_look(now) && observer.is_surprised());
        assert!(look(&mut observer, now, hot).is_watch());
        assert!(!observer.may_look(now) && !observer.is_surprised());

        now += Duration::from_secs(4);
        for _ in 0..2 {
            assert!(look(&mut observer, now, |_| 0).is_watch());
            assert!(observer.may_look(now));
        }
        assert_eq!(look(&mut observer, now, hot).at, None);
        assert!(observer.has_news());
    }

    #[test]
    fn a_shorter_pass_looks_at_what_the_longer_one_could_not_tell() {
        let mut observer = Observer::new(CPU_PERCENT, Duration::ZERO);
        look(&mut observer, Duration::ZERO, |number| match number {
            0..10 => 4,
            10..50 => 1,
            _ => 0,
        });
        assert_eq!(observer.follow_up(0), Some(1));
        let shorter = observer.look(1, Duration::ZERO);
        let expected: Vec<_> = (0..10).map(|n| (PID, block(n, 4).range)).collect();
        assert_eq!(shorter.at, Some(expected));
        assert!(!shorter.is_watch());
    }

    #[test]
    fn a_shorter_pass_that_kdamond_is_too_slow_for_is_spared() {
        let follows = |own_ms: u64, saturated: u64| {
            let mut observer = Observer::new(CPU_PERCENT, Duration::ZERO);
            let found = |n| if n < saturated { 5 } else { 1 };
            let all: Vec<_> = (0..100).map(|n| block(n, found(n))).collect();
            for rung in 0..2 {
                let look = observer.look(rung, Duration::ZERO);
                let interval = look.pass.interval + Duration::from_millis(own_ms);
                observer.found(&look, interval * look.pass.looks, &all);
            }
            observer.follow_up(1)
        };
        // Rung 1 asks for 10 ms, rung 2 for 1.5 ms.
        assert_eq!(follows(0, 100), Some(2));
        assert_eq!(follows(15, 100), Some(2));
        assert_eq!(follows(25, 100), None);
        // Of a few regions it can be short all the same.
        assert_eq!(follows(25, 10), Some(2));
    }

    #[test]
    fn region_bounds_hold_for_any_number_of_targets() {
        for targets in [0, 1, 2, 16, 64] {
            for mapped in [0, 1, 800 << 20, u64::MAX] {
                let (min, max) = region_bounds(targets, mapped);
                // The kernel takes no less than three, and no fewer at the most than at the least.
                assert!(min >= 3 && min * targets <= max);
            }
        }
        // Small memory has a region for each block, and DAMON splits none of them.
        let (min, max) = region_bounds(1, 800 << 20);
        assert!(min == 400 && min >= max / 2);
    }
}
