//! The cost of an event in each tier under the tiers' load now.
//!
//! # Problem
//! A tier that serves all that its bandwidth allows is slower than when idle. It may be slower than the tier below. Hot
//! memory that is promoted then makes programs slower.
//!
//! # Approach
//! Where the driver can, it measures the latency of each tier under load. Events cost what these latencies say. Programs gain
//! until latencies are equal (the principle of Colloid, SOSP 2024).
//! 1. While a tier is slower than the one below, nothing is promoted into it. Its hottest blocks are demoted, as soon as
//!    their loss there has reached the cost of a demotion.
//! 2. A move changes latencies. While a tier is loaded, a plan moves no larger part of all events than half the part by
//!    which the latencies differ.
//!
//! # Properties
//! - Tiers that are idle, and tiers that nobody measures, cost what they cost when idle.
//! - Nothing moves while the latencies of loaded tiers are equal.
//! - Where latency grows with traffic, traffic settles near the balance.

use serde::{Deserialize, Serialize};

use super::Gain;
use crate::saved::finite;
use crate::{ByLevel, Level};

/// A tier is loaded from this multiple of its idle latency on: less is the error of a measurement.
const LOADED: f64 = 1.25;

/// Latencies of loaded tiers that differ by a smaller part are equal.
const EQUAL: f64 = 0.05;

/// Latencies now, and the cost of events that follows.
#[derive(Debug, Clone, Copy, PartialEq, Default, Serialize, Deserialize)]
pub(super) struct Load {
    /// Mean latency lately, nanoseconds; that of an idle tier until it is measured.
    #[serde(deserialize_with = "finite")]
    pub latency_ns: ByLevel<f64>,
    /// Events a second in all memory.
    #[serde(deserialize_with = "finite")]
    pub rate: f64,
    /// The extra cost of an event in each tier compared with the first, seconds; below zero where that one is slower.
    #[serde(skip)]
    pub event_s: ByLevel<f64>,
}

impl Load {
    pub fn new(gain: &Gain) -> Self {
        Self {
            latency_ns: ByLevel(gain.latency_ns.0.map(f64::from)),
            ..Self::default()
        }
    }

    /// Takes new measurements into the means.
    pub fn measured(&mut self, gain: &Gain, latency_ns: &ByLevel<Option<u32>>) {
        for level in Level::ALL {
            if let Some(ns) = latency_ns.get(level).filter(|&ns| ns > 0) {
                let mean = self.latency_ns.get_mut(level);
                *mean = (*mean + f64::from(ns)) / 2.0;
            }
        }
        self.set_event_s(gain);
    }

    /// Takes note of how many events there are a second.
    pub fn set_rate(&mut self, gain: &Gain, rate: f64) {
        self.rate = rate;
        self.set_event_s(gain);
    }

    fn set_event_s(&mut self, gain: &Gain) {
        self.event_s = gain.event_s(&self.costing_ns(gain), self.rate);
    }

    /// Latencies by which events cost: those under load, if some tier is loaded.
    fn costing_ns(&self, gain: &Gain) -> ByLevel<f64> {
        if !self.is_loaded(gain) {
            return ByLevel(gain.latency_ns.0.map(f64::from));
        }
        let mut costing_ns = self.latency_ns;
        for level in Level::ALL.into_iter().skip(1) {
            let above = Level::ALL[level.index() - 1];
            let faster_ns = *costing_ns.get(above);
            let ns = costing_ns.get_mut(level);
            if (*ns - faster_ns).abs() < EQUAL * ns.max(faster_ns) {
                *ns = faster_ns;
            }
        }
        costing_ns
    }

    fn is_loaded(&self, gain: &Gain) -> bool {
        let is_loaded = |level: Level| {
            let idle_ns = f64::from(*gain.latency_ns.get(level));
            idle_ns > 0.0 && *self.latency_ns.get(level) >= LOADED * idle_ns
        };
        Level::ALL.into_iter().any(is_loaded)
    }

    /// How many times as long a load takes now as in the tier that its memory came from; one if it takes no longer.
    pub fn slowdown(&self, gain: &Gain, home: Level, now: Level) -> f64 {
        let latency_ns = self.costing_ns(gain);
        let times = latency_ns.get(now) / latency_ns.get(home).max(1.0);
        times.max(1.0)
    }

    /// The extra cost of an event in a tier compared with the one below, seconds. It is above zero if load has made the tier
    /// the slower one.
    pub fn excess_s(&self, level: Level) -> f64 {
        let below = level.slower().next();
        below.map_or(0.0, |below| {
            self.event_s.get(level) - self.event_s.get(below)
        })
    }

    /// The most events a second whose memory one plan may move across the boundary below a tier.
    pub fn most_events(&self, gain: &Gain, level: Level) -> f64 {
        let Some(below) = level.slower().next().filter(|_| self.is_loaded(gain)) else {
            return f64::INFINITY;
        };
        let (above_ns, below_ns) = (self.latency_ns.get(level), self.latency_ns.get(below));
        let differs = (above_ns - below_ns).abs() / above_ns.max(*below_ns).max(f64::MIN_POSITIVE);
        self.rate * differs / 2.0
    }
}
