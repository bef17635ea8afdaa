//! One kdamond of our own, through `/sys/kernel/mm/damon/admin`
//! (Documentation/admin-guide/mm/damon/usage.rst).
//!
//! The number of kdamonds is one global figure, and changing it destroys those that are there.
//! So we take DAMON only while nobody else has it, and hold a lock on that file, which tells
//! Demeters apart: settings like ours without the lock were left by one that died.

use std::fs::{self, File};
use std::io;
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_policy::Pid;

use super::super::TrackerError;
use super::super::lock::try_lock;
use super::{NAME, Pass};

const ADMIN_DIR: &str = "sys/kernel/mm/damon/admin/kdamonds";

/// The kernel answers EBUSY while it works on another command; so often we ask again.
const BUSY_RETRIES: u32 = 20;
const BUSY_WAIT: Duration = Duration::from_millis(10);

const INTERVALS_DIR: &str = "0/contexts/0/monitoring_attrs/intervals";

/// Between two looks at the mappings, microseconds. No round figure: it tells our settings from
/// others'.
const UPDATE_US: u64 = 1_000_003;

/// The kdamond; dropping it removes it.
pub(super) struct Kdamond {
    dir: PathBuf,
    /// Locked.
    _count: File,
}

impl Kdamond {
    /// Takes DAMON for ourselves.
    pub(super) fn claim(root: &Path) -> Result<Self, TrackerError> {
        let dir = root.join(ADMIN_DIR);
        let path = dir.join("nr_kdamonds");
        let count = File::options()
            .read(true)
            .write(true)
            .open(&path)
            .map_err(|error| {
                let mend = match error.kind() {
                    io::ErrorKind::PermissionDenied => "run the agent as root (CAP_SYS_ADMIN)",
                    _ => "use a kernel with CONFIG_DAMON_SYSFS and CONFIG_DAMON_VADDR",
                };
                unavailable(format!("cannot open {}: {error}", path.display()), mend)
            })?;
        if !try_lock(&count) {
            return Err(unavailable(
                "another Demeter uses DAMON".into(),
                "stop it first",
            ));
        }
        let kdamonds = read(&path)?;
        if kdamonds != "0" {
            if !is_ours(&dir, &kdamonds) {
                return Err(unavailable(
                    format!("DAMON is in use by somebody else ({kdamonds} kdamonds)"),
                    "stop that user, or choose another tracker",
                ));
            }
            tracing::warn!("removing the kdamond that a Demeter left behind when it died");
            remove(&dir)?;
        }
        let kdamond = Self { dir, _count: count };
        kdamond.create()?;
        Ok(kdamond)
    }

    fn create(&self) -> Result<(), TrackerError> {
        self.set("nr_kdamonds", 1)?;
        self.set("0/contexts/nr_contexts", 1)?;
        let offered = self.get("0/contexts/0/avail_operations")?;
        if !offered.split_whitespace().any(|name| name == "vaddr") {
            return Err(unavailable(
                "the kernel's DAMON cannot watch virtual addresses".into(),
                "use a kernel with CONFIG_DAMON_VADDR",
            ));
        }
        self.set("0/contexts/0/operations", "vaddr")
    }

    /// Starts a pass over these processes and returns the kdamond's thread. `regions` are the least
    /// for each process and the most for all. Fails with EINVAL if one of them has gone.
    pub(super) fn start(
        &self,
        targets: &[Pid],
        regions: (u64, u64),
        pass: &Pass,
    ) -> Result<Pid, TrackerError> {
        for (file, us) in [
            ("sample_us", pass.interval.as_micros()),
            ("aggr_us", pass.length().as_micros()),
            ("update_us", UPDATE_US.into()),
        ] {
            self.set(&format!("{INTERVALS_DIR}/{file}"), us)?;
        }
        let regions_dir = "0/contexts/0/monitoring_attrs/nr_regions";
        self.set(&format!("{regions_dir}/max"), regions.1)?;
        self.set(&format!("{regions_dir}/min"), regions.0)?;
        self.set("0/contexts/0/targets/nr_targets", targets.len())?;
        for (index, pid) in targets.iter().enumerate() {
            self.set(&format!("0/contexts/0/targets/{index}/pid_target"), pid)?;
        }
        self.set("0/state", "on")?;
        let path = self.dir.join("0/pid");
        read(&path)?
            .parse()
            .map(Pid)
            .map_err(|error| io_error("read", &path, io::Error::other(error)))
    }

    /// Stops observing; nothing is spent until the next start.
    pub(super) fn stop(&self) -> Result<(), TrackerError> {
        stop(&self.dir)
    }

    fn set(&self, file: &str, value: impl ToString) -> Result<(), TrackerError> {
        write(&self.dir.join(file), &value.to_string())
    }

    fn get(&self, file: &str) -> Result<String, TrackerError> {
        read(&self.dir.join(file))
    }
}

impl Drop for Kdamond {
    fn drop(&mut self) {
        if let Err(error) = remove(&self.dir) {
            tracing::warn!(%error, "the kdamond stays behind");
        }
    }
}

fn remove(dir: &Path) -> Result<(), TrackerError> {
    stop(dir)?;
    write(&dir.join("nr_kdamonds"), "0")
}

/// A kdamond ends by itself when its last target does, and then refuses to be stopped.
fn stop(dir: &Path) -> Result<(), TrackerError> {
    let state = dir.join("0/state");
    let is_on = || read(&state).is_ok_and(|state| state == "on");
    match is_on().then(|| write(&state, "off")) {
        Some(Err(error)) if is_on() => Err(error),
        _ => Ok(()),
    }
}

/// Whether the only kdamond has settings that nobody but us would choose.
fn is_ours(dir: &Path, kdamonds: &str) -> bool {
    let is = |file: &str, value: &str| read(&dir.join(file)).is_ok_and(|text| text == value);
    kdamonds == "1"
        && is("0/contexts/0/operations", "vaddr")
        && is(
            &format!("{INTERVALS_DIR}/update_us"),
            &UPDATE_US.to_string(),
        )
}

fn read(path: &Path) -> Result<String, TrackerError> {
    let text = fs::read_to_string(path).map_err(|source| io_error("read", path, source))?;
    Ok(text.trim().into())
}

fn write(path: &Path, value: &str) -> Result<(), TrackerError> {
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

fn io_error(what: &str, path: &Path, source: io::Error) -> TrackerError {
    TrackerError::Io {
        tracker: NAME,
        what: format!("{what} {}", path.display()),
        source,
    }
}

fn unavailable(why: String, mend: &str) -> TrackerError {
    TrackerError::Unavailable {
        tracker: NAME,
        why,
        mend: mend.into(),
    }
}
