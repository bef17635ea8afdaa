//! Writes the agent's status and log of an epoch.

use std::time::Instant;

use demeter_policy::benefit::{Benefit, Observed};
use demeter_policy::{Level, MIB, PerTier, engine};

use super::Agent;
use super::process::Process;
use crate::status::{LeftAlone, TargetStatus};

const NS_PER_MS: u64 = 1_000_000;

/// Epochs from one benefit of fast memory to the next, because it costs as much as the rest of a report.
const BENEFIT_EVERY: u32 = 4;

impl Agent {
    /// Updates the status after an epoch.
    pub(super) fn report(&mut self) {
        let recorder_error = self.engine.take_error().map(|e| e.to_string());
        let error = recorder_error.or_else(|| self.error.take());
        if error.is_some() && self.warned != error {
            tracing::warn!("{}", error.as_deref().unwrap_or_default());
            self.warned.clone_from(&error);
        }
        let benefit = match self.engine.epoch().is_multiple_of(BENEFIT_EVERY) {
            true => self.benefit(),
            false => None,
        };
        let (engine, figures) = (&*self.engine, self.engine.figures());
        let ranking = engine.ranking();
        let (used, balance) = (engine.working_set(), engine.balance());
        let (cost_ms, benefit_ms) = (
            balance.cost_ns / NS_PER_MS,
            balance.benefit_ns / NS_PER_MS as i64,
        );
        match (self.status.get().is_resting, balance.is_resting) {
            (false, true) => tracing::info!(
                "backing off: moves have earned less than they cost; so far they took {cost_ms} ms and \
                 saved {benefit_ms} ms"
            ),
            (true, false) => tracing::info!("moving again"),
            _ => {}
        }
        // While nothing is accessed, the details stay the same.
        let details = (!ranking.is_empty()).then(|| {
            let targets: Vec<_> = engine.processes().map(|p| self.target_status(&p)).collect();
            (targets, engine.set_aside() as u64)
        });
        self.status.update(|s| {
            s.epochs = figures.epochs;
            s.samples = figures.samples;
            s.samples_lost = figures.samples_lost;
            s.samples_rejected = figures.samples_astray;
            s.tried_bytes = figures.tried.0;
            s.promoted_bytes = figures.promoted.0;
            s.demoted_bytes = figures.demoted.0;
            s.collapsed_bytes = figures.collapsed.0;
            s.moves_cost_ms = cost_ms;
            s.moves_benefit_ms = benefit_ms;
            s.is_resting = balance.is_resting;
            s.working_set_fast_bytes = used.placement.fast.0;
            s.working_set_slow_bytes = used.placement.slow.0;
            s.fast_hit_permille = used.fast_hit_permille.or(s.fast_hit_permille);
            s.benefit = benefit.or(s.benefit.take());
            s.fast_free_bytes = engine.fast_free().map_or(s.fast_free_bytes, |free| free.0);
            if let Some((targets, aside)) = details {
                s.targets = targets;
                s.blocks_set_aside = aside;
            }
            if error.is_some() {
                s.last_error = error;
            }
        });
        tracing::debug!(
            epoch = engine.epoch(),
            samples = figures.samples,
            ranges = ranking.len(),
            promoted_mib = figures.promoted.0 / MIB,
            demoted_mib = figures.demoted.0 / MIB,
            collapsed_mib = figures.collapsed.0 / MIB,
            tried_mib = figures.tried.0 / MIB,
        );
        for range in ranking.iter().take(8) {
            let at = engine.residency().placement(range.pid, &range.range);
            tracing::trace!(
                range = %range.range,
                count = range.count,
                fast_mib = at.fast.0 / MIB,
                slow_mib = at.slow.0 / MIB,
            );
        }
    }

    /// The benefit of fast memory for the managed processes. The CPU time is that of all programs.
    fn benefit(&mut self) -> Option<Benefit> {
        let running_ms = self.cpu_time.running_ms(&self.root, Instant::now());
        let (engine, latency_ns) = (&*self.engine, self.machine.latency_ns());
        let loads_per_sample = self.tracker.loads_per_sample();
        let observed = Observed {
            ranking: engine.ranking(),
            residency: engine.residency(),
            served: loads_per_sample.map(|_| engine.served()),
            latency_ns: PerTier {
                fast: *latency_ns.get(Level::First),
                slow: *latency_ns.get(self.machine.tiers().slowest()),
            },
            running_ms,
            loads_per_s: loads_per_sample.map(|loads| f64::from(loads) * engine.rate()),
            overlaps: self.tracker.loads_overlap(),
        };
        observed.benefit()
    }

    fn target_status(&self, figures: &engine::ProcessFigures) -> TargetStatus {
        let process = self.processes.get(&figures.pid);
        TargetStatus {
            pid: figures.pid.0,
            comm: process.map(|p| p.target.comm.clone()).unwrap_or_default(),
            ranges_left_out: process.map_or(0, Process::ranges_left_out),
            left_alone: process.map(left_alone).unwrap_or_default(),
            ranges: figures.ranges as u64,
            heat: figures.samples,
            fast_bytes: figures.placement.fast.0,
            slow_bytes: figures.placement.slow.0,
        }
    }
}

/// Memory of a process that is left alone, for people.
fn left_alone(process: &Process) -> Vec<LeftAlone> {
    let held = process.left_alone.iter().map(|(hold, bytes)| LeftAlone {
        bytes: Some(bytes.0),
        why: hold.why().into(),
    });
    let hindered = process.hindrance.iter().map(|hindrance| LeftAlone {
        bytes: None,
        why: hindrance.what.clone(),
    });
    held.chain(hindered).collect()
}
