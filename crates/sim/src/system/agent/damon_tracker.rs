//! The agent's tracker on DAMON: what to look at and when [`Observer`] decides, as it does in a live guest;
//! a simulated kdamond looks.
//!
//! A pass begins when the agent sleeps. Short passes, and those of a calm agent, are waited for when it
//! wakes: it has no samples until they have ended.
//!
//! In each long interval the TLB is flushed by helpers, as a live agent has it: here right after bits are cleared, before
//! the program goes on.
//!
//! What a kdamond takes to come and go, and the agent's own work in reading what it found, is left out.

use std::num::NonZero;
use std::time::Duration;

use demeter_policy::damon::{CPU_PERCENT, Look, Observer, Region, region_bounds};
use demeter_policy::{GuestVirtAddr, Sample};

use crate::damon::{Attrs, Bounds, Kdamond};
use crate::guest::Guest;
use crate::machine::actor::Actor;
use crate::machine::cost::PS_PER_NS;
use crate::machine::ledger::Cause;

/// The tracker.
#[derive(Debug)]
pub(super) struct DamonTracker {
    epoch_ps: u64,
    observer: Observer,
    /// Whether the first pass is to begin.
    is_new: bool,
    running: Option<Running>,
    /// When the passes began that are still to be paid for, and what they took.
    round: Option<(u64, u64)>,
    topped_up_ps: Option<u64>,
    passes: u64,
}

/// A pass under way.
#[derive(Debug)]
struct Running {
    look: Look,
    kdamond: Kdamond<GuestVirtAddr>,
    began_ps: u64,
    /// Whether the agent waits for it.
    is_waited_for: bool,
    /// How long after its begin it first reported.
    reported_ps: Option<u64>,
    found: Vec<Region>,
    /// What flushing has taken.
    flushed_ps: u64,
}

impl Running {
    /// An interval has begun.
    fn flush(&mut self, actor: &mut Actor<'_>) {
        if self.look.is_flushed() {
            self.flushed_ps += actor.crowd_out();
        }
    }
}

impl DamonTracker {
    /// One that looks at all processes, for an agent that wakes so often.
    pub(super) fn new(epoch_ps: u64, now_ps: u64) -> Self {
        Self {
            epoch_ps,
            observer: Observer::new(CPU_PERCENT, time(now_ps)),
            is_new: true,
            running: None,
            round: None,
            topped_up_ps: None,
            passes: 0,
        }
    }

    /// When its kdamond wants to look.
    pub(super) fn due_ps(&self) -> Option<u64> {
        match &self.running {
            Some(running) => Some(running.kdamond.due_ps()),
            None => self.is_new.then_some(0),
        }
    }

    /// Bytes of the regions that a kdamond knows now.
    pub(super) fn region_bytes(&self) -> usize {
        let running = self.running.as_ref();
        running.map_or(0, |running| size_of_val(running.kdamond.regions()))
    }

    /// Whether what the agent waits for is there.
    pub(super) fn is_ready(&self) -> bool {
        let running = self.running.as_ref();
        running.is_none_or(|running| running.reported_ps.is_some())
    }

    /// Lets its kdamond look, if that is due.
    pub(super) fn run(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if std::mem::take(&mut self.is_new) {
            self.start_when_due(guest, actor);
        }
        let Some(running) = &mut self.running else {
            return;
        };
        if actor.now_ps() < running.kdamond.due_ps() {
            return;
        }
        if running.kdamond.look(guest, actor) {
            let elapsed_ps = actor.now_ps() - running.began_ps;
            running.reported_ps.get_or_insert(elapsed_ps);
            let regions = running.kdamond.regions();
            let found = regions.iter().flat_map(|region| {
                let pieces = guest.by_process(region.range.clone()).into_iter();
                pieces.map(|(pid, range)| Region {
                    pid,
                    range,
                    accesses: region.accesses,
                    page_bytes: None,
                })
            });
            running.found.extend(found);
        }
        running.kdamond.go_on(guest, actor);
        running.flush(actor);
    }

    /// The agent sleeps now; if it is calm, for longer.
    pub(super) fn epoch_ended(&mut self, is_calm: bool, guest: &mut Guest, actor: &mut Actor<'_>) {
        self.observer.epoch_ended(is_calm);
        if !is_calm {
            self.start_when_due(guest, actor);
        }
    }

    /// Appends the samples of an epoch, at most `most`. Returns whether anything was looked at since the last time;
    /// nothing while the agent has to wait for them.
    pub(super) fn drain(
        &mut self,
        most: usize,
        out: &mut Vec<Sample>,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Option<bool> {
        let has_news = match self.running.take() {
            Some(running) if running.reported_ps.is_some() => {
                if let Some(next) = self.end(running, guest, actor) {
                    self.start(next, true, guest, actor);
                    return self.unless_awaited();
                }
                self.pay();
                if self.observer.is_surprised() && self.observer.may_look(time(actor.now_ps())) {
                    self.start(0, true, guest, actor);
                    return self.unless_awaited();
                }
                self.observer.has_news()
            }
            Some(running) => {
                let is_waited_for = running.is_waited_for;
                self.running = Some(running);
                if is_waited_for {
                    return None;
                }
                false
            }
            None if self.observer.is_calm() && self.observer.may_look(time(actor.now_ps())) => {
                self.start(0, true, guest, actor);
                return self.unless_awaited();
            }
            None => false,
        };
        let now_ps = actor.now_ps();
        let is_due = self
            .topped_up_ps
            .is_none_or(|at_ps| now_ps - at_ps >= self.epoch_ps / 2);
        if has_news || is_due {
            self.observer.samples(most, out);
            self.topped_up_ps = Some(now_ps);
        }
        Some(has_news)
    }

    /// No news; nothing at all while a pass is waited for.
    fn unless_awaited(&self) -> Option<bool> {
        let running = self.running.as_ref();
        let is_awaited = running.is_some_and(|running| running.is_waited_for);
        (!is_awaited).then_some(false)
    }

    /// Begins a long pass, unless one is under way or the budget wants a rest.
    fn start_when_due(&mut self, guest: &mut Guest, actor: &mut Actor<'_>) {
        if self.running.is_none() && self.observer.may_look(time(actor.now_ps())) {
            self.start(0, false, guest, actor);
        }
    }

    fn start(
        &mut self,
        rung: usize,
        is_waited_for: bool,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) {
        let vmas = guest.vmas();
        let (Some(first), Some(last)) = (vmas.first(), vmas.last()) else {
            return;
        };
        let watched = first.start()..last.end();
        let look = self.observer.look(rung, time(actor.now_ps()));
        let (least, most) = match &look.at {
            None => region_bounds(1, vmas.iter().map(|vma| vma.len().0).sum()),
            Some(regions) => (regions.len() as u64, regions.len() as u64),
        };
        let attrs = Attrs {
            sample_ps: look.pass.interval.as_nanos() as u64 * PS_PER_NS,
            looks: look.pass.looks,
            bounds: Bounds {
                least,
                most,
                page_bytes: 1 << guest.page_bits(),
            },
        };
        let began_ps = actor.now_ps();
        self.passes += 1;
        let kdamond = match &look.at {
            None => Kdamond::start(watched, attrs, self.passes, guest, actor),
            Some(regions) => {
                let ranges = regions.iter().map(|(_, range)| range.start()..range.end());
                Kdamond::start_at(ranges, attrs, self.passes, guest, actor)
            }
        };
        let mut running = Running {
            look,
            kdamond,
            began_ps,
            is_waited_for,
            reported_ps: None,
            found: vec![],
            flushed_ps: 0,
        };
        running.flush(actor);
        self.running = Some(running);
    }

    /// Takes what a pass has found. Returns the rung that follows at once, if any.
    fn end(
        &mut self,
        mut running: Running,
        guest: &mut Guest,
        actor: &mut Actor<'_>,
    ) -> Option<usize> {
        let accessed = running.found.iter_mut().filter(|r| r.accesses > 0);
        let mut asked = 0;
        for region in accessed {
            let middle = region.range.start().0 + region.range.len().0 / 2;
            if let Some((_, size)) = guest.tables.find(GuestVirtAddr(middle)) {
                region.page_bytes = NonZero::new(guest.bytes(size));
            }
            asked += 1;
        }
        actor.charge(Cause::Track, asked * actor.costs.agent_lookup_ps);
        let (_, spent_ps) = self.round.get_or_insert((running.began_ps, 0));
        *spent_ps += running.kdamond.spent_ps() + running.flushed_ps;
        let elapsed = time(running.reported_ps.unwrap_or(0));
        let Running {
            look,
            found,
            kdamond,
            ..
        } = running;
        kdamond.stop(guest, actor);
        self.observer.found(&look, elapsed, &found);
        self.observer.follow_up(look.rung)
    }

    fn pay(&mut self) {
        if let Some((began_ps, spent_ps)) = self.round.take() {
            self.observer.pay(time(began_ps), time(spent_ps));
        }
    }
}

fn time(ps: u64) -> Duration {
    Duration::from_nanos(ps / PS_PER_NS)
}
