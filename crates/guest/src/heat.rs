//! The heat of processes' memory, range by range, made on request.

use std::collections::BTreeMap;

use demeter_policy::Pid;
use demeter_policy::engine::Engine;
use serde::{Deserialize, Serialize};
use tokio::sync::watch;

/// The most ranges in a report, the hottest first. Engines have some hundreds.
const RANGES_MAX: usize = 4096;

/// The engine's present heat.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct Heat {
    /// The engine's epoch.
    pub epoch: u32,
    /// Processes by pid; empty while nothing is accessed.
    pub processes: Vec<ProcessHeat>,
    /// Number of further ranges, the coldest, beyond the limit.
    pub ranges_left_out: u64,
}

/// Heat of one process's memory.
#[derive(Debug, Clone, Default, PartialEq, Serialize, Deserialize)]
pub struct ProcessHeat {
    /// Its pid.
    pub pid: u32,
    /// Its ranges, the hottest first.
    pub ranges: Vec<RangeHeat>,
}

/// One range of virtual addresses.
#[derive(Debug, Clone, Copy, Default, PartialEq, Serialize, Deserialize)]
pub struct RangeHeat {
    /// Its first address.
    pub start: u64,
    /// Its end, exclusive.
    pub end: u64,
    /// Decayed samples in it.
    pub samples: f64,
    /// Bytes in fast memory, if known.
    pub fast_bytes: u64,
    /// Bytes in slow memory, if known.
    pub slow_bytes: u64,
}

impl RangeHeat {
    /// Decayed samples per byte.
    pub fn density(&self) -> f64 {
        self.samples / self.end.saturating_sub(self.start).max(1) as f64
    }
}

impl Heat {
    /// The heat of an engine.
    pub fn of(engine: &Engine) -> Self {
        let ranking = engine.ranking();
        let mut processes: BTreeMap<Pid, Vec<RangeHeat>> = BTreeMap::new();
        for ranked in ranking.iter().take(RANGES_MAX) {
            let at = engine.residency().placement(ranked.pid, &ranked.range);
            processes.entry(ranked.pid).or_default().push(RangeHeat {
                start: ranked.range.start().0,
                end: ranked.range.end().0,
                samples: ranked.count,
                fast_bytes: at.fast.0,
                slow_bytes: at.slow.0,
            });
        }
        let process = |(pid, ranges): (Pid, _)| ProcessHeat { pid: pid.0, ranges };
        Self {
            epoch: engine.epoch(),
            processes: processes.into_iter().map(process).collect(),
            ranges_left_out: ranking.len().saturating_sub(RANGES_MAX) as u64,
        }
    }
}

/// Passes heat from the agent to those that requested it.
#[derive(Debug, Clone, Default)]
pub struct HeatCell(watch::Sender<Heat>);

impl HeatCell {
    /// Publishes heat to all listeners.
    pub fn tell(&self, heat: Heat) {
        self.0.send_replace(heat);
    }

    /// A receiver of heat that is published from now on.
    pub fn listen(&self) -> watch::Receiver<Heat> {
        self.0.subscribe()
    }
}
