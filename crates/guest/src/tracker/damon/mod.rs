//! The tracker on DAMON, the kernel's access monitor. Needs no PMU.
//!
//! [`Observer`] decides which blocks to scan and when. A thread carries that out with our own kdamonds (`passes`),
//! while the agent works and sleeps, and keeps the results until the agent reads them. Between passes no kdamond runs.

mod passes;

use std::path::PathBuf;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

use demeter_linux::damon::{DamonError, Kdamond, Statistic, Tracepoint};
use demeter_linux::tlb_flusher::TlbFlusher;
use demeter_policy::damon::{Look, Next, Observer, Prospect, WAITS};
use demeter_policy::{Block, Observation, PAGE_SIZE, Pid, Sample, VirtRange};

pub use demeter_linux::damon::Format;

use super::{Drained, Settings, Tracker, TrackerError};
use crate::maps::read_maps;
use passes::{Listen, Passes};

const NAME: &str = "damon";

/// Time between two readings of mappings.
const REFRESH: Duration = Duration::from_secs(2);

/// Size of a region's record in the ring, with its header.
const RECORD_BYTES: usize = 96;

/// Ring size for one record per region: a power of two of pages. The kernel clears the whole ring in each pass.
fn ring_bytes(regions: u32) -> usize {
    (regions as usize * RECORD_BYTES)
        .next_power_of_two()
        .max(PAGE_SIZE as usize)
}

impl From<DamonError> for TrackerError {
    fn from(error: DamonError) -> Self {
        match error {
            DamonError::Taken => Self::Taken { tracker: NAME },
            DamonError::Held(by) => Self::Held { tracker: NAME, by },
            DamonError::Unavailable { why, hint } => Self::Unavailable {
                tracker: NAME,
                why,
                hint,
            },
            DamonError::Io { what, source } => Self::Io {
                tracker: NAME,
                what,
                source,
            },
        }
    }
}

/// A tracker that scans accessed bits with DAMON.
pub struct DamonTracker {
    shared: Arc<Shared>,
    looker: Option<JoinHandle<()>>,
    /// Observations of the last drain.
    drained: Vec<Observation>,
}

/// State shared by the agent and the scanning thread.
struct Shared {
    root: PathBuf,
    /// Zero of the observer's times.
    born: Instant,
    state: Mutex<State>,
    /// Signals new work to the scanning thread.
    changed: Condvar,
}

struct State {
    observer: Observer,
    targets: Vec<Pid>,
    /// When mappings were last read; `None` for new targets.
    read_at: Option<Instant>,
    is_paused: bool,
    is_over: bool,
    found: Vec<Observation>,
    lost: u64,
    rejected: u64,
    /// The last pass's error. The next pass waits until the agent has read it.
    error: Option<TrackerError>,
}

impl DamonTracker {
    /// Takes DAMON, if it is free. Observes nothing before targets are set.
    pub fn new(settings: &Settings) -> Result<Self, TrackerError> {
        let statistic = match settings.take_damon {
            true => Statistic::TurnOff,
            false => Statistic::Leave,
        };
        let kdamonds = Kdamond::claim(&settings.root, passes::KDAMONDS, statistic)?;
        let tracepoint = Tracepoint::on(&settings.root)?;
        let listen =
            move |kdamond, regions| tracepoint.listen(kdamond, ring_bytes(regions), regions);
        let flusher = TlbFlusher::new().inspect_err(
            |error| tracing::info!(%error, "no TLB is flushed for DAMON: pages that stay there look untouched"),
        );
        Self::with(settings, kdamonds, Box::new(listen), flusher.ok())
    }

    fn with(
        settings: &Settings,
        kdamonds: Vec<Kdamond>,
        listen: Listen,
        flusher: Option<TlbFlusher>,
    ) -> Result<Self, TrackerError> {
        let passes = Passes::new(settings.root.clone(), kdamonds, listen, flusher)?;
        let cpus = std::thread::available_parallelism().map_or(1, |n| n.get() as u32);
        let shared = Arc::new(Shared {
            root: settings.root.clone(),
            born: Instant::now(),
            state: Mutex::new(State {
                observer: Observer::new(settings.cpu_percent, cpus, Duration::ZERO),
                targets: vec![],
                read_at: None,
                is_paused: false,
                is_over: false,
                found: vec![],
                lost: 0,
                rejected: 0,
                error: None,
            }),
            changed: Condvar::new(),
        });
        let looker = std::thread::Builder::new().name("damon".into()).spawn({
            let shared = shared.clone();
            move || look_on(&shared, passes)
        });
        let looker = looker.map_err(|source| TrackerError::Io {
            tracker: NAME,
            what: "start a thread".into(),
            source,
        })?;
        Ok(Self {
            shared,
            looker: Some(looker),
            drained: vec![],
        })
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Changes the state, and wakes the scanning thread.
    fn change(&self, change: impl FnOnce(&mut State)) {
        change(&mut self.lock());
        self.changed.notify_all();
    }

    /// Waits for the next pass; `None` at the end.
    fn next(&self) -> Option<Look> {
        let mut state = self.lock();
        loop {
            if state.is_over {
                return None;
            }
            let mut patience = REFRESH;
            if !state.is_paused && state.error.is_none() {
                if state.read_at.is_none_or(|at| at.elapsed() >= REFRESH) {
                    state = self.read_mappings(state);
                    continue;
                }
                let now = self.born.elapsed();
                match state.observer.next(now) {
                    Next::Look(look) => return Some(look),
                    Next::Rest(until) => patience = until.saturating_sub(now),
                    Next::Idle => {}
                }
            }
            let waited = self.changed.wait_timeout(state, patience.min(REFRESH));
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }

    /// Reads the targets' mappings. It releases the lock meanwhile, since many mappings take a while.
    fn read_mappings<'a>(&'a self, mut state: MutexGuard<'a, State>) -> MutexGuard<'a, State> {
        state.read_at = Some(Instant::now());
        let targets = state.targets.clone();
        drop(state);
        let spaces: Vec<_> = targets
            .iter()
            .map(|&pid| (pid, self.readable(pid)))
            .collect();
        let mut state = self.lock();
        if state.targets == targets && !state.is_paused {
            for (pid, space) in &spaces {
                state.observer.set_memory(*pid, space);
            }
        }
        state
    }

    /// Readable mappings of a process; empty if it has ended.
    fn readable(&self, pid: Pid) -> Vec<VirtRange> {
        let vmas = read_maps(&self.root, pid).unwrap_or_default();
        let readable = vmas.iter().filter(|vma| vma.readable);
        readable.map(|vma| vma.range).collect()
    }

    /// Whether a pass is still wanted.
    fn is_wanted(&self) -> bool {
        let state = self.lock();
        !state.is_over && !state.is_paused && !state.targets.is_empty()
    }
}

/// The scanning thread's main loop.
fn look_on(shared: &Shared, mut passes: Passes) {
    while let Some(look) = shared.next() {
        let taken = passes.carry_out(&look, &|| shared.is_wanted());
        let mut state = shared.lock();
        let (taken, error) = match taken {
            Ok(taken) => (taken, None),
            Err(error) => (Default::default(), Some(error)),
        };
        state.error = error;
        state.lost += taken.lost;
        state.rejected += taken.rejected;
        let State {
            observer, found, ..
        } = &mut *state;
        observer.found(&look, taken.elapsed, &taken.cost, &taken.found, found);
        tracing::debug!(
            blocks = look.blocks.len(), answers = taken.found.len(), interval = ?look.pass.interval,
            looks = look.pass.looks, elapsed = ?taken.elapsed, cost = ?taken.cost, "took a pass"
        );
    }
}

impl Tracker for DamonTracker {
    fn name(&self) -> &'static str {
        NAME
    }

    fn waits(&self) -> f64 {
        WAITS
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        self.shared.change(|state| {
            if state.targets != targets {
                state.targets = targets.to_vec();
                state.read_at = None;
                state.observer.retain(targets);
                state.found.retain(|seen| targets.contains(&seen.pid));
            }
        });
        Ok(())
    }

    fn want(&mut self, blocks: &[(Pid, Block)]) {
        self.shared.lock().observer.want(blocks);
    }

    fn drain(&mut self, _out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        self.drained.clear();
        let mut state = self.shared.lock();
        if let Some(error) = state.error.take() {
            self.shared.changed.notify_all();
            return Err(error);
        }
        std::mem::swap(&mut self.drained, &mut state.found);
        let over = self.drained.len().saturating_sub(max) as u64;
        self.drained.truncate(max);
        Ok(Drained {
            taken: self.drained.len() as u64,
            lost: std::mem::take(&mut state.lost) + over,
            rejected: std::mem::take(&mut state.rejected),
            is_repeat: self.drained.is_empty(),
        })
    }

    fn observed(&self) -> &[Observation] {
        &self.drained
    }

    fn epoch_ended(&mut self, prospect: Prospect) -> Result<(), TrackerError> {
        self.shared
            .change(|state| state.observer.set_prospect(prospect));
        Ok(())
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.shared.change(|state| {
            state.is_paused = true;
            state.observer.clear();
            state.found.clear();
        });
        Ok(())
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        self.shared.change(|state| {
            state.is_paused = false;
            state.read_at = None;
        });
        Ok(())
    }
}

impl Drop for DamonTracker {
    fn drop(&mut self) {
        self.shared.change(|state| state.is_over = true);
        if let Some(looker) = self.looker.take() {
            // The thread has reported its error, if any.
            let _ = looker.join();
        }
    }
}

#[cfg(test)]
pub(crate) mod tests;
