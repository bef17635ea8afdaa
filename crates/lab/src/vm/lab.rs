//! The lab on this machine, and the life of one VM.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_guest::config::Config;
use demeter_guest::tracker::Choice;
use demeter_policy::provision::ProvisionerKind;
use demeter_scenario::{Clock, MachinePlace, Provision, Scenario, Settings, System, Workload};

use super::elastic::{self, Elastic, Module};
use super::initramfs::Initramfs;
use super::memory::nodes_of;
use super::prepared::{INITRAMFS, PreparedVm};
use super::programs::{self as program_files, Finder};
use super::{kernel, module, nested, plugin, qemu};
use crate::error::{Error, VmFault};
use crate::link::{
    AGENT_CONFIG_PATH, AGENT_RECORDING_PATH, AGENT_SOCKET_PATH, EARLY_MODULES_DIR, JOB_PATH, Job,
    MODULES_DIR, Nesting, VmMessage,
};

/// Programs that are added to every VM.
const PROGRAMS: [&str; 4] = ["demeter", "gups", "memlat", "mix"];

/// Minimum resident size of a process that the agent manages in a VM with rounds, MiB; above that of the lab's own
/// processes.
const RESIDENT_MIN_MIB: u64 = 16;

/// Maximum size of the agent's recording, MiB; it lies in the VM's own memory.
const RECORD_MAX_MIB: u64 = 16;

/// Paths of the lab's parts on this machine.
#[derive(Debug, Clone)]
pub struct Lab {
    /// The emulator.
    pub qemu: PathBuf,
    /// The kernel's image; `None` for the newest in the cache or the package archive.
    pub kernel: Option<PathBuf>,
    /// Folder for downloads and builds.
    pub cache: PathBuf,
    /// Folder with the programs demeter, gups, memlat and mix.
    pub programs: PathBuf,
    /// More properties of a VM's CPUs under our own emulator, for example `x-ibs-lose=50`.
    pub cpu_properties: Vec<String>,
    /// Folder for the logs of every VM and the agent's recording. With `None`, only logs of failed VMs are kept, and
    /// nothing is recorded.
    pub keep_logs: Option<PathBuf>,
}

impl Lab {
    /// The lab of a source tree. It uses optimised programs, as an emulated CPU is slow.
    pub fn of_tree(root: &Path) -> Result<Self, Error> {
        Ok(Self {
            programs: root.join("target/release"),
            ..Self::from_env()?
        })
    }

    /// The default paths: `DEMETER_QEMU`, `DEMETER_KERNEL`, the user's cache folder, and the programs beside this one.
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
                hint: "set XDG_CACHE_HOME or HOME".into(),
            })?;
        let this = std::env::current_exe().map_err(Error::io("find", "this program"))?;
        Ok(Self {
            qemu: path("DEMETER_QEMU")
                .unwrap_or_else(|| format!("qemu-system-{}", std::env::consts::ARCH).into()),
            kernel: path("DEMETER_KERNEL"),
            cache: cache.join("demeter"),
            programs: this.parent().unwrap_or(Path::new("/")).to_owned(),
            cpu_properties: vec![],
            keep_logs: None,
        })
    }

    /// Takes our own emulator instead, as `cargo xtask emulator` builds it.
    pub fn exact(self) -> Result<Self, Error> {
        let target = self.programs.parent().unwrap_or(Path::new("/"));
        let qemu = target.join("emulator/qemu-system-x86_64");
        match qemu.is_file() {
            true => Ok(Self { qemu, ..self }),
            false => Err(Error::Missing {
                what: format!("the exact emulator {} is not built", qemu.display()),
                hint: "cargo xtask emulator, or --emulator packaged".into(),
            }),
        }
    }

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
        let mut cpu_properties = vec![];
        let is_exact = qemu::is_exact(&self.qemu)?;
        if scenario.lab.clock == Clock::Model && !is_exact {
            return Err(Error::Missing {
                what: format!("{} has no clock of the model's own", self.qemu.display()),
                hint: "--emulator exact, or leave lab.clock out".into(),
            });
        }
        if is_exact {
            cpu_properties.push("ibs=on".into());
            cpu_properties.extend(self.cpu_properties.iter().cloned());
        }
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
            limit: Duration::from_secs(
                scenario.duration_s + scenario.workload.start_limit_s() + scenario.lab.timeout_s,
            ),
            daemon: None,
            folder,
            keep_logs: self.keep_logs.clone(),
        })
    }

    /// Files that are downloaded or built once: the plugin and the kernel. The emulator is checked before the download
    /// begins.
    fn assets(&self) -> Result<(PathBuf, PathBuf), Error> {
        let plugin = plugin::plugin(&self.cache, &self.qemu)?;
        Ok((plugin, self.kernel_image()?))
    }

    /// The image of the VMs' kernel.
    pub fn kernel_image(&self) -> Result<PathBuf, Error> {
        fs::create_dir_all(&self.cache).map_err(Error::io("create", &self.cache))?;
        let kernel = match &self.kernel {
            Some(kernel) => kernel.clone(),
            None => kernel::kernel(&self.cache)?,
        };
        // The emulator's own message about an unreadable kernel does not name the variable.
        File::open(&kernel).map_err(Error::io("open DEMETER_KERNEL or cached kernel", &kernel))?;
        Ok(kernel)
    }

    /// The balloon driver, built for that kernel.
    pub fn balloon_module(&self) -> Result<PathBuf, Error> {
        module::module(&self.cache, &self.kernel_image()?)
    }

    /// Adds a provisioner's module to a VM, which loads it.
    pub(super) fn add_driver(
        &self,
        initramfs: &mut Initramfs,
        provisioner: ProvisionerKind,
    ) -> Result<(), Error> {
        let file = match elastic::module(provisioner) {
            Module::Balloon => self.balloon_module()?,
            Module::Stock(path) => {
                let [file] = self.stock_modules([path])?;
                file
            }
        };
        initramfs.add_file(&format!("{MODULES_DIR}/driver.ko"), &file);
        Ok(())
    }

    /// Modules of that kernel's own package, by paths such as `arch/x86/kvm/kvm`.
    pub fn stock_modules<const N: usize>(&self, paths: [&str; N]) -> Result<[PathBuf; N], Error> {
        // Only x86 images contain their release.
        if N == 0 {
            return Ok(paths.map(PathBuf::from));
        }
        kernel::modules(&self.cache, &self.kernel_image()?, paths)
    }

    fn initramfs(&self) -> Result<Initramfs, Error> {
        let mut initramfs = Initramfs::default();
        for name in PROGRAMS {
            let from = self.programs.join(name);
            if !from.is_file() {
                return Err(Error::Missing {
                    what: format!("program {} is missing", from.display()),
                    hint: "build all of them: make".into(),
                });
            }
            initramfs.add_program(&format!("bin/{name}"), &from)?;
        }
        Ok(initramfs)
    }
}

/// Name of a system's run, including its settings' name, if any.
pub fn run_name(settings: &Settings) -> String {
    match &settings.name[..] {
        "" => settings.system.to_string(),
        name => format!("{} {name}", settings.system),
    }
}

/// The agent's configuration, with the scenario's settings and the system's tracker: `unit` for a system that uses a
/// sampling unit. If programs have cgroups, it divides memory by their shares. If no process is named as its target, it
/// manages all. `record`: whether it also records.
pub fn agent_config(job: &Job, unit: Choice, record: bool) -> String {
    let cgroups = job
        .launches
        .iter()
        .filter_map(|launch| launch.cgroup.clone());
    let cgroup: Vec<_> = cgroups.collect();
    let config = Config {
        // Programs outside cgroups are managed, too.
        all: job.rounds || (1..job.launches.len()).contains(&cgroup.len()),
        cgroup,
        resident_min_mib: RESIDENT_MIN_MIB,
        tracker: match job.settings.system {
            System::DemeterDamon => Choice::Damon,
            _ => unit,
        },
        socket: AGENT_SOCKET_PATH.into(),
        record: (record && !job.rounds).then(|| AGENT_RECORDING_PATH.into()),
        record_max_mib: RECORD_MAX_MIB,
        tuning: job.scenario.agent.clone(),
        ..Config::default()
    };
    toml::to_string(&config).expect("a configuration is a table of plain values")
}

#[cfg(test)]
mod tests {
    use demeter_guest::config::Cgroup;

    use super::*;
    use crate::program::Launch;

    #[test]
    fn the_scenario_tunes_the_agent() {
        let agent = |system, rounds| {
            let shipped = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/ci.toml");
            let mut scenario = Scenario::load(&shipped).unwrap();
            scenario.agent.sample_period = Some(2047);
            let job = Job {
                settings: Settings::new(system, "test"),
                scenario,
                provisioner: None,
                rounds,
                launches: vec![],
                level: Nesting::Alone,
            };
            let config: Config = toml::from_str(&agent_config(&job, Choice::Lab, true)).unwrap();
            assert_eq!(config.tuning.sample_period, Some(2047));
            config
        };
        let config = agent(System::DemeterDamon, false);
        assert_eq!(config.tracker, Choice::Damon);
        assert!(!config.all, "the VM names its target");
        assert_eq!(config.record, Some(AGENT_RECORDING_PATH.into()));
        let config = agent(System::Demeter, true);
        assert_eq!(config.tracker, Choice::Lab);
        assert!(config.all, "nobody names one");
        config.check().unwrap();
    }

    #[test]
    fn the_agent_deals_between_tenants_and_looks_after_others_too() {
        let launch = |name: &str, weight: Option<u32>| Launch {
            name: name.into(),
            file: "/bin/x".into(),
            args: vec![],
            env: Default::default(),
            folder: "/work".into(),
            ready: None,
            ready_within: Duration::ZERO,
            figure: Default::default(),
            cgroup: weight.map(|weight| Cgroup {
                weight,
                ..Cgroup::new(Path::new("/sys/fs/cgroup").join(name))
            }),
        };
        let shares = |launches: Vec<Launch>| {
            let shipped =
                Path::new(env!("CARGO_MANIFEST_DIR")).join("../../scenarios/tenants.toml");
            let job = Job {
                settings: Settings::new(System::Demeter, ""),
                scenario: Scenario::load(&shipped).unwrap(),
                provisioner: None,
                rounds: false,
                launches,
                level: Nesting::Alone,
            };
            let config: Config = toml::from_str(&agent_config(&job, Choice::Lab, false)).unwrap();
            config.check().unwrap();
            let weights = config
                .shares()
                .iter()
                .map(|(_, share)| share.weight)
                .collect();
            (config.all, weights)
        };
        let tenants = vec![launch("a", Some(3)), launch("b", Some(1))];
        assert_eq!(shares(tenants.clone()), (false, vec![3, 1]));
        let client = launch("client", None);
        assert_eq!(shares([tenants, vec![client]].concat()), (true, vec![3, 1]));
    }
}
