//! Runs a scenario on the simulator.

use std::sync::atomic::{AtomicBool, Ordering};

use demeter_outcome::{Estimate, Metadata, SystemResult};
use demeter_policy::RankedRange;
use demeter_policy::benefit::Benefit;
use demeter_scenario::{Scenario, Settings, System};

use crate::digest::Digest;
use crate::dirty;
use crate::error::SimError;
use crate::machine::cost::PS_PER_S;
use crate::program::Program;
use crate::progress::{OnProgress, OnRanges};
use crate::provision::Provisioner;
use crate::setup::{self, WorldSetup};
use crate::system;
use crate::timeline::{of_each_vm, timeline};
use crate::vm::Vm;
use crate::workload::Workload;

/// Progress reports per simulated second.
const TOLD_A_SECOND: u64 = 16;

/// Runs one system of a scenario. Every simulated second, `seen` receives the first VM's ranges with their heat,
/// hottest first, and a way to ask for its benefit of fast memory. There are none for a system without ranges. `tell`
/// receives the progress of the run, 0 to 1.
///
/// # Errors
/// When the machine is invalid or too small; [`SimError::Interrupted`] when `stop` was set.
pub fn look(
    scenario: &Scenario,
    system: System,
    stop: &AtomicBool,
    tell: &dyn Fn(f64),
    mut seen: impl FnMut(f64, &[RankedRange], &dyn Fn() -> Option<Benefit>),
) -> Result<(), SimError> {
    let watch = |share| {
        tell(share);
        match stop.load(Ordering::Relaxed) {
            true => Err(SimError::Interrupted),
            false => Ok(()),
        }
    };
    let settings = Settings::new(system, "");
    run_looking(scenario, &settings, scenario.seed, &watch, &mut seen).map(drop)
}

/// Runs one system of a scenario. Equal arguments give exactly equal results.
///
/// `mgmt_cpu_s` is the raw time of management; [`crate::run_all`] subtracts the time of `none`.
///
/// # Errors
/// When the machine is invalid or too small; or the error of `watch`.
pub(crate) fn run(
    scenario: &Scenario,
    system: System,
    seed: u64,
    watch: &OnProgress<'_>,
) -> Result<SystemResult, SimError> {
    run_under(scenario, &Settings::new(system, ""), seed, watch)
}

/// Runs one system under named settings of the scenario.
pub(crate) fn run_under(
    scenario: &Scenario,
    settings: &Settings,
    seed: u64,
    watch: &OnProgress<'_>,
) -> Result<SystemResult, SimError> {
    let scenario = scenario.under(settings);
    let result = run_looking(&scenario, settings, seed, watch, &mut |_, _, _| {})?;
    Ok(SystemResult {
        settings: Some(settings.name.clone()).filter(|name| !name.is_empty()),
        ..result
    })
}

fn run_looking(
    scenario: &Scenario,
    settings: &Settings,
    seed: u64,
    watch: &OnProgress<'_>,
    look: &mut OnRanges<'_>,
) -> Result<SystemResult, SimError> {
    if let Some(logging) = &scenario.sim.dirty_logging {
        return dirty::run(scenario, logging, settings.system, watch);
    }
    let setup = WorldSetup::new(scenario)?.under(settings);
    let own = named_vms(scenario);
    let workload = |vm: u64| {
        let own = own.get(vm as usize);
        own.map_or(&scenario.workload, |(_, own)| &own.workload)
    };
    let programs = (0..u64::from(setup.vms))
        .map(|vm| Workload::new(workload(vm), seed.wrapping_add(vm << 32), setup.k))
        .collect::<Result<Vec<_>, _>>()
        .map_err(|e| SimError::Workload(e.to_string()))?;
    setup.check_programs(&programs)?;
    setup.check_system(settings.system)?;
    simulate(scenario, &setup, settings.system, programs, watch, look)
}

fn simulate<P: Program>(
    scenario: &Scenario,
    setup: &WorldSetup,
    system: System,
    programs: Vec<P>,
    watch: &OnProgress<'_>,
    look: &mut OnRanges<'_>,
) -> Result<SystemResult, SimError> {
    let mut world = setup.world(system::build(system), programs);
    setup.reserve(&mut world)?;
    setup.pair(&mut world)?;
    world.start(setup.timed_fill)?;
    let unit = setup::unit(&scenario.workload);
    let mut moments = vec![world.moment(0, &unit)];
    let mut digest = Digest::default();
    let mut fast_bytes = vec![];
    let mut provisioner = Provisioner::new(scenario, setup);
    for second in 1..=scenario.duration_s {
        for part in 1..=TOLD_A_SECOND {
            world.run_until((second - 1) * PS_PER_S + PS_PER_S / TOLD_A_SECOND * part)?;
            let seconds = (second - 1) as f64 + part as f64 / TOLD_A_SECOND as f64;
            watch(world.worked().max(seconds / scenario.duration_s as f64))?;
        }
        let done_ps = world.elapsed_ps().and_then(|vms| vms.into_iter().max());
        // The last second may be partial.
        let at_ps = done_ps.map_or(second * PS_PER_S, |ps| ps.min(second * PS_PER_S));
        moments.push(world.moment(at_ps, &unit));
        world.digest(&mut digest);
        if let Some(vm) = world.vms.first() {
            let benefit = || vm.benefit();
            look(
                at_ps as f64 / PS_PER_S as f64,
                vm.manager.ranking(),
                &benefit,
            );
        }
        for plug in &setup.plugs {
            world.plug(plug, second)?;
        }
        if done_ps.is_none()
            && let Some(provisioner) = &mut provisioner
        {
            provisioner.step(second, &mut world);
        }
        let owned = world.vms.iter().map(|vm| vm.guest.owned_fast().0);
        fast_bytes.push(owned.collect());
        if done_ps.is_some() {
            break;
        }
    }
    if let Some(fault) = world.vms.iter().find_map(|vm| vm.program.fault()) {
        return Err(SimError::Workload(fault));
    }
    debug_assert!(world.is_conserved(), "time was lost or invented");
    let elapsed_s = world.elapsed_ps().map(|vms| mean_s(&vms));
    // A copy owns no memory.
    let fast_bytes = if world.vms.len() > 1 {
        &fast_bytes[..]
    } else {
        &[]
    };
    let names = names(scenario, world.vms.len());
    let workloads = of_each_vm(names, &moments, fast_bytes, &unit);
    let timeline = timeline(moments, unit, elapsed_s, scenario.shift_at_s());
    let result = timeline.summarise(&system.to_string());
    Ok(SystemResult {
        metadata: Metadata {
            event_log_hash: Some(digest.0),
            scale: Some(1 << setup.k),
            ..Metadata::default()
        },
        tail: world.latencies().tail(),
        workloads,
        estimate: estimate(&world.vms),
        provisioning: provisioner.map(|provisioner| provisioner.figures()),
        ..result.ok_or(SimError::Stuck)?
    })
}

/// The estimate of the only VM's agent, if it has one.
fn estimate<P: Program>(vms: &[Vm<P>]) -> Option<Estimate> {
    let [vm] = vms else {
        return None;
    };
    Some(demeter_scenario::estimate(
        vm.guest.owned_fast(),
        &vm.benefit()?,
    ))
}

/// The VMs that a scenario names, each with its own scenario.
fn named_vms(scenario: &Scenario) -> Vec<(String, Scenario)> {
    match &scenario.provision {
        Some(provision) if !provision.vms.is_empty() => scenario.vms(),
        _ => vec![],
    }
}

/// The names of what has a figure of its own: the VMs that a scenario names, or the copies of its program.
fn names(scenario: &Scenario, vms: usize) -> Vec<String> {
    let copies = scenario.workload.copies();
    if vms == 1 && copies > 1 {
        return (0..copies).map(|copy| format!("copy {copy}")).collect();
    }
    let vms = named_vms(scenario).into_iter();
    vms.map(|(name, _)| name).collect()
}

fn mean_s(times_ps: &[u64]) -> f64 {
    let sum: f64 = times_ps.iter().map(|&ps| ps as f64).sum();
    sum / times_ps.len() as f64 / PS_PER_S as f64
}

#[cfg(test)]
mod shapes;
#[cfg(test)]
mod tests;
#[cfg(test)]
mod topologies;
