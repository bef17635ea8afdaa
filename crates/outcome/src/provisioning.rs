//! Results of runs in which memory was resized from outside.

use std::collections::BTreeMap;

use serde::{Deserialize, Serialize};

/// The provisioning of memory and its cost.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Provisioning {
    /// The mechanism: `static`, `virtio-balloon`, `virtio-mem` or `demeter-balloon`.
    pub provisioner: String,
    /// The policy that divided the memory: `static`, `shares`, `wss` or `benefit`.
    pub policy: String,
    /// Bytes taken from the VM before the workload started, according to the guest.
    pub bytes_inflated: Option<u64>,
    /// Bytes by which the host's files of guest memory shrank.
    pub host_bytes_returned: Option<u64>,
    /// Seconds from the request until all memory was taken.
    pub inflate_s: Option<f64>,
    /// `bytes_inflated / inflate_s`, GiB (2^30 bytes) per second.
    pub inflate_gib_per_s: Option<f64>,
    /// Memory that programs could take from the fast node afterwards, bytes.
    pub fast_free_bytes: Option<u64>,
    /// Memory that programs could take from the slow node afterwards, bytes.
    pub slow_free_bytes: Option<u64>,
    /// Resizes in the timed phase.
    #[serde(default)]
    pub resizes: Vec<Resize>,
    /// Speed that 99 % of the reporting intervals with a resize in progress reach, in the run's unit.
    pub p99_resizing: Option<f64>,
    /// Speed that 99 % of all other intervals reach.
    pub p99_other: Option<f64>,
    /// How often a pool was overcommitted, according to the host controller.
    pub pool_violations: Option<u64>,
    /// Results of crashes, for runs that cause them.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub crashes: Option<CrashFigures>,
    /// Use of resources, for long runs that measure it.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub soak: Option<SoakFigures>,
}

/// A resize of a VM's fast memory in the timed phase.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Resize {
    /// Time of the request, seconds into the timed phase.
    pub t_s: f64,
    /// Requested fast memory of the VM, bytes.
    pub fast_bytes: u64,
    /// Seconds until the VM had it; null if it never did.
    pub took_s: Option<f64>,
    /// The host controller's reason if it failed.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub reason: Option<String>,
}

/// Results of crashes and other events in a VM's life.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct CrashFigures {
    /// Number of events, one after the other.
    pub cycles: u64,
    /// Number of events by kind.
    #[serde(alias = "by_victim")]
    pub by_event: BTreeMap<String, u64>,
    /// The longest recovery, seconds: from the event until the VM owned its memory and the workload had verified a
    /// whole round.
    pub recovered_max_s: f64,
    /// Rounds that the workload verified.
    pub rounds: u64,
    /// Words that it checked.
    pub words: u64,
    /// Words that were wrong.
    pub wrong_words: u64,
    /// The highest count of pool violations that a host controller reported.
    pub violations: u64,
}

/// Results of a long run with many resizes.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct SoakFigures {
    /// Its length, seconds.
    pub seconds: u64,
    /// Number of resizes.
    pub resizes: u64,
    /// Rounds that the workloads verified.
    pub rounds: u64,
    /// Words that they checked.
    pub words: u64,
    /// Words that were wrong.
    pub wrong_words: u64,
    /// Use of resources by each process.
    pub uses: Vec<Use>,
}

/// One process's use of one resource.
#[derive(Debug, Clone, PartialEq, Serialize, Deserialize, Default)]
pub struct Use {
    /// The process: the controller, or the agent or kernel of a VM.
    pub who: String,
    /// The resource: `KiB` of memory, `descriptors` or `threads`.
    pub what: String,
    /// The maximum in the second quarter of the run.
    pub early: u64,
    /// The maximum in the last quarter.
    pub late: u64,
    /// Whether it grew by more than noise.
    pub grew: bool,
}
