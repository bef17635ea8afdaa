//! What the lab needs of this machine, and one VM from its parts to its last report.

use std::fmt;
use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_guest::config::Config;
use demeter_guest::tracker::Choice;
use demeter_policy::Tuning;
use demeter_scenario::{Provisioner, Scenario, System, Workload};

use super::bring::{self, Finder};
use super::elastic::{self, Elastic, Module};
use super::initramfs::Initramfs;
use super::memory::NodeSizes;
use super::prepared::{INITRAMFS, PreparedVm};
use super::{kernel, module, plugin, qemu};
use crate::error::{Error, VmFault};
use crate::link::{AGENT_CONFIG_PATH, AGENT_SOCKET_PATH, JOB_PATH, Job, MODULES_DIR, Report};

/// The programs that go into every VM.
const PROGRAMS: [&str; 3] = ["demeter", "gups", "memlat"];

/// Resident size from which on the agent of a VM that runs rounds looks after a process, MiB: above
/// that of the lab's own.
const RESIDENT_MIN_MIB: u64 = 16;

/// Where the lab finds its parts on this machine.
#[derive(Debug, Clone)]
pub struct Lab {
    /// The emulator.
    pub qemu: PathBuf,
    /// The kernel's image; `None` for the newest in the cache or the package archive.
    pub kernel: Option<PathBuf>,
    /// Folder for what is fetched or built once.
    pub cache: PathBuf,
    /// Folder with the programs demeter, gups and memlat.
    pub programs: PathBuf,
    /// Folder for the logs of every VM; `None` keeps those of failed ones only.
    pub keep_logs: Option<PathBuf>,
}

impl Lab {
    /// The usual places: `DEMETER_QEMU`, `DEMETER_KERNEL`, the person's cache folder, and the
    /// programs beside the one that runs.
    pub fn from_env() -> Result<Self, Error> {
        let path = |name: &str| {
            std::env::var_os(name)
                .filter(|value| !value.is_empty())
                .map(PathBuf::from)
        };
        let cache = path("XDG_CACHE_HOME")
            .or_else(|| path("HOME").map(|home| home.join(".cache")))
            .ok_or_else(|| Error::Missing {
                what: "there is no folder for the lab's cache".into(),
                mend: "set XDG_CACHE_HOME or HOME".into(),
            })?;
        let this = std::env::current_exe().map_err(Error::io("find", "this program"))?;
        Ok(Self {
            qemu: path("DEMETER_QEMU").unwrap_or_else(|| "qemu-system-x86_64".into()),
            kernel: path("DEMETER_KERNEL"),
            cache: cache.join("demeter"),
            programs: this.parent().unwrap_or(Path::new("/")).to_owned(),
            keep_logs: None,
        })
    }

    /// Runs `system` of `scenario` in a VM and hands each report to `on_report` as it comes.
    /// Returns after [`Report::Finished`]; nothing of the VM is left behind but logs.
    pub fn run_vm(
        &self,
        scenario: &Scenario,
        system: System,
        stop: &AtomicBool,
        on_report: &mut dyn FnMut(Report) -> Result<(), VmFault>,
    ) -> Result<(), Error> {
        let vm = self.prepare(&system.to_string(), scenario, system, None)?;
        vm.listen(vm.start()?, stop, on_report)
    }

    /// Makes everything that a VM for `system` of `scenario` needs. With a provisioner its memory
    /// can be changed from outside. `run` is its name in messages and of its logs.
    pub(crate) fn prepare(
        &self,
        run: &str,
        scenario: &Scenario,
        system: System,
        provisioner: Option<Provisioner>,
    ) -> Result<PreparedVm, Error> {
        let mut initramfs = self.initramfs()?;
        let launches = match &scenario.workload {
            Workload::Program(programs) => {
                let finder = Finder::new(&self.programs, &self.cache, programs)?;
                bring::into_vm(&mut initramfs, &finder, scenario, programs)?
            }
            _ => vec![],
        };
        let job = Job {
            system,
            scenario: scenario.clone(),
            provisioner,
            rounds: scenario
                .provision
                .as_ref()
                .is_some_and(|p| p.crashes.is_some()),
            launches,
        };
        let agent = agent_config(&job)?;
        let (plugin, kernel) = self.assets()?;
        let folder = tempfile::Builder::new()
            .prefix("demeter-lab-")
            .tempdir()
            .map_err(Error::io("create", "a folder for the VM"))?;
        let text =
            serde_json::to_string(&job).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
        initramfs.add_text(JOB_PATH, text);
        initramfs.add_text(AGENT_CONFIG_PATH, agent);
        if let Some(module) = provisioner.and_then(elastic::module) {
            let file = match module {
                Module::Balloon => self.balloon_module()?,
                Module::Stock(name) => {
                    kernel::driver(&self.cache, &module::release(&kernel)?, name)?
                }
            };
            initramfs.add_file(&format!("{MODULES_DIR}/driver.ko"), &file);
        }
        initramfs.write(&folder.path().join(INITRAMFS))?;
        let initramfs_mib = initramfs.size_bytes()?.div_ceil(1 << 20);
        let machine = &scenario.machine;
        let elastic = provisioner.map(|p| Elastic::new(p, machine, initramfs_mib));
        Ok(PreparedVm {
            run: run.into(),
            scenario: scenario.clone(),
            qemu: self.qemu.clone(),
            plugin,
            kernel,
            sizes: match &elastic {
                Some(elastic) => elastic.boot,
                None => NodeSizes::of(machine, initramfs_mib),
            },
            elastic,
            prealloc: false,
            limit: Duration::from_secs(
                scenario.duration_s + scenario.workload.start_limit_s() + scenario.lab.timeout_s,
            ),
            folder,
            keep_logs: self.keep_logs.clone(),
        })
    }

    /// Everything that is fetched or built once, and the emulator, checked.
    fn assets(&self) -> Result<(PathBuf, PathBuf), Error> {
        qemu::check_version(&self.qemu)?;
        let kernel = self.kernel_image()?;
        Ok((plugin::plugin(&self.cache)?, kernel))
    }

    /// The image of the VMs' kernel.
    pub fn kernel_image(&self) -> Result<PathBuf, Error> {
        fs::create_dir_all(&self.cache).map_err(Error::io("create", &self.cache))?;
        let kernel = match &self.kernel {
            Some(kernel) => kernel.clone(),
            None => kernel::kernel(&self.cache)?,
        };
        // The emulator's own message about an unreadable kernel does not say which variable.
        File::open(&kernel).map_err(Error::io("open DEMETER_KERNEL or cached kernel", &kernel))?;
        Ok(kernel)
    }

    /// The balloon driver, built for that kernel.
    pub fn balloon_module(&self) -> Result<PathBuf, Error> {
        module::module(&self.cache, &self.kernel_image()?)
    }

    fn initramfs(&self) -> Result<Initramfs, Error> {
        let mut initramfs = Initramfs::default();
        for name in PROGRAMS {
            let from = self.programs.join(name);
            if !from.is_file() {
                return Err(Error::Missing {
                    what: format!("program {} is missing", from.display()),
                    mend: "build all of them: cargo build --release".into(),
                });
            }
            initramfs.add_program(&format!("bin/{name}"), &from)?;
        }
        Ok(initramfs)
    }
}

/// The agent's configuration: tuned as the scenario says, with the tracker that the system stands
/// for. Where nobody tells it which processes are its own, it looks after all.
fn agent_config(job: &Job) -> Result<String, Error> {
    let wrong = |e: &dyn fmt::Display| Error::Agent(e.to_string());
    let table = job.scenario.agent.clone();
    let tuning: Tuning = table.try_into().map_err(|e: toml::de::Error| wrong(&e))?;
    tuning.check().map_err(|e| wrong(&e))?;
    let config = Config {
        all: job.rounds,
        resident_min_mib: RESIDENT_MIN_MIB,
        tracker: match job.system {
            System::DemeterDamon => Choice::Damon,
            _ => Choice::Lab,
        },
        socket: AGENT_SOCKET_PATH.into(),
        tuning,
        ..Config::default()
    };
    toml::to_string(&config).map_err(|e| wrong(&e))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the agent reads, under a scenario with this table.
    fn agent(table: &str, system: System, rounds: bool) -> Result<Config, Error> {
        let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
        let mut scenario = Scenario::load(&shipped).unwrap();
        scenario.agent = table.parse().unwrap();
        let job = Job {
            system,
            scenario,
            provisioner: None,
            rounds,
            launches: vec![],
        };
        agent_config(&job).map(|text| toml::from_str(&text).unwrap())
    }

    #[test]
    fn the_scenario_tunes_the_agent() {
        let config = agent("sample_period = 2047", System::DemeterDamon, false).unwrap();
        assert_eq!(config.tuning.sample_period, 2047);
        assert_eq!(config.tracker, Choice::Damon);
        assert!(!config.all, "the VM names its target");
        let config = agent("", System::Demeter, true).unwrap();
        assert_eq!(config.tuning, Tuning::default());
        assert_eq!(config.tracker, Choice::Lab);
        config.check().unwrap();
    }

    #[test]
    fn what_no_agent_can_be_tuned_to_is_refused_before_a_vm_boots() {
        for (table, named) in [
            ("epoch_ms = 0", "scenario: [agent] epoch_ms = 0 is out"),
            ("tracker = \"perf\"", "unknown field `tracker`"),
            ("alpha = \"2\"", "alpha"),
        ] {
            let said = agent(table, System::Demeter, false).unwrap_err();
            assert!(said.to_string().contains(named), "{said}");
        }
    }
}
