//! Reads a kdamond's results through the tracepoint `damon:damon_aggregated`.
//!
//! It has one record per region and aggregation interval. Listing regions through sysfs instead waits for two
//! aggregation intervals, needs four file reads per region and does not name the process.

use std::fs;
use std::io;
use std::os::fd::{AsRawFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::time::Duration;

use demeter_policy::{GuestVirtAddr, Pid, VirtRange};

use super::{DamonError, Region};
use crate::perf::ring::{self, Record, Ring};
use crate::perf::sys::{self, Attr, Scope, flag, sample};
use crate::perf::{PARANOIA_MAX, paranoia};

/// Where tracefs is mounted.
const TRACEFS: [&str; 2] = ["sys/kernel/tracing", "sys/kernel/debug/tracing"];

/// `PERF_TYPE_TRACEPOINT` (linux/perf_event.h).
const TYPE_TRACEPOINT: u32 = 2;

/// Results of a kdamond.
#[derive(Debug, Default)]
pub struct Reported {
    /// In the order of the reports.
    pub regions: Vec<Region>,
    /// Time of the first report, nanoseconds of the monotonic clock.
    pub first_ns: Option<u64>,
    /// Records lost for lack of space in the ring.
    pub lost: u64,
    /// Malformed records.
    pub rejected: u64,
}

/// The enabled tracepoint.
///
/// Without a listener the kernel patches a tracepoint out of its code, and patches it in again for the next one. This
/// costs more than a short pass, and interrupts every CPU. An enabled tracepoint costs nothing while no kdamond runs.
#[derive(Debug)]
pub struct Tracepoint {
    root: PathBuf,
    id: u64,
    format: Format,
    /// An event on this process, which is no kdamond.
    _on: OwnedFd,
}

impl Tracepoint {
    /// Enables the tracepoint, which also tests our permission.
    ///
    /// # Errors
    /// The kernel has no such tracepoint, or permission is missing.
    pub fn on(root: &Path) -> Result<Self, DamonError> {
        let (id, format) = tracepoint(root)?;
        Ok(Self {
            root: root.into(),
            id,
            format,
            _on: event(root, id, Pid(std::process::id()), 0)?,
        })
    }

    /// Listens to a kdamond's thread through a ring of `ring_bytes`: a power of two of pages.
    ///
    /// [`Aggregations::wait`] returns after `wake_after` regions, or when half of the ring is full if that is zero.
    ///
    /// # Errors
    /// The thread has ended, or the ring cannot be created.
    pub fn listen(
        &self,
        kdamond: Pid,
        ring_bytes: usize,
        wake_after: u32,
    ) -> Result<Aggregations, DamonError> {
        let event = event(&self.root, self.id, kdamond, wake_after)?;
        Aggregations::of(event, self.format, ring_bytes)
    }
}

/// The tracepoint's records of one kdamond.
#[derive(Debug)]
pub struct Aggregations {
    ring: Ring,
    format: Format,
    /// Kept open, because the kernel writes while it is.
    event: OwnedFd,
}

impl Aggregations {
    /// Reads the ring of a given event.
    pub fn of(event: OwnedFd, format: Format, ring_bytes: usize) -> Result<Self, DamonError> {
        let ring = Ring::map(&event, ring_bytes)
            .map_err(|error| to_error("map the ring of damon_aggregated", error))?;
        Ok(Self {
            ring,
            format,
            event,
        })
    }

    /// Waits until the expected number of regions was reported, at most for `patience`.
    pub fn wait(&self, patience: Duration) {
        let mut waited = libc::pollfd {
            fd: self.event.as_raw_fd(),
            events: libc::POLLIN,
            revents: 0,
        };
        let patience_ms = libc::c_int::try_from(patience.as_millis()).unwrap_or(libc::c_int::MAX);
        // A signal may end the wait early, as reports do. SAFETY: one entry, which the kernel writes to.
        unsafe { libc::poll(&raw mut waited, 1, patience_ms) };
    }

    /// Takes the reports since the last call. The target with number `i` is `targets[i]`.
    pub fn take(&self, targets: &[Pid]) -> Result<Reported, String> {
        let mut bytes = Vec::new();
        self.ring.take(&mut bytes)?;
        let mut reported = Reported::default();
        for record in ring::records(&bytes) {
            match record? {
                Record::Sample(sample) => {
                    let parsed = ring::raw(sample).and_then(|(time_ns, raw)| {
                        Some((time_ns, self.format.region(raw, targets)?))
                    });
                    match parsed {
                        Some((time_ns, region)) => {
                            reported.first_ns.get_or_insert(time_ns);
                            reported.regions.push(region);
                        }
                        None => reported.rejected += 1,
                    }
                }
                Record::Lost(count) => reported.lost = reported.lost.saturating_add(count),
                Record::Other => {}
            }
        }
        Ok(reported)
    }
}

/// Opens an event for the tracepoint's records in a thread.
fn event(root: &Path, id: u64, thread: Pid, wake_after: u32) -> Result<OwnedFd, DamonError> {
    let attr = Attr {
        kind: TYPE_TRACEPOINT,
        size: size_of::<Attr>() as u32,
        config: id,
        sample_period: 1,
        sample_type: sample::TIME | sample::RAW,
        flags: flag::USE_CLOCKID,
        wakeup_events: wake_after,
        clockid: libc::CLOCK_MONOTONIC,
        ..Attr::default()
    };
    sys::open(&attr, Scope::Thread(thread), None).map_err(|error| match error.kind() {
        io::ErrorKind::PermissionDenied => DamonError::Unavailable {
            why: format!("the kernel refuses the tracepoint damon_aggregated: {error}"),
            hint: match paranoia(root) {
                Some(level) if level > PARANOIA_MAX => format!(
                    "kernel.perf_event_paranoid is {level}, as Debian has it, and leaves that to \
                     CAP_SYS_ADMIN; sysctl kernel.perf_event_paranoid={PARANOIA_MAX}"
                ),
                _ => "run Demeter as root (CAP_PERFMON and CAP_SYS_PTRACE)".into(),
            },
        },
        _ => to_error("listen to damon_aggregated", error),
    })
}

fn to_error(what: &str, source: io::Error) -> DamonError {
    DamonError::Io {
        what: what.into(),
        source,
    }
}

/// The tracepoint's number and record format.
fn tracepoint(root: &Path) -> Result<(u64, Format), DamonError> {
    let unavailable = |why: String| DamonError::Unavailable {
        why,
        hint: "use a kernel with CONFIG_FTRACE and mount tracefs: \
               mount -t tracefs tracefs /sys/kernel/tracing"
            .into(),
    };
    let dir = TRACEFS
        .iter()
        .map(|dir| root.join(dir).join("events/damon/damon_aggregated"))
        .find(|dir| dir.join("id").exists())
        .ok_or_else(|| unavailable("no tracepoint damon_aggregated in tracefs".into()))?;
    let read = |file: &str| {
        fs::read_to_string(dir.join(file))
            .map_err(|error| to_error(&format!("read {}", dir.join(file).display()), error))
    };
    let id = read("id")?.trim().parse();
    let id = id.map_err(|error| unavailable(format!("the tracepoint's id: {error}")))?;
    let format = Format::parse(&read("format")?);
    let format = format.map_err(|field| unavailable(format!("the tracepoint has no {field}")))?;
    Ok((id, format))
}

/// Positions of the fields in the tracepoint's record.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Format {
    target: Field,
    start: Field,
    end: Field,
    accesses: Field,
}

#[derive(Debug, Clone, Copy, PartialEq, Eq)]
struct Field {
    offset: usize,
    /// 1 to 8 bytes.
    size: usize,
}

impl Format {
    /// Parses the tracepoint's `format` file; the error names a missing field.
    pub fn parse(text: &str) -> Result<Self, &'static str> {
        let field = |name: &'static str| Field::parse(text, name).ok_or(name);
        Ok(Self {
            target: field("target_id")?,
            start: field("start")?,
            end: field("end")?,
            accesses: field("nr_accesses")?,
        })
    }

    /// Decodes a record's region. Its target number is an index of `targets`.
    pub fn region(&self, record: &[u8], targets: &[Pid]) -> Option<Region> {
        let target = usize::try_from(self.target.value(record)?).ok()?;
        let start = GuestVirtAddr(self.start.value(record)?);
        let end = GuestVirtAddr(self.end.value(record)?);
        Some(Region {
            pid: *targets.get(target)?,
            range: VirtRange::new(start, end)?,
            accesses: u32::try_from(self.accesses.value(record)?).ok()?,
        })
    }
}

impl Field {
    /// Parses a line: `field:unsigned long start;`, `offset:24;`, `size:8;`, `signed:0;`.
    fn parse(text: &str, name: &str) -> Option<Self> {
        let line = text.lines().find(|line| {
            let declaration = line
                .trim()
                .strip_prefix("field:")
                .and_then(|rest| rest.split(';').next());
            declaration.and_then(|words| words.split_whitespace().last()) == Some(name)
        })?;
        let number = |key: &str| {
            line.split(';')
                .find_map(|part| part.trim().strip_prefix(key)?.parse::<usize>().ok())
        };
        let field = Self {
            offset: number("offset:")?,
            size: number("size:")?,
        };
        (1..=8).contains(&field.size).then_some(field)
    }

    fn value(&self, record: &[u8]) -> Option<u64> {
        let bytes = record.get(self.offset..self.offset.checked_add(self.size)?)?;
        let mut word = [0; 8];
        if cfg!(target_endian = "little") {
            word[..self.size].copy_from_slice(bytes);
        } else {
            word[8 - self.size..].copy_from_slice(bytes);
        }
        Some(u64::from_ne_bytes(word))
    }
}

/// Test data for the tracepoint.
#[cfg(any(test, feature = "testing"))]
pub mod testing {
    /// A `format` file of the kernel.
    pub const FORMAT: &str = "\
name: damon_aggregated
ID: 500
format:
\tfield:unsigned short common_type;\toffset:0;\tsize:2;\tsigned:0;
\tfield:int common_pid;\toffset:4;\tsize:4;\tsigned:1;

\tfield:unsigned long target_id;\toffset:8;\tsize:8;\tsigned:0;
\tfield:unsigned int nr_regions;\toffset:16;\tsize:4;\tsigned:0;
\tfield:unsigned long start;\toffset:24;\tsize:8;\tsigned:0;
\tfield:unsigned long end;\toffset:32;\tsize:8;\tsigned:0;
\tfield:unsigned int nr_accesses;\toffset:40;\tsize:4;\tsigned:0;
\tfield:unsigned int age;\toffset:44;\tsize:4;\tsigned:0;
";

    /// The bytes of a record in that format.
    pub fn record(target: u64, start: u64, end: u64, accesses: u32) -> Vec<u8> {
        let mut bytes = vec![0; 48];
        bytes[8..16].copy_from_slice(&target.to_ne_bytes());
        bytes[24..32].copy_from_slice(&start.to_ne_bytes());
        bytes[32..40].copy_from_slice(&end.to_ne_bytes());
        bytes[40..44].copy_from_slice(&accesses.to_ne_bytes());
        bytes
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::testing::{FORMAT, record};
    use super::*;

    #[test]
    fn a_region_belongs_to_the_target_of_its_number() {
        let format = Format::parse(FORMAT).unwrap();
        let region = format
            .region(&record(1, 0x1000, 0x5000, 17), &[Pid(7), Pid(9)])
            .unwrap();
        assert_eq!((region.pid, region.accesses), (Pid(9), 17));
        assert_eq!(region.range.start(), GuestVirtAddr(0x1000));
        assert_eq!(region.range.end(), GuestVirtAddr(0x5000));
    }

    #[test]
    fn records_that_make_no_sense_are_no_regions() {
        let format = Format::parse(FORMAT).unwrap();
        let targets = [Pid(7)];
        assert_eq!(format.region(&record(1, 0x1000, 0x5000, 1), &targets), None);
        assert_eq!(format.region(&record(0, 0x5000, 0x5000, 1), &targets), None);
        assert_eq!(
            format.region(&record(0, 0x1000, 0x5000, 1)[..40], &targets),
            None
        );
    }

    #[test]
    fn a_missing_field_is_named() {
        let text = FORMAT.replace("nr_accesses", "accesses");
        assert_eq!(Format::parse(&text), Err("nr_accesses"));
        assert_eq!(
            Format::parse(&FORMAT.replace("size:8", "size:9")),
            Err("target_id")
        );
    }

    proptest! {
        #[test]
        fn any_record_in_any_format_is_survived(
            offsets in prop::array::uniform4(prop_oneof![0usize..64, any::<usize>()]),
            record in prop::collection::vec(any::<u8>(), 0..64),
        ) {
            let text: String = ["target_id", "start", "end", "nr_accesses"]
                .iter()
                .zip(offsets)
                .map(|(name, offset)| format!("field:int {name};\toffset:{offset};\tsize:8;\n"))
                .collect();
            let format = Format::parse(&text).unwrap();
            if let Some(region) = format.region(&record, &[Pid(1)]) {
                prop_assert!(region.range.start() < region.range.end());
            }
        }
    }
}
