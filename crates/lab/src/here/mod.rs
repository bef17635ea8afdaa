//! Runs a scenario on this machine's own two nodes, without a VM. Workloads, systems, observers and results are those
//! of a lab VM.
//!
//! All changes are temporary. At the end of a run, also after Ctrl-C, an error or a panic, the kernel's settings are
//! restored, ballast is freed, and all processes are gone. Only SIGKILL leaves the current settings in place.

mod locked_memory;
mod machine;
mod settings;
#[cfg(test)]
mod tests;

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_guest::config::{BalloonMode, Config};
use demeter_guest::nodes::Pair;
use demeter_guest::tracker::Choice;
use demeter_scenario::{Scenario, Settings, System, Workload as Kind};

use self::locked_memory::LockedMemory;
use self::machine::Machine;
use self::settings::Lent;
use crate::cpus::Pinned;
use crate::error::Error;
use crate::fault::Fault;
use crate::inside::job::{fill, watch};
use crate::inside::kernel;
use crate::inside::rivals::{self, Rival};
use crate::inside::testbed::{StopConditions, Testbed};
use crate::inside::workload::Workload;
use crate::inside::zones::nodes_free_mib;
use crate::launch::Launch;
use crate::link::{Job, Nesting, VmMessage};
use crate::vm::{Finder, Lab, in_place};

/// Maximum size of the agent's recording, MiB.
const RECORD_MAX_MIB: u64 = 64;

/// This machine, prepared for a scenario's systems. Dropping it restores the machine.
#[derive(Debug)]
pub struct Here<'a> {
    scenario: &'a Scenario,
    lab: &'a Lab,
    stop: &'a AtomicBool,
    root: PathBuf,
    machine: Machine,
    // In this order, memory is freed before the kernel's settings are restored.
    locked: LockedMemory,
    _pinned: Pinned,
    _lent: Lent,
}

impl<'a> Here<'a> {
    /// Prepares the machine, if it can run all of the scenario. Changes nothing yet except this thread's CPU affinity.
    ///
    /// # Errors
    /// [`Error::Unfit`] gives the reason.
    pub fn new(scenario: &'a Scenario, lab: &'a Lab, stop: &'a AtomicBool) -> Result<Self, Error> {
        machine::refuse_what_is_not_for_here(scenario)?;
        // SAFETY: takes nothing and cannot fail.
        if unsafe { libc::geteuid() } != 0 {
            return Err(Error::Unfit {
                what: "--on here changes the kernel's settings and holds memory, which needs root"
                    .into(),
                hint: "run it with sudo, or use --on lab".into(),
            });
        }
        let root = PathBuf::from("/");
        let machine = Machine::find(&root, scenario)?;
        for &system in scenario.systems.iter().filter(|s| s.has_agent()) {
            machine::tracker(&root, system)?;
        }
        Ok(Self {
            scenario,
            lab,
            stop,
            locked: LockedMemory::new(root.clone(), machine.fast),
            _pinned: Pinned::to(&machine.cpus).map_err(Error::io("choose", "CPUs"))?,
            _lent: Lent::new(&root),
            machine,
            root,
        })
    }

    /// Runs one system, and passes each report to `say`.
    pub fn run(
        &mut self,
        system: System,
        say: &mut dyn FnMut(VmMessage) -> Result<(), Fault>,
    ) -> Result<(), Error> {
        let folder = tempfile::Builder::new().prefix("demeter-here-").tempdir();
        let folder = folder.map_err(Error::io("create", "a folder for the run"))?;
        let bed = self.testbed(folder.path());
        let config = self.agent_config(&bed, system)?;
        fs::write(&bed.agent_config, config).map_err(Error::io("write", &bed.agent_config))?;
        let job = Job {
            settings: Settings::new(system, ""),
            scenario: self.scenario.clone(),
            provisioner: None,
            rounds: false,
            launches: self.launches(folder.path())?,
            level: Nesting::Alone,
        };
        let fault = |fault| self::fault(system, fault);
        kernel::prepare(&bed.root, self.scenario.machine.thp).map_err(fault)?;
        say(bed.booted().map_err(fault)?).map_err(fault)?;
        self.locked
            .leave(self.scenario.machine.fast.usable_mib, self.stop)?;
        say(sized(&bed).map_err(fault)?).map_err(fault)?;
        let outcome = measure(&bed, &job, say);
        if let Some(kept) = &self.lab.keep_logs {
            keep_logs(folder.path(), kept, &self.scenario.name, system)?;
        }
        outcome.map_err(|why| match why {
            Fault::AgentDied(_) | Fault::AgentStuck(_) | Fault::AgentSilent(_) => Error::Here {
                system,
                what: format!("{why}; {} is kept", bed.agent_log.display()),
                // The file that the message names.
                said: last_line(&folder.keep().join("agent.log")),
            },
            why => fault(why),
        })
    }

    fn testbed(&self, folder: &Path) -> Testbed<'a> {
        let scenario = self.scenario;
        let workload_s =
            scenario.duration_s + scenario.workload.start_limit_s() + scenario.lab.timeout_s;
        Testbed {
            root: self.root.clone(),
            tiers: Pair {
                fast: self.machine.fast,
                slow: self.machine.slow,
            }
            .into(),
            plugs: vec![],
            programs: self.lab.programs.clone(),
            agent_config: folder.join("agent.toml"),
            agent_has_targets: false,
            agent_socket: folder.join("agent.sock"),
            agent_log: folder.join("agent.log"),
            limits: StopConditions {
                stop: Some(self.stop),
                workload: Some(Duration::from_secs(workload_s)),
            },
        }
    }

    fn agent_config(&self, bed: &Testbed<'_>, system: System) -> Result<String, Error> {
        let tracker = match system.has_agent() {
            true => machine::tracker(&self.root, system)?,
            false => Choice::default(),
        };
        let folder = bed.agent_config.parent().unwrap_or(Path::new("/"));
        let config = Config {
            tracker,
            tiers: Some(bed.tiers.clone()),
            balloon: BalloonMode::Off,
            socket: bed.agent_socket.clone(),
            record: self.lab.keep_logs.is_some().then(|| folder.join(RECORDING)),
            record_max_mib: RECORD_MAX_MIB,
            tuning: self.scenario.agent.clone(),
            ..Config::default()
        };
        Ok(toml::to_string(&config).expect("a configuration is a table of plain values"))
    }

    fn launches(&self, folder: &Path) -> Result<Vec<Launch>, Error> {
        let Kind::Program(programs) = &self.scenario.workload else {
            return Ok(vec![]);
        };
        let finder = Finder::new(&self.lab.programs, &self.lab.cache, programs)?;
        in_place(&finder, self.scenario, programs, &folder.join("work"))
    }
}

/// Measures one system, from populating memory to verification.
fn measure(
    bed: &Testbed<'_>,
    job: &Job,
    say: &mut dyn FnMut(VmMessage) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let rival = rivals::start(bed, &job.settings)?;
    let mut workload = Workload::new(bed, job)?;
    let outcome = populate_and_measure(bed, &mut workload, rival, say);
    for log in workload.logs(&outcome) {
        say(VmMessage::Program(log))?;
    }
    outcome
}

fn populate_and_measure(
    bed: &Testbed<'_>,
    workload: &mut Workload<'_>,
    rival: Box<dyn Rival>,
    say: &mut dyn FnMut(VmMessage) -> Result<(), Fault>,
) -> Result<(), Fault> {
    let hot = match fill(bed, workload) {
        Ok(hot) => hot,
        Err(fault) => {
            // Report the first error only.
            let _ = rival.stop();
            return Err(fault);
        }
    };
    watch(bed, workload, hot, rival, say)?;
    match workload.verify()? {
        Some((words, errors)) => say(VmMessage::Verified { words, errors }),
        None => Ok(()),
    }
}

fn sized(bed: &Testbed<'_>) -> Result<VmMessage, Fault> {
    Ok(VmMessage::Sized {
        fast_free_mib: nodes_free_mib(&bed.root, bed.tiers.fastest().to_vec())?,
        slow_free_mib: nodes_free_mib(&bed.root, bed.tiers.slower())?,
    })
}

fn fault(system: System, fault: Fault) -> Error {
    match fault {
        Fault::Interrupted => Error::Interrupted,
        fault => Error::Here {
            system,
            what: fault.to_string(),
            said: String::new(),
        },
    }
}

/// The agent's recording in a run's folder.
const RECORDING: &str = "agent.rec";

/// Copies the agent's files to `kept`, named after scenario and system.
fn keep_logs(folder: &Path, kept: &Path, scenario: &str, system: System) -> Result<(), Error> {
    fs::create_dir_all(kept).map_err(Error::io("create", kept))?;
    for name in ["agent.log", RECORDING] {
        let from = folder.join(name);
        if from.exists() {
            let to = kept.join(format!("{scenario}-{system}-{name}"));
            fs::copy(&from, &to).map_err(Error::io("create", &to))?;
        }
    }
    Ok(())
}

/// The last line of a log, as far as it is readable.
fn last_line(log: &Path) -> String {
    let text = fs::read_to_string(log).unwrap_or_default();
    text.lines().next_back().unwrap_or_default().to_owned()
}
