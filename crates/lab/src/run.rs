//! A scenario in the lab: one VM, or several side by side, for each system; one result for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use demeter_outcome::{RunResult, SystemResult, less_none};
use demeter_scenario::{Place, Scenario, System};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::{Error, VmFault};
use crate::here::Here;
use crate::inside::Fault;
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
        None => run_systems(scenario, progress, &mut systems, &mut |system, say| {
            lab.run_vm(scenario, system, stop, say)
        }),
    });
    finished(scenario, "lab", systems, ended)
}

/// The same on this machine's own two nodes, without a VM: its CPUs, its memory, its kernel, whose
/// settings are as before at the end. Of `lab` it takes the folders.
///
/// # Errors
/// What only VMs or the simulator can do is refused, and so is a machine without two tiers, with too
/// little free memory, or that an agent manages already.
pub fn run_here(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut dyn FnMut(&str, &Report),
) -> LabRun {
    let mut systems = vec![];
    let ended = Here::new(scenario, lab, stop).and_then(|mut here| {
        run_systems(scenario, progress, &mut systems, &mut |system, say| {
            here.run(system, &mut |report| {
                say(report).map_err(|fault| Fault::Workload(fault.to_string()))
            })
        })
    });
    finished(scenario, "here", systems, ended)
}

fn finished(
    scenario: &Scenario,
    on: &str,
    mut systems: Vec<SystemResult>,
    ended: Result<(), Error>,
) -> LabRun {
    less_none(&mut systems);
    let result = RunResult {
        systems,
        ..scenario.empty_result(on)
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

/// Takes the reports of a run.
type Say<'a> = dyn FnMut(Report) -> Result<(), VmFault> + 'a;

/// Measures one system after the other. What was measured is in `results` even when one fails.
fn run_systems(
    scenario: &Scenario,
    progress: &mut dyn FnMut(&str, &Report),
    results: &mut Vec<SystemResult>,
    measure: &mut dyn FnMut(System, &mut Say<'_>) -> Result<(), Error>,
) -> Result<(), Error> {
    for &system in &scenario.systems {
        let mut timeline = VmTimeline::default();
        let name = system.to_string();
        measure(system, &mut |report| {
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
