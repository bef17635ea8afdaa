//! The lab's tracker: samples from the emulator that runs this VM.
//!
//! The emulator's plugin sees every load and writes each `period`-th slow one into a ring per vCPU, in memory that is
//! BAR 2 of an ivshmem device. It cannot see processes, so samples are attributed by the targets' mappings.

mod ring;

use std::fs::{self, OpenOptions};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicU32, Ordering};

use demeter_linux::lock::LockedFile;
use demeter_linux::mapping::{Mapping, unread};
use demeter_policy::{Pid, Sample};

pub use ring::{Layout, Record, records};

use super::owners::{Owner, Owners};
use super::{Drained, Settings, Tracker, TrackerError};

const NAME: &str = "lab";
const PCI_VENDOR: &str = "0x1af4";
const PCI_DEVICE: &str = "0x1110";

/// Drains after which mappings are read again.
const REFRESH_DRAINS: u32 = 8;
/// Drains after which they are read again if one in `STRANGERS_SHARE` records has no owner.
const REFRESH_DRAINS_STRANGERS: u32 = 2;
const STRANGERS_SHARE: usize = 4;

/// A reader of the lab emulator's sample rings.
pub struct LabTracker {
    memory: Mapping,
    _device: LockedFile,
    layout: Layout,
    period: u32,
    paused: bool,
    owners: Owners,
    drains_since_refresh: u32,
    /// The writer's drop counters at the last drain.
    dropped_seen: Vec<u64>,
    /// Samples of addresses that several processes map, given to the first one.
    ambiguous: u64,
}

impl LabTracker {
    /// Finds the lab's device below `settings.root` and starts sampling.
    pub fn new(settings: &Settings) -> Result<Self, TrackerError> {
        Self::open(&find_device(&settings.root)?, settings)
    }

    /// Starts sampling on a file of the same layout.
    pub fn open(path: &Path, settings: &Settings) -> Result<Self, TrackerError> {
        let to_error = |source| TrackerError::Io {
            tracker: NAME,
            what: format!("map {}", path.display()),
            source,
        };
        let corrupt = |what| TrackerError::Corrupt {
            tracker: NAME,
            what,
        };
        let file = OpenOptions::new()
            .read(true)
            .write(true)
            .open(path)
            .map_err(to_error)?;
        let device =
            LockedFile::try_new(file).map_err(|_| TrackerError::Taken { tracker: NAME })?;
        let file = device.file();
        let len = file.metadata().map_err(to_error)?.len();
        if len < ring::CONTROL_BYTES as u64 {
            return Err(corrupt(format!("{len} bytes hold no control page")));
        }
        let mut control = Vec::new();
        Mapping::new(file, ring::CONTROL_BYTES)
            .map_err(to_error)?
            .copy(0..ring::control::BYTES, &mut control);
        let layout = Layout::parse(&control, len).map_err(corrupt)?;
        let mut tracker = Self {
            memory: Mapping::new(file, layout.bytes()).map_err(to_error)?,
            _device: device,
            layout,
            period: settings.period,
            paused: true,
            owners: Owners::new(&settings.root),
            drains_since_refresh: 0,
            dropped_seen: vec![0; layout.vcpus as usize],
            ambiguous: 0,
        };
        let threshold_ns = tracker.memory.u32_at(ring::control::THRESHOLD_NS);
        threshold_ns.store(settings.latency_threshold_ns, Ordering::Relaxed);
        tracker.resume()?;
        Ok(tracker)
    }

    fn period_word(&self) -> &AtomicU32 {
        self.memory.u32_at(ring::control::PERIOD)
    }

    /// Copies new records from a ring. Returns the number that the writer dropped since the last call.
    fn take(&mut self, vcpu: u32, bytes: &mut Vec<u8>) -> Result<u64, TrackerError> {
        let start = self.layout.ring(vcpu);
        let tail_word = self.memory.u64_at(start + ring::header::TAIL);
        // Acquire: records up to this head were written before it. We are the tail's only writer.
        let head = self
            .memory
            .u64_at(start + ring::header::HEAD)
            .load(Ordering::Acquire);
        let tail = tail_word.load(Ordering::Relaxed);
        let pieces = unread(head, tail, self.layout.ring_records.into());
        for piece in pieces.iter().flatten() {
            let offset =
                |index: u64| start + ring::RING_HEADER_BYTES + index as usize * ring::RECORD_BYTES;
            self.memory
                .copy(offset(piece.start)..offset(piece.end), bytes);
        }
        // Release: the writer reuses records only after they were copied.
        tail_word.store(head, Ordering::Release);

        let dropped = self
            .memory
            .u64_at(start + ring::header::DROPPED)
            .load(Ordering::Relaxed);
        let seen = std::mem::replace(&mut self.dropped_seen[vcpu as usize], dropped);
        if pieces.is_none() {
            return Err(TrackerError::Corrupt {
                tracker: NAME,
                what: format!(
                    "vCPU {vcpu}: head {head} is not within {} records of tail {tail}",
                    self.layout.ring_records
                ),
            });
        }
        Ok(dropped.saturating_sub(seen))
    }

    /// Discards all records in the rings.
    fn discard(&mut self) {
        let mut bytes = Vec::new();
        for vcpu in 0..self.layout.vcpus {
            // A corrupt ring is resynchronized by this, which suffices here.
            let _ = self.take(vcpu, &mut bytes);
            bytes.clear();
        }
    }

    /// Appends the targets' samples; returns the number of records without an owner.
    fn attribute(
        &mut self,
        records: Vec<Record>,
        out: &mut Vec<Sample>,
        drained: &mut Drained,
    ) -> Vec<Record> {
        let mut strangers = Vec::new();
        for record in records {
            let pid = match self.owners.find(record.gva, record.gpa) {
                Owner::One(pid) => pid,
                Owner::Ambiguous(pid) => {
                    self.ambiguous += 1;
                    pid
                }
                Owner::Nobody => {
                    strangers.push(record);
                    continue;
                }
            };
            out.push(Sample {
                pid,
                addr: record.gva,
                weight: 1,
            });
            drained.taken += 1;
        }
        strangers
    }
}

impl Tracker for LabTracker {
    fn name(&self) -> &'static str {
        NAME
    }

    fn loads_per_sample(&self) -> Option<u32> {
        Some(self.period)
    }

    /// The emulator makes one load at a time.
    fn loads_overlap(&self) -> bool {
        false
    }

    fn set_targets(&mut self, targets: &[Pid]) -> Result<(), TrackerError> {
        self.owners.set_targets(targets);
        self.drains_since_refresh = 0;
        Ok(())
    }

    fn drain(&mut self, out: &mut Vec<Sample>, max: usize) -> Result<Drained, TrackerError> {
        let mut drained = Drained::default();
        if self.paused {
            return Ok(drained);
        }
        let mut fault = None;
        let mut found = Vec::new();
        let mut bytes = Vec::new();
        for vcpu in 0..self.layout.vcpus {
            bytes.clear();
            match self.take(vcpu, &mut bytes) {
                // The writer is not trusted: the count may be anything.
                Ok(dropped) => drained.lost = drained.lost.saturating_add(dropped),
                Err(error) => fault = Some(error),
            }
            // Each vCPU has a quota, so that no vCPU displaces the later ones.
            let quota = (max - found.len()) / (self.layout.vcpus - vcpu) as usize;
            let before = found.len();
            for record in records(&bytes) {
                match record {
                    None => drained.rejected += 1,
                    Some(_) if found.len() - before == quota => {
                        drained.lost = drained.lost.saturating_add(1);
                    }
                    Some(record) => found.push(record),
                }
            }
        }

        let all = found.len();
        self.drains_since_refresh += 1;
        let mut strangers = self.attribute(found, out, &mut drained);
        let many_strangers = strangers.len() * STRANGERS_SHARE > all;
        if self.drains_since_refresh >= REFRESH_DRAINS
            || (many_strangers && self.drains_since_refresh >= REFRESH_DRAINS_STRANGERS)
        {
            self.owners.refresh();
            self.drains_since_refresh = 0;
            strangers = self.attribute(strangers, out, &mut drained);
        }
        drained.rejected += strangers.len() as u64;
        if self.ambiguous > 0 {
            let samples = std::mem::take(&mut self.ambiguous);
            tracing::debug!(samples, "several targets map the same addresses");
        }
        fault.map_or(Ok(drained), Err)
    }

    fn pause(&mut self) -> Result<(), TrackerError> {
        self.paused = true;
        self.period_word().store(0, Ordering::Relaxed);
        Ok(())
    }

    fn resume(&mut self) -> Result<(), TrackerError> {
        if self.paused {
            self.discard();
            self.period_word().store(self.period, Ordering::Relaxed);
            self.paused = false;
        }
        Ok(())
    }
}

impl Drop for LabTracker {
    fn drop(&mut self) {
        self.period_word().store(0, Ordering::Relaxed);
    }
}

/// Finds the file of the device's shared memory.
fn find_device(root: &Path) -> Result<PathBuf, TrackerError> {
    let is = |path: PathBuf, id: &str| {
        fs::read_to_string(path).is_ok_and(|text| text.trim().eq_ignore_ascii_case(id))
    };
    let mut devices: Vec<_> = fs::read_dir(root.join("sys/bus/pci/devices"))
        .into_iter()
        .flatten()
        .filter_map(|entry| entry.ok().map(|entry| entry.path()))
        .filter(|dir| is(dir.join("vendor"), PCI_VENDOR) && is(dir.join("device"), PCI_DEVICE))
        .map(|dir| dir.join("resource2"))
        .collect();
    devices.sort();
    devices
        .into_iter()
        .next()
        .ok_or_else(|| TrackerError::Unavailable {
            tracker: NAME,
            why: "no ivshmem device: this machine does not run in Demeter's lab".into(),
            hint: "use it with `demeter run SCENARIO --on lab`".into(),
        })
}

#[cfg(test)]
pub(crate) mod tests;
