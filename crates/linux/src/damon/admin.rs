//! Our own kdamonds, through `/sys/kernel/mm/damon/admin` (Documentation/admin-guide/mm/damon/usage.rst).
//!
//! The number of kdamonds is global, and changing it destroys the existing ones. So we take DAMON only while it is
//! unused, and hold a lock on the file of that number. Other instances see the lock. Settings like ours without the
//! lock were left by an instance that was killed.

use std::fs::File;
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Pid, VirtRange};

use super::DamonError;
use super::file::{io_error, line, open, read, unavailable, write};
use super::left::Change;
use super::owner::{Owner, STATISTIC};
use crate::lock::LockedFile;
use crate::open_files;

const ADMIN_DIR: &str = "sys/kernel/mm/damon/admin/kdamonds";

const CONTEXT_DIR: &str = "contexts/0";
const INTERVALS_DIR: &str = "contexts/0/monitoring_attrs/intervals";
const REGIONS_DIR: &str = "contexts/0/monitoring_attrs/nr_regions";
const TARGETS_DIR: &str = "contexts/0/targets";

/// Time between two updates of the mappings, microseconds. The odd number marks settings as ours.
const UPDATE_US: u64 = 1_000_003;

/// Name of the operations set that monitors given regions, and of the set that older versions used.
const OPERATIONS: &str = "fvaddr";
const OLD_OPERATIONS: &str = "vaddr";

/// How to treat DAMON_STAT, which the kernel starts by itself and which blocks other users.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// Turn it off while we have DAMON.
    TurnOff,
    /// Leave it on, and do not use DAMON.
    Leave,
}

/// The exclusive right to change DAMON. Dropping it turns DAMON_STAT on again.
#[derive(Debug)]
struct Ownership {
    root: PathBuf,
    dir: PathBuf,
    _count: LockedFile,
}

/// DAMON with our kdamonds, which are removed at the end.
#[derive(Debug)]
struct Claim(Ownership);

/// A kdamond. Dropping it stops it; dropping the last one removes all.
#[derive(Debug)]
pub struct Kdamond {
    dir: PathBuf,
    claim: Arc<Claim>,
    /// Whether region files may stay open.
    keeps_files: bool,
    targets: Mutex<Vec<Target>>,
}

/// The files of a process and its regions. They are kept, because creating a region's files costs several times as much
/// as writing to them.
#[derive(Debug)]
struct Target {
    pid: Pid,
    regions: Vec<RegionFiles>,
}

/// The files of a region.
#[derive(Debug, Default)]
struct RegionFiles {
    /// Their contents; `None` if unknown.
    range: Option<VirtRange>,
    /// Both files, start first, if they stay open.
    open: Option<[File; 2]>,
}

impl RegionFiles {
    /// Writes a range to the files in `dir`. With `keep` the files stay open.
    fn set(&mut self, dir: &Path, range: VirtRange, keep: bool) -> Result<(), DamonError> {
        let before = self.range.take();
        let files = match self.open.take() {
            Some(files) => files,
            None => [open(&dir.join("start"))?, open(&dir.join("end"))?],
        };
        let is_before = |value: fn(&VirtRange) -> GuestVirtAddr| {
            before.as_ref().map(value) == Some(value(&range))
        };
        let values = [
            ("start", range.start(), is_before(VirtRange::start)),
            ("end", range.end(), is_before(VirtRange::end)),
        ];
        for (file, (name, value, is_before)) in files.iter().zip(values) {
            if !is_before {
                let written = file.write_all_at(line(value.0).as_bytes(), 0);
                written.map_err(|source| io_error("write to", &dir.join(name), source))?;
            }
        }
        self.range = Some(range);
        self.open = keep.then_some(files);
        Ok(())
    }
}

/// Reverts changes of DAMON that a killed instance has left. Returns a line for each.
///
/// # Errors
/// Another instance uses DAMON, the kernel has none, or permission is missing.
pub fn clean_up(root: &Path) -> Result<Vec<&'static str>, DamonError> {
    let ownership = Ownership::take(root)?;
    let mut undone = vec![];
    if ownership.remove_what_is_left()? {
        undone.push("removed the kdamonds that a killed Demeter left behind");
    }
    if ownership.return_statistic()? {
        undone.push("turned DAMON_STAT on again, which a killed Demeter had turned off");
    }
    Ok(undone)
}

impl Ownership {
    /// Locks other instances out; changes nothing else.
    fn take(root: &Path) -> Result<Self, DamonError> {
        let dir = root.join(ADMIN_DIR);
        let path = dir.join("nr_kdamonds");
        let count = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| {
                let hint = match error.kind() {
                    io::ErrorKind::PermissionDenied => "run Demeter as root (CAP_SYS_ADMIN)",
                    _ => "use a kernel with CONFIG_DAMON_SYSFS and CONFIG_DAMON_VADDR",
                };
                unavailable(format!("cannot open {}: {error}", path.display()), hint)
            })?;
        Ok(Self {
            root: root.into(),
            dir,
            _count: LockedFile::try_new(count).map_err(|_| DamonError::Taken)?,
        })
    }

    /// Removes kdamonds that a killed instance has left. Returns whether there were any.
    fn remove_what_is_left(&self) -> Result<bool, DamonError> {
        let there = read(&self.dir.join("nr_kdamonds"))?;
        let is_left = there != "0";
        if is_left {
            if !are_left(&self.root, &self.dir, &there) {
                return Err(DamonError::Held(Owner::Kdamonds));
            }
            self.remove()?;
        }
        Ok(is_left)
    }

    /// Checks that the kernel's own users do not have DAMON; turns DAMON_STAT off if permitted.
    fn free(&self, statistic: Statistic) -> Result<(), DamonError> {
        if statistic == Statistic::Leave {
            self.return_statistic()?;
        }
        match Owner::in_kernel(&self.root) {
            None => Ok(()),
            Some(Owner::Statistic) if statistic == Statistic::TurnOff => {
                Change::Statistic.note(&self.root)?;
                tracing::info!("turning DAMON_STAT off, until we are done with DAMON");
                write(&self.root.join(STATISTIC), "N")
            }
            Some(owner) => Err(DamonError::Held(owner)),
        }
    }

    /// Turns DAMON_STAT on again if we had turned it off. Returns whether we had.
    fn return_statistic(&self) -> Result<bool, DamonError> {
        let was_on = Change::Statistic.is_noted(&self.root);
        if was_on {
            write(&self.root.join(STATISTIC), "Y")?;
            Change::Statistic.forget(&self.root)?;
        }
        Ok(was_on)
    }

    fn add(self, kdamonds: usize) -> Result<Claim, DamonError> {
        if let Err(error) = Change::Kdamonds.note(&self.root) {
            // Most of them are recognized by their settings.
            tracing::warn!(%error, "after a kill, kdamonds that are not set up yet would stay");
        }
        write(&self.dir.join("nr_kdamonds"), &kdamonds.to_string())?;
        Ok(Claim(self))
    }

    /// Stops and removes all kdamonds.
    fn remove(&self) -> Result<(), DamonError> {
        let count = self.dir.join("nr_kdamonds");
        for index in 0..read(&count)?.parse().unwrap_or(0u32) {
            stop(&self.dir.join(index.to_string()))?;
        }
        write(&count, "0")?;
        Change::Kdamonds.forget(&self.root)
    }
}

impl Kdamond {
    /// Takes DAMON with `kdamonds` kdamonds.
    ///
    /// # Errors
    /// The kernel has no DAMON, another user has it, or permission is missing.
    pub fn claim(
        root: &Path,
        kdamonds: usize,
        statistic: Statistic,
    ) -> Result<Vec<Self>, DamonError> {
        let ownership = Ownership::take(root)?;
        if ownership.remove_what_is_left()? {
            tracing::warn!("removed the kdamonds that a Demeter left behind when it died");
        }
        ownership.free(statistic)?;
        let claim = Arc::new(ownership.add(kdamonds)?);
        let keeps_files = open_files::raise(OPEN_FILES) >= OPEN_FILES;
        let kdamond = |index: usize| Self {
            keeps_files,
            dir: claim.0.dir.join(index.to_string()),
            claim: claim.clone(),
            targets: Mutex::default(),
        };
        let kdamonds: Vec<_> = (0..kdamonds).map(kdamond).collect();
        for kdamond in &kdamonds {
            kdamond.create()?;
        }
        Ok(kdamonds)
    }

    fn create(&self) -> Result<(), DamonError> {
        self.set("contexts/nr_contexts", 1)?;
        let offered = self.get(&format!("{CONTEXT_DIR}/avail_operations"))?;
        if !offered.split_whitespace().any(|name| name == OPERATIONS) {
            return Err(unavailable(
                format!("the kernel's DAMON watches no given regions ({OPERATIONS})"),
                "use Linux 5.19 or later with CONFIG_DAMON_VADDR",
            ));
        }
        self.set(&format!("{CONTEXT_DIR}/operations"), OPERATIONS)?;
        self.set(&format!("{INTERVALS_DIR}/update_us"), UPDATE_US)
    }

    /// Sets the regions to monitor from the next start. Returns the number of regions that are reported.
    ///
    /// `regions` are sorted by process and address, disjoint, and at most a block long, so that the kernel neither
    /// splits nor merges them. [Fillers](is_filler) take the place of earlier regions, and make up the minimum of
    /// three.
    ///
    /// # Errors
    /// The kernel does not accept them, or the kdamond is running.
    pub fn set_regions(&self, regions: &[(Pid, VirtRange)]) -> Result<usize, DamonError> {
        let mut known = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        // After an error the files' contents are unknown.
        let mut targets = std::mem::take(&mut *known);
        let wanted: Vec<_> = regions.chunk_by(|a, b| a.0 == b.0).collect();
        let kept = targets.iter().zip(&wanted);
        let kept: usize = kept.map(|(t, w)| t.regions.len().max(w.len())).sum();
        if targets.len() != wanted.len() || kept > REGIONS_PER_BLOCK_MAX * regions.len() + SPARE {
            // The kernel creates all targets again, without regions.
            self.set(&format!("{TARGETS_DIR}/nr_targets"), wanted.len())?;
            targets.clear();
        }
        for (index, wanted) in wanted.into_iter().enumerate() {
            let dir = format!("{TARGETS_DIR}/{index}");
            let pid = wanted[0].0;
            if targets.len() == index {
                let regions = vec![];
                targets.push(Target { pid, regions });
                self.set(&format!("{dir}/pid_target"), pid)?;
            }
            let target = &mut targets[index];
            if target.pid != pid {
                self.set(&format!("{dir}/pid_target"), pid)?;
                target.pid = pid;
            }
            let count = match regions.len() < REGIONS_MIN {
                true => REGIONS_MIN,
                false => wanted.len(),
            };
            self.write_regions(
                &format!("{dir}/regions"),
                &mut target.regions,
                wanted,
                count,
            )?;
        }
        // DAMON splits regions while there are fewer than half of the maximum. It merges them up to the size of all
        // memory divided by the minimum number; since Linux 7 it also splits larger ones. This size is between one and
        // two blocks here.
        let all = || {
            let regions = targets.iter().flat_map(|target| &target.regions);
            regions.filter_map(|region| region.range)
        };
        let (count, bytes) = (all().count(), all().map(|r| r.len().0).sum::<u64>());
        let least = (bytes / BLOCK_SIZE).max(REGIONS_MIN as u64);
        self.set(&format!("{REGIONS_DIR}/max"), (count as u64).max(least))?;
        self.set(&format!("{REGIONS_DIR}/min"), least)?;
        *known = targets;
        Ok(count)
    }

    /// Writes a target's regions, at least `count` of them.
    fn write_regions(
        &self,
        dir: &str,
        there: &mut Vec<RegionFiles>,
        wanted: &[(Pid, VirtRange)],
        count: usize,
    ) -> Result<(), DamonError> {
        if there.len() < count {
            self.set(&format!("{dir}/nr_regions"), count)?;
            there.clear();
            there.resize_with(count, RegionFiles::default);
        }
        let fillers = (wanted.len()..there.len()).map(filler);
        let ranges = wanted.iter().map(|&(_, range)| range).chain(fillers);
        let dir = self.dir.join(dir);
        for ((index, files), range) in there.iter_mut().enumerate().zip(ranges) {
            if files.range != Some(range) {
                files.set(&dir.join(index.to_string()), range, self.keeps_files)?;
            }
        }
        Ok(())
    }

    /// Starts aggregations of `looks` looks, one per interval. Returns the kdamond's thread.
    ///
    /// # Errors
    /// The kernel refuses; EINVAL means that a target has ended.
    pub fn start(&self, interval: Duration, looks: u32) -> Result<Pid, DamonError> {
        for (file, us) in [
            ("sample_us", interval.as_micros()),
            ("aggr_us", (interval * looks).as_micros()),
        ] {
            self.set(&format!("{INTERVALS_DIR}/{file}"), us)?;
        }
        self.set("state", "on").map_err(|error| match error {
            // The kernel reports an exclusive user in this way.
            DamonError::Io { source, .. } if source.kind() == io::ErrorKind::ResourceBusy => {
                let owner = Owner::in_kernel(&self.claim.0.root);
                DamonError::Held(owner.unwrap_or(Owner::Unknown))
            }
            error => error,
        })?;
        let path = self.dir.join("pid");
        read(&path)?
            .parse()
            .map(Pid)
            .map_err(|error| io_error("read", &path, io::Error::other(error)))
    }

    /// Stops observing; a stopped kdamond costs nothing.
    ///
    /// # Errors
    /// The kernel refuses.
    pub fn stop(&self) -> Result<(), DamonError> {
        stop(&self.dir)
    }

    fn set(&self, file: &str, value: impl ToString) -> Result<(), DamonError> {
        write(&self.dir.join(file), &value.to_string())
    }

    fn get(&self, file: &str) -> Result<String, DamonError> {
        read(&self.dir.join(file))
    }
}

/// The most regions that a kdamond keeps per region to monitor. The kernel visits fillers, too, but they have no page to
/// look at.
pub const REGIONS_PER_BLOCK_MAX: usize = 4;

/// Fillers that are allowed beyond these.
const SPARE: usize = 16;

/// Start of the fillers: above all user memory, so that they sort last and have no pages.
const FILLERS: u64 = 1 << 63;

/// The filler for a target's `index`th region: of a block's size, and not adjacent to others.
fn filler(index: usize) -> VirtRange {
    let start = FILLERS + index as u64 * 2 * BLOCK_SIZE;
    let [start, end] = [start, start + BLOCK_SIZE].map(GuestVirtAddr);
    VirtRange::new(start, end).expect("a block has a length")
}

/// Whether a region is a filler.
pub fn is_filler(range: &VirtRange) -> bool {
    range.start().0 >= FILLERS
}

/// The kernel's minimum number of regions.
const REGIONS_MIN: usize = 3;

impl Drop for Kdamond {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::warn!(%error, "a kdamond goes on");
        }
    }
}

impl Drop for Claim {
    fn drop(&mut self) {
        if let Err(error) = self.0.remove() {
            tracing::warn!(%error, "kdamonds stay behind");
        }
    }
}

impl Drop for Ownership {
    fn drop(&mut self) {
        match self.return_statistic() {
            Ok(false) => {}
            Ok(true) => tracing::info!("turned DAMON_STAT on again"),
            Err(error) => tracing::warn!(%error, "DAMON_STAT stays off"),
        }
    }
}

/// Stops a kdamond. It ends by itself with its last target, and then refuses to be stopped.
fn stop(dir: &Path) -> Result<(), DamonError> {
    let state = dir.join("state");
    let is_on = || read(&state).is_ok_and(|state| state == "on");
    match is_on().then(|| write(&state, "off")) {
        Some(Err(error)) if is_on() => Err(error),
        _ => Ok(()),
    }
}

/// Whether all kdamonds were left by a killed instance: they have settings that only we choose, or they were noted and
/// are still blank (off and without targets).
fn are_left(root: &Path, dir: &Path, kdamonds: &str) -> bool {
    let is_noted = Change::Kdamonds.is_noted(root);
    let is_left = |index: u32| {
        let text = |file: &str| read(&dir.join(index.to_string()).join(file)).unwrap_or_default();
        let operations = text(&format!("{CONTEXT_DIR}/operations"));
        let has_our_settings = [OPERATIONS, OLD_OPERATIONS].contains(&operations.as_str())
            && text(&format!("{INTERVALS_DIR}/update_us")) == UPDATE_US.to_string();
        let is_none = |file: &str| matches!(text(file).as_str(), "" | "0");
        let is_blank = || {
            text("state") == "off"
                && (is_none("contexts/nr_contexts")
                    || is_none(&format!("{TARGETS_DIR}/nr_targets"))
                        && is_none(&format!("{CONTEXT_DIR}/schemes/nr_schemes")))
        };
        has_our_settings || is_noted && is_blank()
    };
    kdamonds
        .parse()
        .is_ok_and(|count: u32| (0..count).all(is_left))
}

/// Limit of open files at which all region files can stay open: two for each region of all kdamonds, and as many again.
const OPEN_FILES: u64 = 32_768;
