//! The result file: one schema for `sim`, `lab` and `here`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::provisioning::Provisioning;
use crate::unit::Unit;

/// Version of the schema that this crate writes. It reads version 1, too.
pub const SCHEMA: u32 = 2;

/// What one run of a scenario measured: the result file, as JSON.
///
/// Units are in the names: `_s` seconds, `_ns` nanoseconds, `bytes_` bytes; a workload's speed names
/// its own. Shares go from 0 to 1. What was not measured is `null` or not there. Within one version
/// of the schema fields may be added, never changed or taken away; readers ignore what they do not
/// know. A file that breaks these rules is refused, see [`RunResult::check`].
///
/// `demeter run scenarios/gups.toml --on lab --json result.json` writes, here cut to two seconds
/// and one system:
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
    /// One entry for each system, in the scenario's order; none when there are cases.
    pub systems: Vec<SystemResult>,
    /// The cases of a scenario that varies, in its order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub cases: Vec<Case>,
    /// What others have published about the scenario, beside what was measured here.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub published: Vec<Published>,
}

impl Default for RunResult {
    /// An empty result of no scenario.
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

/// One case of a scenario that varies.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Case {
    /// Which table of the scenario's `vary` it belongs to, from 0.
    #[serde(default)]
    pub group: usize,
    /// What it sets: key and value, as a person gives them.
    pub settings: Vec<(String, String)>,
    /// One entry for each system, in the scenario's order.
    pub systems: Vec<SystemResult>,
}

/// A published figure and ours.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Published {
    /// The name of a [`Figure`](crate::Figure).
    pub figure: String,
    /// Whose.
    pub system: String,
    /// The system that it is divided by, if it is a ratio; with what is different in its case.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub over: Option<String>,
    /// Settings of the case that it is about; empty without cases.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub case: Vec<(String, String)>,
    /// What was published.
    pub value: f64,
    /// What was measured; null when it was not.
    pub ours: Option<f64>,
    /// How far the two may be apart, as a share of the published one, and still agree.
    pub within: f64,
    /// Where it was published.
    pub source: String,
}

/// A published ratio that is nearer to 1 says that both are as good, not which is better.
const EQUAL: f64 = 0.05;

impl Published {
    /// Whether ours is within the limit and, for a ratio, on the same side of 1. A figure that was not measured
    /// does not agree.
    pub fn agrees(&self) -> bool {
        let limit = self.within * self.value.abs();
        let is_near = |ours: f64| (ours - self.value).abs() <= limit;
        self.ours.is_some_and(is_near) && !self.is_reversed()
    }

    /// Whether it is a ratio that says who has more, and ours does not say the same.
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
    /// The name of the settings under which it ran, where the scenario has some: those under which
    /// the system was best.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub settings: Option<String>,
    /// What it did under its other settings, in the scenario's order.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    pub other_settings: Vec<Self>,
    /// What tells how the run was made, not what came of it.
    #[serde(default, skip_serializing_if = "Metadata::is_empty")]
    pub metadata: Metadata,
    /// Seconds until a fixed amount of work was done: the mean over all VMs, the latest of several
    /// workloads; null where the time was fixed or the work did not end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// How long single operations took, where the workload tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<Tail>,
    /// What other seeds gave; null for a single run. All other fields are those of the run in the
    /// middle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats: Option<Repeats>,
    /// How fast the workload went: the sum over VMs side by side. Null where nothing is counted, and
    /// where several `workloads` count different things.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<Speed>,
    /// Share of the hot set in fast memory at the end, 0 to 1; null where the workload does not say
    /// what is hot.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub hot_in_fast_final: Option<f64>,
    /// Seconds of the timed phase until 90 % of the (first) hot set was in fast memory; null if
    /// never.
    pub t90_s: Option<f64>,
    /// Seconds from the hot set's jump until 90 % of the new one was in fast memory.
    #[serde(default)]
    pub t90_after_shift_s: Option<f64>,
    /// CPU seconds of management in the timed phase (see [`Role`](crate::Role)), less what the
    /// same causes took under `none`. In a VM: its system time plus the agent's user time. Null
    /// without a run of `none`.
    pub mgmt_cpu_s: Option<f64>,
    /// The same in the last third.
    pub mgmt_cpu_steady_s: Option<f64>,
    /// Pages that kswapd scanned in the timed phase.
    pub kswapd_scanned: u64,
    /// Bytes moved from slow to fast memory: verified by node where the system is Demeter, the
    /// kernel's own counters elsewhere; null where nobody counts them.
    pub bytes_promoted: Option<u64>,
    /// Bytes moved from fast to slow memory; likewise.
    pub bytes_demoted: Option<u64>,
    /// Bytes moved in either direction per second of the last third; likewise.
    #[serde(default)]
    pub moved_steady_bytes_per_s: Option<f64>,
    /// The most memory that the system had for itself, bytes, of all VMs together: histories, counters, filters,
    /// queues, second copies. What a kernel keeps of its pages anyway does not count. Null where nobody looked.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub memory_overhead_bytes: Option<u64>,
    /// Words that the workload found wrong at the end; null when it did not verify.
    pub verify_errors: Option<u64>,
    /// CPU seconds in the timed phase by cause, see [`CAUSES`](crate::CAUSES).
    #[serde(default)]
    pub cpu_s: BTreeMap<String, f64>,
    /// What was counted in the timed phase: in a VM by the names of /proc/vmstat, on the simulator by
    /// those of [`COUNTERS`](crate::COUNTERS).
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// How memory was provisioned, where the scenario compares that. The system's name is then
    /// that of the mechanism or of the policy.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning: Option<Provisioning>,
    /// Each workload of a run with several: programs in one VM, or VMs side by side.
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

    /// CPU time of management divided by the time that passed.
    pub fn cores_managing(&self) -> Option<f64> {
        let seconds = self.elapsed_s.or(self.series.last().map(|p| p.t_s))?;
        (seconds > 0.0).then_some(self.mgmt_cpu_s? / seconds)
    }

    /// The same of the last third.
    pub fn cores_managing_steady(&self) -> Option<f64> {
        let end_s = self.elapsed_s.or(self.series.last().map(|p| p.t_s))?;
        (end_s > 0.0).then_some(self.mgmt_cpu_steady_s? / (end_s / 3.0))
    }

    /// Bytes moved in either direction.
    pub fn bytes_moved(&self) -> Option<u64> {
        Some(self.bytes_promoted?.saturating_add(self.bytes_demoted?))
    }
}

/// How a run was made.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize, Default)]
pub struct Metadata {
    /// A hash of all that happened on the simulator: equal runs have equal ones.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub event_log_hash: Option<u64>,
    /// Real pages that one page of the simulator stands for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub scale: Option<u64>,
    /// Share of the timed phase in which the host ran something else than the VM's CPUs, 0 to 1.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_noise: Option<f64>,
    /// The same of the last third.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub host_noise_steady: Option<f64>,
}

/// A run is disturbed when the host took more than this share of its time, or of its last third.
pub const HOST_NOISE_MAX: f64 = 0.03;

impl Metadata {
    /// The larger share of the time that the host took, of all of it and of the last third; 0 where
    /// nobody looked.
    pub fn noise(&self) -> f64 {
        let shares = [self.host_noise, self.host_noise_steady];
        shares.into_iter().flatten().fold(0.0, f64::max)
    }

    /// Whether the host did so much else that the figures do not count.
    pub fn is_disturbed(&self) -> bool {
        self.noise() > HOST_NOISE_MAX
    }

    fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// How fast a workload went.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize)]
pub struct Speed {
    /// What it is told in: a throughput, or the time of an operation.
    pub unit: Unit,
    /// Mean over the timed phase.
    pub mean: Option<f64>,
    /// Mean over the last third.
    pub steady: Option<f64>,
}

impl Speed {
    /// Mean and steady speed, as far as they are known.
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
    /// Seconds until it was done, if it has an end and came to it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// How fast it went; null where nothing is counted.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub speed: Option<Speed>,
    /// Words that it found wrong at the end; null when it did not verify.
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
    /// Half of them took no longer.
    pub p50_ns: f64,
    /// 90 % of them took no longer.
    pub p90_ns: f64,
    /// 99 %.
    pub p99_ns: f64,
    /// 99.9 %.
    pub p999_ns: f64,
}

/// Runs of one system with several seeds, by their main figure: the elapsed time where the work
/// is fixed, else the mean speed.
#[derive(Debug, Clone, Copy, PartialEq, Serialize, Deserialize)]
pub struct Repeats {
    /// Runs.
    pub runs: u32,
    /// The smallest main figure.
    pub min: f64,
    /// The largest.
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
    /// Fast memory that the VM owned then, bytes; with several VMs that of all. Of a program in a cgroup: what
    /// the cgroup held of it. Null where it does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_bytes: Option<u64>,
}
