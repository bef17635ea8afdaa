//! Kdamonds of our own, through `/sys/kernel/mm/damon/admin`
//! (Documentation/admin-guide/mm/damon/usage.rst).
//!
//! The number of kdamonds is one global figure, and changing it destroys those that are there.
//! So we take DAMON only while nobody else has it, and hold a lock on that file, which tells
//! Demeters apart: settings like ours without the lock were left by one that died.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;

use demeter_policy::{Pid, VirtRange};

use super::DamonError;
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

/// DAMON, taken for ourselves; given back with the last kdamond.
#[derive(Debug)]
struct Ownership {
    dir: PathBuf,
    _count: LockedFile,
}

/// A kdamond; dropping it stops it, and dropping the last one removes all.
#[derive(Debug)]
pub struct Kdamond {
    dir: PathBuf,
    _claim: Arc<Ownership>,
}

impl Kdamond {
    /// Takes DAMON for ourselves, with so many kdamonds.
    ///
    /// # Errors
    /// When the kernel has no DAMON, somebody else has it, or the right to use it is missing.
    pub fn claim(root: &Path, kdamonds: usize) -> Result<Vec<Self>, DamonError> {
        let dir = root.join(ADMIN_DIR);
        let path = dir.join("nr_kdamonds");
        let count = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| {
                let mend = match error.kind() {
                    io::ErrorKind::PermissionDenied => "run Demeter as root (CAP_SYS_ADMIN)",
                    _ => "use a kernel with CONFIG_DAMON_SYSFS and CONFIG_DAMON_VADDR",
                };
                unavailable(format!("cannot open {}: {error}", path.display()), mend)
            })?;
        let count = LockedFile::try_new(count).ok_or(DamonError::Taken)?;
        let there = read(&path)?;
        if there != "0" {
            if !are_ours(&dir, &there) {
                return Err(unavailable(
                    format!("DAMON is in use by somebody else ({there} kdamonds)"),
                    "stop that user, or choose another tracker",
                ));
            }
            tracing::warn!("removing the kdamonds that a Demeter left behind when it died");
            remove(&dir)?;
        }
        let claim = Arc::new(Ownership { dir, _count: count });
        write(&path, &kdamonds.to_string())?;
        let kdamond = |index: usize| Self {
            dir: claim.dir.join(index.to_string()),
            _claim: claim.clone(),
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

    /// Watches these regions from the next start on, in order of process and address and disjoint: none of them is
    /// split or merged.
    ///
    /// # Errors
    /// When the kernel refuses, or it is on.
    pub fn set_regions(&self, regions: &[(Pid, VirtRange)]) -> Result<(), DamonError> {
        // As many at least as at most: DAMON splits while there are fewer than half of the most, and
        // merges to no more than the average size of the least.
        let count = (regions.len() as u64).max(REGIONS_MIN);
        self.set(&format!("{REGIONS_DIR}/max"), count)?;
        self.set(&format!("{REGIONS_DIR}/min"), count)?;
        let targets: Vec<_> = regions.chunk_by(|a, b| a.0 == b.0).collect();
        let pids: Vec<_> = targets.iter().map(|regions| regions[0].0).collect();
        self.set_pids(&pids)?;
        for (target, regions) in targets.iter().enumerate() {
            let dir = format!("{TARGETS_DIR}/{target}/regions");
            self.set(&format!("{dir}/nr_regions"), regions.len())?;
            for (index, (_, range)) in regions.iter().enumerate() {
                self.set(&format!("{dir}/{index}/start"), range.start().0)?;
                self.set(&format!("{dir}/{index}/end"), range.end().0)?;
            }
        }
        Ok(())
    }

    /// The kernel makes all targets anew, without regions.
    fn set_pids(&self, targets: &[Pid]) -> Result<(), DamonError> {
        self.set(&format!("{TARGETS_DIR}/nr_targets"), targets.len())?;
        for (index, pid) in targets.iter().enumerate() {
            self.set(&format!("{TARGETS_DIR}/{index}/pid_target"), pid)?;
        }
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
        self.set("state", "on")?;
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

/// The kernel takes no fewer.
const REGIONS_MIN: u64 = 3;

impl Drop for Kdamond {
    fn drop(&mut self) {
        if let Err(error) = self.stop() {
            tracing::warn!(%error, "a kdamond goes on");
        }
    }
}

impl Drop for Ownership {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.dir) {
            tracing::warn!(%error, "kdamonds stay behind");
        }
    }
}

fn remove(dir: &Path) -> Result<(), DamonError> {
    let count = dir.join("nr_kdamonds");
    for index in 0..read(&count)?.parse().unwrap_or(0u32) {
        stop(&dir.join(index.to_string()))?;
    }
    write(&count, "0")
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

/// Whether all kdamonds have settings that nobody but us would choose.
fn are_ours(dir: &Path, kdamonds: &str) -> bool {
    let is_ours = |index: u32| {
        let text = |file: &str| read(&dir.join(index.to_string()).join(file)).unwrap_or_default();
        let operations = text(&format!("{CONTEXT_DIR}/operations"));
        [OPERATIONS, OLD_OPERATIONS].contains(&operations.as_str())
            && text(&format!("{INTERVALS_DIR}/update_us")) == UPDATE_US.to_string()
    };
    kdamonds
        .parse()
        .is_ok_and(|count: u32| (0..count).all(is_ours))
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

fn io_error(what: &str, path: &Path, source: io::Error) -> DamonError {
    DamonError::Io {
        what: format!("{what} {}", path.display()),
        source,
    }
}

fn unavailable(why: String, mend: &str) -> DamonError {
    DamonError::Unavailable {
        why,
        mend: mend.into(),
    }
}
