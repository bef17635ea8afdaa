//! A scenario in the lab: one VM, or several side by side, for each system; one result for all.

use std::io;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;

use demeter_report::{RunResult, SCHEMA, SystemResult};
use demeter_scenario::{Place, Scenario, System};
use signal_hook::consts::{SIGINT, SIGTERM};

use crate::error::Error;
use crate::link::Report;
use crate::provision;
use crate::summary::Trace;
use crate::vm::Lab;

/// Most virtual CPUs: what the plugin's shared page has rings for.
const VCPUS_MAX: u32 = 16;

/// What a run came to.
#[derive(Debug)]
pub struct Outcome {
    /// What was measured: every system of the scenario, or those before the one that failed.
    pub result: RunResult,
    /// Why it ended early, if it did.
    pub ended: Result<(), Error>,
}

impl Outcome {
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
) -> Outcome {
    let mut systems = vec![];
    let ended = refuse_the_simulated(scenario).and_then(|()| match &scenario.provision {
        Some(provision) => provision::run(scenario, provision, lab, stop, progress, &mut systems),
        None => run_systems(scenario, lab, stop, progress, &mut systems),
    });
    let result = RunResult {
        schema: SCHEMA,
        scenario: scenario.name.clone(),
        on: "lab".into(),
        seed: scenario.seed,
        duration_s: scenario.duration_s,
        shift_at_s: scenario.shift_at_s(),
        systems,
        cases: vec![],
        published: vec![],
    };
    Outcome { result, ended }
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
    let mut traces: Vec<(System, Trace)> = Vec::new();
    let mut ended = Ok(());
    for &system in &scenario.systems {
        let mut trace = Trace::default();
        let name = system.to_string();
        ended = lab
            .run_vm(scenario, system, stop, &mut |report| {
                progress(&name, &report);
                trace.add(report)
            })
            .and_then(|()| match trace.is_complete() {
                true => Ok(()),
                false => Err(Error::Incomplete(name.clone())),
            });
        if ended.is_err() {
            break;
        }
        traces.push((system, trace));
    }
    let baseline = traces.iter().find(|(system, _)| *system == System::None);
    let baseline = baseline.map(|(_, trace)| trace);
    let of = |(system, trace): &(System, Trace)| trace.summarise(&system.to_string(), baseline);
    results.extend(traces.iter().filter_map(of));
    ended
}

/// A flag that SIGINT and SIGTERM set, for [`run`].
pub fn stop_on_signals() -> io::Result<Arc<AtomicBool>> {
    let stop = Arc::new(AtomicBool::new(false));
    for signal in [SIGINT, SIGTERM] {
        signal_hook::flag::register(signal, Arc::clone(&stop))?;
    }
    Ok(stop)
}
