//! What the lab needs of this machine, and one VM from its parts to its last report.

use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::time::Duration;

use demeter_scenario::{Scenario, System};

use super::child::VmChild;
use super::initramfs::Initramfs;
use super::{kernel, plugin, qemu};
use crate::error::{Error, VmFault};
use crate::link::{AGENT_CONFIG_PATH, AGENT_SOCKET_PATH, JOB_PATH, Job, Report};

/// What the kernel takes of node 0 for itself and what stays below its watermarks, MiB, beside
/// the initramfs; measured with Debian's 6.12 cloud kernel.
const FAST_OVERHEAD_MIB: u64 = 64;
/// The same of node 1: page descriptors and watermarks.
const SLOW_OVERHEAD_MIB: u64 = 24;
/// What the emulator takes beside its guest's memory, MiB.
const EMULATOR_MIB: u64 = 512;

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
        let parts = qemu::Parts {
            qemu: &self.qemu,
            plugin: &plugin,
            kernel: &kernel,
            initramfs: &initramfs_path,
            machine: &scenario.machine,
            dilation: scenario.lab.dilation,
            fast_mib: scenario.machine.fast.usable_mib + FAST_OVERHEAD_MIB + initramfs_mib,
            slow_mib: scenario.machine.slow.usable_mib + SLOW_OVERHEAD_MIB,
            folder: folder.path(),
        };
        check_memory(
            Path::new("/"),
            parts.fast_mib + parts.slow_mib + EMULATOR_MIB,
        )?;
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
        fs::create_dir_all(&self.cache).map_err(Error::io("create", &self.cache))?;
        let plugin = plugin::plugin(&self.cache)?;
        let kernel = match &self.kernel {
            Some(kernel) => kernel.clone(),
            None => kernel::kernel(&self.cache)?,
        };
        // The emulator's own message about an unreadable kernel does not say which variable.
        fs::File::open(&kernel)
            .map_err(Error::io("open DEMETER_KERNEL or cached kernel", &kernel))?;
        Ok((plugin, kernel))
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

/// Hands reports on until the VM has finished; the agent's log goes to a file.
fn listen(
    vm: &mut VmChild,
    stop: &AtomicBool,
    folder: &Path,
    on_report: &mut dyn FnMut(Report) -> Result<(), VmFault>,
) -> Result<(), VmFault> {
    loop {
        match vm.next_report(stop)? {
            Report::AgentLog { text } => {
                fs::write(folder.join("agent.log"), text).map_err(VmFault::Link)?;
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
    for name in ["console.log", "qemu.log", "agent.log"] {
        let from = folder.join(name);
        if from.exists() {
            let to = kept.join(format!("{}-{system}-{name}", scenario.name));
            fs::copy(&from, &to).map_err(Error::io("create", &to))?;
        }
    }
    Ok(())
}

/// Fails when the machine has less than `need_mib` available (MemAvailable of /proc/meminfo).
fn check_memory(root: &Path, need_mib: u64) -> Result<(), Error> {
    let path = root.join("proc/meminfo");
    let text = fs::read_to_string(&path).map_err(Error::io("read", &path))?;
    let available_kib: Option<u64> = text
        .lines()
        .find_map(|line| line.strip_prefix("MemAvailable:"))
        .and_then(|rest| rest.split_whitespace().next()?.parse().ok());
    match available_kib.map(|kib| kib / 1024) {
        Some(have_mib) if have_mib < need_mib => Err(Error::Memory { need_mib, have_mib }),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_scenario_larger_than_the_machine_is_refused_by_name() {
        let root = tempfile::tempdir().unwrap();
        fs::create_dir(root.path().join("proc")).unwrap();
        let meminfo = "MemTotal: 8192000 kB\nMemAvailable:    2097152 kB\n";
        fs::write(root.path().join("proc/meminfo"), meminfo).unwrap();
        check_memory(root.path(), 2048).unwrap();
        let said = check_memory(root.path(), 2049).unwrap_err().to_string();
        assert!(
            said.contains("2049 MiB") && said.contains("2048 MiB"),
            "{said}"
        );
    }
}
