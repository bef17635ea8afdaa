//! A scenario on the simulator.

use std::collections::VecDeque;
use std::sync::Mutex;
use std::thread;

use demeter_report::{RunResult, SCHEMA, SystemResult};
use demeter_scenario::{Scenario, System};

use crate::error::SimError;
use crate::program::Program;
use crate::result::{Asked, summarise};
use crate::setup::{Setup, is_told_as_latency};
use crate::system::Parts;
use crate::workload::Workload;

/// Picoseconds in a second: also the time between two points of a result's series.
const PS_PER_S: u64 = 1_000_000_000_000;

/// Runs one system of a scenario. The same arguments give the same result, to the last digit.
///
/// `mgmt_cpu_s` is what management took by itself; [`run_all`] takes that of `none` off.
///
/// # Errors
/// When the system has no model here, or the machine cannot be or is too small.
pub fn run(scenario: &Scenario, system: System, seed: u64) -> Result<SystemResult, SimError> {
    let setup = Setup::new(scenario)?;
    let programs = (0..u64::from(setup.vms))
        .map(|vm| Workload::new(&scenario.workload, seed.wrapping_add(vm << 32)))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| SimError::Workload(e.to_string()))?;
    simulate(scenario, &setup, system, programs)
}

fn simulate<P: Program>(
    scenario: &Scenario,
    setup: &Setup,
    system: System,
    programs: Vec<P>,
) -> Result<SystemResult, SimError> {
    let parts = Parts::of(system).ok_or(SimError::NoModel(system))?;
    let mut world = setup.world(parts, programs);
    world.populate()?;
    let mut snapshots = vec![world.snapshot(0)];
    let mut digest = Digest::default();
    for second in 1..=scenario.duration_s {
        world.run_until(second * PS_PER_S)?;
        let done_ps = world.elapsed_ps().and_then(|vms| vms.into_iter().max());
        // The last point may be a part of a second.
        let at_ps = done_ps.map_or(second * PS_PER_S, |ps| ps.min(second * PS_PER_S));
        snapshots.push(world.snapshot(at_ps));
        world.digest(&mut digest);
        if done_ps.is_some() {
            break;
        }
    }
    if let Some(fault) = world.vms.iter().find_map(|vm| vm.program.fault()) {
        return Err(SimError::Workload(fault));
    }
    debug_assert!(world.is_conserved(), "time was lost or invented");
    let asked = Asked {
        as_latency: is_told_as_latency(&scenario.workload),
        shift_at_s: scenario.shift_at_s(),
        elapsed_s: world.elapsed_ps().map(|vms| mean_s(&vms)),
    };
    let mut result = summarise(&system.to_string(), &snapshots, asked).ok_or(SimError::Stuck)?;
    result.counters.insert("event_log_hash".into(), digest.0);
    result.counters.insert("scale".into(), 1 << setup.k);
    Ok(result)
}

fn mean_s(times_ps: &[u64]) -> f64 {
    let sum: f64 = times_ps.iter().map(|&ps| ps as f64).sum();
    sum / times_ps.len() as f64 / PS_PER_S as f64
}

/// Whether the simulator has a model of a system.
pub fn is_modelled(system: System) -> bool {
    Parts::of(system).is_some()
}

/// Runs all systems of a scenario, as many at a time as this computer has cores; `done` is told
/// of each that is finished. The result does not depend on how many run at a time.
///
/// # Errors
/// The first that [`run`] gives, in the scenario's order of systems.
pub fn run_all(
    scenario: &Scenario,
    done: &(dyn Fn(&SystemResult) + Sync),
) -> Result<RunResult, SimError> {
    let jobs: Mutex<VecDeque<(usize, System)>> =
        Mutex::new(scenario.systems.iter().copied().enumerate().collect());
    let finished = Mutex::new(Vec::new());
    let workers = thread::available_parallelism().map_or(1, usize::from);
    thread::scope(|scope| {
        for _ in 0..workers.min(scenario.systems.len()) {
            scope.spawn(|| {
                while let Some((index, system)) = lock(&jobs).pop_front() {
                    let result = run(scenario, system, scenario.seed);
                    if let Ok(result) = &result {
                        done(result);
                    }
                    lock(&finished).push((index, result));
                }
            });
        }
    });
    let mut finished = std::mem::take(&mut *lock(&finished));
    finished.sort_by_key(|(index, _)| *index);
    let mut systems = finished
        .into_iter()
        .map(|(_, result)| result)
        .collect::<Result<Vec<_>, _>>()?;
    subtract_none(&mut systems);
    Ok(RunResult {
        schema: SCHEMA,
        scenario: scenario.name.clone(),
        on: "sim".into(),
        seed: scenario.seed,
        duration_s: scenario.duration_s,
        shift_at_s: scenario.shift_at_s(),
        systems,
        cases: vec![],
        published: vec![],
    })
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex
        .lock()
        .unwrap_or_else(|poisoned| poisoned.into_inner())
}

/// Management is what a system costs on top of what `none` has anyway; unknown without it.
fn subtract_none(systems: &mut [SystemResult]) {
    let none = systems.iter().find(|s| s.name == "none");
    let baseline = none.map(|n| (n.mgmt_cpu_s, n.mgmt_cpu_steady_s));
    let less = |of: Option<f64>, baseline: Option<f64>| Some(of? - baseline?);
    for system in systems {
        let (whole, steady) = baseline.unwrap_or((None, None));
        system.mgmt_cpu_s = less(system.mgmt_cpu_s, whole);
        system.mgmt_cpu_steady_s = less(system.mgmt_cpu_steady_s, steady);
    }
}

/// A running hash of all that happened (FNV-1a, 48 bits so that every reader of JSON holds it).
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Digest(u64);

impl Default for Digest {
    fn default() -> Self {
        Self(0xcbf2_9ce4_8422)
    }
}

impl Digest {
    /// Takes a number in.
    pub(crate) fn add(&mut self, value: u64) {
        for byte in value.to_le_bytes() {
            self.0 = ((self.0 ^ u64::from(byte)).wrapping_mul(0x100_0000_01b3)) & ((1 << 48) - 1);
        }
    }
}

#[cfg(test)]
mod tests;
