//! Reading, checking and writing result files.

use std::fs;
use std::io::{self, Read, Write};
use std::os::unix::fs::PermissionsExt;
use std::path::{Path, PathBuf};

use serde::Deserialize;

use crate::provision::Provisioning;
use crate::schema::{Point, Repeats, RunResult, SCHEMA, SystemResult, Tail};

/// Longest result file that is read, bytes: a thousand systems with an hour of seconds each.
pub const FILE_BYTES_MAX: u64 = 512 << 20;

/// Why a result file cannot be read or written.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    /// The file cannot be read.
    #[error("cannot read result file {}", path.display())]
    Read {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// A file cannot be written.
    #[error("cannot write {}", path.display())]
    Write {
        /// The file.
        path: PathBuf,
        /// What the system said.
        source: io::Error,
    },
    /// The file's content is no result.
    #[error("result file {}", path.display())]
    Content {
        /// The file.
        path: PathBuf,
        /// What is wrong with it.
        source: ContentError,
    },
}

/// What is wrong with a result.
#[derive(Debug, thiserror::Error)]
pub enum ContentError {
    /// Not JSON.
    #[error("not JSON ({0}); write it with `demeter run SCENARIO --json FILE`")]
    Json(serde_json::Error),
    /// JSON, but not of a result's shape.
    #[error("not a result ({0}); write it with `demeter run SCENARIO --json FILE`")]
    Shape(serde_json::Error),
    /// A version of the schema that this program does not know.
    #[error(
        "schema version {found}, but this demeter knows only {SCHEMA}; \
         use the demeter that wrote the file, or run the scenario again"
    )]
    Schema {
        /// The file's version.
        found: u64,
    },
    /// A value that cannot have been measured.
    #[error("{place} is {value}; it must be {rule}")]
    Value {
        /// Which value.
        place: String,
        /// What it is.
        value: f64,
        /// What it must be.
        rule: &'static str,
    },
}

impl From<serde_json::Error> for ContentError {
    fn from(error: serde_json::Error) -> Self {
        if error.is_data() {
            Self::Shape(error)
        } else {
            Self::Json(error)
        }
    }
}

impl RunResult {
    /// Reads and checks a result file.
    ///
    /// # Errors
    /// [`Error::Read`] when it cannot be read or is longer than [`FILE_BYTES_MAX`],
    /// [`Error::Content`] when it is no result of this [`SCHEMA`] or fails [`RunResult::check`].
    pub fn load(path: &Path) -> Result<Self, Error> {
        let text = read_bounded(path).map_err(|source| Error::Read {
            path: path.into(),
            source,
        })?;
        Self::from_json(&text).map_err(|source| Error::Content {
            path: path.into(),
            source,
        })
    }

    /// Parses and checks a result.
    ///
    /// # Errors
    /// As [`RunResult::load`], without the file.
    pub fn from_json(text: &str) -> Result<Self, ContentError> {
        // The version first: another version may have another shape.
        #[derive(Deserialize)]
        struct Version {
            schema: u64,
        }
        let Version { schema: found } = serde_json::from_str(text)?;
        if found != u64::from(SCHEMA) {
            return Err(ContentError::Schema { found });
        }
        let result: Self = serde_json::from_str(text)?;
        result.check()?;
        Ok(result)
    }

    /// Checks and writes the result: whole or not at all, see [`write_file`].
    ///
    /// # Errors
    /// [`Error::Content`] when the result fails [`RunResult::check`] (JSON has no NaN),
    /// [`Error::Write`] when the system refuses.
    pub fn save(&self, path: &Path) -> Result<(), Error> {
        self.check().map_err(|source| Error::Content {
            path: path.into(),
            source,
        })?;
        let mut text = serde_json::to_vec_pretty(self).map_err(|error| Error::Write {
            path: path.into(),
            source: error.into(),
        })?;
        text.push(b'\n');
        write_file(path, &text)
    }

    /// Checks that every value can have been measured: numbers are finite; times, rates and
    /// latencies are not negative; shares lie in 0 to 1; each series is in order of time.
    /// `mgmt_cpu_s` may be negative: it is a difference of two noisy runs.
    ///
    /// # Errors
    /// [`ContentError::Schema`] or [`ContentError::Value`]: the first thing that is wrong.
    pub fn check(&self) -> Result<(), ContentError> {
        if self.schema != SCHEMA {
            return Err(ContentError::Schema {
                found: self.schema.into(),
            });
        }
        for (index, system) in self.systems.iter().enumerate() {
            system.check(&format!("systems[{index}]"))?;
        }
        for (number, case) in self.cases.iter().enumerate() {
            for (index, system) in case.systems.iter().enumerate() {
                system.check(&format!("cases[{number}].systems[{index}]"))?;
            }
        }
        for (index, published) in self.published.iter().enumerate() {
            let amounts = [
                ("value", Some(published.value)),
                ("ours", published.ours),
                ("within", Some(published.within)),
            ];
            for (name, value) in amounts {
                let value = value.unwrap_or(0.0);
                require(value.is_finite(), value, "finite", || {
                    format!("published[{index}].{name}")
                })?;
            }
        }
        Ok(())
    }
}

impl SystemResult {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        let tail = |of: fn(&Tail) -> f64| self.tail.as_ref().map(of);
        let repeats = |of: fn(&Repeats) -> f64| self.repeats.as_ref().map(of);
        let amounts = [
            ("elapsed_s", self.elapsed_s),
            ("tail.mean_ns", tail(|t| t.mean_ns)),
            ("tail.p50_ns", tail(|t| t.p50_ns)),
            ("tail.p90_ns", tail(|t| t.p90_ns)),
            ("tail.p99_ns", tail(|t| t.p99_ns)),
            ("tail.p999_ns", tail(|t| t.p999_ns)),
            ("repeats.min", repeats(|r| r.min)),
            ("repeats.max", repeats(|r| r.max)),
            ("mean_mops", self.mean_mops),
            ("steady_mops", self.steady_mops),
            ("mean_latency_ns", self.mean_latency_ns),
            ("steady_latency_ns", self.steady_latency_ns),
            ("t90_s", self.t90_s),
            ("t90_after_shift_s", self.t90_after_shift_s),
            ("moved_steady_bytes_per_s", self.moved_steady_bytes_per_s),
        ];
        for (name, value) in amounts {
            amount(value, || format!("{place}.{name}"))?;
        }
        let differences = [
            ("mgmt_cpu_s", self.mgmt_cpu_s),
            ("mgmt_cpu_steady_s", self.mgmt_cpu_steady_s),
        ];
        for (name, value) in differences {
            let value = value.unwrap_or(0.0);
            require(value.is_finite(), value, "finite", || {
                format!("{place}.{name}")
            })?;
        }
        share(self.hot_in_fast_final, || {
            format!("{place}.hot_in_fast_final")
        })?;
        for (cause, &cpu_s) in &self.cpu_s {
            amount(Some(cpu_s), || format!("{place}.cpu_s.{cause}"))?;
        }
        check_series(&self.series, place)?;
        match &self.provisioning {
            Some(provisioning) => provisioning.check(&format!("{place}.provisioning")),
            None => Ok(()),
        }
    }
}

impl Provisioning {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        let amounts = [
            ("inflate_s", self.inflate_s),
            ("inflate_gib_per_s", self.inflate_gib_per_s),
            ("p99_resizing_mops", self.p99_resizing_mops),
            ("p99_other_mops", self.p99_other_mops),
        ];
        for (name, value) in amounts {
            amount(value, || format!("{place}.{name}"))?;
        }
        for (index, resize) in self.resizes.iter().enumerate() {
            let place = |name| format!("{place}.resizes[{index}].{name}");
            amount(Some(resize.t_s), || place("t_s"))?;
            amount(resize.took_s, || place("took_s"))?;
        }
        if let Some(crashes) = &self.crashes {
            amount(Some(crashes.recovered_max_s), || {
                format!("{place}.crashes.recovered_max_s")
            })?;
        }
        for (index, vm) in self.vms.iter().enumerate() {
            let place = format!("{place}.vms[{index}]");
            amount(vm.mean_mops, || format!("{place}.mean_mops"))?;
            check_series(&vm.series, &place)?;
        }
        Ok(())
    }
}

fn check_series(series: &[Point], place: &str) -> Result<(), ContentError> {
    for (index, point) in series.iter().enumerate() {
        point.check(&format!("{place}.series[{index}]"))?;
    }
    for (index, pair) in series.windows(2).enumerate() {
        require(
            pair[0].t_s < pair[1].t_s,
            pair[1].t_s,
            "later than the point before",
            || format!("{place}.series[{}].t_s", index + 1),
        )?;
    }
    Ok(())
}

impl Point {
    fn check(&self, place: &str) -> Result<(), ContentError> {
        let amounts = [
            ("t_s", Some(self.t_s)),
            ("mops", self.mops),
            ("latency_ns", self.latency_ns),
        ];
        for (name, value) in amounts {
            amount(value, || format!("{place}.{name}"))?;
        }
        share(self.hot_in_fast, || format!("{place}.hot_in_fast"))
    }
}

fn amount(value: Option<f64>, place: impl Fn() -> String) -> Result<(), ContentError> {
    let value = value.unwrap_or(0.0);
    require(
        value.is_finite() && value >= 0.0,
        value,
        "finite and not negative",
        place,
    )
}

fn share(value: f64, place: impl Fn() -> String) -> Result<(), ContentError> {
    require(
        (0.0..=1.0).contains(&value),
        value,
        "between 0 and 1",
        place,
    )
}

fn require(
    holds: bool,
    value: f64,
    rule: &'static str,
    place: impl Fn() -> String,
) -> Result<(), ContentError> {
    if holds {
        Ok(())
    } else {
        Err(ContentError::Value {
            place: place(),
            value,
            rule,
        })
    }
}

fn read_bounded(path: &Path) -> io::Result<String> {
    let mut text = String::new();
    fs::File::open(path)?
        .take(FILE_BYTES_MAX + 1)
        .read_to_string(&mut text)?;
    if text.len() as u64 > FILE_BYTES_MAX {
        return Err(io::Error::new(
            io::ErrorKind::FileTooLarge,
            format!("longer than {} MiB", FILE_BYTES_MAX >> 20),
        ));
    }
    Ok(text)
}

/// Writes a file whole or not at all: into a temporary file in the same directory that then takes
/// the name. What is no regular file (a pipe, `/dev/stdout`) is written to as it is.
///
/// # Errors
/// [`Error::Write`] when the system refuses; a file that was there is then unchanged.
pub fn write_file(path: &Path, bytes: &[u8]) -> Result<(), Error> {
    let written = match fs::metadata(path) {
        Ok(metadata) if !metadata.is_file() => fs::OpenOptions::new()
            .write(true)
            .open(path)
            .and_then(|mut file| file.write_all(bytes)),
        // Through a symbolic link: the link stays, its target is replaced.
        Ok(metadata) => path.canonicalize().and_then(|target| {
            write_then_rename(&target, bytes, metadata.permissions().mode() & 0o777)
        }),
        Err(_) => write_then_rename(path, bytes, 0o666),
    };
    written.map_err(|source| Error::Write {
        path: path.into(),
        source,
    })
}

/// `mode` is cut by the process's umask.
fn write_then_rename(path: &Path, bytes: &[u8], mode: u32) -> io::Result<()> {
    let dir = match path.parent() {
        Some(dir) if !dir.as_os_str().is_empty() => dir,
        _ => Path::new("."),
    };
    let mut file = tempfile::Builder::new()
        .prefix(".demeter-")
        .permissions(fs::Permissions::from_mode(mode))
        .tempfile_in(dir)?;
    file.write_all(bytes)?;
    file.as_file().sync_all()?;
    file.persist(path)?;
    Ok(())
}
