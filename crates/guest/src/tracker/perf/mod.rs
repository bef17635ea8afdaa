//! The tracker on the CPU's load sampling (PEBS, IBS), through perf_event_open(2).
//!
//! One event per CPU samples all processes, and records are filtered by process. Hence running threads, new threads and
//! forked children are covered, and the number of descriptors does not grow with the targets. It needs CAP_PERFMON (or
//! perf_event_paranoid <= 0).
//!
//! The kernel writes hardware records in bulk at task switches, without an interrupt for each. That needs an event with
//! a fixed period, no wake-up and only simple fields (large PEBS: arch/x86/events/intel/core.c,
//! `intel_pmu_large_pebs_flags`). The attributes in event.rs comply.

mod event;
mod selftest;
mod watchdog;

use std::collections::{BTreeMap, BTreeSet};
use std::io;
use std::os::fd::OwnedFd;
use std::path::Path;
use std::time::Instant;

use demeter_linux::perf::ring::Ring;
use demeter_linux::perf::sys;
use demeter_policy::damon::Prospect;
use demeter_policy::{GuestVirtAddr, Pid, Sample, thinning};

pub use demeter_linux::perf::ring::{Record, access, ibs_load, raw, records};
pub use event::EventKind;

use super::{Drained, Settings, Tracker, TrackerError, is_user_address};
use event::PerfEvent;
use watchdog::Watchdog;

const NAME: &str = "perf";

/// Size of the records in a CPU's ring. With its control page it fits the kernel's default `perf_event_mlock_kb` of
/// 516.
const RING_BYTES: usize = 512 << 10;

/// A reader of the kernel's perf rings, one per CPU.
pub struct PerfTracker {
    event: PerfEvent,
    /// Loads below this latency are rejected.
    threshold_cycles: u64,
    root: std::path::PathBuf,
    rings: BTreeMap<u32, CpuRing>,
    targets: BTreeSet<Pid>,
    paused: bool,
    watchdog: Watchdog,
    /// Each n-th sample is taken, with this `n` and this maximum.
    thinning: u32,
    most_thinning: u32,
    /// Samples of this epoch.
    samples: u64,
}

struct CpuRing {
    ring: Ring,
    event: OwnedFd,
    /// Kept open: the kernel schedules the event only together with its leader.
    _leader: Option<OwnedFd>,
}

impl PerfTracker {
    /// Opens the hardware's load sampling, and tests that it yields addresses.
    pub fn new(settings: &Settings) -> Result<Self, TrackerError> {
        let mut tracker = Self::with_event(EventKind::detect(&settings.root)?, settings)?;
        selftest::check(&mut tracker)?;
        tracker.set_targets(&[])?;
        Ok(tracker)
    }

    /// Opens a kind of event on every CPU, without a test.
    pub fn with_event(kind: EventKind, settings: &Settings) -> Result<Self, TrackerError> {
        let event = kind.event(settings)?;
        let mut tracker = Self {
            most_thinning: event.most_thinning(),
            thinning: 1,
            samples: 0,
            event,
            threshold_cycles: event::threshold_cycles(settings),
            root: settings.root.clone(),
            rings: BTreeMap::new(),
            targets: BTreeSet::new(),
            paused: false,
            watchdog: Watchdog::new(Instant::now()),
        };
        tracker.follow_cpus()?;
        Ok(tracker)
    }

    /// Opens rings of CPUs that came online, and closes those of CPUs that went offline.
    fn follow_cpus(&mut self) -> Result<(), TrackerError> {
        let online = online_cpus(&self.root)?;
        self.rings.retain(|cpu, _| online.contains(cpu));
        for cpu in online {
            if self.rings.contains_key(&cpu) {
                continue;
            }
            match CpuRing::open(&self.event, cpu) {
                Ok(ring) => {
                    if self.thinning > 1 {
                        // Refused: this CPU yields more samples than it should, until the next change.
                        let _ = ring.set_period(self.period());
                    }
                    if !self.paused {
                        ring.enable(true)?;
                    }
                    self.rings.insert(cpu, ring);
                }
                // The CPU went offline after we read the list.
                Err(error) if error.raw_os_error() == Some(libc::ENODEV) => {}
                Err(error) => return Err(self.event.refused(&self.root, error)),
            }
        }
        if self.rings.is_empty() {
            let error = io::Error::from_raw_os_error(libc::ENODEV);
            return Err(self.event.refused(&self.root, error));
        }
        Ok(())
    }

    /// Takes the records of all CPUs.
    fn take(&self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        let mut drained = Drained::default();
        if self.paused {
            return Ok(drained);
        }
        let mut fault = None;
        let mut bytes = Vec::new();
        for (index, (cpu, CpuRing { ring, .. })) in self.rings.iter().enumerate() {
            if let Err(what) = ring.take(&mut bytes) {
                fault = Some(format!("CPU {cpu}: {what}"));
                continue;
            }
            // No CPU may fill the whole quota and silence those after it.
            let cpus_left = self.rings.len() - index;
            let mut quota = (max - drained.taken as usize) / cpus_left;
            for record in records(&bytes) {
                let sample = match record {
                    Ok(Record::Sample(sample)) => self.access(sample),
                    Ok(Record::Lost(count)) => {
                        drained.lost = drained.lost.saturating_add(count);
                        continue;
                    }
                    Ok(Record::Other) => continue,
                    Err(what) => {
                        fault = Some(format!("CPU {cpu}: {what}"));
                        continue;
                    }
                };
                match sample
                    .filter(|(pid, addr)| self.targets.contains(pid) && is_user_address(*addr))
                {
                    None => drained.rejected += 1,
                    Some(_) if quota == 0 => drained.lost += 1,
                    Some((pid, addr)) => {
                        out.push(Sample {
                            pid,
                            addr,
                            weight: 1,
                        });
                        drained.taken += 1;
                        quota -= 1;
                    }
                }
            }
        }
        match fault {
            None => Ok(drained),
            Some(what) => Err(TrackerError::Corrupt {
                tracker: NAME,
                what,
            }),
        }
    }

    /// After a long silence: a program may have had no slow load, but this one has some now.
    fn prove_alive(&mut self) -> Result<(), TrackerError> {
        let targets = self.targets.clone();
        let alive = selftest::check(self);
        self.targets = targets;
        self.watchdog.is_alive(Instant::now());
        match alive {
            Err(TrackerError::Unavailable { tracker, why, .. }) => {
                Err(TrackerError::Silent { tracker, why })
            }
            alive => alive,
        }
    }

    /// The slow load in a sample, if there is one.
    fn access(&self, sample: &[u8]) -> Option<(Pid, GuestVirtAddr)> {
        match self.event.kind {
            EventKind::AmdIbs => ibs_load(sample)
                .filter(|load| u64::from(load.latency_cycles) >= self.threshold_cycles)
                .map(|load| (load.pid, load.addr)),
            EventKind::IntelLoadLatency | EventKind::PageFaults => access(sample),
        }
    }

    /// Loads per sample now.
    fn period(&self) -> u64 {
        self.event.attr.sample_period * u64::from(self.thinning)
    }

    /// From now on takes each n-th sample (`n` is `thinning`), or all if the kernel refuses that.
    fn thin(&mut self, thinning: u32) {
        self.thinning = thinning;
        let period = self.period();
        let refused = (self.rings.values()).find_map(|ring| ring.set_period(period).err());
        if let Some(error) = refused {
            tracing::debug!("the kernel refuses to change the sampling period: {error}");
            (self.thinning, self.most_thinning) = (1, 1);
            for ring in self.rings.values() {
                // It had this period when it was opened.
                let _ = ring.set_period(self.event.attr.sample_period);
            }
        }
    }

    fn enable(&self, on: bool) -> Result<(), TrackerError> {
        self.rings.values().try_for_each(|ring| ring.enable(on))
    }
}

impl CpuRing {
    fn open(event: &PerfEvent, cpu: u32) -> io::Result<Self> {
        let leader = event
            .leader
            .as_ref()
            .map(|leader| sys::open(leader, sys::Scope::Cpu(cpu), None))
            .transpose()?;
        let event = sys::open(&event.attr, sys::Scope::Cpu(cpu), leader.as_ref())?;
        let ring = Ring::map(&event, RING_BYTES)?;
        Ok(Self {
            ring,
            event,
            _leader: leader,
        })
    }

    fn set_period(&self, period: u64) -> io::Result<()> {
        sys::set_period(&self.event, period)
    }

    fn enable(&self, on: bool) -> Result<(), TrackerError> {
        sys::enable(self._leader.as_ref().unwrap_or(&self.event), on).map_err(|source| {
            TrackerError::Io {
                tracker: NAME,
                what: "switch the event".into(),
                source,
            }
        })
    }
}

impl Tracker for PerfTracker {
    fn name(&self) -> &'static str {
        NAME
    }

    fn loads_per_sample(&self) -> Option<u32> {
        u32::try_from(self.event.attr.sample_period).ok()
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        self.targets = targets.iter().copied().collect();
        self.follow_cpus()
    }

    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        let drained = self.take(out, max)?;
        self.samples = self
            .samples
            .saturating_add(drained.taken.saturating_add(drained.lost));
        let now = Instant::now();
        if !self.paused && self.watchdog.is_suspect(is_life(&drained), now) {
            self.prove_alive()?;
        }
        Ok(drained)
    }

    fn epoch_ended(&mut self, prospect: Prospect) -> Result<(), TrackerError> {
        let samples = std::mem::take(&mut self.samples);
        let next = thinning(&prospect, samples, self.thinning, self.most_thinning);
        if next != self.thinning {
            self.thin(next);
        }
        Ok(())
    }

    fn thinning(&self) -> u32 {
        self.thinning
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.paused = true;
        self.enable(false)
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        if self.paused {
            self.rings.values().for_each(|cpu| cpu.ring.discard());
            self.paused = false;
            self.watchdog = Watchdog::new(Instant::now());
            self.enable(true)?;
        }
        Ok(())
    }
}

/// Whether these records show that the unit works. Rejected ones do not: they may be all without an address.
fn is_life(drained: &Drained) -> bool {
    drained.taken + drained.lost > 0
}

fn online_cpus(root: &Path) -> Result<Vec<u32>, TrackerError> {
    let path = root.join("sys/devices/system/cpu/online");
    let text = std::fs::read_to_string(&path).map_err(|source| TrackerError::Io {
        tracker: NAME,
        what: format!("read {}", path.display()),
        source,
    })?;
    Ok(crate::nodes::parse_list(&text))
}

#[cfg(test)]
pub(super) mod tests;
