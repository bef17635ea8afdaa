//! Selects the event to sample, and builds its perf attributes.

use std::fs;
use std::io;
use std::path::Path;

use super::super::{Settings, TrackerError};
use super::NAME;
use demeter_linux::perf::paranoia;
use demeter_linux::perf::sys::{Attr, flag, sample};

const PMU_DIR: &str = "sys/bus/event_source/devices";

/// `PERF_TYPE_SOFTWARE` and `PERF_COUNT_SW_PAGE_FAULTS` (linux/perf_event.h).
const TYPE_SOFTWARE: u32 = 1;
const SW_PAGE_FAULTS: u64 = 2;

/// Factor from the load period to the IBS period. Without a filter IBS interrupts for every micro-operation that it samples,
/// not only for slow loads.
const IBS_PERIOD_FACTOR: u64 = 64;
/// The kernel wants a multiple.
const IBS_PERIOD_STEP: u64 = 16;
/// Newer kernels refuse shorter ones.
const IBS_PERIOD_MIN: u64 = 0x90;
/// The largest period of the first IBS implementations (16 bits, in steps of 16).
const IBS_PERIOD_MAX: u64 = 0xffff << 4;
/// IBS counts dispatched micro-operations instead of cycles (`format/cnt_ctl`).
const IBS_COUNT_OPS: u64 = 1 << 19;

/// The kind of a sampled event.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum EventKind {
    /// Intel's load latency (PEBS).
    IntelLoadLatency,
    /// AMD's instruction-based sampling of micro-operations.
    AmdIbs,
    /// Page faults, which have addresses on every machine. For tests only: they do not show hot memory.
    PageFaults,
}

/// An event that can be opened.
#[derive(Debug, PartialEq, Eq)]
pub(super) struct PerfEvent {
    pub kind: EventKind,
    pub attr: Attr,
    /// The leader of the event's group, which must be opened first.
    pub leader: Option<Attr>,
}

impl PerfEvent {
    /// The largest multiple of the period that the unit takes.
    pub fn most_thinning(&self) -> u32 {
        let most = match self.kind {
            EventKind::AmdIbs => IBS_PERIOD_MAX,
            EventKind::IntelLoadLatency | EventKind::PageFaults => u32::MAX.into(),
        };
        u32::try_from(most / self.attr.sample_period.max(1)).unwrap_or(u32::MAX)
    }
}

impl EventKind {
    /// The hardware event that the CPU offers.
    pub fn detect(root: &Path) -> Result<Self, TrackerError> {
        let pmu = |name: &str| root.join(PMU_DIR).join(name);
        if pmu("cpu/events/mem-loads").exists() {
            return Ok(Self::IntelLoadLatency);
        }
        if pmu("ibs_op/type").exists() {
            return Ok(Self::AmdIbs);
        }
        Err(TrackerError::Unavailable {
            tracker: NAME,
            why: "the kernel sees neither Intel load-latency sampling nor AMD IBS".into(),
            hint: "give the VM a virtual PMU (QEMU: -cpu host,pmu=on) on hardware that has one"
                .into(),
        })
    }

    pub(super) fn event(self, settings: &Settings) -> Result<PerfEvent, TrackerError> {
        let base = Attr {
            size: size_of::<Attr>() as u32,
            sample_period: u64::from(settings.period),
            sample_type: sample::TID | sample::ADDR,
            flags: flag::DISABLED | flag::EXCLUDE_KERNEL | flag::EXCLUDE_HV,
            ..Attr::default()
        };
        let pmu = settings.root.join(PMU_DIR);
        let (attr, leader) = match self {
            Self::PageFaults => (
                Attr {
                    kind: TYPE_SOFTWARE,
                    config: SW_PAGE_FAULTS,
                    sample_period: 1,
                    ..base
                },
                None,
            ),
            Self::AmdIbs => {
                let pmu = pmu.join("ibs_op");
                let mut attr = Attr {
                    kind: pmu_type(&pmu)?,
                    config: IBS_COUNT_OPS,
                    sample_type: sample::TID | sample::RAW,
                    // Most generations cannot exclude the kernel; its addresses are rejected later.
                    flags: flag::DISABLED,
                    ..base
                };
                // Zen 4 and later discard what did not miss the last cache before anybody is interrupted. Of each
                // `sample_period` ops that count one is looked at, so that is one of as many slow loads.
                if pmu.join("format/l3missonly").exists() {
                    set_field(&pmu, "l3missonly", 1, &mut attr)?;
                } else {
                    attr.sample_period *= IBS_PERIOD_FACTOR;
                }
                attr.sample_period = (attr.sample_period.next_multiple_of(IBS_PERIOD_STEP))
                    .clamp(IBS_PERIOD_MIN, IBS_PERIOD_MAX);
                (attr, None)
            }
            Self::IntelLoadLatency => {
                let pmu = pmu.join("cpu");
                let mut attr = named_event(&pmu, "mem-loads", &base)?;
                set_field(&pmu, "ldlat", threshold_cycles(settings), &mut attr)?;
                attr.flags |= 2 << flag::PRECISE_IP_SHIFT;
                let leader = pmu
                    .join("events/mem-loads-aux")
                    .exists()
                    .then(|| named_event(&pmu, "mem-loads-aux", &base))
                    .transpose()?
                    // The leader only counts.
                    .map(|leader| Attr {
                        sample_period: 0,
                        sample_type: 0,
                        ..leader
                    });
                (attr, leader)
            }
        };
        Ok(PerfEvent {
            kind: self,
            attr,
            leader,
        })
    }
}

impl PerfEvent {
    /// The error to report if the kernel refuses the event.
    pub(super) fn refused(&self, root: &Path, error: io::Error) -> TrackerError {
        let hint = match error.raw_os_error() {
            Some(libc::EACCES | libc::EPERM) => {
                let paranoia = paranoia(root).map_or("unknown".into(), |level| level.to_string());
                format!(
                    "give the agent CAP_PERFMON or set kernel.perf_event_paranoid=0 (it is {paranoia})"
                )
            }
            Some(libc::EBUSY) => "stop the other program that samples memory loads".into(),
            Some(libc::EMFILE) => "raise the limit of open files (ulimit -n)".into(),
            _ => "the virtual PMU does not offer this event; use the damon tracker".into(),
        };
        TrackerError::Unavailable {
            tracker: NAME,
            why: format!("the kernel refuses the event {:?}: {error}", self.kind),
            hint,
        }
    }
}

fn read(path: &Path) -> Result<String, TrackerError> {
    fs::read_to_string(path).map_err(|source| TrackerError::Io {
        tracker: NAME,
        what: format!("read {}", path.display()),
        source,
    })
}

fn unavailable(why: String) -> TrackerError {
    TrackerError::Unavailable {
        tracker: NAME,
        why,
        hint: "this kernel describes its events in a way that is not known; use the damon tracker"
            .into(),
    }
}

fn pmu_type(pmu: &Path) -> Result<u32, TrackerError> {
    let text = read(&pmu.join("type"))?;
    text.trim()
        .parse()
        .map_err(|_| unavailable(format!("PMU type {:?}", text.trim())))
}

/// Parses an event of sysfs, such as `event=0xcd,umask=0x1,ldlat=3`.
fn named_event(pmu: &Path, name: &str, base: &Attr) -> Result<Attr, TrackerError> {
    let mut attr = Attr {
        kind: pmu_type(pmu)?,
        ..base.clone()
    };
    let text = read(&pmu.join("events").join(name))?;
    for term in text.trim().split(',') {
        let (field, value) = term.split_once('=').unwrap_or((term, "1"));
        let parsed = match value.strip_prefix("0x") {
            Some(hex) => u64::from_str_radix(hex, 16),
            None => value.parse(),
        };
        let value =
            parsed.map_err(|_| unavailable(format!("event {name} has the term {term:?}")))?;
        set_field(pmu, field, value, &mut attr)?;
    }
    Ok(attr)
}

/// Sets a field at the position in `format/FIELD`, such as `config1:0-15`.
fn set_field(pmu: &Path, field: &str, value: u64, attr: &mut Attr) -> Result<(), TrackerError> {
    let format = read(&pmu.join("format").join(field))?;
    let place = parse_format(format.trim())
        .ok_or_else(|| unavailable(format!("field {field} lies at {:?}", format.trim())))?;
    let word = match place.word {
        0 => &mut attr.config,
        1 => &mut attr.config1,
        _ => &mut attr.config2,
    };
    let mask = u64::MAX >> (63 - (place.last - place.first));
    *word = (*word & !(mask << place.first)) | ((value & mask) << place.first);
    Ok(())
}

/// Bits `first..=last` of config, config1 or config2 (`word` 0, 1, 2).
struct FieldBits {
    word: u32,
    first: u32,
    last: u32,
}

fn parse_format(text: &str) -> Option<FieldBits> {
    let (word, bits) = text.split_once(':')?;
    let word = match word {
        "config" => 0,
        "config1" => 1,
        "config2" => 2,
        _ => return None,
    };
    let (first, last) = bits.split_once('-').unwrap_or((bits, bits));
    let place = FieldBits {
        word,
        first: first.parse().ok()?,
        last: last.parse().ok()?,
    };
    (place.first <= place.last && place.last < 64).then_some(place)
}

/// The latency threshold in core cycles, from the first CPU's frequency. Assumes 1 cycle per nanosecond if that is
/// unknown.
pub(super) fn threshold_cycles(settings: &Settings) -> u64 {
    /// The range that the hardware field accepts.
    const CYCLES: std::ops::RangeInclusive<u64> = 3..=0xffff;
    let cpuinfo = fs::read_to_string(settings.root.join("proc/cpuinfo")).unwrap_or_default();
    let mhz = cpuinfo
        .lines()
        .find_map(|line| {
            line.strip_prefix("cpu MHz")?
                .split(':')
                .nth(1)?
                .trim()
                .parse()
                .ok()
        })
        .unwrap_or(1000.0);
    let cycles = (f64::from(settings.latency_threshold_ns) * mhz / 1000.0) as u64;
    cycles.clamp(*CYCLES.start(), *CYCLES.end())
}

#[cfg(test)]
mod tests {
    use super::*;

    fn machine(files: &[(&str, &str)]) -> (tempfile::TempDir, Settings) {
        let root = tempfile::tempdir().unwrap();
        for (path, text) in files {
            let path = root.path().join(path);
            fs::create_dir_all(path.parent().unwrap()).unwrap();
            fs::write(path, format!("{text}\n")).unwrap();
        }
        let settings = Settings {
            root: root.path().into(),
            ..Settings::default()
        };
        (root, settings)
    }

    const INTEL: [(&str, &str); 6] = [
        ("sys/bus/event_source/devices/cpu/type", "4"),
        (
            "sys/bus/event_source/devices/cpu/events/mem-loads",
            "event=0xcd,umask=0x1,ldlat=3",
        ),
        (
            "sys/bus/event_source/devices/cpu/format/event",
            "config:0-7",
        ),
        (
            "sys/bus/event_source/devices/cpu/format/umask",
            "config:8-15",
        ),
        (
            "sys/bus/event_source/devices/cpu/format/ldlat",
            "config1:0-15",
        ),
        ("proc/cpuinfo", "processor\t: 0\ncpu MHz\t\t: 2500.000"),
    ];

    #[test]
    fn load_latency_is_described_as_the_kernel_says() {
        let (_root, settings) = machine(&INTEL);
        let kind = EventKind::detect(&settings.root).unwrap();
        let event = kind.event(&settings).unwrap();
        assert_eq!(kind, EventKind::IntelLoadLatency);
        assert_eq!((event.attr.kind, event.attr.config), (4, 0x1cd));
        assert_eq!(event.attr.config1, 160);
        assert_eq!(event.attr.sample_period, 4093);
        assert_eq!(event.leader, None);
        // Conditions of large PEBS: only TID and ADDR, no wake-up, precise, fixed period.
        assert_eq!(event.attr.sample_type, 0b1010);
        assert_eq!(event.attr.wakeup_events, 0);
        assert_eq!(event.attr.flags, 1 | 1 << 5 | 1 << 6 | 2 << 15);
    }

    #[test]
    fn the_auxiliary_event_leads_where_there_is_one() {
        let (_root, settings) = machine(
            &[
                &INTEL[..],
                &[(
                    "sys/bus/event_source/devices/cpu/events/mem-loads-aux",
                    "event=0x03,umask=0x82",
                )],
            ]
            .concat(),
        );
        let leader = EventKind::IntelLoadLatency
            .event(&settings)
            .unwrap()
            .leader
            .unwrap();
        assert_eq!((leader.config, leader.sample_period), (0x8203, 0));
    }

    #[test]
    fn ibs_gets_a_period_that_it_accepts() {
        let (_root, settings) = machine(&[("sys/bus/event_source/devices/ibs_op/type", "11")]);
        assert_eq!(
            EventKind::detect(&settings.root).unwrap(),
            EventKind::AmdIbs
        );
        for period in [1, 4093, u32::MAX] {
            let settings = Settings {
                period,
                ..settings.clone()
            };
            let event = EventKind::AmdIbs.event(&settings).unwrap();
            let attr = &event.attr;
            assert!(attr.sample_period.is_multiple_of(16));
            assert!((0x90..=IBS_PERIOD_MAX).contains(&attr.sample_period));
            let thinned = attr.sample_period * u64::from(event.most_thinning());
            assert!(thinned <= IBS_PERIOD_MAX);
            assert_eq!((attr.kind, attr.config), (11, IBS_COUNT_OPS));
            assert_eq!(attr.sample_type, 1 << 1 | 1 << 10);
        }
    }

    #[test]
    fn ibs_that_reports_misses_only_samples_as_many_loads() {
        let (_root, settings) = machine(&[
            ("sys/bus/event_source/devices/ibs_op/type", "11"),
            (
                "sys/bus/event_source/devices/ibs_op/format/l3missonly",
                "config:16",
            ),
        ]);
        let attr = EventKind::AmdIbs.event(&settings).unwrap().attr;
        assert_eq!(attr.config, IBS_COUNT_OPS | 1 << 16);
        assert_eq!(attr.sample_period, 4096, "4093 in steps of 16");
    }

    #[test]
    fn a_machine_without_sampling_is_told_what_it_lacks() {
        let (root, _) = machine(&[]);
        let error = EventKind::detect(root.path()).unwrap_err().to_string();
        assert!(error.contains("IBS") && error.contains("PMU"), "{error}");
    }

    #[test]
    fn a_refusal_names_the_permission() {
        let (root, settings) = machine(&[("proc/sys/kernel/perf_event_paranoid", "3")]);
        let event = EventKind::PageFaults.event(&settings).unwrap();
        let error = io::Error::from_raw_os_error(libc::EACCES);
        let text = event.refused(root.path(), error).to_string();
        assert!(
            text.contains("CAP_PERFMON") && text.contains("(it is 3)"),
            "{text}"
        );
    }

    #[test]
    fn places_outside_a_word_are_refused() {
        for text in [
            "config:8-64",
            "config:9-8",
            "config3:0-7",
            "config",
            "config:a",
        ] {
            assert!(parse_format(text).is_none(), "{text}");
        }
    }
}
