//! The schema of result files of `sim`, `lab` and `here`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::provisioning::Provisioning;
use crate::unit::Unit;

/// The schema version that is written. Version 1 can be read, too.
pub const SCHEMA: u32 = 2;

/// The result of one run of a scenario: a result file, as JSON.
///
/// Units are in the names: `_s` seconds, `_ns` nanoseconds, `bytes_` bytes; a workload's speed names its own. Shares go
/// from 0 to 1. Values that were not measured are `null` or missing. Within one version of the schema fields may be
/// added, but never changed or removed; readers ignore unknown fields. A file that breaks these rules is rejected, see
/// [`RunResult::check`].
///
/// `demeter run scenarios/gups.toml --on lab --json result.json` writes, cut here to two seconds and one system:
///
/// ```json
#[doc = include_str!("../tests/example.json")]
/// ```
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct RunResult {
    /// [`SCHEMA`].
    pub schema: u32,
    /// The scenario's name.
    pub scenario: String,
    /// Where it ran: `lab`, `sim` or `here`.
    pub on: String,
    /// Seed of the workload.
    pub seed: u64,
    /// Length of the timed phase, seconds.
    pub duration_s: u64,
    /// When the workload's hot set jumps, seconds into the timed phase.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub shift_at_s: Option<u64>,
    /// One entry for each system, in the scenario's order; empty if there are cases.
    pub systems: Vec<SystemResult>,
    /// The cases of a scenario with `vary`, in its order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cases: Vec<Case>,
    /// Published figures of the scenario, beside the measured ones.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<Published>,
}

impl Default for RunResult {
    /// An empty result without a scenario.
    fn default() -> Self {
        Self {
            schema: SCHEMA,
            scenario: String::new(),
            on: String::new(),
            seed: 0,
            duration_s: 0,
            shift_at_s: None,
            systems: vec![],
            cases: vec![],
            published: vec![],
        }
    }
}

/// A case of a scenario with `vary`.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Index of its table in the scenario's `vary`, from 0.
    #[serde(default)]
    pub group: usize,
    /// Its settings: key and value, as written.
    pub settings: Vec<(String, String)>,
    /// One entry for each system, in the scenario's order.
    pub systems: Vec<SystemResult>,
}

/// A published figure and the measured one.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// The name of a [`Figure`](crate::Figure).
    pub figure: String,
    /// The system that it is about.
    pub system: String,
    /// The system that it is divided by, for a ratio, with the settings that differ in its case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    /// Settings of its case; empty without cases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub case: Vec<(String, String)>,
    /// The published value.
    pub value: f64,
    /// The measured value; null if it was not measured.
    pub ours: Option<f64>,
    /// The allowed difference, as a share of the published value.
    pub within: f64,
    /// The publication.
    pub source: String,
}

/// A published ratio this close to 1 says that both are equal, not which one is better.
const EQUAL: f64 = 0.05;

impl Published {
    /// Whether the measured value agrees: within the limit and, for a ratio, on the same side of 1. A figure that was
    /// not measured does not agree.
    pub fn agrees(&self) -> bool {
        let limit = self.within * self.value.abs();
        let is_near = |ours: f64| (ours - self.value).abs() <= limit;
        self.ours.is_some_and(is_near) && !self.is_reversed()
    }

    /// Whether the published ratio says which system is better, and the measured one does not agree.
    pub fn is_reversed(&self) -> bool {
        let says_who = self.over.is_some() && (self.value - 1.0).abs() > EQUAL;
        let other = |ours: f64| (ours - 1.0) * (self.value - 1.0) <= 0.0;
        says_who && self.ours.is_some_and(other)
    }
}

/// The figures of one system.
///
/// *Steady* is the last third of the timed phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct SystemResult {
    /// The system's name, as in the scenario.
    pub name: String,
    /// The name of its settings, where the scenario has several; the best ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// Results under its other settings, in the scenario's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_settings: Vec<Self>,
    /// How the run was made.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
    /// Seconds until a fixed amount of work was done: the mean of all VMs, the latest of several workloads. Null if the
    /// time was fixed or the work did not end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// Latencies of single operations, if the workload reports them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<Tail>,
    /// Results of other seeds; null for a single run. All other fields are those of the median run.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats: Option<Repeats>,
    /// Speed of the workload, summed over VMs. Null if nothing is counted, or if several `workloads` count different
    /// things.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<Speed>,
    /// Share of the hot set in fast memory at the end, 0 to 1; null if the workload does not report its hot set.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot_in_fast_final: Option<f64>,
    /// Seconds of the timed phase until 90 % of the (first) hot set was in fast memory; null if that never happened.
    pub t90_s: Option<f64>,
    /// Seconds from the hot set's jump until 90 % of the new one was in fast memory.
    #[serde(default)]
    pub t90_after_shift_s: Option<f64>,
    /// CPU seconds of management in the timed phase (see [`Role`](crate::Role)), less those of the same causes under
    /// `none`. In a VM: its system time plus the agent's user time. Null without a run of `none`.
    pub mgmt_cpu_s: Option<f64>,
    /// CPU seconds of management in the last third.
    pub mgmt_cpu_steady_s: Option<f64>,
    /// Pages that kswapd scanned in the timed phase.
    pub kswapd_scanned: u64,
    /// Bytes moved from slow to fast memory: checked by node for Demeter, the kernel's counters otherwise. Null if they
    /// are not counted.
    pub bytes_promoted: Option<u64>,
    /// Bytes moved from fast to slow memory, counted likewise.
    pub bytes_demoted: Option<u64>,
    /// Bytes moved in either direction per second of the last third, counted likewise.
    #[serde(default)]
    pub moved_steady_bytes_per_s: Option<f64>,
    /// The system's own memory at its maximum, bytes, over all VMs: histories, counters, filters, queues, second
    /// copies. Memory that a kernel needs anyway for its pages does not count. Null if unknown.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_overhead_bytes: Option<u64>,
    /// Words that the workload found wrong at the end; null if it did not verify.
    pub verify_errors: Option<u64>,
    /// CPU seconds in the timed phase by cause, see [`CAUSES`](crate::CAUSES).
    #[serde(default)]
    pub cpu_s: BTreeMap<String, f64>,
    /// Counters of the timed phase: in a VM by the names of /proc/vmstat, on the simulator by those of
    /// [`COUNTERS`](crate::COUNTERS).
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// Results of provisioning, if the scenario compares provisioners. The system's name is then that of the mechanism
    /// or policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning: Option<Provisioning>,
    /// The slowdown with fast memory of each size, as the system's agent estimates it at the end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub estimate: Option<Estimate>,
    /// Results by workload, if there are several: programs in one VM, or VMs side by side.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub workloads: Vec<WorkloadResult>,
    /// One point per reporting interval.
    pub series: Vec<Point>,
}

impl SystemResult {
    /// Mean speed over the timed phase, in its own unit.
    pub fn mean(&self) -> Option<f64> {
        self.speed.as_ref()?.mean
    }

    /// Mean speed over the last third, in its own unit.
    pub fn steady(&self) -> Option<f64> {
        self.speed.as_ref()?.steady
    }

    /// CPU time of management divided by elapsed time.
    pub fn cores_managing(&self) -> Option<f64> {
        let seconds = self.elapsed_s.or(self.series.last().map(|p| p.t_s))?;
        (seconds > 0.0).then_some(self.mgmt_cpu_s? / seconds)
    }

    /// CPU time of management divided by elapsed time, in the last third.
    pub fn cores_managing_steady(&self) -> Option<f64> {
        let end_s = self.elapsed_s.or(self.series.last().map(|p| p.t_s))?;
        (end_s > 0.0).then_some(self.mgmt_cpu_steady_s? / (end_s / 3.0))
    }

    /// Bytes moved in either direction.
    pub fn bytes_moved(&self) -> Option<u64> {
        Some(self.bytes_promoted?.saturating_add(self.bytes_demoted?))
    }
}

/// An agent's estimate of a program's slowdown against memory that is all fast.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Estimate {
    /// Fast memory that the VM had, bytes.
    pub fast_bytes: u64,
    /// By rising size; linear between two points.
    pub points: Vec<EstimatePoint>,
}

/// The estimated slowdown with fast memory of one size: 1.1 is 10 % slower.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct EstimatePoint {
    /// The size.
    pub fast_bytes: u64,
    /// Lower bound of the slowdown.
    pub slowdown_min: f64,
    /// Upper bound of the slowdown.
    pub slowdown_max: f64,
}

impl Estimate {
    /// Lower and upper bound of the slowdown with this much fast memory; `None` without points.
    pub fn slowdown(&self, fast_bytes: u64) -> Option<[f64; 2]> {
        let both = |point: &EstimatePoint| [point.slowdown_min, point.slowdown_max];
        let after = self
            .points
            .partition_point(|point| point.fast_bytes <= fast_bytes);
        let above = self.points.get(after);
        let Some(below) = after.checked_sub(1).map(|at| &self.points[at]) else {
            return above.map(both);
        };
        let Some(above) = above else {
            return Some(both(below));
        };
        let part =
            (fast_bytes - below.fast_bytes) as f64 / (above.fast_bytes - below.fast_bytes) as f64;
        let (from, to) = (both(below), both(above));
        Some([0, 1].map(|bound| from[bound] + (to[bound] - from[bound]) * part))
    }
}

/// How a run was made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Metadata {
    /// A hash of all events on the simulator; equal runs have equal hashes.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_log_hash: Option<u64>,
    /// Real pages per page of the simulator.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<u64>,
    /// Share of the timed phase in which the host ran something other than the VM's CPUs, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_noise: Option<f64>,
    /// The host's share of the last third.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_noise_steady: Option<f64>,
}

/// A run is disturbed if the host took more than this share of its time, or of its last third.
pub const HOST_NOISE_MAX: f64 = 0.03;

impl Metadata {
    /// The host's larger share, of the whole time and the last third; 0 if unknown.
    pub fn noise(&self) -> f64 {
        let shares = [self.host_noise, self.host_noise_steady];
        shares.into_iter().flatten().fold(0.0, f64::max)
    }

    /// Whether the host took too much time for valid figures.
    pub fn is_disturbed(&self) -> bool {
        self.noise() > HOST_NOISE_MAX
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// The speed of a workload.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// Its unit: a throughput, or the time of an operation.
    pub unit: Unit,
    /// Mean over the timed phase.
    pub mean: Option<f64>,
    /// Mean over the last third.
    pub steady: Option<f64>,
}

impl Speed {
    /// Mean and steady speed, if known.
    pub fn new(unit: Unit, mean: impl Into<Option<f64>>, steady: impl Into<Option<f64>>) -> Self {
        Self {
            unit,
            mean: mean.into(),
            steady: steady.into(),
        }
    }
}

/// One of several workloads that ran at the same time.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct WorkloadResult {
    /// Its name, or its VM's.
    pub name: String,
    /// Seconds until it ended, if it has an end and reached it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// Its speed; null if nothing is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<Speed>,
    /// Words that it found wrong at the end; null if it did not verify.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub verify_errors: Option<u64>,
    /// One point per reporting interval.
    pub series: Vec<Point>,
}

/// Latencies of single operations over the timed phase, nanoseconds.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Tail {
    /// Their mean.
    pub mean_ns: f64,
    /// Median.
    pub p50_ns: f64,
    /// 90th percentile.
    pub p90_ns: f64,
    /// 99th percentile.
    pub p99_ns: f64,
    /// 99.9th percentile.
    pub p999_ns: f64,
}

/// The range of a system's runs with several seeds, by their main figure.
///
/// The main figure is the elapsed time of fixed work, otherwise the mean speed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Repeats {
    /// Number of runs.
    pub runs: u32,
    /// The lowest main figure.
    pub min: f64,
    /// The highest main figure.
    pub max: f64,
}

/// One interval of the timed phase.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Point {
    /// End of the interval, seconds into the timed phase.
    pub t_s: f64,
    /// Mean speed in the interval, in the unit of the workload's [`Speed`].
    pub speed: Option<f64>,
    /// Share of the hot set that lay in fast memory at the end of the interval, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot_in_fast: Option<f64>,
    /// Fast memory that the VM owned then, or all VMs together, bytes. For a program in a cgroup: the part that the
    /// cgroup held. Null if it does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_bytes: Option<u64>,
}
