//! A scenario in the lab: one VM, or several side by side, for each system; one result for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use demeter_outcome::{RunResult, SystemResult, less_none};
use demeter_scenario::{Place, Scenario};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::Error;
use crate::link::Report;
use crate::provision;
use crate::timeline::VmTimeline;
use crate::vm::Lab;

/// Most virtual CPUs: what the plugin's shared page has rings for.
const VCPUS_MAX: u32 = 16;

/// A run, perhaps one that ended early.
#[derive(Debug)]
pub struct LabRun {
    /// What was measured: every system of the scenario, or those before the one that failed.
    pub result: RunResult,
    /// Why it ended early, if it did.
    pub ended: Result<(), Error>,
}

impl LabRun {
    /// The result if every system ran.
    pub fn whole(self) -> Result<RunResult, Error> {
        self.ended.map(|()| self.result)
    }
}

/// Runs every system of the scenario, one after the other, because VMs side by side would
/// measure each other, unless the scenario wants them so. A system that fails ends the run; what
/// was measured before it stays.
///
/// `progress` sees each report as it comes, and whose it is. Once `stop` is set the running VM is
/// killed and the run ends with [`Error::Interrupted`]. What only the simulator knows is refused.
pub fn run(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &Report),
) -> LabRun {
    let mut systems = vec![];
    let ended = refuse_the_simulated(scenario).and_then(|()| match &scenario.provision {
        Some(provision) => provision::run(scenario, provision, lab, stop, progress, &mut systems),
        None => run_systems(scenario, lab, stop, progress, &mut systems),
    });
    less_none(&mut systems);
    let result = RunResult {
        systems,
        ..scenario.empty_result("lab")
    };
    LabRun { result, ended }
}

/// What only the simulator knows cannot run in a VM.
fn refuse_the_simulated(scenario: &Scenario) -> Result<(), Error> {
    if let Some(system) = scenario.systems.iter().find(|s| !s.runs_on(Place::Lab)) {
        return Err(Error::SimulatedOnly(*system));
    }
    if !scenario.vary.is_empty() {
        return Err(Error::SimOnly("cases ([[vary]])"));
    }
    if !scenario.workload.is_real() {
        return Err(Error::SimOnly(scenario.workload.kind()));
    }
    if scenario.machine.vcpus > VCPUS_MAX {
        return Err(Error::Vcpus(scenario.machine.vcpus));
    }
    Ok(())
}

/// One VM for each system. What was measured is in `results` even when one fails.
fn run_systems(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &Report),
    results: &mut Vec<SystemResult>,
) -> Result<(), Error> {
    for &system in &scenario.systems {
        let mut timeline = VmTimeline::default();
        let name = system.to_string();
        lab.run_vm(scenario, system, stop, &mut |report| {
            progress(&name, &report);
            timeline.add(report)
        })?;
        results.push(timeline.summarise(&name).ok_or(Error::Incomplete(name))?);
    }
    Ok(())
}

/// A flag that SIGINT and SIGTERM set, for [`run`].
pub fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
