//! What a run in which memory was changed from outside measured beside its systems' figures.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// How memory was provisioned, and what that cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Provisioning {
    /// The mechanism: `static`, `virtio-balloon`, `virtio-mem` or `demeter-balloon`.
    pub provisioner: String,
    /// What decided how much each VM gets: `static`, `shares` or `wss`.
    pub policy: String,
    /// Bytes taken from the VM before the workload started, as the guest says.
    pub bytes_inflated: Option<u64>,
    /// Bytes that the host's files of guest memory were smaller afterwards.
    pub host_bytes_returned: Option<u64>,
    /// Seconds from the request until all of it was taken.
    pub inflate_s: Option<f64>,
    /// `bytes_inflated / inflate_s`, GiB (2^30 bytes) per second.
    pub inflate_gib_per_s: Option<f64>,
    /// Memory that programs could take from the fast node afterwards, bytes.
    pub fast_free_bytes: Option<u64>,
    /// The same for the slow node.
    pub slow_free_bytes: Option<u64>,
    /// What was asked for in the timed phase.
    #[serde(default)]
    pub resizes: Vec<Resize>,
    /// Speed that 99 % of the reporting intervals reached in which a resize was under way, in the
    /// unit of the run's.
    pub p99_resizing: Option<f64>,
    /// The same for all other intervals.
    pub p99_other: Option<f64>,
    /// How often more was promised than a pool holds, as the host controller counts it.
    pub pool_violations: Option<u64>,
    /// What was crashed, where that is what the run is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crashes: Option<CrashFigures>,
    /// What was used over a long time, where that is what the run is for.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soak: Option<SoakFigures>,
}

/// One change of a VM's fast memory in the timed phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Resize {
    /// When it was asked for, seconds into the timed phase.
    pub t_s: f64,
    /// Fast memory that the VM was to own, bytes.
    pub fast_bytes: u64,
    /// Seconds until it did; null if it never did.
    pub took_s: Option<f64>,
    /// What the host controller said instead.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Crashes, and other events of a VM's life, that a run has survived.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct CrashFigures {
    /// How many, one after the other.
    pub cycles: u64,
    /// The same by what happened.
    #[serde(alias = "by_victim")]
    pub by_event: BTreeMap<String, u64>,
    /// The longest time from one until the VM owned what it should and its workload had
    /// verified a round from its beginning, seconds.
    pub recovered_max_s: f64,
    /// Rounds that the workload verified.
    pub rounds: u64,
    /// Words that it checked in them.
    pub words: u64,
    /// Words that were wrong.
    pub wrong_words: u64,
    /// The largest count of pool violations that a host controller showed.
    pub violations: u64,
}

/// Figures of a long run with many changes of size.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct SoakFigures {
    /// How long it was, seconds.
    pub seconds: u64,
    /// Changes of a VM's size.
    pub resizes: u64,
    /// Rounds that the workloads verified.
    pub rounds: u64,
    /// Words that they checked in them.
    pub words: u64,
    /// Words that were wrong.
    pub wrong_words: u64,
    /// What everybody used.
    pub uses: Vec<Use>,
}

/// One process's use of one resource.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Use {
    /// Who: the controller, or which VM's agent or kernel.
    pub who: String,
    /// What: `KiB` of memory, `descriptors` or `threads`.
    pub what: String,
    /// The most in the second quarter of the run.
    pub early: u64,
    /// The most in its last quarter.
    pub late: u64,
    /// Whether that is more than chance.
    pub grew: bool,
}
