//! Runs a scenario in the lab: one or several VMs for each system, and one result.

use std::num::{NonZeroU32, NonZeroUsize};
use std::panic::resume_unwind;
use std::sync::atomic::AtomicBool;
use std::sync::{Mutex, PoisonError};
use std::thread;

use demeter_outcome::{Case, RunResult, SystemResult, best, less_none, middle};
use demeter_scenario::{Scenario, Settings};

use crate::error::{Error, VmFault};
use crate::fault::Fault;
use crate::here::Here;
use crate::link::VmMessage;
use crate::provision;
use crate::timeline::VmTimeline;
use crate::vm::{Lab, run_name};

/// Maximum virtual CPUs: the number of rings in the plugin's shared page.
const VCPUS_MAX: u32 = 16;

/// Repetitions and parallelism of systems.
#[derive(Debug, Clone, Copy)]
pub struct Repetition {
    /// Runs of each system, each with its own seed; the median run counts.
    pub repeat: NonZeroU32,
    /// Maximum number of repeats for a run that the host disturbed.
    pub retries: u32,
    /// Number of systems that run in parallel. They compete for the host's resources, but are slowed equally by other
    /// load on the host.
    pub at_once: NonZeroUsize,
}

impl Default for Repetition {
    /// One run of each system, one at a time.
    fn default() -> Self {
        Self {
            repeat: NonZeroU32::MIN,
            retries: 0,
            at_once: NonZeroUsize::MIN,
        }
    }
}

/// Results of a run, possibly incomplete.
#[derive(Debug)]
pub struct LabRun {
    /// Results of all systems, or of those before a failure.
    pub result: RunResult,
    /// The error, if the run ended early.
    pub ended: Result<(), Error>,
}

impl LabRun {
    /// The result, if all systems ran.
    pub fn whole(self) -> Result<RunResult, Error> {
        self.ended.map(|()| self.result)
    }
}

/// Runs every system of the scenario, or of each of its cases. Systems run one at a time, because parallel VMs disturb each
/// other, unless the scenario or `repetition` requests parallel runs. A system that fails ends the run; earlier and parallel
/// results are kept.
///
/// `progress` receives each report and the name of its run. When `stop` is set, running VMs are killed and the run ends
/// with [`Error::Interrupted`]. Features of the simulator alone are refused.
pub fn run(
    scenario: &Scenario,
    repetition: Repetition,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut Progress<'_>,
) -> LabRun {
    if scenario.vary.is_empty() {
        return run_case(scenario, repetition, lab, stop, progress);
    }
    let mut result = scenario.empty_result("lab");
    let ended = run_cases(scenario, &mut result.cases, &mut |case, name| {
        let progress: &mut Progress<'_> =
            &mut |run, report| progress(&format!("{run} {name}"), report);
        run_case(case, repetition, lab, stop, progress)
    });
    LabRun { result, ended }
}

/// Runs each case of a scenario with `vary`, until one fails. `run` gets its scenario and settings.
fn run_cases(
    scenario: &Scenario,
    results: &mut Vec<Case>,
    run: &mut dyn FnMut(&Scenario, &str) -> LabRun,
) -> Result<(), Error> {
    let cases = scenario.cases().map_err(Error::Scenario)?;
    for case in &cases {
        refuse_the_simulated(&case.point.scenario)?;
    }
    for (case, number) in cases.into_iter().zip(1..) {
        let (settings, name) = (case.point.texts(), case.point.to_string());
        // Logs are named after it.
        let scenario = Scenario {
            name: format!("{}-{number}", scenario.name),
            ..case.point.scenario
        };
        let LabRun { result, ended } = run(&scenario, &name);
        if !result.systems.is_empty() {
            results.push(Case {
                group: case.group,
                settings,
                systems: result.systems,
            });
        }
        ended?;
    }
    Ok(())
}

/// Runs every system of a scenario without cases.
fn run_case(
    scenario: &Scenario,
    repetition: Repetition,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut Progress<'_>,
) -> LabRun {
    let mut systems = vec![];
    let ended = refuse_the_simulated(scenario).and_then(|()| match &scenario.provision {
        Some(provision) if scenario.machine.place.is_guest() => {
            provision::run(scenario, provision, lab, stop, progress, &mut systems)
        }
        _ => run_systems(
            scenario,
            repetition,
            progress,
            &mut systems,
            &|scenario, settings, say| lab.run_vm(scenario, settings, stop, say),
        ),
    });
    finished(scenario, "lab", systems, ended)
}

/// Runs a scenario on this machine's own two nodes, without a VM. The kernel's settings are restored at the end. Only
/// the folders of `lab` are used.
///
/// # Errors
/// Scenarios that need VMs or the simulator are refused. So is a machine without two tiers, with too little free
/// memory, or with a running agent.
pub fn run_here(
    scenario: &Scenario,
    lab: &Lab,
    stop: &AtomicBool,
    progress: &mut Progress<'_>,
) -> LabRun {
    let mut systems = vec![];
    let ended = Here::new(scenario, lab, stop).and_then(|here| {
        // Settings of rivals cannot be restored on this machine, so they are left out.
        let as_it_is = Scenario {
            settings: vec![],
            ..scenario.clone()
        };
        let once = Repetition::default();
        let here = Mutex::new(here);
        let measure: &Measure<'_> = &|_, settings, say| {
            let mut here = here.lock().unwrap_or_else(PoisonError::into_inner);
            here.run(settings.system, &mut |report| {
                say(report).map_err(|fault| Fault::Workload(fault.to_string()))
            })
        };
        run_systems(&as_it_is, once, progress, &mut systems, measure)
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

/// Refuses scenarios that only the simulator can run.
fn refuse_the_simulated(scenario: &Scenario) -> Result<(), Error> {
    let place = scenario.machine.place.in_lab();
    if let Some(system) = scenario.systems.iter().find(|s| !s.runs_on(place)) {
        return Err(Error::SimulatedOnly(*system));
    }
    let rivals = scenario.provision.as_ref().map(|of| &of.rivals);
    if rivals.is_some_and(|rivals| !rivals.is_empty()) {
        return Err(Error::SimOnly("published policies (provision.rivals)"));
    }
    if !scenario.workload.is_real() {
        return Err(Error::SimOnly(scenario.workload.kind()));
    }
    if let Some(key) = scenario.workload.simulated_only() {
        return Err(Error::SimOnly(key));
    }
    if scenario.machine.vcpus > VCPUS_MAX {
        return Err(Error::Vcpus(scenario.machine.vcpus));
    }
    Ok(())
}

/// Receives each report and the name of its run.
pub type Progress<'a> = dyn FnMut(&str, &VmMessage) + Send + 'a;

/// Receives the reports of a run.
type Say<'a> = dyn FnMut(VmMessage) -> Result<(), VmFault> + 'a;

/// Runs a scenario once.
type Measure<'a> = dyn Fn(&Scenario, &Settings, &mut Say<'_>) -> Result<(), Error> + Sync + 'a;

/// A system's runs under one of its settings.
struct Runs {
    settings: Settings,
    /// One result per round.
    results: Vec<SystemResult>,
}

/// Runs each system and setting once per round. If the machine's speed changes, it then changes for all of them.
/// `results` has all measurements, even if a run fails.
fn run_systems(
    scenario: &Scenario,
    repetition: Repetition,
    progress: &mut Progress<'_>,
    results: &mut Vec<SystemResult>,
    measure: &Measure<'_>,
) -> Result<(), Error> {
    let at_once = repetition.at_once.get();
    let (vcpus, cores) = (scenario.machine.vcpus as usize * at_once, host_cores());
    let retries = if vcpus > cores {
        tracing::warn!(
            "{vcpus} virtual CPUs share the {cores} cores of this machine: all runs are disturbed, \
             and none is made again for it"
        );
        0
    } else {
        repetition.retries
    };
    let mut all: Vec<Runs> = scenario.settings_to_run().map(Runs::new).collect();
    let progress = Mutex::new(progress);
    let ended = (0..repetition.repeat.get()).try_for_each(|round| {
        let mut scenario = scenario.clone();
        scenario.seed = scenario.seed.wrapping_add(round.into());
        let run =
            |settings: &Settings| run_quietly(&scenario, settings, retries, &progress, measure);
        all.chunks_mut(at_once)
            .try_for_each(|beside| run_side_by_side(beside, &run))
    });
    for &system in &scenario.systems {
        let of_system = all.iter_mut().filter(|runs| runs.settings.system == system);
        let middles = of_system.filter_map(|runs| middle(std::mem::take(&mut runs.results)));
        results.extend(best(middles.collect()));
    }
    ended
}

/// Runs each of them once, in parallel. Returns after all have ended, with the first error, if any.
fn run_side_by_side(
    beside: &mut [Runs],
    run: &(dyn Fn(&Settings) -> Result<SystemResult, Error> + Sync),
) -> Result<(), Error> {
    thread::scope(|scope| {
        let started: Vec<_> = beside
            .iter_mut()
            .map(|runs| {
                scope.spawn(|| {
                    runs.results.push(run(&runs.settings)?);
                    Ok(())
                })
            })
            .collect();
        started
            .into_iter()
            .try_for_each(|run| run.join().unwrap_or_else(|panic| resume_unwind(panic)))
    })
}

/// Number of cores for this process; the maximum if the system does not report it.
fn host_cores() -> usize {
    std::thread::available_parallelism().map_or(usize::MAX, usize::from)
}

impl Runs {
    fn new(settings: Settings) -> Self {
        Self {
            settings,
            results: vec![],
        }
    }
}

/// Runs once, and again up to `retries` times while the host disturbs the run. Returns the least disturbed result.
fn run_quietly(
    scenario: &Scenario,
    settings: &Settings,
    retries: u32,
    progress: &Mutex<&mut Progress<'_>>,
    measure: &Measure<'_>,
) -> Result<SystemResult, Error> {
    let name = run_name(settings);
    let run = || {
        let mut timeline = VmTimeline::new(scenario.machine.vcpus);
        measure(scenario, settings, &mut |report| {
            progress.lock().unwrap_or_else(PoisonError::into_inner)(&name, &report);
            timeline.add(report)
        })?;
        let result = timeline.summarise(&settings.system.to_string());
        let result = result.ok_or_else(|| Error::Incomplete(name.clone()))?;
        Ok(SystemResult {
            settings: Some(settings.name.clone()).filter(|name| !name.is_empty()),
            ..result
        })
    };
    let mut kept = run()?;
    for left in (0..retries).rev() {
        if !kept.metadata.is_disturbed() {
            break;
        }
        let percent = kept.metadata.noise() * 100.0;
        tracing::warn!("{name}: the host took {percent:.0} % of its time: run again ({left} left)");
        let again = run()?;
        if again.metadata.noise() < kept.metadata.noise() {
            kept = again;
        }
    }
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use std::path::Path;

    use demeter_scenario::Workload;

    use super::*;

    fn shipped(name: &str) -> Scenario {
        let folder = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios");
        Scenario::load(&folder.join(name)).unwrap()
    }

    #[test]
    fn each_case_runs_until_one_fails_and_the_results_so_far_are_kept() {
        let scenario = shipped("assess-lab.toml");
        let (mut results, mut ran) = (vec![], vec![]);
        let run = &mut |case: &Scenario, name: &str| {
            ran.push((
                case.name.clone(),
                case.machine.fast.usable_mib,
                name.to_owned(),
            ));
            LabRun {
                result: RunResult {
                    systems: vec![SystemResult::default()],
                    ..RunResult::default()
                },
                ended: match ran.len() {
                    3 => Err(Error::Interrupted),
                    _ => Ok(()),
                },
            }
        };
        run_cases(&scenario, &mut results, run).unwrap_err();
        assert_eq!((results.len(), ran.len()), (3, 3));
        let cases = scenario.cases().unwrap();
        for ((result, case), (name, mib, told)) in results.iter().zip(&cases).zip(&ran) {
            assert_eq!(result.settings, case.point.texts());
            assert_eq!(*mib, case.point.scenario.machine.fast.usable_mib);
            assert_eq!(*told, case.point.to_string());
            assert!(name.starts_with("assess-lab-"), "{name}");
        }
        assert_ne!(ran[0].0, ran[1].0, "each has logs of its own");
    }

    #[test]
    fn cases_for_the_simulator_are_refused_before_any_runs() {
        let none = &mut |_: &Scenario, _: &str| unreachable!();
        let refused = run_cases(&shipped("assess.toml"), &mut vec![], none);
        assert!(refused.unwrap_err().to_string().contains("btree"));
    }

    #[test]
    fn misses_that_overlap_are_for_the_simulator() {
        let mut scenario = shipped("gups.toml");
        refuse_the_simulated(&scenario).unwrap();
        let Workload::Gups(gups) = &mut scenario.workload else {
            unreachable!()
        };
        gups.in_flight = 2;
        let said = refuse_the_simulated(&scenario).unwrap_err().to_string();
        assert!(said.contains("workload.in_flight") && said.contains("--on sim"));
    }
}
