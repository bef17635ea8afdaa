//! A scenario in the lab: one VM for each system, one result for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use demeter_report::{RunResult, SCHEMA};
use demeter_scenario::{Scenario, System};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::Error;
use crate::link::Report;
use crate::summary::Trace;
use crate::vm::Lab;

/// Most virtual CPUs: what the plugin's shared page has rings for.
const VCPUS_MAX: u32 = 16;

/// Runs every system of the scenario, one after the other, because VMs side by side would
/// measure each other.
///
/// `progress` sees each report as it comes. Once `stop` is set the running VM is killed and the
/// run ends with [`Error::Interrupted`]. A workload that only the simulator knows is refused.
pub fn run(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(System, &Report),
) -> Result<RunResult, Error> {
    if let Some(system) = scenario.systems.iter().find(|s| s.is_simulated_only()) {
        return Err(Error::SimulatedOnly(*system));
    }
    if !scenario.workload.is_real() {
        return Err(Error::SimOnly(scenario.workload.kind()));
    }
    if scenario.machine.vcpus > VCPUS_MAX {
        return Err(Error::Vcpus(scenario.machine.vcpus));
    }
    let mut traces: Vec<(System, Trace)> = Vec::new();
    for &system in &scenario.systems {
        let mut trace = Trace::default();
        lab.run_vm(scenario, system, stop, &mut |report| {
            progress(system, &report);
            trace.add(report)
        })?;
        traces.push((system, trace));
    }
    let baseline = traces.iter().find(|(system, _)| *system == System::None);
    let systems = traces
        .iter()
        .map(|(system, trace)| {
            trace
                .summarise(*system, baseline.map(|(_, trace)| trace))
                .ok_or(Error::Incomplete(*system))
        })
        .collect::<Result<_, _>>()?;
    Ok(RunResult {
        schema: SCHEMA,
        scenario: scenario.name.clone(),
        on: "lab".into(),
        seed: scenario.seed,
        duration_s: scenario.duration_s,
        shift_at_s: scenario.shift_at_s(),
        systems,
    })
}

/// A flag that SIGINT and SIGTERM set, for [`run`].
pub fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
