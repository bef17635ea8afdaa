//! The lab's parts on this machine.

use std::fs::{self, File};
use std::path::{Path, PathBuf};

use demeter_guest::config::Config;
use demeter_guest::tracker::Choice;
use demeter_policy::provision::ProvisionerKind;
use demeter_scenario::System;

use super::elastic::{self, Module};
use super::initramfs::Initramfs;
use super::{kernel, module, plugin};
use crate::error::Error;
use crate::link::{AGENT_RECORDING_PATH, AGENT_SOCKET_PATH, Job, MODULES_DIR};

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

    /// Files that are downloaded or built once: the plugin and the kernel. The emulator is checked before the download
    /// begins.
    pub(super) fn assets(&self) -> Result<(PathBuf, PathBuf), Error> {
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

    pub(super) fn initramfs(&self) -> Result<Initramfs, Error> {
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
    use std::time::Duration;

    use demeter_guest::config::Cgroup;
    use demeter_scenario::{Scenario, Settings};

    use super::*;
    use crate::launch::Launch;
    use crate::link::Nesting;

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
