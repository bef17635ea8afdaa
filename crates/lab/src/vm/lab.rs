//! What the lab needs of this machine, and one VM from its parts to its last report.

use std::fs::{self, File};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_guest::config::Config;
use demeter_guest::tracker::Choice;
use demeter_policy::provision::ProvisionerKind;
use demeter_scenario::{MachinePlace, Provision, Scenario, Settings, System, Workload};

use super::bring::{self, Finder};
use super::elastic::{self, Elastic, Module};
use super::initramfs::Initramfs;
use super::memory::nodes_of;
use super::prepared::{INITRAMFS, PreparedVm};
use super::{kernel, module, nested, plugin};
use crate::error::{Error, VmFault};
use crate::link::{
    AGENT_CONFIG_PATH, AGENT_RECORDING_PATH, AGENT_SOCKET_PATH, EARLY_MODULES_DIR, JOB_PATH, Job,
    Level, MODULES_DIR, VmMessage,
};

/// The programs that go into every VM.
const PROGRAMS: [&str; 4] = ["demeter", "gups", "memlat", "mix"];

/// Resident size from which on the agent of a VM that runs rounds looks after a process, MiB: above
/// that of the lab's own.
const RESIDENT_MIN_MIB: u64 = 16;

/// What the agent may record, MiB: it lies in the VM's own memory.
const RECORD_MAX_MIB: u64 = 16;

/// Where the lab finds its parts on this machine.
#[derive(Debug, Clone)]
pub struct Lab {
    /// The emulator.
    pub qemu: PathBuf,
    /// The kernel's image; `None` for the newest in the cache or the package archive.
    pub kernel: Option<PathBuf>,
    /// Folder for what is fetched or built once.
    pub cache: PathBuf,
    /// Folder with the programs demeter, gups, memlat and mix.
    pub programs: PathBuf,
    /// Folder for the logs of every VM, and for the agent's recording; `None` keeps the logs of
    /// failed ones only and records nothing.
    pub keep_logs: Option<PathBuf>,
}

impl Lab {
    /// The same with the programs that a source tree has built: an emulated CPU needs optimised ones.
    pub fn of_tree(root: &Path) -> Result<Self, Error> {
        Ok(Self {
            programs: root.join("target/release"),
            ..Self::from_env()?
        })
    }

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
                hint: "set XDG_CACHE_HOME or HOME".into(),
            })?;
        let this = std::env::current_exe().map_err(Error::io("find", "this program"))?;
        Ok(Self {
            qemu: path("DEMETER_QEMU")
                .unwrap_or_else(|| format!("qemu-system-{}", std::env::consts::ARCH).into()),
            kernel: path("DEMETER_KERNEL"),
            cache: cache.join("demeter"),
            programs: this.parent().unwrap_or(Path::new("/")).to_owned(),
            keep_logs: None,
        })
    }

    /// Runs the system that `settings` are for in a VM of `scenario` and hands each report to `on_report` as it comes.
    /// Returns after [`VmMessage::Finished`]; nothing of the VM is left behind but logs.
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

    /// Makes everything that a VM of `scenario` needs for the system that `settings` are for. With a provisioner its memory
    /// can be changed from outside. `run` is its name in messages and of its logs.
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
                bring::into_vm(&mut initramfs, &finder, scenario, programs)?
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
            level: Level::Alone,
        };
        let (plugin, kernel) = self.assets()?;
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
        let text =
            serde_json::to_string(&job).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
        initramfs.add_text(JOB_PATH, text);
        initramfs.add_text(
            AGENT_CONFIG_PATH,
            agent_config(&job, self.keep_logs.is_some()),
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

    /// Everything that is fetched or built once: the plugin, which the emulator was seen to load,
    /// and the kernel. An emulator that cannot be used is told before the download begins.
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
        // The emulator's own message about an unreadable kernel does not say which variable.
        File::open(&kernel).map_err(Error::io("open DEMETER_KERNEL or cached kernel", &kernel))?;
        Ok(kernel)
    }

    /// The balloon driver, built for that kernel.
    pub fn balloon_module(&self) -> Result<PathBuf, Error> {
        module::module(&self.cache, &self.kernel_image()?)
    }

    /// Puts the module that a provisioner needs into a VM, which loads it.
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

    /// Modules of that kernel's own package, by their paths as `arch/x86/kvm/kvm`.
    pub fn stock_modules<const N: usize>(&self, paths: [&str; N]) -> Result<[PathBuf; N], Error> {
        // Only images for x86 tell their release.
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

/// The name of a system's run: with that of its settings, where they have one.
pub fn run_name(settings: &Settings) -> String {
    match &settings.name[..] {
        "" => settings.system.to_string(),
        name => format!("{} {name}", settings.system),
    }
}

/// The agent's configuration: tuned as the scenario says, with the tracker that the system stands
/// for. Where programs have cgroups it deals by their shares. Where nobody tells it which processes are its own, it
/// looks after all. `record`: whether it
/// records, too.
pub fn agent_config(job: &Job, record: bool) -> String {
    let cgroups = job
        .launches
        .iter()
        .filter_map(|launch| launch.cgroup.clone());
    let cgroup: Vec<_> = cgroups.collect();
    let config = Config {
        // Programs outside of cgroups are looked after, too.
        all: job.rounds || (1..job.launches.len()).contains(&cgroup.len()),
        cgroup,
        resident_min_mib: RESIDENT_MIN_MIB,
        tracker: match job.settings.system {
            System::DemeterDamon => Choice::Damon,
            _ => Choice::Lab,
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
            scenario.agent.sample_period = 2047;
            let job = Job {
                settings: Settings::new(system, "test"),
                scenario,
                provisioner: None,
                rounds,
                launches: vec![],
                level: Level::Alone,
            };
            let config: Config = toml::from_str(&agent_config(&job, true)).unwrap();
            assert_eq!(config.tuning.sample_period, 2047);
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
                level: Level::Alone,
            };
            let config: Config = toml::from_str(&agent_config(&job, false)).unwrap();
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
