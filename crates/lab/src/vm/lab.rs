//! What the lab needs of this machine, and one VM from its parts to its last report.

use std::fs::{self, File};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_scenario::{Scenario, System};

use super::child::VmChild;
use super::initramfs::Initramfs;
use super::memory::NodeSizes;
use super::{kernel, module, plugin, qemu};
use crate::error::{Error, VmFault};
use crate::link::{AGENT_CONFIG_PATH, AGENT_SOCKET_PATH, JOB_PATH, Job, Report};

/// The programs that go into every VM.
const PROGRAMS: [&str; 3] = ["demeter", "gups", "memlat"];

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
        let (plugin, kernel) = self.assets()?;
        let folder = tempfile::Builder::new()
            .prefix("demeter-lab-")
            .tempdir()
            .map_err(Error::io("create", "a folder for the VM"))?;
        let initramfs = self.initramfs(scenario, system)?;
        let initramfs_path = folder.path().join("initramfs");
        initramfs.write(&initramfs_path)?;
        let initramfs_mib = initramfs.size_bytes()?.div_ceil(1 << 20);
        let sizes = NodeSizes::of(&scenario.machine, initramfs_mib);
        sizes.check_host(Path::new("/"))?;
        let parts = qemu::Parts {
            qemu: &self.qemu,
            plugin: &plugin,
            kernel: &kernel,
            initramfs: &initramfs_path,
            machine: &scenario.machine,
            dilation: scenario.lab.dilation,
            sizes,
            folder: folder.path(),
        };
        let limit = Duration::from_secs(scenario.lab.timeout_s);
        let output_log = folder.path().join("qemu.log");
        let mut vm = VmChild::start(parts.command(), limit, parts.console_log(), output_log)?;
        let outcome = listen(&mut vm, stop, folder.path(), on_report);
        match &outcome {
            Ok(()) => vm.finish(),
            Err(_) => drop(vm),
        }
        let logs = match (&outcome, &self.keep_logs) {
            (_, Some(kept)) => kept.clone(),
            (Ok(()) | Err(VmFault::Interrupted), None) => PathBuf::new(),
            (Err(_), None) => tempfile::Builder::new()
                .prefix("demeter-logs-")
                .tempdir()
                .map_err(Error::io("create", "a folder for logs"))?
                .keep(),
        };
        if !logs.as_os_str().is_empty() {
            keep_logs(folder.path(), &logs, scenario, system)?;
        }
        outcome.map_err(|fault| match fault {
            VmFault::Interrupted => Error::Interrupted,
            fault => Error::Vm {
                system,
                fault,
                logs,
            },
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

    fn initramfs(&self, scenario: &Scenario, system: System) -> Result<Initramfs, Error> {
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
        let job = Job {
            system,
            scenario: scenario.clone(),
        };
        let text =
            serde_json::to_string(&job).map_err(|e| Error::io("encode", JOB_PATH)(e.into()))?;
        initramfs.add_text(JOB_PATH, text);
        initramfs.add_text(AGENT_CONFIG_PATH, agent_config(scenario, system));
        Ok(initramfs)
    }
}

/// The agent's configuration: the scenario's, with the tracker that the system stands for.
fn agent_config(scenario: &Scenario, system: System) -> String {
    let mut config = scenario.agent.clone();
    let tracker = if system == System::DemeterDamon {
        "damon"
    } else {
        "lab"
    };
    config.insert("tracker".into(), tracker.into());
    config.insert("socket".into(), AGENT_SOCKET_PATH.into());
    config.to_string()
}

/// Hands reports on until the VM has finished. All of them go to a file, the agent's log to one
/// of its own.
fn listen(
    vm: &mut VmChild,
    stop: &AtomicBool,
    folder: &Path,
    on_report: &mut dyn FnMut(Report) -> Result<(), VmFault>,
) -> Result<(), VmFault> {
    let mut reports = File::create(folder.join("reports.jsonl")).map_err(VmFault::Log)?;
    loop {
        let report = vm.next_report(stop)?;
        serde_json::to_writer(&reports, &report).map_err(|e| VmFault::Log(e.into()))?;
        reports.write_all(b"\n").map_err(VmFault::Log)?;
        match report {
            Report::AgentLog { text } => {
                fs::write(folder.join("agent.log"), text).map_err(VmFault::Log)?;
            }
            Report::Failed { what } => return Err(VmFault::Job(what)),
            Report::Finished => return Ok(()),
            report => on_report(report)?,
        }
    }
}

/// Moves the logs to `kept`, named after scenario and system.
fn keep_logs(folder: &Path, kept: &Path, scenario: &Scenario, system: System) -> Result<(), Error> {
    fs::create_dir_all(kept).map_err(Error::io("create", kept))?;
    for name in ["console.log", "qemu.log", "agent.log", "reports.jsonl"] {
        let from = folder.join(name);
        if from.exists() {
            let to = kept.join(format!("{}-{system}-{name}", scenario.name));
            fs::copy(&from, &to).map_err(Error::io("create", &to))?;
        }
    }
    Ok(())
}
