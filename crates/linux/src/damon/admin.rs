//! Kdamonds of our own, through `/sys/kernel/mm/damon/admin`
//! (Documentation/admin-guide/mm/damon/usage.rst).
//!
//! The number of kdamonds is one global figure, and changing it destroys those that are there.
//! So we take DAMON only while nobody else has it, and hold a lock on that file, which tells
//! Demeters apart: settings like ours without the lock were left by one that died.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

use demeter_policy::{BLOCK_SIZE, GuestVirtAddr, Pid, VirtRange};

use super::DamonError;
use super::left::Change;
use super::owner::{Owner, STATISTIC};
use crate::lock::LockedFile;

const ADMIN_DIR: &str = "sys/kernel/mm/damon/admin/kdamonds";

/// The kernel answers EBUSY while it works on another command; so often we ask again.
const BUSY_RETRIES: u32 = 20;
const BUSY_WAIT: Duration = Duration::from_millis(10);

const CONTEXT_DIR: &str = "contexts/0";
const INTERVALS_DIR: &str = "contexts/0/monitoring_attrs/intervals";
const REGIONS_DIR: &str = "contexts/0/monitoring_attrs/nr_regions";
const TARGETS_DIR: &str = "contexts/0/targets";

/// Between two looks at the mappings, microseconds. No round figure: it tells our settings from
/// others'.
const UPDATE_US: u64 = 1_000_003;

/// The kernel's name for a kdamond that watches the regions of processes that it is given, and for one that chooses
/// them itself, as older Demeters had it.
const OPERATIONS: &str = "fvaddr";
const OLD_OPERATIONS: &str = "vaddr";

/// The treatment of DAMON_STAT. The kernel starts it by itself, and it keeps everybody else from DAMON.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Statistic {
    /// It is turned off for as long as we have DAMON.
    TurnOff,
    /// It is left on, and we do without DAMON.
    Leave,
}

/// The right to change DAMON, which one Demeter has at a time. DAMON_STAT is turned on again at its end.
#[derive(Debug)]
struct Ownership {
    root: PathBuf,
    dir: PathBuf,
    _count: LockedFile,
}

/// DAMON with kdamonds of ours, which are removed at the end.
#[derive(Debug)]
struct Claim(Ownership);

/// A kdamond; dropping it stops it, and dropping the last one removes all.
#[derive(Debug)]
pub struct Kdamond {
    dir: PathBuf,
    claim: Arc<Claim>,
    /// The contents of its files.
    targets: Mutex<Vec<Target>>,
}

/// The files of a process and its regions. Once made they are kept: making a region's costs several times as much as writing
/// to them.
#[derive(Debug)]
struct Target {
    pid: Pid,
    regions: Vec<VirtRange>,
}

/// Undoes what a Demeter that was killed has changed in DAMON. Returns what that was, a line each.
///
/// # Errors
/// When a Demeter runs that has DAMON, the kernel has none, or the right to use it is missing.
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
    /// Locks out other Demeters; changes nothing.
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
            _count: LockedFile::try_new(count).ok_or(DamonError::Taken)?,
        })
    }

    /// Removes kdamonds that a killed Demeter has left. Returns whether there were some.
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

    /// Sees to it that none of the kernel's own users has DAMON.
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

    /// Turns DAMON_STAT on again, if it was. Returns whether it was.
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
            // Most are recognised by their settings, too.
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
    /// Takes DAMON for ourselves, with `kdamonds` kdamonds.
    ///
    /// # Errors
    /// When the kernel has no DAMON, somebody else has it, or the right to use it is missing.
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
        let kdamond = |index: usize| Self {
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

    /// Watches these regions from the next start on, in order of process and address, disjoint, and none larger than a
    /// block: none of them is split or merged. Returns how many it will report: where it has had more, and in place of
    /// fewer than three, there are [fillers](is_filler).
    ///
    /// # Errors
    /// When the kernel refuses, or it is on.
    pub fn set_regions(&self, regions: &[(Pid, VirtRange)]) -> Result<usize, DamonError> {
        let mut known = self.targets.lock().unwrap_or_else(PoisonError::into_inner);
        // After an error nothing is known.
        let mut targets = std::mem::take(&mut *known);
        let wanted: Vec<_> = regions.chunk_by(|a, b| a.0 == b.0).collect();
        let kept = targets.iter().zip(&wanted);
        let kept: usize = kept.map(|(t, w)| t.regions.len().max(w.len())).sum();
        if targets.len() != wanted.len() || kept > 2 * regions.len() + SPARE {
            // The kernel makes all targets anew, without regions.
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
        // DAMON splits while there are fewer than half of the most. It merges to no more than all memory divided by the
        // least, and since Linux 7 it splits what is larger than that: here a block, and less than two.
        let all = || targets.iter().flat_map(|target| &target.regions);
        let (count, bytes) = (all().count(), all().map(|r| r.len().0).sum::<u64>());
        let least = (bytes / BLOCK_SIZE).max(REGIONS_MIN as u64);
        self.set(&format!("{REGIONS_DIR}/max"), (count as u64).max(least))?;
        self.set(&format!("{REGIONS_DIR}/min"), least)?;
        *known = targets;
        Ok(count)
    }

    /// Makes the files of a target's regions, `count` or more, say what is wanted.
    fn write_regions(
        &self,
        dir: &str,
        there: &mut Vec<VirtRange>,
        wanted: &[(Pid, VirtRange)],
        count: usize,
    ) -> Result<(), DamonError> {
        let is_new = there.len() < count;
        if is_new {
            self.set(&format!("{dir}/nr_regions"), count)?;
        }
        let count = there.len().max(count);
        let fillers = (wanted.len()..count).map(filler);
        let all: Vec<_> = wanted
            .iter()
            .map(|&(_, range)| range)
            .chain(fillers)
            .collect();
        for (index, range) in all.iter().enumerate() {
            let before = there.get(index).filter(|_| !is_new);
            if before.map(|range| range.start()) != Some(range.start()) {
                self.set(&format!("{dir}/{index}/start"), range.start().0)?;
            }
            if before.map(|range| range.end()) != Some(range.end()) {
                self.set(&format!("{dir}/{index}/end"), range.end().0)?;
            }
        }
        *there = all;
        Ok(())
    }

    /// Starts aggregations of `looks` looks, each an interval after the one before. Returns the kdamond's thread.
    /// Fails with EINVAL if a target has gone.
    ///
    /// # Errors
    /// When the kernel refuses.
    pub fn start(&self, interval: Duration, looks: u32) -> Result<Pid, DamonError> {
        for (file, us) in [
            ("sample_us", interval.as_micros()),
            ("aggr_us", (interval * looks).as_micros()),
        ] {
            self.set(&format!("{INTERVALS_DIR}/{file}"), us)?;
        }
        self.set("state", "on").map_err(|error| match error {
            // So the kernel says that it has an exclusive user now.
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

    /// Stops observing; nothing is spent until the next start.
    ///
    /// # Errors
    /// When the kernel refuses.
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

/// Fillers that are allowed beside one for each region. The kernel looks at fillers, too.
const SPARE: usize = 16;

/// Where fillers begin: above all memory of programs, so that they come last and there is nothing to look at.
const FILLERS: u64 = 1 << 63;

/// The region that takes the place of a target's `index`th where there are fewer: of the size of the others, and apart from
/// them.
fn filler(index: usize) -> VirtRange {
    let start = FILLERS + index as u64 * 2 * BLOCK_SIZE;
    let [start, end] = [start, start + BLOCK_SIZE].map(GuestVirtAddr);
    VirtRange::new(start, end).expect("a block has a length")
}

/// Whether a region is none of those that were asked for.
pub fn is_filler(range: &VirtRange) -> bool {
    range.start().0 >= FILLERS
}

/// The kernel takes no fewer.
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

/// A kdamond ends by itself when its last target does, and then refuses to be stopped.
fn stop(dir: &Path) -> Result<(), DamonError> {
    let state = dir.join("state");
    let is_on = || read(&state).is_ok_and(|state| state == "on");
    match is_on().then(|| write(&state, "off")) {
        Some(Err(error)) if is_on() => Err(error),
        _ => Ok(()),
    }
}

/// Whether all kdamonds were left by a Demeter that was killed. They have settings that only we choose, or they were noted
/// and are blank still: off and with nothing to watch.
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

fn read(path: &Path) -> Result<String, DamonError> {
    let text = fs::read_to_string(path).map_err(|source| io_error("read", path, source))?;
    Ok(text.trim().into())
}

fn write(path: &Path, value: &str) -> Result<(), DamonError> {
    let mut result = Ok(());
    for _ in 0..BUSY_RETRIES {
        // Not fs::write: it would create the file where the kernel has none.
        result = File::options()
            .write(true)
            .truncate(true)
            .open(path)
            .and_then(|mut file| io::Write::write_all(&mut file, value.as_bytes()));
        match &result {
            Err(error) if error.kind() == io::ErrorKind::ResourceBusy => {
                std::thread::sleep(BUSY_WAIT);
            }
            _ => break,
        }
    }
    result.map_err(|source| io_error(&format!("write {value:?} to"), path, source))
}

pub(super) fn io_error(what: &str, path: &Path, source: io::Error) -> DamonError {
    DamonError::Io {
        what: format!("{what} {}", path.display()),
        source,
    }
}

fn unavailable(why: String, hint: &str) -> DamonError {
    DamonError::Unavailable {
        why,
        hint: hint.into(),
    }
}
