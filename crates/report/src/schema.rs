//! The result file: one schema for `sim`, `lab` and `here`.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

use crate::provision::Provisioning;

/// Version of the schema that this crate writes and reads.
pub const SCHEMA: u32 = 1;

/// What one run of a scenario measured: the result file, as JSON.
///
/// Units are in the names: `_s` seconds, `_ns` nanoseconds, `_mops` million updates per second,
/// `bytes_` bytes. Shares go from 0 to 1. What was not measured is `null`. Within one version of
/// the schema fields may be added, never changed or taken away; readers ignore what they do not
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
    /// Which figure, see [`figure`](crate::figure()).
    pub figure: String,
    /// Whose.
    pub system: String,
    /// The system that it is divided by, if it is a ratio.
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

impl Published {
    /// Whether ours is within the limit. A figure that was not measured does not agree.
    pub fn agrees(&self) -> bool {
        let limit = self.within * self.value.abs();
        self.ours
            .is_some_and(|ours| (ours - self.value).abs() <= limit)
    }
}

/// What one system did.
///
/// *Steady* is the last third of the timed phase. The throughput fields are set by gups, the
/// latency fields by memlat; the other pair is null.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct SystemResult {
    /// The system's name, as in the scenario.
    pub name: String,
    /// Seconds until a fixed amount of work was done, the mean over all VMs; null where the time
    /// was fixed or the work did not end.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub elapsed_s: Option<f64>,
    /// How long single operations took, where the workload tells.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub tail: Option<Tail>,
    /// What other seeds gave; null for a single run. All other fields are those of the run in the
    /// middle.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub repeats: Option<Repeats>,
    /// Mean throughput over the timed phase, million updates per second.
    pub mean_mops: Option<f64>,
    /// Mean throughput over the last third.
    pub steady_mops: Option<f64>,
    /// Mean latency of a dependent load over the timed phase, nanoseconds.
    #[serde(default)]
    pub mean_latency_ns: Option<f64>,
    /// The same over the last third.
    #[serde(default)]
    pub steady_latency_ns: Option<f64>,
    /// Share of the hot set in fast memory at the end, 0 to 1.
    pub hot_in_fast_final: f64,
    /// Seconds of the timed phase until 90 % of the (first) hot set was in fast memory; null if
    /// never.
    pub t90_s: Option<f64>,
    /// Seconds from the hot set's jump until 90 % of the new one was in fast memory.
    #[serde(default)]
    pub t90_after_shift_s: Option<f64>,
    /// CPU seconds of management in the timed phase: system time of the whole VM plus the
    /// agent's user time, less the system time of `none`. Null without a run of `none`.
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
    /// Words that the workload found wrong at the end; null when it did not verify.
    pub verify_errors: Option<u64>,
    /// CPU seconds in the timed phase by cause: `agent_user`, `agent_system`, `kswapd`,
    /// `kdamond`, `workload_user`, `workload_system`, `other_system`, ...
    #[serde(default)]
    pub cpu_s: BTreeMap<String, f64>,
    /// Differences of kernel counters over the timed phase, by their name in /proc/vmstat.
    #[serde(default)]
    pub counters: BTreeMap<String, u64>,
    /// How memory was provisioned, where the scenario compares that. The system's name is then
    /// that of the mechanism or of the policy; with several VMs its throughput is their sum.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub provisioning: Option<Provisioning>,
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
/// is fixed, else mean throughput or latency.
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
    /// Throughput in the interval, million updates per second.
    pub mops: Option<f64>,
    /// Mean latency in the interval, nanoseconds.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub latency_ns: Option<f64>,
    /// Share of the hot set that lay in fast memory at the end of the interval, 0 to 1.
    pub hot_in_fast: f64,
    /// Fast memory that the VM owned then, bytes; with several VMs that of all. Null where it
    /// does not change.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub fast_bytes: Option<u64>,
}
