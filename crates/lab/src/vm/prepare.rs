//! Prepares one VM of a scenario, and runs it.

use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_guest::tracker::Choice;
use demeter_policy::provision::ProvisionerKind;
use demeter_scenario::{
    Clock, MachinePlace, Provision, SamplingUnit, Scenario, Settings, Workload,
};

use super::elastic::Elastic;
use super::lab::{Lab, agent_config};
use super::memory::nodes_of;
use super::prepared::{INITRAMFS, PreparedVm};
use super::programs::{self as program_files, Finder};
use super::{kernel, nested, qemu, qemu_check};
use crate::error::{Error, VmFault};
use crate::link::{AGENT_CONFIG_PATH, EARLY_MODULES_DIR, JOB_PATH, Job, Nesting, VmMessage};

impl Lab {
    /// Runs the system of `settings` in a VM of `scenario`. Passes each report to `on_report`. Returns after
    /// [`VmMessage::Finished`]. Only logs of the VM remain.
    pub fn run_vm(
        &self,
        scenario: &Scenario,
        settings: &Settings,
        stop: &AtomicBool,
        on_report: &mut dyn FnMut(VmMessage) -> Result<(), VmFault>,
    ) -> Result<(), Error> {
        let vm = self.prepare(&run_name(settings), scenario, settings, None)?;
        vm.listen(vm.start()?, stop, on_report)
    }

    /// Prepares a VM of `scenario` for the system of `settings`. With a provisioner its memory is resizable. `run`
    /// names it in messages and logs.
    pub(crate) fn prepare(
        &self,
        run: &str,
        scenario: &Scenario,
        settings: &Settings,
        provisioner: Option<ProvisionerKind>,
    ) -> Result<PreparedVm, Error> {
        let scenario = &scenario.under(settings);
        let mut initramfs = self.initramfs()?;
        let launches = match &scenario.workload {
            Workload::Program(programs) => {
                let finder = Finder::new(&self.programs, &self.cache, programs)?;
                program_files::into_vm(&mut initramfs, &finder, scenario, programs)?
            }
            _ => vec![],
        };
        let mut job = Job {
            settings: settings.clone(),
            scenario: scenario.clone(),
            provisioner,
            rounds: scenario
                .provision
                .as_ref()
                .is_some_and(Provision::runs_rounds),
            launches,
            level: Nesting::Alone,
        };
        let (plugin, kernel) = self.assets()?;
        let cpu_properties = self.cpu_properties_for(scenario)?;
        let early = kernel::early_modules(&self.cache, &kernel)?;
        for (at, file) in early.iter().enumerate() {
            initramfs.add_file(&format!("{EARLY_MODULES_DIR}/{at}.ko"), file);
        }
        let folder = tempfile::Builder::new()
            .prefix("demeter-lab-")
            .tempdir()
            .map_err(Error::io("create", "a folder for the VM"))?;
        if scenario.machine.place == MachinePlace::Host {
            nested::into_host(self, &kernel, &mut initramfs, &mut job, folder.path())?;
        }
        // The CPU's own unit, where it has one: `Auto` prefers that to the plugin's.
        let unit = match cpu_properties.is_empty() {
            true => Choice::Lab,
            false => Choice::Auto,
        };
        let text =
            serde_json::to_string(&job).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
        initramfs.add_text(JOB_PATH, text);
        initramfs.add_text(
            AGENT_CONFIG_PATH,
            agent_config(&job, unit, self.keep_logs.is_some()),
        );
        if let Some(provisioner) = provisioner {
            self.add_driver(&mut initramfs, provisioner)?;
        }
        initramfs.write(&folder.path().join(INITRAMFS))?;
        let initramfs_mib = initramfs.size_bytes()?.div_ceil(1 << 20);
        let machine = &scenario.machine;
        let elastic = provisioner.map(|p| Elastic::new(p, machine, initramfs_mib));
        Ok(PreparedVm {
            run: run.into(),
            scenario: scenario.clone(),
            qemu: self.qemu.clone(),
            cpu_properties,
            plugin,
            kernel,
            nodes: match &elastic {
                Some(elastic) => elastic.nodes(),
                None => nodes_of(machine, initramfs_mib),
            },
            elastic,
            prealloc: false,
            limit: time_limit(scenario),
            daemon: None,
            folder,
            keep_logs: self.keep_logs.clone(),
        })
    }

    /// Properties of the CPUs, beside those of every emulator.
    ///
    /// # Errors
    /// The emulator lacks what the scenario asks for.
    fn cpu_properties_for(&self, scenario: &Scenario) -> Result<Vec<String>, Error> {
        let mut cpu_properties = vec![];
        let is_exact = qemu_check::is_exact(&self.qemu)?;
        if scenario.lab.clock == Clock::Model && !is_exact {
            return Err(Error::Missing {
                what: format!("{} has no clock of the model's own", self.qemu.display()),
                hint: "--emulator exact, or leave lab.clock out".into(),
            });
        }
        if scenario.lab.unit == SamplingUnit::Pebs && !is_exact {
            return Err(Error::Missing {
                what: format!("the CPUs of {} have no PEBS", self.qemu.display()),
                hint: "--emulator exact, or leave lab.unit out".into(),
            });
        }
        if is_exact {
            let unit = qemu::unit_properties(scenario.lab.unit);
            let all = unit.iter().map(|it| (*it).to_owned());
            cpu_properties.extend(all.chain(self.cpu_properties.iter().cloned()));
        }
        Ok(cpu_properties)
    }
}

/// Name of a system's run, including its settings' name, if any.
pub fn run_name(settings: &Settings) -> String {
    match &settings.name[..] {
        "" => settings.system.to_string(),
        name => format!("{} {name}", settings.system),
    }
}

/// The longest life of a VM.
fn time_limit(scenario: &Scenario) -> Duration {
    Duration::from_secs(
        scenario.duration_s + scenario.workload.start_limit_s() + scenario.lab.timeout_s,
    )
}
