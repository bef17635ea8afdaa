//! The agent's status: a snapshot of each epoch, for JSON and Prometheus.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::{Arc, Mutex, PoisonError};

use demeter_policy::benefit::Benefit;
use prometheus_client::collector::Collector;
use prometheus_client::encoding::{DescriptorEncoder, EncodeLabelSet, EncodeMetric};
use prometheus_client::metrics::counter::ConstCounter;
use prometheus_client::metrics::family::Family;
use prometheus_client::metrics::gauge::ConstGauge;
use prometheus_client::registry::{Registry, Unit};
use serde::{Deserialize, Serialize};

use crate::heat::HeatCell;

/// A snapshot of the agent. Counters start at its start.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Status {
    /// The agent's version.
    pub version: String,
    /// Whether it is paused: it neither observes nor moves.
    pub paused: bool,
    /// The tracker in use.
    pub tracker: String,
    /// Trackers that were tried before and not used, with the reason.
    pub passed_over: Vec<String>,
    /// The tiers, the fastest first.
    pub tiers: Vec<TierStatus>,
    /// Nodes that are in no tier, each with the reason.
    pub nodes_left_alone: Vec<String>,
    /// Epochs so far.
    pub epochs: u64,
    /// Managed processes.
    pub targets: Vec<TargetStatus>,
    /// Samples read from the tracker.
    pub samples: u64,
    /// Samples that the tracker lost.
    pub samples_lost: u64,
    /// Samples rejected as malformed, or outside of all managed processes and ranges.
    pub samples_rejected: u64,
    /// Bytes that the agent tried to move.
    pub tried_bytes: u64,
    /// Bytes moved to fast memory, checked by node.
    pub promoted_bytes: u64,
    /// Bytes moved to slow memory, checked by node.
    pub demoted_bytes: u64,
    /// Bytes whose small pages were to become huge ones where they lie. The kernel may have refused some.
    pub collapsed_bytes: u64,
    /// CPU time spent on moves and collapses, without those for the host, milliseconds.
    pub moves_cost_ms: u64,
    /// Estimated time that moves saved programs, less the time they lost, milliseconds.
    pub moves_benefit_ms: i64,
    /// Whether moves are suspended because they brought less than they cost.
    pub is_resting: bool,
    /// Bytes that did not move, by the kernel's error.
    pub failed_bytes: BTreeMap<String, u64>,
    /// Unmovable blocks that are skipped for a while.
    pub blocks_set_aside: u64,
    /// Free fast memory above the kernel's watermarks, at the last check.
    pub fast_free_bytes: u64,
    /// Working set in fast memory, bytes.
    pub working_set_fast_bytes: u64,
    /// Working set in slow memory, bytes.
    pub working_set_slow_bytes: u64,
    /// Samples in fast memory per thousand; null before the first sample.
    pub fast_hit_permille: Option<u16>,
    /// Benefit of fast memory for the managed processes; null until enough accesses were seen.
    #[serde(default)]
    pub benefit: Option<Benefit>,
    /// Fast memory that is kept free for the balloon, bytes.
    pub balloon_wants_bytes: u64,
    /// The last error after which the agent continued.
    pub last_error: Option<String>,
}

/// A tier.
#[derive(Debug, Clone, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct TierStatus {
    /// Its nodes.
    pub nodes: Vec<u32>,
    /// Its size, bytes.
    pub bytes: u64,
    /// Latency of a load from it, measured at the start from the nearest CPUs, nanoseconds.
    pub latency_ns: u32,
}

/// A managed process.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct TargetStatus {
    /// Its pid.
    pub pid: u32,
    /// Its command's name.
    pub comm: String,
    /// Number of ranges of its address space with different heat.
    pub ranges: u64,
    /// Number of ranges beyond the limit, which are not managed: the smallest.
    pub ranges_left_out: u64,
    /// Decayed samples in them.
    pub heat: f64,
    /// Bytes in fast memory, if known.
    pub fast_bytes: u64,
    /// Bytes in slow memory, if known.
    pub slow_bytes: u64,
    /// Its memory that is left alone, with reasons.
    #[serde(default)]
    pub left_alone: Vec<LeftAlone>,
}

/// Memory that is left alone.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct LeftAlone {
    /// Its resident bytes; null for the whole process.
    pub bytes: Option<u64>,
    /// The reason.
    pub why: String,
}

/// The snapshot that the agent writes and the server reads.
#[derive(Debug, Clone, Default)]
pub struct StatusCell {
    status: Arc<Mutex<Status>>,
    /// Heat, published on demand.
    pub heat: HeatCell,
}

impl StatusCell {
    /// A copy of the latest snapshot.
    pub fn get(&self) -> Status {
        self.status
            .lock()
            .unwrap_or_else(PoisonError::into_inner)
            .clone()
    }

    /// Changes the snapshot.
    pub fn update(&self, change: impl FnOnce(&mut Status)) {
        change(&mut self.status.lock().unwrap_or_else(PoisonError::into_inner));
    }

    /// The latest snapshot in Prometheus' text format (OpenMetrics).
    pub fn prometheus(&self) -> String {
        let mut registry = Registry::with_prefix("demeter_guest");
        registry.register_collector(Box::new(Snapshot(self.get())));
        let mut text = String::new();
        prometheus_client::encoding::text::encode(&mut text, &registry)
            .expect("writing to a string does not fail");
        text
    }
}

/// The labels of per-process metrics.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ProcessLabels {
    pid: u32,
    comm: String,
    tier: &'static str,
}

/// The label of failed bytes.
#[derive(Debug, Clone, PartialEq, Eq, Hash, EncodeLabelSet)]
struct ReasonLabel {
    errno: String,
}

#[derive(Debug)]
struct Snapshot(Status);

impl Collector for Snapshot {
    fn encode(&self, mut encoder: DescriptorEncoder<'_>) -> fmt::Result {
        let (status, encoder) = (&self.0, &mut encoder);
        work(status, encoder)?;
        state(status, encoder)?;
        effect(status, encoder)?;
        failures(status, encoder)?;
        processes(status, encoder)
    }
}

/// Counters of samples and moves.
fn work(s: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let bytes = Some(&Unit::Bytes);
    let mut counter = |name, help, unit: Option<&Unit>, value: u64| {
        let metric = ConstCounter::new(value);
        metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
    };
    counter("epochs", "Epochs since the start", None, s.epochs)?;
    counter("samples", "Samples taken from the tracker", None, s.samples)?;
    counter(
        "samples_lost",
        "Samples that the tracker lost",
        None,
        s.samples_lost,
    )?;
    counter(
        "samples_rejected",
        "Malformed records, and records of other processes",
        None,
        s.samples_rejected,
    )?;
    counter("tried", "Bytes tried to move", bytes, s.tried_bytes)?;
    counter(
        "promoted",
        "Bytes moved to fast memory, verified",
        bytes,
        s.promoted_bytes,
    )?;
    counter(
        "demoted",
        "Bytes moved to slow memory, verified",
        bytes,
        s.demoted_bytes,
    )?;
    counter(
        "collapsed",
        "Bytes whose small pages were to become huge ones where they lie",
        bytes,
        s.collapsed_bytes,
    )
}

/// The agent's state, and the memory that it sees.
fn state(s: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let bytes = Some(&Unit::Bytes);
    let mut gauge = |name, help, unit: Option<&Unit>, value: u64| {
        let metric = ConstGauge::new(i64::try_from(value).unwrap_or(i64::MAX));
        metric.encode(encoder.encode_descriptor(name, help, unit, metric.metric_type())?)
    };
    gauge("paused", "1 while paused", None, s.paused.into())?;
    gauge(
        "resting",
        "1 while the budget for moves is empty because earlier ones have saved less than they cost",
        None,
        s.is_resting.into(),
    )?;
    gauge("targets", "Managed processes", None, s.targets.len() as u64)?;
    gauge(
        "blocks_set_aside",
        "Blocks left alone after they failed",
        None,
        s.blocks_set_aside,
    )?;
    gauge(
        "fast_free",
        "Free fast memory above the watermarks",
        bytes,
        s.fast_free_bytes,
    )?;
    gauge(
        "working_set_fast",
        "Memory in use again and again that lies in fast memory",
        bytes,
        s.working_set_fast_bytes,
    )?;
    gauge(
        "working_set_slow",
        "Memory in use again and again that lies in slow memory",
        bytes,
        s.working_set_slow_bytes,
    )?;
    gauge(
        "balloon_wants",
        "Fast memory that the balloon still waits for",
        bytes,
        s.balloon_wants_bytes,
    )
}

/// Cost and benefit of moves.
fn effect(s: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let seconds = Some(&Unit::Seconds);
    let metric = ConstCounter::new(s.moves_cost_ms as f64 / 1000.0);
    let help = "CPU time that moves took, but for what the host has ordered";
    let kind = metric.metric_type();
    metric.encode(encoder.encode_descriptor("moves_cost", help, seconds, kind)?)?;
    let metric = ConstGauge::new(s.moves_benefit_ms as f64 / 1000.0);
    let help = "Time that moves are estimated to have saved programs, less what they lost";
    let kind = metric.metric_type();
    metric.encode(encoder.encode_descriptor("moves_benefit", help, seconds, kind)?)?;
    if let Some(permille) = s.fast_hit_permille {
        let metric = ConstGauge::new(f64::from(permille) / 1000.0);
        let help = "Share of samples that fell into fast memory";
        let kind = metric.metric_type();
        metric.encode(encoder.encode_descriptor("fast_hit_ratio", help, None, kind)?)?;
    }
    Ok(())
}

/// Bytes that did not move.
fn failures(s: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let bytes = Some(&Unit::Bytes);
    let failed = Family::<ReasonLabel, prometheus_client::metrics::counter::Counter>::default();
    for (errno, bytes) in &s.failed_bytes {
        failed
            .get_or_create(&ReasonLabel {
                errno: errno.clone(),
            })
            .inc_by(*bytes);
    }
    let help = "Bytes that did not move, by reason";
    failed.encode(encoder.encode_descriptor("failed", help, bytes, failed.metric_type())?)
}

/// Memory of each process.
fn processes(s: &Status, encoder: &mut DescriptorEncoder<'_>) -> fmt::Result {
    let resident = Family::<ProcessLabels, prometheus_client::metrics::gauge::Gauge>::default();
    for t in &s.targets {
        for (tier, bytes) in [("fast", t.fast_bytes), ("slow", t.slow_bytes)] {
            let labels = ProcessLabels {
                pid: t.pid,
                comm: t.comm.clone(),
                tier,
            };
            resident
                .get_or_create(&labels)
                .set(i64::try_from(bytes).unwrap_or(i64::MAX));
        }
    }
    let help = "Resident bytes of a process by tier";
    resident.encode(encoder.encode_descriptor(
        "resident",
        help,
        Some(&Unit::Bytes),
        resident.metric_type(),
    )?)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_snapshot_reads_the_same_in_both_formats() {
        let cell = StatusCell::default();
        cell.update(|s| {
            s.promoted_bytes = 4096;
            s.moves_cost_ms = 1500;
            s.moves_benefit_ms = -250;
            s.failed_bytes.insert("EBUSY".into(), 8192);
            s.targets.push(TargetStatus {
                pid: 7,
                comm: "a\"b\n".into(),
                fast_bytes: 5,
                ..Default::default()
            });
        });
        let text = cell.prometheus();
        for line in [
            "demeter_guest_promoted_bytes_total 4096",
            "demeter_guest_failed_bytes_total{errno=\"EBUSY\"} 8192",
            "demeter_guest_resident_bytes{pid=\"7\",comm=\"a\\\"b\\n\",tier=\"fast\"} 5",
            "demeter_guest_targets 1",
            "demeter_guest_moves_cost_seconds_total 1.5",
            "demeter_guest_moves_benefit_seconds -0.25",
        ] {
            assert!(text.lines().any(|l| l == line), "{line} is not in\n{text}");
        }
        let json = serde_json::to_value(cell.get()).unwrap();
        assert_eq!(json["promoted_bytes"], 4096);
        assert_eq!(json["failed_bytes"]["EBUSY"], 8192);
    }
}
