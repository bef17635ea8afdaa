//! The tracker on DAMON, the kernel's monitor of data accesses: works in any guest whose kernel
//! has it, without a PMU.
//!
//! The kernel clears the accessed bit of one page of each region and looks again one sampling
//! interval later. Each look costs microseconds, so looks are few and long: a long pass tells hot
//! small pages from cold ones; while many regions are always found accessed, as huge pages are,
//! shorter passes follow at once. Then the tracker rests for as long as its CPU bound wants, and five
//! times as long while the agent is calm: between passes there is no kdamond at work. exposure.rs
//! says what can be made of the looks.
//!
//! One thing stays hidden: the kernel clears accessed bits without flushing the TLB. A page that
//! never leaves the TLB during a pass looks untouched.

mod budget;
mod exposure;

use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

use demeter_linux::cpu;
use demeter_linux::damon::{Aggregations, DamonError, Kdamond, Operations, Pass};
use demeter_linux::page_size::PageSizes;
use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Pid, Sample};

pub use demeter_linux::damon::{Format, Region};
pub use exposure::Exposures;

use super::{Drained, Settings, Tracker, TrackerError};
use crate::maps::read_maps;
use budget::Budget;

const NAME: &str = "damon";

/// Longest first. The first one ends within an epoch, kdamond's own work included; the others are
/// waited for. Intervals are no round figures, so that they do not keep step with a program.
const PASSES: [Pass; 4] = [
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

/// The first one of a calm agent: enough to see that memory which was hot no longer is. At half of the cost
/// it comes twice as often.
const CALM_PASS: Pass = Pass {
    looks: 2,
    ..PASSES[0]
};

/// A pass that has reported nothing after so many times its length has no target left, or a
/// kernel that is too busy.
const PASS_PATIENCE: u32 = 8;

/// An interval is taken to be no longer than so many times what was asked for, whatever a clock says.
const STRETCH_MAX: u32 = 100;

/// Looks at a short pass's ring, in vain, before it is given up.
const SHORT_PASS_WAITS: u32 = 20;
const SHORT_PASS_WAIT: Duration = Duration::from_millis(5);

/// Most processes that are watched; the first win.
const MAX_TARGETS: usize = 64;

/// Regions, over all targets: one for each block where memory is small enough, so that none is split or merged;
/// else DAMON adapts their sizes.
const REGIONS_MAX: u64 = 400;
const REGIONS_MIN_PER_TARGET: u64 = 10;

/// How often a start is tried again without the processes that went meanwhile.
const START_ATTEMPTS: u32 = 5;

/// Several epochs' worth of records of about 64 bytes.
const RING_BYTES: usize = 256 << 10;

type Listen = fn(&Path, Pid) -> Result<Aggregations, DamonError>;

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
    exposures: Exposures,
    budget: Budget,
    /// CPU time of the agent's own that the budget has not been charged with.
    unpaid: Duration,
    /// When the policy was last topped up.
    topped_up: Option<Instant>,
    paused: bool,
    calm: bool,
}

/// A pass under way.
struct Running {
    rung: usize,
    pass: Pass,
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
        Self::with_listener(settings, |root, kdamond| {
            Aggregations::open(root, kdamond, RING_BYTES)
        })
    }

    fn with_listener(settings: &Settings, listen: Listen) -> Result<Self, TrackerError> {
        let mut kdamonds = Kdamond::claim(&settings.root, 1, Operations::Mapped)?;
        let kdamond = kdamonds.remove(0);
        // Proves that we may listen, to ourselves while there is no kdamond yet.
        listen(&settings.root, Pid(std::process::id()))?;
        Ok(Self {
            root: settings.root.clone(),
            kdamond,
            listen,
            epoch: settings.epoch,
            wanted: Vec::new(),
            running: None,
            exposures: Exposures::default(),
            budget: Budget::new(settings.cpu_percent),
            unpaid: Duration::ZERO,
            topped_up: None,
            paused: false,
            calm: false,
        })
    }

    fn stop(&mut self) -> Result<(), TrackerError> {
        self.running = None;
        Ok(self.kdamond.stop()?)
    }

    /// Begins a pass over what is wanted and alive.
    fn start(&mut self, rung: usize) -> Result<(), TrackerError> {
        let pass = match (rung, self.calm && !self.exposures.is_urgent()) {
            (0, true) => CALM_PASS,
            _ => PASSES[rung],
        };
        for attempt in 1.. {
            self.stop()?;
            let mut targets = self.wanted.clone();
            targets.retain(|pid| self.root.join(format!("proc/{pid}/maps")).exists());
            targets.truncate(MAX_TARGETS);
            if targets.is_empty() {
                return Ok(());
            }
            let regions = self.regions(&targets);
            let started = self
                .kdamond
                .set_targets(&targets, regions)
                .and_then(|()| self.kdamond.start(&pass));
            let started_ns = cpu::monotonic_ns();
            let started =
                started.and_then(|kdamond| Ok((kdamond, (self.listen)(&self.root, kdamond)?)));
            match started {
                Ok((kdamond, aggregations)) => {
                    self.running = Some(Running {
                        rung,
                        pass,
                        started: Instant::now(),
                        started_ns,
                        kdamond,
                        aggregations,
                        targets,
                    });
                    break;
                }
                Err(error) if attempt == START_ATTEMPTS => return Err(error.into()),
                Err(error) => tracing::debug!(%error, "a target may have ended: trying again"),
            }
        }
        Ok(())
    }

    /// Begins a long pass, unless one is under way or the budget wants a rest.
    fn start_when_due(&mut self) -> Result<(), TrackerError> {
        match self.running.is_none() && self.budget.allows(Instant::now()) {
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
        for regions in regions.chunk_by_mut(|a, b| a.pid == b.pid) {
            let pages = PageSizes::of(&self.root, regions[0].pid);
            for region in regions.iter_mut().filter(|region| region.accesses > 0) {
                let middle = region.range.start().0 + region.range.len().0 / 2;
                region.page_bytes = pages.at(GuestVirtAddr(middle));
            }
        }
        let pass = running.pass;
        // From one look at a region to the next, kdamond goes through all others, too, and may have
        // to wait for a CPU.
        let elapsed = Duration::from_nanos(first_ns.saturating_sub(running.started_ns));
        let interval = (elapsed / pass.looks).clamp(pass.interval, pass.interval * STRETCH_MAX);
        tracing::debug!(
            rung = running.rung,
            ?interval,
            regions = regions.len(),
            "took a pass"
        );
        self.exposures
            .add(running.rung, interval, pass.looks, regions);
        Ok(true)
    }

    /// Ends a pass. Returns the CPU time that kdamond has spent in it.
    fn end(&mut self) -> Result<Duration, TrackerError> {
        let kdamond = self.running.as_ref().map(|running| running.kdamond);
        let spent = kdamond.and_then(|pid| cpu::of(&self.root, pid));
        self.stop()?;
        Ok(spent.unwrap_or_default())
    }

    /// A pass, waited for: a short one, or that of a calm agent. Returns what kdamond has spent, nothing where nothing was found.
    fn look(
        &mut self,
        rung: usize,
        drained: &mut Drained,
    ) -> Result<Option<Duration>, TrackerError> {
        self.start(rung)?;
        let length = self.running.as_ref().map(|running| running.pass.length());
        std::thread::sleep(length.unwrap_or_default());
        for _ in 0..SHORT_PASS_WAITS {
            if self.running.is_none() {
                break;
            }
            if self.take(drained)? {
                return self.end().map(Some);
            }
            std::thread::sleep(SHORT_PASS_WAIT);
        }
        self.stop()?;
        Ok(None)
    }

    /// Ends the long pass under way if it has found something. Returns what kdamond has spent.
    fn long_pass(
        &mut self,
        started: Instant,
        drained: &mut Drained,
    ) -> Result<Option<Duration>, TrackerError> {
        if self.take(drained)? {
            return self.end().map(Some);
        }
        let patience = PASSES[0].length() * PASS_PATIENCE;
        if started.elapsed() > patience.max(self.epoch * 2) {
            let spent = self.end()?;
            self.unpaid += spent;
        }
        Ok(None)
    }

    /// Takes what the long pass has found, follows it up with short ones, and rests. True when
    /// something was found.
    fn proceed(&mut self, drained: &mut Drained) -> Result<bool, TrackerError> {
        let (started, spent) = match self.running.as_ref().map(|running| running.started) {
            Some(started) => (started, self.long_pass(started, drained)?),
            None if self.calm && self.budget.allows(Instant::now()) => {
                (Instant::now(), self.look(0, drained)?)
            }
            None => return Ok(false),
        };
        let Some(mut spent) = spent else {
            return Ok(false);
        };
        for rung in 1..PASSES.len() {
            let is_due = !self.calm || self.exposures.is_urgent() || !self.exposures.knows(rung);
            if !is_due || !self.exposures.is_saturated(rung - 1) {
                break;
            }
            match self.look(rung, drained)? {
                Some(more) => spent += more,
                None => break,
            }
        }
        spent += std::mem::take(&mut self.unpaid);
        let is_calm = self.calm && !self.exposures.is_urgent();
        self.budget.spend(started, spent, is_calm);
        tracing::debug!(?spent, is_calm, "looked at accessed bits");
        Ok(true)
    }
}

impl Tracker for DamonTracker {
    fn name(&self) -> &'static str {
        NAME
    }

    /// DAMON clears access bits without flushing the TLB: what is hot and huge stays in the TLB,
    /// sets no bit again and looks cold.
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
        self.exposures.retain(targets);
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
        if self.calm && !is_calm {
            self.budget.wake();
        }
        self.calm = is_calm;
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
        let before = cpu::of_this_thread();
        let has_news = self.proceed(&mut drained)?;
        let is_due = self
            .topped_up
            .is_none_or(|at| at.elapsed() >= self.epoch / 2);
        if has_news || is_due {
            let first = out.len();
            self.exposures.samples(max, out);
            drained.taken = (out.len() - first) as u64;
            self.topped_up = Some(Instant::now());
        }
        self.unpaid += cpu::of_this_thread().saturating_sub(before);
        Ok(drained)
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.paused = true;
        self.exposures.clear();
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

/// How many regions a kdamond keeps of so many targets with so many mapped bytes: at least so many
/// for each target, at most so many for all. DAMON splits regions while there are fewer than half
/// of the most.
fn region_bounds(targets: u64, mapped_bytes: u64) -> (u64, u64) {
    let targets = targets.max(1);
    let blocks = mapped_bytes.div_ceil(BLOCK_SIZE).min(REGIONS_MAX);
    let min = (blocks / targets).max(REGIONS_MIN_PER_TARGET);
    (min, (min * targets).max(REGIONS_MAX))
}

#[cfg(test)]
mod harm;
#[cfg(test)]
pub(super) mod tests;
