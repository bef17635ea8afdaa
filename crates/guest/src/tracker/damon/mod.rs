//! The tracker on DAMON, the kernel's monitor of data accesses: works in any guest whose kernel
//! has it, without a PMU.
//!
//! [`Observer`] decides when to look, for how long, and what is made of it; here it is carried out, by a
//! kdamond of our own. Between passes there is no kdamond at work.

use std::num::NonZero;
use std::path::PathBuf;
use std::time::{Duration, Instant};

use demeter_linux::cpu;
use demeter_linux::damon::{Aggregations, DamonError, Kdamond, Tracepoint};
use demeter_linux::page_size::PageSizes;
use demeter_linux::tlb_flusher::TlbFlusher;
use demeter_policy::damon::{Look, Observer, PASSES, Regions, region_bounds};
use demeter_policy::{GuestVirtAddr, Pid, Sample};

pub use demeter_linux::damon::Format;

use super::{Drained, Settings, Tracker, TrackerError};
use crate::maps::read_maps;

const NAME: &str = "damon";

/// A pass that has reported nothing after so many times its length has no target left, or a
/// kernel that is too busy.
const PASS_PATIENCE: u32 = 8;

/// A pass that is waited for is given up after so many times its length more, and this time. From one look to the
/// next, kdamond goes through all regions, and may have to wait for a CPU: a look may take twice as long as it should.
const LOOK_PATIENCE: u32 = 3;
const LOOK_PATIENCE_MIN: Duration = Duration::from_millis(100);

/// Flushes are wanted for so many times a pass's length, if it has not ended before.
const FLUSH_PATIENCE: u32 = LOOK_PATIENCE + 1;

/// What a pass has found is there so soon after most of it is.
const REPORT_WAIT: Duration = Duration::from_millis(5);

/// Looks that follow a watch that finds what was hot no longer so: another watch that confirms it, and a look at all memory.
const FOLLOWING_LOOKS: u32 = 2;

/// Most processes that are watched; the first win.
const MAX_TARGETS: usize = 64;

/// How often a start is tried again without the processes that went meanwhile.
const START_ATTEMPTS: u32 = 5;

/// Several epochs' worth of records of about 64 bytes.
const RING_BYTES: usize = 256 << 10;

/// Listens to a kdamond's thread, and waits for so many regions.
type Listen = Box<dyn Fn(Pid, u32) -> Result<Aggregations, DamonError> + Send>;

impl From<DamonError> for TrackerError {
    fn from(error: DamonError) -> Self {
        match error {
            DamonError::Taken => Self::Taken { tracker: NAME },
            DamonError::Unavailable { why, mend } => Self::Unavailable {
                tracker: NAME,
                why,
                mend,
            },
            DamonError::Io { what, source } => Self::Io {
                tracker: NAME,
                what,
                source,
            },
        }
    }
}

/// Reads regions and their access counts from a kdamond of our own.
pub struct DamonTracker {
    root: PathBuf,
    kdamond: Kdamond,
    listen: Listen,
    epoch: Duration,
    wanted: Vec<Pid>,
    running: Option<Running>,
    /// The regions that kdamond has been told to look at, and still is.
    told: Option<Regions>,
    observer: Observer,
    /// Nothing where there is no way: pages that stay in the TLB look untouched then.
    flusher: Option<TlbFlusher>,
    /// What the observer's times count from.
    born: Instant,
    /// CPU time of the agent's own that the budget has not been charged with.
    unpaid: Duration,
    /// When the policy was last topped up.
    topped_up: Option<Instant>,
    paused: bool,
}

/// A pass under way.
struct Running {
    look: Look,
    started: Instant,
    /// The same, nanoseconds of the monotonic clock.
    started_ns: u64,
    kdamond: Pid,
    aggregations: Aggregations,
    /// In the kdamond's order.
    targets: Vec<Pid>,
}

impl DamonTracker {
    /// Takes DAMON, if nobody else has it; observes nothing before targets are set.
    pub fn new(settings: &Settings) -> Result<Self, TrackerError> {
        let kdamond = Kdamond::claim(&settings.root, 1)?.remove(0);
        let tracepoint = Tracepoint::on(&settings.root)?;
        let listen = move |kdamond, regions| tracepoint.listen(kdamond, RING_BYTES, regions);
        let mut tracker = Self::with(settings, kdamond, Box::new(listen));
        tracker.flusher = TlbFlusher::new()
            .inspect_err(|error| tracing::info!(%error, "no TLB is flushed for DAMON: pages that stay there look untouched"))
            .ok();
        Ok(tracker)
    }

    fn with(settings: &Settings, kdamond: Kdamond, listen: Listen) -> Self {
        Self {
            root: settings.root.clone(),
            kdamond,
            listen,
            epoch: settings.epoch,
            wanted: Vec::new(),
            running: None,
            told: None,
            observer: Observer::new(settings.cpu_percent, Duration::ZERO),
            flusher: None,
            born: Instant::now(),
            unpaid: Duration::ZERO,
            topped_up: None,
            paused: false,
        }
    }

    fn stop(&mut self) -> Result<(), TrackerError> {
        self.running = None;
        self.flusher.iter_mut().for_each(TlbFlusher::stop);
        Ok(self.kdamond.stop()?)
    }

    /// Begins a pass over what is wanted and alive.
    fn start(&mut self, rung: usize) -> Result<(), TrackerError> {
        let look = self.observer.look(rung, self.born.elapsed());
        for attempt in 1.. {
            self.stop()?;
            let mut targets = self.wanted.clone();
            targets.retain(|pid| self.root.join(format!("proc/{pid}/maps")).exists());
            targets.truncate(MAX_TARGETS);
            let told = self.tell(&look, targets);
            if told.as_ref().is_ok_and(|(targets, _)| targets.is_empty()) {
                return Ok(());
            }
            let started = told.and_then(|(targets, regions)| {
                let kdamond = self.kdamond.start(&look.pass)?;
                let started_ns = cpu::monotonic_ns();
                // Not all of them: kdamond may have a few less than it was asked for.
                let wake_after = (regions / 4 * 3).max(1);
                let aggregations = (self.listen)(kdamond, wake_after as u32)?;
                Ok((kdamond, started_ns, aggregations, targets))
            });
            match started {
                Ok((kdamond, started_ns, aggregations, targets)) => {
                    if let Some(flusher) = self.flusher.as_mut().filter(|_| look.is_flushed()) {
                        flusher.flush_each(look.pass.interval, look.pass.looks * FLUSH_PATIENCE);
                    }
                    self.running = Some(Running {
                        look,
                        started: Instant::now(),
                        started_ns,
                        kdamond,
                        aggregations,
                        targets,
                    });
                    break;
                }
                Err(error) if attempt == START_ATTEMPTS => return Err(error.into()),
                Err(error) => {
                    tracing::debug!(%error, "a target may have ended: trying again");
                    self.told = None;
                }
            }
        }
        Ok(())
    }

    /// Tells kdamond what to look at, unless it has been. Returns which of the targets that is, in its order, and about how
    /// many regions.
    fn tell(&mut self, look: &Look, targets: Vec<Pid>) -> Result<(Vec<Pid>, u64), DamonError> {
        let told = self.told.take();
        let Some(at) = &look.at else {
            let (min, max) = self.regions(&targets);
            self.kdamond.set_targets(&targets, (min, max))?;
            let regions = min * targets.len() as u64;
            return Ok((targets, regions));
        };
        let alive = at.iter().filter(|(pid, _)| targets.contains(pid));
        let at: Regions = alive.copied().collect();
        if told.as_ref() != Some(&at) {
            self.kdamond.set_regions(&at)?;
        }
        let mut targets: Vec<_> = at.iter().map(|&(pid, _)| pid).collect();
        targets.dedup();
        let regions = at.len() as u64;
        self.told = Some(at);
        Ok((targets, regions))
    }

    /// Begins a long pass, unless one is under way or the budget wants a rest.
    fn start_when_due(&mut self) -> Result<(), TrackerError> {
        match self.running.is_none() && self.observer.may_look(self.born.elapsed()) {
            true => self.start(0),
            false => Ok(()),
        }
    }

    /// The regions that each target shall have at least, and all together at most.
    fn regions(&self, targets: &[Pid]) -> (u64, u64) {
        let mapped = |&pid: &Pid| {
            let vmas = read_maps(&self.root, pid).unwrap_or_default();
            vmas.iter().map(|vma| vma.range.len().0).sum::<u64>()
        };
        region_bounds(targets.len() as u64, targets.iter().map(mapped).sum())
    }

    /// Takes what the pass under way has found; false while that is nothing.
    fn take(&mut self, drained: &mut Drained) -> Result<bool, TrackerError> {
        let Some(running) = &self.running else {
            return Ok(false);
        };
        let taken = running.aggregations.take(&running.targets);
        let mut reported = taken.map_err(|what| TrackerError::Corrupt {
            tracker: NAME,
            what,
        })?;
        drained.lost += reported.lost;
        drained.rejected += reported.rejected;
        let regions = &mut reported.regions;
        let Some(first_ns) = reported.first_ns else {
            return Ok(false);
        };
        // DAMON reports target after target.
        let targets = regions.chunk_by_mut(|a, b| a.pid == b.pid);
        for regions in targets.filter(|_| !running.look.is_watch()) {
            let pages = PageSizes::of(&self.root, regions[0].pid);
            for region in regions.iter_mut().filter(|region| region.accesses > 0) {
                let middle = region.range.start().0 + region.range.len().0 / 2;
                region.page_bytes = NonZero::new(pages.at(GuestVirtAddr(middle)));
            }
        }
        let elapsed = Duration::from_nanos(first_ns.saturating_sub(running.started_ns));
        let look = &running.look;
        let interval = self.observer.found(look, elapsed, regions);
        tracing::debug!(look.rung, ?interval, regions = regions.len(), "took a pass");
        Ok(true)
    }

    /// Ends a pass. Returns the CPU time that kdamond and flushes have spent in it.
    fn end(&mut self) -> Result<Duration, TrackerError> {
        let kdamond = self.running.as_ref().map(|running| running.kdamond);
        let spent = kdamond.and_then(|pid| cpu::of(&self.root, pid));
        self.stop()?;
        let flushes = self.flusher.as_mut().map(TlbFlusher::take_spent);
        Ok(spent.unwrap_or_default() + flushes.unwrap_or_default())
    }

    /// A pass, waited for: a short one, or that of a calm agent. Returns what kdamond has spent, nothing where nothing was found.
    fn look(
        &mut self,
        rung: usize,
        drained: &mut Drained,
    ) -> Result<Option<Duration>, TrackerError> {
        self.start(rung)?;
        let Some(length) = self
            .running
            .as_ref()
            .map(|running| running.look.pass.length())
        else {
            return Ok(None);
        };
        if self.wait(length * (1 + LOOK_PATIENCE) + LOOK_PATIENCE_MIN, drained)? {
            return self.end().map(Some);
        }
        // What found nothing was not for nothing.
        let spent = self.end()?;
        self.unpaid += spent;
        Ok(None)
    }

    /// Waits for what the pass under way finds, for so long at most; false where that is nothing.
    fn wait(&mut self, patience: Duration, drained: &mut Drained) -> Result<bool, TrackerError> {
        let last = Instant::now() + patience;
        loop {
            if let Some(running) = &self.running {
                running
                    .aggregations
                    .wait(last.saturating_duration_since(Instant::now()));
            }
            std::thread::sleep(REPORT_WAIT);
            if self.take(drained)? {
                return Ok(true);
            }
            if Instant::now() >= last {
                return Ok(false);
            }
        }
    }

    /// Ends the long pass under way if it has found something. Returns what kdamond has spent. A pass that is late is
    /// waited for as long again: until the next drain kdamond would look at everything a second time.
    fn long_pass(
        &mut self,
        started: Instant,
        drained: &mut Drained,
    ) -> Result<Option<Duration>, TrackerError> {
        let length = PASSES[0].length();
        let is_late = started.elapsed() >= length;
        if self.take(drained)? || (is_late && self.wait(length, drained)?) {
            return self.end().map(Some);
        }
        if started.elapsed() > (length * PASS_PATIENCE).max(self.epoch * 2) {
            let spent = self.end()?;
            self.unpaid += spent;
        }
        Ok(None)
    }

    /// Takes what the long pass has found, follows it up with short ones, and rests. True when
    /// that can tell what is hot. `own` is this thread's CPU time up to which all is paid for, or noted as unpaid.
    fn proceed(&mut self, drained: &mut Drained, own: &mut Duration) -> Result<bool, TrackerError> {
        let (started, spent) = match self.running.as_ref().map(|running| running.started) {
            Some(started) => (started, self.long_pass(started, drained)?),
            None if self.observer.is_calm() && self.observer.may_look(self.born.elapsed()) => {
                (Instant::now(), self.look(0, drained)?)
            }
            None => return Ok(false),
        };
        let Some(mut spent) = spent else {
            return Ok(false);
        };
        let mut rung = 0;
        while let Some(next) = self.observer.follow_up(rung) {
            match self.look(next, drained)? {
                Some(more) => spent += more,
                None => break,
            }
            rung = next;
        }
        let now = cpu::of_this_thread();
        spent += now.saturating_sub(std::mem::replace(own, now));
        // Watching is cheap, and comes soon again: looks at all memory pay for the rest.
        if self.observer.has_news() {
            spent += std::mem::take(&mut self.unpaid);
        }
        let began = started.saturating_duration_since(self.born);
        let is_calm = self.observer.pay(began, spent);
        tracing::debug!(?spent, is_calm, "looked at accessed bits");
        Ok(self.observer.has_news())
    }
}

impl Tracker for DamonTracker {
    fn name(&self) -> &'static str {
        NAME
    }

    /// The shortest passes are not flushed: what is hot and huge stays in the TLB, sets no bit again and looks less
    /// hot than it is.
    fn sees_huge_pages(&self) -> bool {
        false
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        // A pass that is cut short is lost: not for nothing.
        if self.wanted == targets {
            return Ok(());
        }
        if targets.len() > MAX_TARGETS {
            tracing::warn!(
                targets = targets.len(),
                watched = MAX_TARGETS,
                "DAMON watches only the first processes"
            );
        }
        self.wanted = targets.to_vec();
        self.observer.retain(targets);
        let spent = self.end()?;
        self.unpaid += spent;
        match self.paused {
            true => Ok(()),
            false => self.start_when_due(),
        }
    }

    /// Looks begin here, not with [`Self::drain`]: kdamond would work on while pages move, for longer
    /// than a pass takes, and then be owed a rest just when it matters what the moves have brought.
    /// A calm agent sleeps longer than a pass takes, too, and has the time to wait for one when it wakes.
    fn epoch_ended(&mut self, is_calm: bool) -> Result<(), TrackerError> {
        self.observer.epoch_ended(is_calm);
        match self.paused || is_calm {
            true => Ok(()),
            false => self.start_when_due(),
        }
    }

    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        let mut drained = Drained::default();
        if self.paused {
            return Ok(drained);
        }
        let mut own = cpu::of_this_thread();
        let mut has_news = self.proceed(&mut drained, &mut own)?;
        for _ in 0..FOLLOWING_LOOKS {
            if !has_news && self.observer.is_surprised() {
                has_news = self.proceed(&mut drained, &mut own)?;
            }
        }
        drained.is_repeat = !has_news;
        let is_due = self
            .topped_up
            .is_none_or(|at| at.elapsed() >= self.epoch / 2);
        if has_news || is_due {
            let first = out.len();
            self.observer.samples(max, out);
            drained.taken = (out.len() - first) as u64;
            self.topped_up = Some(Instant::now());
        }
        self.unpaid += cpu::of_this_thread().saturating_sub(own);
        Ok(drained)
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.paused = true;
        self.observer.clear();
        self.stop()
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        if self.paused {
            self.paused = false;
            self.start_when_due()?;
        }
        Ok(())
    }
}

#[cfg(test)]
pub(super) mod tests;
