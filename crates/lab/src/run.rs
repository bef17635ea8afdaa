//! A scenario in the lab: one VM, or several side by side, for each system; one result for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use demeter_report::{RunResult, SCHEMA, SystemResult};
use demeter_scenario::{Scenario, System};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::Error;
use crate::link::Report;
use crate::provision;
use crate::summary::Trace;
use crate::vm::Lab;

/// Runs every system of the scenario, one after the other, because VMs side by side would
/// measure each other, unless the scenario wants them so.
///
/// `progress` sees each report as it comes, and whose it is. Once `stop` is set the running VM is killed and the
/// run ends with [`Error::Interrupted`].
pub fn run(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &Report),
) -> Result<RunResult, Error> {
    let systems = match &scenario.provision {
        Some(provision) => provision::run(scenario, provision, lab, stop, progress)?,
        None => run_systems(scenario, lab, stop, progress)?,
    };
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

/// One VM for each system.
fn run_systems(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &Report),
) -> Result<Vec<SystemResult>, Error> {
    let mut traces: Vec<(System, Trace)> = Vec::new();
    for &system in &scenario.systems {
        let mut trace = Trace::default();
        lab.run_vm(scenario, system, stop, &mut |report| {
            progress(&system.to_string(), &report);
            trace.add(report)
        })?;
        traces.push((system, trace));
    }
    let baseline = traces.iter().find(|(system, _)| *system == System::None);
    traces
        .iter()
        .map(|(system, trace)| {
            let name = system.to_string();
            let baseline = baseline.map(|(_, trace)| trace);
            let result = trace.summarise(&name, baseline);
            result.ok_or(Error::Incomplete(name))
        })
        .collect()
}

/// A flag that SIGINT and SIGTERM set, for [`run`].
pub fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
